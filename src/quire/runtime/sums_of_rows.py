"""The gradients of keys and values: sums of slices of queries, and the rows that each touched."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.runtime.slices import Numbers


class Touched:
    """The rows of keys that each slice of a round has added to."""

    def __init__(self) -> None:
        self._ends: dict[int, tuple[int, int]] = {}

    def note(self, slices: Numbers, rows: Numbers) -> None:
        """Take in the rows [first, end) that shares of these slices have touched."""
        for number in set(slices.tolist()):
            found = rows[(slices == number) & (rows[:, 0] < rows[:, 1])]
            if len(found):
                first, end = self._ends.get(number, (found[0, 0], 0))
                low, high = found[:, 0].min(), found[:, 1].max()
                self._ends[number] = int(min(first, low)), int(max(end, high))

    def __getitem__(self, number: int) -> slice:
        return slice(*self._ends.get(number, (0, 0)))


class SumsOfRows:
    """Sums for the rows of keys or values: [slices, B, H, rows, columns], and their total.

    If a share is all slices, the kernel adds them, and there is one slice here.
    """

    def __init__(self, num_slices: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.sums = torch.zeros((num_slices, *shape), dtype=dtype, device="cpu")
        self._total: Tensor | None = None

    def add_slices(self, touched: Touched, *, last: bool) -> None:
        """Add the slices of a round, in order."""
        first = int(self._total is None)
        if self._total is None:
            self._total = self.sums[0] if last else self.sums[0].clone()
        for number, part in enumerate(self.sums[first:], first):
            self._total[:, :, touched[number]] += part[:, :, touched[number]]
        if not last:
            for number, part in enumerate(self.sums):
                part[:, :, touched[number]] = 0

    @property
    def total(self) -> Tensor:
        """Return the sums over all slices."""
        return self.sums[0] if self._total is None else self._total
