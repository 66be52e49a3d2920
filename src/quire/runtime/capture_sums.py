"""The gradients of captured tensors: where each share of the work adds, and how sums meet."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ir.graph import Node
from quire.results import folded


class Round(NamedTuple):
    """The shares of some sequences and key heads: [b, b_stop) and [h, h_stop)."""

    b: int
    b_stop: int
    h: int
    h_stop: int


class SumsOfCapture:
    """The gradient of a captured tensor: sums [b, key head, slice, ...] of a round, and of all."""

    def __init__(
        self,
        tensor: Tensor,
        dtype: torch.dtype,
        shared: tuple[bool, bool],
        slices: int,
    ) -> None:
        self._shape, self._dtype = tensor.shape, dtype
        self._shared, self._slices = shared, slices
        self._sums = self.total = torch.zeros(tensor.shape, dtype=dtype, device="cpu")

    def _counts(self, batch: int, heads: int) -> tuple[int, int, int]:
        b, h = self._shared
        return 1 if b else batch, 1 if h else heads, self._slices

    def size(self, batch: int, heads: int) -> int:
        """The bytes that a round needs."""
        return math.prod((*self._counts(batch, heads), *self._shape)) * self._dtype.itemsize

    def begin(self, part: Round) -> tuple[int, int, int, int]:
        """Where the sums of a round are: the address of the first, and from share to share."""
        counts = self._counts(part.b_stop - part.b, part.h_stop - part.h)
        if counts == (1, 1, 1):  # no two shares have a place in common, whatever the round
            self._sums = self.total.view(1, 1, 1, *self._shape)
        else:
            self._sums = torch.zeros((*counts, *self._shape), dtype=self._dtype, device="cpu")
        one = math.prod(self._shape)
        batch, head, slice = (
            0 if self._shared[0] else one * counts[1] * counts[2],
            0 if self._shared[1] else one * counts[2],
            0 if counts[2] == 1 else one,
        )
        before = part.b * batch + part.h * head
        address = self._sums.data_ptr() - before * self._dtype.itemsize
        return address, batch, head, slice

    def end(self) -> None:
        """Add the sums of a round to those of all."""
        if self._sums.data_ptr() != self.total.data_ptr():
            self.total += folded(self._sums.flatten(0, 2))


def direct_inputs(load: Node) -> set[str]:
    """The inputs that are indices of a load themselves."""
    found = set()
    for index in load.args:
        while index.op == "cast":
            (index,) = index.args
        if index.op == "input":
            found.add(str(index.payload))
    return found
