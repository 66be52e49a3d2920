"""Who sees whom in a model of transformers: a function of positions where others build a matrix.

transformers asks its mask interface once per step what all layers are to be given. Ours answers
with a `TokenMask`: the function that it was asked about, and the padding of the batch.

    positions        0  1  2  3  4  5  6  7      as transformers counts them, padding among them
    row 0, left pad  .  .  .  a  b  c  d  e      starts[0] = 3, ends[0] = 8
    row 1, right     a  b  c  d  e  .  .  .      starts[1] = 0, ends[1] = 5
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from quire.mods import MaskMod


@dataclass(frozen=True, eq=False)
class Padding:
    """The tokens of each row: from `starts` [B] to before `ends` [B]; `real` [B, S] has holes."""

    starts: Tensor
    ends: Tensor
    real: Tensor | None = None

    @classmethod
    def of(cls, real: Tensor, kv_end: int) -> Padding | None:
        """What a mask [B, S] says of the positions before `kv_end`; None if all are tokens.

        Positions that the mask does not reach, which a static cache has, are no tokens.
        """
        width = real.shape[1]
        counts = real.sum(1)
        if width >= kv_end and int(counts.sum()) == real.numel():
            return None
        places = torch.arange(width)
        starts = torch.where(real, places, width).amin(1)
        ends = torch.where(real, places + 1, 0).amax(1)
        if torch.equal(counts, (ends - starts).clamp(min=0)):
            return cls(starts, ends)
        return cls(starts, ends, torch.nn.functional.pad(real, (0, max(0, kv_end - width))))

    def mask(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Keys are tokens."""
        shown = (kv_idx >= self.starts[b]) & (kv_idx < self.ends[b])
        return shown if self.real is None else shown & self.real[b, kv_idx]


@dataclass(frozen=True, eq=False)
class TokenMask:
    """What every layer gets as its attention mask.

    The first query is at `q_start`, the first key at `kv_start`. `seen` says which keys a query
    sees but for padding, all of them if it is None. To transformers it is a mask of four
    dimensions, made ahead.
    """

    seen: MaskMod | None
    padding: Padding | None
    q_start: int
    kv_start: int
    shape: tuple[int, int, int, int]

    ndim = 4

    def contiguous(self) -> TokenMask:
        """Itself: there is no memory to put in order."""
        return self

    @property
    def origins(self) -> Tensor | None:
        """[B] where the first token of each row is; None if it is at 0 in all of them."""
        starts = None if self.padding is None else self.padding.starts
        return starts if starts is not None and bool(starts.any()) else None


def token_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | TokenMask | None = None,
    **_: object,
) -> TokenMask:
    """The mask interface: what transformers calls once per step for each kind of layer."""
    if isinstance(attention_mask, TokenMask):  # made ahead by generate, for a static cache
        return attention_mask
    padding = None
    if attention_mask is not None:
        padding = Padding.of(attention_mask, kv_offset + kv_length)
    return TokenMask(
        None if mask_function is bidirectional_mask_function else mask_function,
        padding,
        int(q_offset),  # a static cache counts on in the tensor that it gave
        kv_offset,
        (batch_size, 1, q_length, kv_length),
    )


def of_tensor(table: Tensor, q_start: int) -> TokenMask:
    """A user's own mask of truth values, which is [B, H, L, S] or has ones in place of these."""

    def listed(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        place = (b, h, q_idx - q_start, kv_idx)
        return table[tuple(0 if n == 1 else i for i, n in zip(place, table.shape, strict=True))]

    batch, heads, q_length, kv_length = table.shape
    return TokenMask(listed, None, q_start, 0, (batch, heads, q_length, kv_length))
