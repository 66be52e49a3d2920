"""Two calls for `quire walk examples/walks.py:NAME`, which prints the files that a call enters."""

from __future__ import annotations

import torch
from torch import Tensor

from quire import Paged, attention, create_block_mask, flex_attention


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


PAGES = Paged(
    key=torch.randn(12, 2, 16, 64),
    value=torch.randn(12, 2, 16, 64),
    page_table=torch.tensor([[3, 1, 8], [5, 11, 0]], dtype=torch.int32),
    lengths=torch.tensor([40, 23]),
)
TOKEN = torch.randn(2, 8, 1, 64)  # one query for each of two sequences

QUERY, KEY, VALUE = (torch.randn(2, 4, 256, 64, requires_grad=True) for _ in range(3))
BLOCKS = create_block_mask(causal, None, None, 256, 256)


def paged_decode() -> None:
    """Decode one token for each sequence, from a cache in pages."""
    attention(TOKEN, PAGES, mask=causal)


def flex_training() -> None:
    """Call `flex_attention` with a block mask, forward and backward."""
    flex_attention(QUERY, KEY, VALUE, block_mask=BLOCKS).sum().backward()
