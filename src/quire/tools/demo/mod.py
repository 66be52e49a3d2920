"""The mod of the demo, for three documents that are packed into one sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import quire

HEADS = 4
HEAD_DIM = 64

SOURCE = """\
def mask(b, h, q_idx, kv_idx):
    near = (kv_idx <= q_idx) & (q_idx - kv_idx < window)
    return near & (document[q_idx] == document[kv_idx])
"""
"""The text that is shown is the text that runs."""


def mask_mod(tokens: int) -> Callable[..., Any]:
    """Return the function of SOURCE: own document only, and an eighth of the sequence back."""
    ends = torch.tensor([0.35, 0.5]) * tokens
    names: dict[str, Any] = {
        "document": torch.bucketize(torch.arange(tokens), ends, right=True),
        "window": tokens // 8,
    }
    exec(SOURCE, names)
    mod: Callable[..., Any] = names["mask"]
    return mod


def block_mask(tokens: int, block_size: int = 128) -> quire.BlockMask:
    """Return the block mask of the mod, which PyTorch takes too."""
    mod, create = mask_mod(tokens), quire.create_block_mask
    return create(mod, None, None, tokens, tokens, device="cpu", BLOCK_SIZE=block_size)
