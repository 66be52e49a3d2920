"""What a score mod makes of one score, at some of its positions.

    ScoreMap("alibi_8", (1 << 20, 1 << 20), mod, (0, 0), 0.0).cells((512, 512)).values

Out: one value for each cell, that of the element in the middle of it; so no array has a side for
each token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from quire.block_mask.lists import ceil_div
from quire.draw.subject import Pair
from quire.ir.trace import Mod
from quire.ir.vectorise import evaluate


class Values(NamedTuple):
    """What the score becomes at the middle of each cell."""

    values: NDArray[np.float64]
    step: Pair  # tokens in a cell

    @property
    def ends(self) -> Ends | None:
        """The least and the largest finite value; None where there is none."""
        finite = self.values[np.isfinite(self.values)]
        return Ends(float(finite.min()), float(finite.max())) if finite.size else None

    def special(self) -> dict[str, NDArray[np.bool_]]:
        """Where values are no numbers on a scale, for each kind of these that there is."""
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
    """A score mod with a name, a batch and a head, and the score that it is given."""

    name: str
    lengths: Pair
    mod: Mod
    at: Pair  # b, h
    score: float

    def cells(self, most: Pair) -> Values:
        """Its values in at most so many rows and columns of cells."""
        q_step, kv_step = map(ceil_div, self.lengths, most)
        q_idx, kv_idx = (
            (torch.arange(0, length, step) + step // 2).clamp(max=length - 1)
            for length, step in zip(self.lengths, (q_step, kv_step), strict=True)
        )
        score = torch.full((1, 1, len(q_idx), len(kv_idx)), self.score)
        b, h = (torch.tensor([index]) for index in self.at)
        with torch.no_grad():
            found = evaluate(self.mod, "score", b, h, q_idx, kv_idx, score).expand_as(score)
        return Values(found[0, 0].double().numpy(), (q_step, kv_step))


def written(value: float) -> str:
    """A number in a few digits, and a large one in all that stand before the point."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
