"""The attention mask of a model of transformers, as a function of positions and not as a matrix.

transformers calls its mask interface once per step, and gives the result to all layers. Ours
returns a `TokenMask`: the mask function that transformers passes in, and the padding of the batch.

    positions        0  1  2  3  4  5  6  7      as transformers counts them, with padding
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
from quire.support.torch_private import is_in_a_graph


@dataclass(frozen=True, eq=False)
class Padding:
    """The tokens of row b have the positions from starts[b] up to ends[b].

    If some positions between them are padding, `real` [B, S] is True for tokens.
    """

    starts: Tensor
    ends: Tensor
    real: Tensor | None = None

    @classmethod
    def of(cls, real: Tensor, kv_end: int) -> Padding | None:
        """Return the padding that a mask [B, S] gives, or None if all positions are tokens.

        Positions from S to `kv_end` are padding: a static cache has such positions. Where a graph
        is made, values are not known, so the mask counts as one with padding anywhere.
        """
        width = real.shape[1]
        known = _is_known(real)
        if known and width >= kv_end and bool(real.all()):
            return None
        places = torch.arange(width)
        starts = torch.where(real, places, width).amin(1)
        ends = torch.where(real, places + 1, 0).amax(1)
        padded = torch.nn.functional.pad(real, (0, max(0, kv_end - width)))
        found = cls(starts, ends, padded)
        return found if not known or found.has_gaps else cls(starts, ends)

    @property
    def has_gaps(self) -> bool:
        """Return whether there is padding between the tokens of a row."""
        if self.real is None:
            return False
        counts = self.real.sum(1)
        return not torch.equal(counts, (self.ends - self.starts).clamp(min=0))

    def mask(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """A mask_mod that is True if the key is a token."""
        shown = (kv_idx >= self.starts[b]) & (kv_idx < self.ends[b])
        return shown if self.real is None else shown & self.real[b, kv_idx]


@dataclass(frozen=True, eq=False)
class TokenMask:
    """The attention mask that every layer gets.

    The first query is at `q_start`, the first key at `kv_start`. `seen` is a mask_mod that does not
    know of padding. None hides nothing. transformers treats this object as a prepared mask with
    four dimensions.
    """

    seen: MaskMod | None
    padding: Padding | None
    q_start: int
    kv_start: int
    shape: tuple[int, int, int, int]

    ndim = 4

    def contiguous(self) -> TokenMask:
        """Return self: there is no memory to rearrange."""
        return self

    @property
    def origins(self) -> Tensor | None:
        """The position of the first token of each row [B]. None if all are known to be 0."""
        starts = None if self.padding is None else self.padding.starts
        if starts is None or (_is_known(starts) and not starts.any()):
            return None
        return starts


def _is_known(tensor: Tensor) -> bool:
    """Return whether the values of a tensor can be read. They cannot while a graph is made."""
    return not torch.compiler.is_compiling() and not is_in_a_graph(tensor)


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
    """Return the mask of a step. transformers calls this once per step for each kind of layer."""
    if isinstance(attention_mask, TokenMask):  # generate prepares it for a static cache
        return attention_mask
    padding = None
    if attention_mask is not None:
        padding = Padding.of(attention_mask, kv_offset + kv_length)
    return TokenMask(
        None if mask_function is bidirectional_mask_function else mask_function,
        padding,
        # Copied, since a static cache changes its tensor in place.
        int(q_offset) if isinstance(q_offset, Tensor) else q_offset,
        kv_offset,
        (batch_size, 1, q_length, kv_length),
    )


def of_tensor(table: Tensor, q_start: int) -> TokenMask:
    """Return the TokenMask of a user's boolean mask [B, H, L, S], where sizes of 1 broadcast."""

    def listed(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        place = (b, h, q_idx - q_start, kv_idx)
        return table[tuple(0 if n == 1 else i for i, n in zip(place, table.shape, strict=True))]

    batch, heads, q_length, kv_length = table.shape
    return TokenMask(listed, None, q_start, 0, (batch, heads, q_length, kv_length))
