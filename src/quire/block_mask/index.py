"""The index in `block_mask[index]`: what is allowed, and how it is read."""

from __future__ import annotations

import operator

import numpy as np
import torch
from torch import Tensor

from quire.block_mask.lists import INDEX_DTYPES, is_readable
from quire.checks.arguments import dtype_name
from quire.errors import BlockIndexError


def expand_index(index: object, shape: torch.Size) -> tuple[slice | Tensor, ...]:
    """Return one slice or 1-d tensor for each dimension of `shape` from what a user wrote.

    An integer becomes a slice of length 1, so that all dimensions stay.
    """
    parts = index if isinstance(index, tuple) else (index,)
    dots = [place for place, part in enumerate(parts) if part is Ellipsis]
    given = len(parts) - len(dots)
    if given > len(shape) or len(dots) > 1:
        raise BlockIndexError(
            f"the index of a block mask must have at most {len(shape)} parts (batch, head, row of "
            f"blocks) and one `...`, but has {given} and {len(dots)}. Index no columns of blocks."
        )
    place = dots[0] if dots else given
    everything = (slice(None),) * (len(shape) - given)
    parts = parts[:place] + everything + parts[place + 1 :]
    expanded = tuple(_expand_part(part, size) for part, size in zip(parts, shape, strict=True))
    if isinstance(expanded[-1], Tensor) and any(isinstance(part, Tensor) for part in expanded[:-1]):
        raise BlockIndexError(
            "a tensor that picks rows must be the only tensor in the index, but there are several. "
            "Index twice: mask[batches, heads][:, :, rows]."
        )
    return expanded


def _expand_part(part: object, size: int) -> slice | Tensor:
    if isinstance(part, slice):
        if part.step is not None and part.step < 1:
            raise BlockIndexError(
                f"a slice of a block mask must have a positive step, but is {part}. Pick blocks in "
                f"another order with a tensor."
            )
        return part
    if isinstance(part, (Tensor, list, np.ndarray)):
        return _expand_picks(torch.as_tensor(part), size)
    try:
        number = operator.index(part)  # type: ignore[arg-type]
    except TypeError:
        raise BlockIndexError(
            f"a part of an index must be an integer, a slice, a tensor or `...`, but is {part!r}. "
            f"Index batch, head and row of blocks."
        ) from None
    _check_range(number, size)
    return slice(number % size, number % size + 1)


def _expand_picks(picks: Tensor, size: int) -> Tensor:
    if picks.dtype == torch.bool and picks.shape == (size,):
        picks = picks.nonzero().squeeze(-1)
    picks = picks.reshape(1) if picks.dim() == 0 else picks
    if picks.dim() != 1 or (picks.numel() and picks.dtype not in INDEX_DTYPES):
        raise BlockIndexError(
            f"a tensor in an index must be 1-D and hold integers, or {size} truth values, but is "
            f"{dtype_name(picks.dtype)} {list(picks.shape)}. Flatten it and convert it to int64."
        )
    picks = picks.long()  # torch takes uint8 for truth values
    if is_readable(picks):
        for number in picks[(picks < -size) | (picks >= size)].tolist():
            _check_range(number, size)
    return picks


def _check_range(number: int, size: int) -> None:
    if not -size <= number < size:
        raise BlockIndexError(
            f"an index into a dimension of size {size} of a block mask must be from {-size} to "
            f"{size - 1}, but is {number}. Count batches, heads and rows of blocks, not tokens."
        )
