"""Compiles, plans and launches kernels, and keeps their code on disk."""
