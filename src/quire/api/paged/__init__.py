"""PagedAttention: a cache of keys and values in pages, with the names of PyTorch's class.

    paged = PagedAttention(n_pages=64, page_size=128, max_batch_size=8, device="cpu")
    paged.reserve(slots, lengths)
    paged.assign(slots, positions, k_val, v_val, k_cache, v_cache)
    block_mask = paged.convert_logical_block_mask(logical_mask, slots)
    flex_attention(query, k_cache, v_cache, block_mask=block_mask)

Reading order: attention (the class), physical (masks and mods for rows of the cache), checks.
"""

from quire.api.paged.attention import PagedAttention

__all__ = ["PagedAttention"]
