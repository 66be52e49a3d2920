"""Attention as an operator that graphs of PyTorch can hold."""
