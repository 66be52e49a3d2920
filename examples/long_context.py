"""A mask for a context of a million tokens. `quire draw` draws it."""

from __future__ import annotations

from torch import Tensor


def long_context(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Let a query see the first 32,768 tokens, and the last 65,536 tokens of its own chapter.

    A chapter has 262,144 tokens.
    """
    recent = q_idx - kv_idx < 65_536
    chapter = q_idx // 262_144 == kv_idx // 262_144
    return (kv_idx <= q_idx) & (recent & chapter | (kv_idx < 32_768))
