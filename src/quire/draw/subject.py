"""A mask that is drawn, and the kinds of its cells.

A subject consists of blocks, which are single elements if sequences are short. A cell is one block,
or a rectangle of `fold` blocks if there are too many to show.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.block_mask.blocks import EMPTY, FULL, PARTIAL, Runs, ceil_div
from quire.block_mask.tiles import TILE_ELEMENTS, count_blocks
from quire.draw.survey import Cells, Kinds, Pair, survey
from quire.ir.trace import Mod, Traced

MOST_ELEMENTS = 1 << 26
"""The largest number of elements of a mask_mod that cannot be traced: all of them are computed."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A mask with a name. Subclasses find the kinds of its cells."""

    name: str
    lengths: Pair
    block: Pair
    outline: Pair  # the blocks whose outlines are drawn

    @property
    def elementwise(self) -> bool:
        """Whether blocks are single elements."""
        return self.block == (1, 1)

    def num_blocks(self) -> Pair:
        """Return the number of blocks along each axis."""
        rows, columns = map(ceil_div, self.lengths, self.block)
        return rows, columns

    def cells(self, most: Pair) -> Cells:
        """Return the mask in at most `most` rows and columns of cells."""
        rows, columns = (
            max(1, ceil_div(n, m)) for n, m in zip(self.num_blocks(), most, strict=True)
        )
        return self._folded((rows, columns))

    def _folded(self, fold: Pair) -> Cells:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class TracedMask(Subject):
    """A mask_mod that has a graph."""

    mask: Traced
    at: Pair  # b, h

    def _folded(self, fold: Pair) -> Cells:
        return survey(self.mask, self.at, self.lengths, self.block, fold)


@dataclass(frozen=True, eq=False)
class ListedMask(Subject):
    """A mask whose blocks are known: those of a block mask, or of a mask_mod without a graph."""

    runs: Runs
    at: Pair

    def _folded(self, fold: Pair) -> Cells:
        num_rows, num_columns = self.num_blocks()
        heights, widths = extents(self.lengths, self.block)
        parts, empty = [], 0.0
        count = fold[0] * max(1, TILE_ELEMENTS // (fold[0] * num_columns))
        for first in range(0, num_rows, count):
            kinds = self._rows(first, min(num_rows, first + count))[:, :num_columns]
            rows = heights[first : first + count]
            empty += share(kinds == EMPTY, rows, widths) * int(rows.sum()) / self.lengths[0]
            parts.append(folded(kinds, fold))
        step = self.block[0] * fold[0], self.block[1] * fold[1]
        return Cells(np.concatenate(parts), step, empty, True)

    def _rows(self, first: int, last: int) -> Kinds:
        """Return the kinds of the blocks in rows `first` up to `last`: [rows, columns]."""
        batches, heads, num_rows, columns = self.runs.shape
        b, h = min(self.at[0], batches - 1), min(self.at[1], heads - 1)
        rows = (b * heads + h) * num_rows + np.arange(first, last)
        shown = self.runs.pick(rows, (1, 1, last - first, columns)).cells()[0, 0]
        kinds: Kinds = shown.astype(np.uint8)
        return kinds


def runs_of(mod: Mod, name: str, at: Pair, lengths: Pair, block: Pair) -> Runs:
    """Return the blocks of a mask_mod at batch and head `at`, by all its elements."""

    def here(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        result: Tensor = mod(b + at[0], h + at[1], q_idx, kv_idx)
        return result

    here.__name__ = name
    counts = count_blocks(here, (1, 1, *lengths), block, torch.device("cpu")).numpy()
    every = np.outer(*extents(lengths, block))
    return Runs.of_cells(kinds_of(counts > 0, counts == every))


def extents(lengths: Pair, step: Pair) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the number of tokens in each row and in each column of cells."""
    rows, columns = (
        np.minimum(np.arange(0, length, size) + size, length) - np.arange(0, length, size)
        for length, size in zip(lengths, step, strict=True)
    )
    return rows, columns


def share(
    marked: NDArray[np.bool_], heights: NDArray[np.int64], widths: NDArray[np.int64]
) -> float:
    """Return the share of elements that lie in marked cells."""
    return float(heights @ (marked @ widths) / (heights.sum() * widths.sum()))


def kinds_of(some: NDArray[np.bool_], every: NDArray[np.bool_]) -> Kinds:
    """Return FULL where `every` is True, else PARTIAL where `some` is, else EMPTY."""
    return np.where(every, FULL, np.where(some, PARTIAL, EMPTY)).astype(np.uint8)


def folded(kinds: Kinds, fold: Pair) -> Kinds:
    """Return the kinds of cells of `fold` blocks each."""
    least, most = kinds, kinds
    for axis, count in enumerate(fold):
        starts = np.arange(0, kinds.shape[axis], count)
        least = np.minimum.reduceat(least, starts, axis)
        most = np.maximum.reduceat(most, starts, axis)
    return kinds_of(most != EMPTY, least == FULL)
