"""Attention as an operator that graphs of PyTorch can hold. Importing this makes it known."""

from quire.operator import in_graph as in_graph
