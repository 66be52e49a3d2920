"""The gradients of captured tensors: one sum for each share of the work, or a shared one."""

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
    """The gradient of a captured tensor: sums [b, key head, slice, ...] of a round, and the total.

    `shared` tells if all sequences, and if all key heads, add to the same sum.
    """

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
        """Return the bytes that a round needs."""
        return math.prod((*self._counts(batch, heads), *self._shape)) * self._dtype.itemsize

    def begin(self, part: Round) -> tuple[int, int, int, int]:
        """Return the address of the sums of a round, and their strides over b, head and slice."""
        counts = self._counts(part.b_stop - part.b, part.h_stop - part.h)
        if counts == (1, 1, 1):  # the round has one sum: use the total itself
            self._sums = self.total.view(1, 1, 1, *self._shape)
        else:
            self._sums = torch.zeros((*counts, *self._shape), dtype=self._dtype, device="cpu")
        size = math.prod(self._shape)
        batch_stride = 0 if self._shared[0] else size * counts[1] * counts[2]
        head_stride = 0 if self._shared[1] else size * counts[2]
        slice_stride = 0 if counts[2] == 1 else size
        # The kernel counts from the first share of all rounds.
        before = part.b * batch_stride + part.h * head_stride
        address = self._sums.data_ptr() - before * self._dtype.itemsize
        return address, batch_stride, head_stride, slice_stride

    def end(self) -> None:
        """Add the sums of a round to the total."""
        if self._sums.data_ptr() != self.total.data_ptr():
            self.total += folded(self._sums.flatten(0, 2))


def direct_inputs(load: Node) -> set[str]:
    """Return the inputs (b, h, ...) that are an index of a load, without any arithmetic."""
    found = set()
    for index in load.args:
        while index.op == "cast":
            (index,) = index.args
        if index.op == "input":
            found.add(str(index.payload))
    return found
