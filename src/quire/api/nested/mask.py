"""From an attn_mask over sequences of unequal lengths to a mod that reads its elements.

dense    [.., L, S]     cut to each sequence; a dimension of size 1 is broadcast
nested   one tensor [.., L_b, S_b] for each sequence
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from quire.errors import ShapeError
from quire.ir.trace import Mod
from quire.memory.tables import Numbers
from quire.mods.compose import named

Look: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""look(b, h, q_idx, kv_idx) returns an element of the mask."""


def as_mod(
    attn_mask: Tensor,
    lengths: tuple[Numbers, Numbers] | None,
    num_heads: int | None,
    batch: int,
) -> dict[str, Mod]:
    """Return {"mask": ...} for a boolean `attn_mask`, else {"score_mod": ...}.

    `lengths` are the numbers of queries and of keys of each of `batch` sequences; None if they are
    unknown, which a nested mask does not allow. `num_heads` is None if the tensors have no
    dimension of heads.
    """
    if attn_mask.is_nested:
        assert lengths is not None, "the lengths say where the elements of a nested mask are"
        look = _nested(attn_mask, lengths, num_heads)
    else:
        longest = None if lengths is None else [int(each.max(initial=0)) for each in lengths]
        look = _dense(attn_mask, longest, num_heads, batch)

    @named("attn_mask")
    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        # Without `b` a mask of one element would not depend on an index.
        return look(b, h, q_idx, kv_idx) & (b >= 0)

    @named("attn_mask")
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + look(b, h, q_idx, kv_idx)

    return {"mask": mask} if attn_mask.dtype == torch.bool else {"score_mod": score_mod}


def _dense(mask: Tensor, longest: list[int] | None, num_heads: int | None, batch: int) -> Look:
    shape = list(mask.shape)
    axes = ["batch", *(["heads"] if num_heads else []), "queries", "keys"]
    if not 2 <= mask.dim() <= len(axes):
        raise ShapeError(
            f"attn_mask must have from 2 to {len(axes)} dimensions [{', '.join(axes)}], but has "
            f"shape {shape}. Leave out dimensions from the left, or make them 1."
        )
    wide = mask.reshape(*[1] * (len(axes) - mask.dim()), *shape)
    if not num_heads:
        wide = wide.unsqueeze(1)
    exact = wide.shape[0] in (1, batch) and wide.shape[1] in (1, num_heads or 1)
    most = longest or [1, 1]
    if not exact or any(
        n != 1 and n < least for n, least in zip(wide.shape[2:], most, strict=True)
    ):
        heads = f"{num_heads} heads, " if num_heads else ""
        raise ShapeError(
            f"attn_mask must be for {batch} sequences, {heads}{most[0]} queries and "
            f"{most[1]} keys, with 1 for what is the same for all, but has shape {shape}. It is "
            f"cut to each sequence, so make it for the longest."
        )
    kept = [axis for axis, size in enumerate(wide.shape) if size > 1]
    squeezed = wide.squeeze()

    def look(*place: Tensor) -> Tensor:
        return squeezed[tuple(place[axis] for axis in kept)] if kept else squeezed

    return look


def _nested(mask: Tensor, lengths: tuple[Numbers, Numbers], num_heads: int | None) -> Look:
    """Return a `look` into all elements in one flat tensor, with a start and steps per sequence."""
    pieces = list(mask.unbind())
    if len(pieces) != len(lengths[0]):
        raise ShapeError(
            f"attn_mask must be for {len(lengths[0])} sequences, but is nested with {len(pieces)}. "
            f"Give a mask for each sequence."
        )
    starts, head_steps, row_steps, end = [], [], [], 0
    for b, (piece, q_len, kv_len) in enumerate(zip(pieces, *lengths, strict=True)):
        heads = piece.shape[0] if piece.dim() == 3 else 1
        plain = piece.dim() == 2 or (piece.dim() == 3 and num_heads and heads in (1, num_heads))
        if not plain or piece.shape[-2] < q_len or piece.shape[-1] < kv_len:
            front = "heads, " if num_heads else ""
            raise ShapeError(
                f"attn_mask must have [{front}queries, keys] for each sequence, but for sequence "
                f"{b} of {q_len} queries and {kv_len} keys it has shape {list(piece.shape)}. Make "
                f"it as large as the sequence."
            )
        rows, columns = piece.shape[-2:]
        starts.append(end)
        head_steps.append(rows * columns if heads > 1 else 0)
        row_steps.append(columns)
        end += piece.numel()
    flat = torch.cat([piece.reshape(-1) for piece in pieces])
    start, head_step, row_step = map(torch.tensor, (starts, head_steps, row_steps))

    def look(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return flat[start[b] + head_step[b] * h + row_step[b] * q_idx + kv_idx]

    return look
