"""The kinds of the cells of a traced mask, found with a bounded amount of work.

    +-------+-------+        Bounds decide most cells. An undecided cell is split into parts, down
    | empty | +-+-+ |        to single blocks. For an undecided block the corners are computed, and
    |       | +-+-+ |        then all elements.
    +-------+-------+

If there are too many parts or elements, a sample of them is used. A sample with a True and a False
element proves a block partial. So a sample can only mistake partial for empty or full. `proven` is
False if a result depends on samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.block_mask.blocks import EMPTY, FULL, PARTIAL, ceil_div
from quire.block_mask.classify import UNSURE, Rectangles
from quire.ir.trace import Traced

AT_ONCE = 1 << 18
"""The number of rectangles or elements that are computed together."""

PARTS = 8  # an undecided rectangle is split into so many parts along each side
MOST_PARTS = 1 << 19
MOST_ELEMENTS = 1 << 23
"""If there are more parts of one size, or more elements, a sample is taken."""


Pair: TypeAlias = tuple[int, int]
"""One number for queries, one for keys."""

Kinds: TypeAlias = NDArray[np.uint8]
"""EMPTY, PARTIAL or FULL for each cell: [rows, columns]."""


class Cells(NamedTuple):
    """The kinds of the cells of a drawing."""

    kinds: Kinds
    step: Pair  # tokens in a cell
    empty: float  # the share of elements that lie in empty blocks
    proven: bool  # False if kinds were estimated from samples


def survey(mask: Traced, at: Pair, lengths: Pair, block: Pair, fold: Pair) -> Cells:
    """Return the kinds of cells of `fold` blocks, at batch and head `at`. The last may be short."""
    (b, h), (q_len, kv_len) = at, lengths
    ranges = {"b": (b, b), "h": (h, h), "q_idx": (0, q_len - 1), "kv_idx": (0, kv_len - 1)}
    place = {"b": torch.tensor(b), "h": torch.tensor(h)}
    q, kv = (_Axis(*each) for each in zip(lengths, block, strict=True))
    return _Surveyor(Rectangles(mask, ranges), place, q, kv).survey(fold)


class _Axis(NamedTuple):
    """The queries, or the keys, in blocks."""

    length: int
    block: int

    def low(self, start: Tensor) -> Tensor:
        """The first position of block `start`."""
        return start * self.block

    def high(self, stop: Tensor) -> Tensor:
        """The last position before block `stop`."""
        return (stop * self.block).clamp(max=self.length) - 1

    def cut(self, count: int) -> tuple[Tensor, Tensor]:
        """Return where pieces of `count` blocks start and stop."""
        end = ceil_div(self.length, self.block)
        start = torch.arange(0, end, count)
        return start, (start + count).clamp(max=end)


class _Open(NamedTuple):
    """Undecided rectangles of blocks. Each is in a cell and represents `weight` times its area."""

    cell: Tensor
    top: Tensor
    bottom: Tensor
    left: Tensor
    right: Tensor
    weight: Tensor

    def where(self, kept: Tensor) -> _Open:
        return _Open(*(part[kept] for part in self))


class _Surveyor:
    def __init__(
        self, rectangles: Rectangles, place: dict[str, Tensor], q: _Axis, kv: _Axis
    ) -> None:
        self.rectangles, self.place, self.q, self.kv = rectangles, place, q, kv
        self.chance = torch.Generator().manual_seed(0)
        self.proven = True

    def survey(self, fold: Pair) -> Cells:
        step = self.q.block * fold[0], self.kv.block * fold[1]
        (top, bottom), (left, right) = self.q.cut(fold[0]), self.kv.cut(fold[1])
        sides = torch.broadcast_tensors(
            top.view(-1, 1), bottom.view(-1, 1), left, right, torch.ones((), dtype=torch.float64)
        )
        shape = sides[0].shape
        count = shape.numel()
        self.some = torch.zeros(count, dtype=torch.bool)
        self.every = torch.ones(count, dtype=torch.bool)
        self.empty = 0.0
        rectangles = _Open(torch.arange(count), *(side.flatten() for side in sides))
        while len(rectangles.cell):
            rectangles = self._settled(rectangles, self._bounded)
            if fold == (1, 1):
                rectangles = self._settled(rectangles, self._corners)
                self._settled(rectangles, self._elements)
                break
            parts = ceil_div(fold[0], PARTS), ceil_div(fold[1], PARTS)
            rectangles, fold = self._split(rectangles, fold, parts), parts
        kinds = torch.where(self.every, FULL, torch.where(self.some, PARTIAL, EMPTY))
        share = self.empty / (self.q.length * self.kv.length)
        return Cells(kinds.view(shape).numpy().astype(np.uint8), step, share, self.proven)

    def _settled(self, asked: _Open, look: Callable[[_Open], Tensor]) -> _Open:
        """Record the kinds that `look` finds for rectangles, and return the undecided ones."""
        kind = look(asked) if len(asked.cell) else torch.empty(0)
        self.some[asked.cell[(kind == PARTIAL) | (kind == FULL)]] = True
        self.every[asked.cell[(kind == PARTIAL) | (kind == EMPTY)]] = False
        empty = asked.where(kind == EMPTY)
        self.empty += float((self._area(empty) * empty.weight).sum())
        return asked.where(kind == UNSURE)

    def _area(self, of: _Open) -> Tensor:
        height = self.q.high(of.bottom) - self.q.low(of.top) + 1
        return height * (self.kv.high(of.right) - self.kv.low(of.left) + 1)

    def _split(self, whole: _Open, fold: Pair, parts: Pair) -> _Open:
        """Split rectangles of at most `fold` blocks into rectangles of at most `parts` blocks."""
        if not len(whole.cell):
            return whole
        across = ceil_div(fold[1], parts[1])
        number = ceil_div(fold[0], parts[0]) * across
        asked = max(1, MOST_PARTS // len(whole.cell))
        if number <= asked:
            picked = torch.arange(number).expand(len(whole.cell), -1)
        else:
            self.proven = False
            picked = torch.randint(number, (len(whole.cell), asked), generator=self.chance)
            picked[:, 0] = 0  # the first part exists in every rectangle
        rows, columns = picked // across * parts[0], picked % across * parts[1]
        cell, top, bottom, left, right, weight = (side.unsqueeze(-1) for side in whole)
        split = _Open(
            cell=cell.expand_as(picked),
            top=top + rows,
            bottom=(top + rows + parts[0]).minimum(bottom),
            left=left + columns,
            right=(left + columns + parts[1]).minimum(right),
            weight=weight.expand_as(picked),
        )
        exists = (split.top < bottom) & (split.left < right)
        seen = torch.where(exists, self._area(split), 0).sum(-1)
        scaled = split.weight * (self._area(whole) / seen).unsqueeze(-1)
        return split._replace(weight=scaled).where(exists)

    # --- the kinds [n] of n rectangles: EMPTY, PARTIAL, FULL or UNSURE

    def _bounded(self, asked: _Open) -> Tensor:
        def kinds(part: _Open) -> Tensor:
            env = {
                "q_low": self.q.low(part.top),
                "q_high": self.q.high(part.bottom),
                "kv_low": self.kv.low(part.left),
                "kv_high": self.kv.high(part.right),
            }
            return self.rectangles.kinds(self.place | env).expand_as(part.cell)

        return _in_pieces(kinds, asked, AT_ONCE)

    def _corners(self, asked: _Open) -> Tensor:
        def agreed(part: _Open) -> Tensor:
            q_idx = torch.stack([self.q.low(part.top), self.q.high(part.bottom)], -1)
            kv_idx = torch.stack([self.kv.low(part.left), self.kv.high(part.right)], -1)
            kinds = self._seen(q_idx.unsqueeze(-1), kv_idx.unsqueeze(-2))
            return torch.where(kinds == PARTIAL, PARTIAL, UNSURE)

        return _in_pieces(agreed, asked, AT_ONCE // 4)

    def _elements(self, asked: _Open) -> Tensor:
        def all_of(part: _Open) -> Tensor:
            q_idx = self.q.low(part.top).unsqueeze(-1) + torch.arange(self.q.block)
            kv_idx = self.kv.low(part.left).unsqueeze(-1) + torch.arange(self.kv.block)
            # The last position replaces positions after the end.
            q_idx, kv_idx = q_idx.clamp(max=self.q.length - 1), kv_idx.clamp(max=self.kv.length - 1)
            return self._seen(q_idx.unsqueeze(-1), kv_idx.unsqueeze(-2))

        def some_of(part: _Open) -> Tensor:
            q_idx = self._chosen(self.q.low(part.top), self.q.high(part.bottom), count)
            kv_idx = self._chosen(self.kv.low(part.left), self.kv.high(part.right), count)
            return self._seen(q_idx, kv_idx)

        size, blocks = self.q.block * self.kv.block, len(asked.cell)
        if blocks * size <= MOST_ELEMENTS:
            return _in_pieces(all_of, asked, AT_ONCE // size)
        count = max(1, MOST_ELEMENTS // blocks)
        kinds = _in_pieces(some_of, asked, AT_ONCE // count)
        self.proven &= bool((kinds == PARTIAL).all())
        return kinds

    def _chosen(self, low: Tensor, high: Tensor, count: int) -> Tensor:
        """Return random positions from `low` to `high`: [n, count]."""
        low, high = low.unsqueeze(-1), high.unsqueeze(-1)
        chance = torch.rand((len(low), count), generator=self.chance, dtype=torch.float64)
        return low + (chance * (high - low + 1)).long()

    def _seen(self, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return the kinds of n rectangles, as their elements [n, ...] show them."""
        held = self.rectangles.holds(self.place | {"q_idx": q_idx, "kv_idx": kv_idx})
        held = held.expand_as(torch.broadcast_tensors(q_idx, kv_idx)[0]).flatten(1)
        return torch.where(held.all(-1), FULL, torch.where(held.any(-1), PARTIAL, EMPTY))


def _in_pieces(look: Callable[[_Open], Tensor], asked: _Open, count: int) -> Tensor:
    edges = [*range(0, len(asked.cell), max(1, count)), len(asked.cell)]
    pieces = (slice(*ends) for ends in itertools.pairwise(edges))
    return torch.cat([look(_Open(*(side[piece] for side in asked))) for piece in pieces])
