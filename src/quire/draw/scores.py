"""The values that a score mod returns for one score, at some positions.

    ScoreMap("alibi_8", (1 << 20, 1 << 20), mod, (0, 0), 0.0).cells((512, 512)).values

Each cell has the value of the element in its middle, so the number of tokens does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

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
class ScoreMap:
    """A score mod with its name, the lengths, a batch and a head, and the score it is given."""

    name: str
    lengths: Pair
    mod: Mod
    at: Pair  # b, h
    score: float

    def cells(self, most: Pair) -> Values:
        """Return values in at most `most` rows and columns of cells."""
        q_step, kv_step = map(ceil_div, self.lengths, most)
        q_idx, kv_idx = (
            (torch.arange(0, length, step) + step // 2).clamp(max=length - 1)
            for length, step in zip(self.lengths, (q_step, kv_step), strict=True)
        )
        score = torch.full((1, 1, len(q_idx), len(kv_idx)), self.score)
        b, h = (torch.tensor([index]) for index in self.at)
        with torch.no_grad():
            found = evaluate(self.mod, "score", b, h, q_idx=q_idx, kv_idx=kv_idx, score=score)
        return Values(found.expand_as(score)[0, 0].double().numpy(), (q_step, kv_step))


def written(value: float) -> str:
    """Return a number with four digits, or with all digits before the point if it is large."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
