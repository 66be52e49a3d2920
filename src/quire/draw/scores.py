"""The values that a score mod returns for one score, at some positions.

    ScoreMap("alibi_8", (1 << 20, 1 << 20), 0.0, mod, (0, 0)).cells((512, 512)).values

Each cell has the value of the element in its middle, so the number of tokens does not matter.
Attention weights are drawn in the same way, but a cell has the largest of its weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.block_mask.blocks import ceil_div
from quire.draw.survey import Pair
from quire.ir.trace import Mod
from quire.ir.vectorise import evaluate


class Values(NamedTuple):
    """The score that a mod returns at the middle of each cell."""

    values: NDArray[np.float64]
    step: Pair  # tokens in a cell

    @property
    def ends(self) -> Ends | None:
        """The least and the largest finite value, or None if no value is finite."""
        finite = self.values[np.isfinite(self.values)]
        return Ends(float(finite.min()), float(finite.max())) if finite.size else None

    def special(self) -> dict[str, NDArray[np.bool_]]:
        """Return where values are -inf, inf or nan, for each of these that occurs."""
        kinds = {
            "-inf": np.isneginf(self.values),
            "inf": np.isposinf(self.values),
            "nan": np.isnan(self.values),
        }
        return {name: found for name, found in kinds.items() if found.any()}


class Ends(NamedTuple):
    """A range of values."""

    low: float
    high: float

    def __str__(self) -> str:
        low, high = written(self.low), written(self.high)
        return low if low == high else f"{low} to {high}"


@dataclass(frozen=True, eq=False)
class HeatMap:
    """Numbers for queries and keys, with a name. `middle` is the number that has no colour."""

    name: str
    lengths: Pair
    middle: float
    shown = "one element"  # of a cell

    @property
    def what(self) -> str:
        """What the numbers are, in front of them."""
        raise NotImplementedError

    def cells(self, most: Pair) -> Values:
        """Return values in at most `most` rows and columns of cells."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class WeightMap(HeatMap):
    """Attention weights [rows, S]. A cell shows the largest of its weights."""

    weights: Tensor
    shown = "the largest"

    @property
    def what(self) -> str:
        """What the numbers are."""
        return "weights of"

    def cells(self, most: Pair) -> Values:
        """Return values in at most `most` rows and columns of cells."""
        q_step, kv_step = map(ceil_div, self.lengths, most)
        values = self.weights.detach().double().numpy()
        for axis, step in enumerate((q_step, kv_step)):
            values = np.maximum.reduceat(values, np.arange(0, values.shape[axis], step), axis)
        return Values(values, (q_step, kv_step))


@dataclass(frozen=True, eq=False)
class ScoreMap(HeatMap):
    """A score mod at a batch and a head. Its score is in the middle."""

    mod: Mod
    at: Pair  # b, h

    @property
    def what(self) -> str:
        """What the numbers are."""
        return f"score {self.middle:g} becomes"

    def cells(self, most: Pair) -> Values:
        """Return values in at most `most` rows and columns of cells."""
        q_step, kv_step = map(ceil_div, self.lengths, most)
        q_idx, kv_idx = (
            (torch.arange(0, length, step) + step // 2).clamp(max=length - 1)
            for length, step in zip(self.lengths, (q_step, kv_step), strict=True)
        )
        score = torch.full((1, 1, len(q_idx), len(kv_idx)), self.middle)
        b, h = (torch.tensor([index]) for index in self.at)
        with torch.no_grad():
            found = evaluate(self.mod, "score", b, h, q_idx=q_idx, kv_idx=kv_idx, score=score)
        return Values(found.expand_as(score)[0, 0].double().numpy(), (q_step, kv_step))


def written(value: float) -> str:
    """Return a number with four digits, or with all digits before the point if it is large."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
