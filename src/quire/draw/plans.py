"""A plan of `quire.distributed`: a row for each rank, a column for each block of the sequence.

    causal: 1,024 tokens over 4 ranks, layout zigzag, blocks of 16, balance 1.02
      0       512
    0 ██░░░░░░······██
    1 ░░██░░░░····██░░
    ...

A rank computes its own blocks and sends their keys to the ranks that show them as received.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.block_mask.blocks import ceil_div
from quire.distributed import ContextPlan
from quire.draw.base import Drawing
from quire.draw.survey import Kinds, Pair
from quire.draw.text import grid, written_legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ABSENT, RECEIVED, OWN = 0, 1, 2
SIGNS = {ABSENT: "·", RECEIVED: "░", OWN: "█"}
COLOURS = {ABSENT: "#eef0f3", RECEIVED: "#f0a63c", OWN: "#205493"}
MEANINGS = {OWN: "computes and sends", RECEIVED: "receives", ABSENT: "does not need"}
MOST_ROWS = 64  # of text
MOST_CELLS, LARGEST = 1024, 24  # of a picture: cells along a side, and dots of a cell


@dataclass(frozen=True, eq=False, repr=False)
class PlanDrawing(Drawing):
    """A drawing of who computes which rows, and who sends which keys to whom."""

    plan: ContextPlan
    width: int

    def kinds(self, most: Pair) -> tuple[Kinds, Pair]:
        """Return cells, and the ranks and tokens of one. Of several ranks the first is shown."""
        division, ranks = self.plan.division, self.plan.num_ranks
        own = division.owner == np.arange(ranks)[:, None]
        kinds = np.where(own, OWN, np.where(division.needs.any(1), RECEIVED, ABSENT))
        step = ceil_div(ranks, most[0]), ceil_div(kinds.shape[1], most[1])
        columns = np.arange(0, kinds.shape[1], step[1])
        folded = np.maximum.reduceat(kinds[:: step[0]], columns, axis=1)
        return folded.astype(np.uint8), (step[0], step[1] * self.plan.block)

    def __str__(self) -> str:
        room = self.width - len(str(self.plan.num_ranks)) - 1
        cells, step = self.kinds((MOST_ROWS, room))
        signs = [[SIGNS[kind] for kind in row] for row in cells.tolist()]
        note = f"a cell is {step[1]:,} tokens"
        if step[0] > 1:
            note += f", of {step[0]} ranks one is shown"
        rows = grid(signs, self._lengths, step, 1)
        legend = {SIGNS[kind]: word for kind, word in MEANINGS.items()}
        return "\n".join([str(self.plan).splitlines()[0], *rows, written_legend(legend, note)])

    @property
    def _lengths(self) -> Pair:
        plan = self.plan
        return plan.num_ranks, plan.num_blocks * plan.block if plan.is_ragged else plan.length

    def _figure(self) -> Figure:
        from quire.draw.picture import SIDE, legend, paint, sheet, whole_dots

        cells, step = self.kinds((MOST_CELLS, MOST_CELLS))
        pixels = whole_dots(self._lengths, step, (SIDE, SIDE), LARGEST)
        title, facts = str(self.plan).splitlines()[0].split(": ", 1)
        figure, axes = sheet(title, facts, self._lengths, pixels, ("ranks", "tokens"), lines=1)
        paint(axes, cells, step, COLOURS)
        legend(axes, {word: [COLOURS[kind]] for kind, word in MEANINGS.items()})
        return figure
