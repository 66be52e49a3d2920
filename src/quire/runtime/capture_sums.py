"""The gradients of captured tensors: one sum for each share of the work, or a shared one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.ir.graph import Node
from quire.results import folded
from quire.runtime.slices import Round


class SumsOfCapture:
    """The gradient of a captured tensor: sums [b, key head, slice, ...] of a round, and the total.

    `shared` tells if all sequences, all key heads and all slices add to the same sum: then they add
    to different elements of it. The sums of a slice are added over sequences and heads first. Then
    slices are added in ascending order; `apart` keeps them.
    """

    def __init__(
        self,
        tensor: Tensor,
        dtype: torch.dtype,
        shared: tuple[bool, bool, bool],
        *,
        apart: bool = False,
    ) -> None:
        self._shape, self._dtype, self._shared, self._apart = tensor.shape, dtype, shared, apart
        self._sums = self._total = torch.zeros(tensor.shape, dtype=dtype, device="cpu")
        self._slices: dict[int, Tensor] = {}
        self._added: list[Tensor] = []

    def _counts(self, batch: int, heads: int, slices: int) -> tuple[int, ...]:
        counts = zip(self._shared, (batch, heads, slices), strict=True)
        return tuple(1 if shared else count for shared, count in counts)

    def size(self, batch: int, heads: int, slices: int) -> int:
        """Return the bytes that a round needs."""
        counts = self._counts(batch, heads, slices)
        return math.prod((*counts, *self._shape)) * self._dtype.itemsize

    def begin(self, part: Round) -> tuple[int, int, int, int]:
        """Return the address of the sums of a round, and their strides over b, head and slice."""
        counts = self._counts(part.b_stop - part.b, part.h_stop - part.h, part.s_stop - part.s)
        if all(self._shared):
            self._sums = self._total.view(1, 1, 1, *self._shape)
        else:
            self._sums = torch.zeros((*counts, *self._shape), dtype=self._dtype, device="cpu")
        size = math.prod(self._shape)
        batch_stride = 0 if self._shared[0] else size * counts[1] * counts[2]
        head_stride = 0 if self._shared[1] else size * counts[2]
        slice_stride = 0 if self._shared[2] else size
        # The kernel counts sequences and heads from the first of all rounds.
        before = part.b * batch_stride + part.h * head_stride
        address = self._sums.data_ptr() - before * self._dtype.itemsize
        return address, batch_stride, head_stride, slice_stride

    def end(self, part: Round) -> None:
        """Add the sums of a round to those of its slices."""
        if all(self._shared):
            return
        for place, sums in enumerate(folded(self._sums.flatten(0, 1))):
            number = part.s + place
            before = self._slices.get(number)
            self._slices[number] = sums if before is None else before.add_(sums)

    def add_slices(self) -> None:
        """Add the slices whose sums are complete to the total, or keep them apart."""
        for number in sorted(self._slices):
            if self._apart:
                self._added.append(self._slices[number])
            else:
                self._total += self._slices[number]
        self._slices.clear()

    @property
    def total(self) -> Tensor:
        """Return the sums over all slices; if they are kept apart, one for each: [slices, ...]."""
        if not self._apart:
            return self._total
        return torch.stack(self._added) if self._added else self._total.unsqueeze(0)


def direct_inputs(load: Node) -> set[str]:
    """Return the inputs (b, h, ...) that are an index of a load, without any arithmetic."""
    found = set()
    for index in load.args:
        while index.op == "cast":
            (index,) = index.args
        if index.op == "input":
            found.add(str(index.payload))
    return found
