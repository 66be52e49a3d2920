"""Helpers for the whole package: locks, caches, warnings, and the private names of PyTorch."""
