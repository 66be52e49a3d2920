"""Attention of nested tensors, as PyTorch's `jagged_scaled_dot_product_attention`.

    query = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)    # [B, H, j, D]
    jagged_scaled_dot_product_attention(query, key, value, is_causal=True)

Name, parameters and meaning are PyTorch's. Unlike PyTorch's, this function supports masks, groups
of heads, holes between sequences, empty sequences and all head dims. After `quire.patch_torch()`,
`F.scaled_dot_product_attention` calls it for nested tensors.
"""

from quire.api.nested.attention import jagged_scaled_dot_product_attention

__all__ = ["jagged_scaled_dot_product_attention"]
