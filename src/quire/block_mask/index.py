"""What can be written between the brackets of `block_mask[...]`."""

from __future__ import annotations

import operator

import numpy as np
import torch
from torch import Tensor

from quire.block_mask.lists import INDEX_DTYPES, is_readable
from quire.errors import BlockIndexError


def expand_index(index: object, shape: torch.Size) -> tuple[slice | Tensor, ...]:
    """What was written in `mask[...]` as one slice or 1-d tensor for each dimension of `shape`.

    An integer becomes a slice of one, so that no dimension is lost.
    """
    parts = index if isinstance(index, tuple) else (index,)
    dots = [place for place, part in enumerate(parts) if part is Ellipsis]
    given = len(parts) - len(dots)
    if given > len(shape) or len(dots) > 1:
        raise BlockIndexError(
            f"expected at most {len(shape)} indices (batch, head, row of blocks) and one `...`, "
            f"got {given} and {len(dots)}. Leave the blocks themselves out of the index."
        )
    place = dots[0] if dots else given
    everything = (slice(None),) * (len(shape) - given)
    parts = parts[:place] + everything + parts[place + 1 :]
    expanded = tuple(_expand_part(part, size) for part, size in zip(parts, shape, strict=True))
    if isinstance(expanded[-1], Tensor) and any(isinstance(part, Tensor) for part in expanded[:-1]):
        raise BlockIndexError(
            "expected a tensor that picks rows to be the only tensor in the index, got several. "
            "Index twice: mask[batches, heads][:, :, rows]."
        )
    return expanded


def _expand_part(part: object, size: int) -> slice | Tensor:
    if isinstance(part, slice):
        if part.step is not None and part.step < 1:
            raise BlockIndexError(
                f"expected a slice with a positive step, got {part}. "
                f"Pick blocks in another order with a tensor."
            )
        return part
    if isinstance(part, (Tensor, list, np.ndarray)):
        return _expand_picks(torch.as_tensor(part), size)
    try:
        number = operator.index(part)  # type: ignore[arg-type]
    except TypeError:
        raise BlockIndexError(
            f"expected an integer, a slice, a tensor or `...`, got {part!r}. "
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
            f"expected a tensor of integers with one dimension, or of {size} truth values, got "
            f"{picks.dtype} of shape {list(picks.shape)}. Flatten it and convert it to int64."
        )
    picks = picks.long()  # uint8 would be taken for truth values
    if is_readable(picks):
        for number in picks[(picks < -size) | (picks >= size)].tolist():
            _check_range(number, size)
    return picks


def _check_range(number: int, size: int) -> None:
    if not -size <= number < size:
        raise BlockIndexError(
            f"expected an index from {-size} to {size - 1} into a dimension of size {size} of a "
            f"block mask, got {number}. Count batches, heads and rows of blocks, not tokens."
        )
