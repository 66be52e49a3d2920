"""PagedAttention: a cache of keys and values in pages, with the names of PyTorch's class.

Reading order: attention (the class), physical (masks and mods for rows of the cache), checks.
"""

from quire.api.paged.attention import PagedAttention

__all__ = ["PagedAttention"]
