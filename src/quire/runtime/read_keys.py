"""Which keys the tiles of a mask read, found by evaluating its graphs with torch.

The kernels compute, for each panel of queries and each block of keys, the keys from the first to
the last one that some query of the panel reads (`codegen/kernels/visits.py`):

              block of 128 keys
             +-------------------+
             | . . . x x . . . . |     x: a query reads a key
      panel  | . . . . x . x . . |
             | . . . . . . x . . |
             +-------------------+
                     |-----|           4 keys are multiplied, with every query of the panel

Here the bounds of the mask (`ir/bound.py`) decide most tiles, for 64 blocks at once or for one. The
elements of the others are evaluated. If there are too many, some of them stand for all: one out of
each of many equal parts of a list, picked at random with a fixed seed. So memory and time are
bounded, also at a million tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.block_mask.tiles import TILE_ELEMENTS
from quire.codegen.convention import EMPTY, PARTIAL, PLAIN
from quire.codegen.kernels.visits import SPAN
from quire.codegen.scratch import BLOCKS_TOGETHER
from quire.ir.graph import inputs
from quire.ir.interpret import interpret
from quire.ir.pyramid import anything, heap
from quire.ir.terms import FALSE, TRUE, term, whole
from quire.ir.trace import Traced
from quire.runtime.mods import bounds_of
from quire.runtime.pyramids import is_worth

MOST_SPANS = 2**22  # whose bounds are computed
MOST_SPLIT = 2**16  # spans that are split into blocks
MOST_ELEMENTS = 2**26  # of tiles that bounds do not decide
ASKED = 2**18  # spans or blocks whose bounds are computed at once

_range = functools.partial(torch.arange, device="cpu")  # whatever the default device is
_NOWHERE = torch.zeros(
    (), dtype=torch.bool, device="cpu"
)  # an index that is out of range raises nothing here


class Panels(NamedTuple):
    """Queries that are computed together, and the keys of their sequence; each column is [n].

    Queries have the positions [q_idx, q_idx + q_count) and keys [kv_begin, kv_end).
    """

    b: Tensor
    h: Tensor
    q_idx: Tensor
    q_count: Tensor
    kv_begin: Tensor
    kv_end: Tensor

    def pick(self, numbers: Tensor) -> Panels:
        """Return some of the panels, in this order."""
        return Panels(*(column[numbers] for column in self))


class MaskBounds:
    """The kinds of tiles by the bounds of a mask, as the kernels decide them."""

    def __init__(self, mask: Traced, end: int, work: int) -> None:
        """Positions are below `end`; the call does `work` multiplications."""
        bounds = bounds_of(mask, end)
        self.tell_nothing = bounds.can is TRUE and bounds.must is FALSE
        undecided = term("where", bounds.can, whole(PARTIAL), whole(EMPTY))
        self._kind = term("where", bounds.must, whole(PLAIN), undecided)
        self.inputs = inputs(self._kind)
        self._captures = [*mask.captures]
        for pyramid in bounds.pyramids:
            tensor = mask.captures[pyramid.slot]
            make = heap if is_worth(tensor, pyramid, work) else anything
            self._captures.append(make(tensor, pyramid))

    def kinds(self, panels: Panels, first: Tensor, end: Tensor) -> Tensor:
        """Return EMPTY, PARTIAL or PLAIN for the keys [first, end) of each panel."""
        env = {
            "b": panels.b,
            "h": panels.h,
            "q_low": panels.q_idx,
            "q_high": panels.q_idx + panels.q_count - 1,
            "kv_low": torch.maximum(first, panels.kv_begin),
            "kv_high": torch.minimum(end, panels.kv_end) - 1,
        }
        kinds = interpret(self._kind, env, self._captures, live=_NOWHERE)
        return kinds.expand(len(first))


class Tiling(NamedTuple):
    """The masks of a tile, and its size: queries of a panel and keys of a block."""

    masks: Sequence[Traced]
    width: int
    block: int

    def num_scores(self, panels: Panels, bounds: MaskBounds) -> int:
        """Return how many scores of panels are computed; `bounds` are those of the masks."""
        first, stop = panels.kv_begin // self.block, -(-panels.kv_end // self.block)
        spans = (stop - first + (SPAN - 1)) // SPAN * (panels.kv_begin < panels.kv_end)
        total, undecided = 0.0, []
        picked, stands_for = spread(int(spans.sum()), MOST_SPANS)
        for some in picked.split(ASKED):
            panel, place = locate(spans, some)
            start = first[panel] + place * SPAN
            ends = torch.minimum(start + SPAN, stop[panel])
            decided, left = self._decide(panels, bounds, torch.stack([panel, start, ends]))
            total += decided * stands_for
            undecided.append(left)
        left, more = _some(undecided, MOST_SPLIT)
        stands_for, undecided = stands_for * more, []
        for some in left.split(max(1, ASKED // SPAN), 1):
            decided, remaining = self._decide(panels, bounds, _split(some))
            total += decided * stands_for
            undecided.append(remaining)
        left, more = _some(undecided, self.most_tiles)
        tiles = self.num_read(panels.pick(left[0]), left[1] * self.block)
        return round(total + tiles * stands_for * more)

    def num_listed(self, blocks: Panels, first: Tensor, keys: Tensor) -> int:
        """Return how many scores of blocks of queries are computed, with `keys` from `first` on."""
        panels = -(-blocks.q_count // self.width)
        across = -(-keys // self.block)
        picked, stands_for = spread(int((panels * across).sum()), self.most_tiles)
        run, place = locate(panels * across, picked)
        q_first = place // across[run] * self.width
        mine = blocks.pick(run)
        tiles = mine._replace(
            q_idx=mine.q_idx + q_first,
            q_count=(mine.q_count - q_first).clamp(max=self.width),
        )
        return round(
            self.num_read(tiles, first[run] + place % across[run] * self.block) * stands_for
        )

    @property
    def most_tiles(self) -> int:
        """Return how many tiles may be evaluated."""
        return max(1, MOST_ELEMENTS // (self.width * self.block))

    def _decide(self, panels: Panels, bounds: MaskBounds, spans: Tensor) -> tuple[int, Tensor]:
        """Return the scores of spans that are read for sure, and the spans of unknown kind.

        Spans are [3, n]: the number of a panel, the first block and the end.
        """
        panel, start, stop = spans
        mine = panels.pick(panel)
        first, end = start * self.block, stop * self.block
        kinds = bounds.kinds(mine, first, end)
        keys = torch.minimum(end, mine.kv_end) - torch.maximum(first, mine.kv_begin)
        sure = int((keys * mine.q_count)[kinds == PLAIN].sum())
        return sure, spans[:, kinds == PARTIAL]

    def num_read(self, panels: Panels, first: Tensor) -> int:
        """Return how many scores are computed in the tiles with keys from `first` [n] on."""
        total, at_once = 0, max(1, TILE_ELEMENTS // (self.width * self.block))
        for some in _range(len(first)).split(at_once):
            mine = panels.pick(some)
            total += int((self._extent(mine, first[some]) * mine.q_count).sum())
        return total

    def _extent(self, panels: Panels, first: Tensor) -> Tensor:
        """Return how many keys there are from the first to the last that a panel reads: [n]."""
        b, h, q_idx, q_count, kv_begin, kv_end = (x.view(-1, 1, 1) for x in panels)
        queries = torch.minimum(_range(self.width), q_count.mT - 1).mT + q_idx
        keys = first.view(-1, 1, 1) + _range(self.block)
        exists = (keys >= kv_begin) & (keys < kv_end)
        inside = torch.maximum(torch.minimum(keys, kv_end - 1), kv_begin)
        env = {"b": b, "h": h, "q_idx": queries, "kv_idx": inside}
        held = exists
        for mask in self.masks:
            held = held & interpret(mask.output, env, mask.captures, live=_NOWHERE)
        read = held.any(1)
        first_read, after_last = (x.to(torch.uint8).argmax(1) for x in (read, read.flip(1)))
        return torch.where(read.any(1), self.block - after_last - first_read, 0)


class Units(NamedTuple):
    """What the decode kernel computes at once: some keys, for the queries of all members.

    Unit n has the keys [kv_begin[n], kv_end[n]), and `members` [m, n] are numbers of panels, or -1.
    """

    panels: Panels
    members: Tensor
    kv_begin: Tensor
    kv_end: Tensor

    def num_scores(self, bounds: MaskBounds, block: int) -> int:
        """Return how many scores are computed, of aligned groups of blocks with `block` keys.

        Of each group, these are the blocks from the first to the last in which the mask can hold.
        """
        size = block * BLOCKS_TOGETHER
        groups = -(-self.kv_end // size) - self.kv_begin // size
        groups = torch.where(self.kv_begin < self.kv_end, groups, 0)
        total = 0
        picked, stands_for = spread(int(groups.sum()), MOST_SPANS)
        for some in picked.split(ASKED // BLOCKS_TOGETHER):
            unit, place = locate(groups, some)
            first = (self.kv_begin[unit] // size + place) * size
            total += self._computed(bounds, unit, first, block)
        return round(total * stands_for)

    def _computed(self, bounds: MaskBounds, unit: Tensor, first: Tensor, block: int) -> int:
        """Return the scores of the groups of blocks that begin at the keys `first` [n]."""
        starts = first.view(-1, 1) + _range(BLOCKS_TOGETHER) * block
        low = torch.maximum(starts, self.kv_begin[unit].view(-1, 1))
        high = torch.minimum(starts + block, self.kv_end[unit].view(-1, 1))
        seen, rows = torch.zeros_like(starts, dtype=torch.bool), torch.zeros_like(unit)
        for member in self.members:
            there, panels = member[unit] >= 0, self.panels.pick(member[unit].clamp(min=0))
            rows += torch.where(there, panels.q_count, 0)
            by_block = Panels(*(column.repeat_interleave(BLOCKS_TOGETHER) for column in panels))
            kinds = bounds.kinds(by_block, low.flatten(), high.flatten())
            seen |= (kinds.view_as(seen) != EMPTY) & there.view(-1, 1)
        seen &= low < high
        begin = torch.where(seen, low, high.amax(1, keepdim=True)).amin(1)
        end = torch.where(seen, high, begin.view(-1, 1)).amax(1)
        return int(((end - begin) * rows).sum())


# --- lists ----------------------------------------------------------------------------------------


def spread(total: int, most: int) -> tuple[Tensor, float]:
    """Return at most `most` of the numbers below `total`, and how many each of them stands for."""
    if total <= most:
        return _range(total), 1.0
    ends = _range(most + 1, dtype=torch.float64) * (total / most)
    ends = ends.long().clamp(max=total)
    random = torch.Generator("cpu").manual_seed(total)
    where = torch.rand(most, generator=random, dtype=torch.float64, device="cpu")
    return ends[:-1] + (where * (ends[1:] - ends[:-1])).long(), total / most


def locate(counts: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return which list each number is in, if lists of `counts` entries follow each other.

    Also return its place in that list.
    """
    ends = counts.cumsum(0)
    which = torch.searchsorted(ends, numbers, right=True)
    return which, numbers - (ends - counts)[which]


def _some(parts: Sequence[Tensor], most: int) -> tuple[Tensor, float]:
    """Return at most `most` columns of all parts, and how many each of them stands for."""
    every = torch.cat([torch.empty(3, 0, dtype=torch.int64, device="cpu"), *parts], 1)
    picked, stands_for = spread(every.shape[1], most)
    return every[:, picked], stands_for


def _split(spans: Tensor) -> Tensor:
    """Return the blocks of spans, as spans of one block."""
    panel, start, stop = spans.unsqueeze(-1)
    blocks = start + _range(SPAN)
    split = torch.stack([panel.expand_as(blocks), blocks, blocks + 1])
    return split[:, blocks < stop]
