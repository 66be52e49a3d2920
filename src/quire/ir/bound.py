"""Graph to graph: whether a mask can hold, and whether it must hold, in a tile.

    q_idx >= kv_idx    over q_idx in [q_low, q_high] and kv_idx in [kv_low, kv_high]

    can:   kv_low <= q_high         some element may hold; if false, the tile is empty
    must:  kv_high <= q_low         every element holds; the tile is full

The bounds of a number are an interval, a pair of graphs; those of a truth value are `can` and
`must`. Sums of integers are kept as sums, so that terms cancel: q_idx - (q_idx - kv_idx) is kv_idx.
A load whose index moves within the tile is bounded by the minimum and maximum of a range, found by
two loads from a pyramid of minima or maxima; with two such indices, of a rectangle, by four loads.
A node without a rule is unknown: it can hold and need not.

Bounds are never wrong, only wide. Rounding keeps the order of floats; functions that are not quite
monotone are widened. Comparisons with NaN are false, so `can` is written as "not excluded".
Integers that might wrap around are unknown, and so is everything if a captured integer reaches
LARGEST.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.ir import intervals
from quire.ir.graph import Node, const, walk
from quire.ir.intervals import UNKNOWN, Interval, Truth
from quire.ir.parts import parts_of
from quire.ir.pyramid import Pyramid, axes_of, entries_of
from quire.ir.ranges import FAR, LARGEST, Range, Ranges
from quire.ir.simplify import simplest
from quire.ir.sums import Sum, added, plus, sum_of
from quire.ir.terms import (
    BOOL,
    FALSE,
    I64,
    TRUE,
    as_dtype,
    both,
    denied,
    either,
    term,
    whole,
)

MOST_LOADS = 64
"""The most entries of a pyramid that one bound loads."""


class Bounds(NamedTuple):
    """Whether a mask can hold and must hold. Loads after its captured tensors are from `pyramids`.

    `unknown` are the nodes without bounds whose operands have bounds.
    """

    can: Node
    must: Node
    pyramids: tuple[Pyramid, ...]
    unknown: tuple[Node, ...]


def bound(
    root: Node, shapes: Sequence[Sequence[int]], ranges: Mapping[str, Range], levels: int = 0
) -> Bounds:
    """The bounds of a mask over tensors of `shapes` and inputs in `ranges`.

    With `levels`, bounds of loads are exact for ranges of up to 2**levels elements.
    """
    sizes, pyramids, unknown = Ranges(ranges, sure=True), dict[Pyramid, int](), dict[Node, None]()
    can, must = FALSE, TRUE
    for part in parts_of(root):
        tile = _Bounder(shapes, sizes, levels, part.ends, pyramids)
        here = tile.truth(root)
        can = either(can, both(part.exists, either(here.can, denied(tile.sure))))
        must = both(must, either(denied(part.exists), both(here.must, tile.sure)))
        unknown |= dict.fromkeys(tile.unknown(root))
    return Bounds(can, must, tuple(pyramids), tuple(unknown))


@dataclass
class _Bounder:
    """Finds the bounds of all nodes of one graph, each once, for one part of a tile."""

    shapes: Sequence[Sequence[int]]
    sizes: Ranges
    levels: int
    ends: Mapping[str, Interval]
    pyramids: dict[Pyramid, int]
    sure: Node = TRUE  # whether captured integers are below LARGEST, and indices in range
    _truths: dict[Node, Truth] = field(default_factory=dict)
    _intervals: dict[Node, Interval | None] = field(default_factory=dict)

    def unknown(self, root: Node) -> list[Node]:
        """The nodes without bounds, except those that have such a node as an operand."""
        nothing = {node for node, found in self._truths.items() if found == UNKNOWN}
        nothing |= {node for node, found in self._intervals.items() if found is None}
        return [node for node in walk(root) if node in nothing and nothing.isdisjoint(node.args)]

    # --- truth values

    def truth(self, node: Node) -> Truth:
        """Whether a bool node can hold, and whether it must."""
        if node not in self._truths:
            self._truths[node] = self._truth(node)
        return self._truths[node]

    def _truth(self, node: Node) -> Truth:
        match node.op:
            case "const":
                return Truth(node, node)
            case "lt" | "le" | "eq" if node.args[0].dtype != BOOL:
                return self._comparison(node)
            case "and" | "or" | "xor" | "eq":
                return intervals.logic(node.op, *map(self.truth, node.args))
            case "mul" | "min":
                return intervals.logic("and", *map(self.truth, node.args))
            case "add" | "max":
                return intervals.logic("or", *map(self.truth, node.args))
            case "not":
                return intervals.inverse(self.truth(node.args[0]))
            case "where":
                return intervals.choice(*map(self.truth, node.args))
            case "cast":
                return self._nonzero(node.args[0])
            case "load":
                found = self._load(node)
                return UNKNOWN if found is None else Truth(found.high, found.low)
        return UNKNOWN

    def _nonzero(self, node: Node) -> Truth:
        if node.dtype == BOOL:
            return self.truth(node)
        found = self.interval(node)
        return UNKNOWN if found is None else intervals.nonzero(found)

    def _comparison(self, node: Node) -> Truth:
        a, b = node.args
        if not a.dtype.is_floating_point:
            difference = self._difference(a, b)
            if difference is not None:
                zero = whole(0)
                return intervals.compared(node.op, difference, Interval(zero, zero))
        left, right = self.interval(a), self.interval(b)
        return (
            UNKNOWN if left is None or right is None else intervals.compared(node.op, left, right)
        )

    # --- numbers

    def interval(self, node: Node) -> Interval | None:
        """The interval of a number; None if it is unknown."""
        if node not in self._intervals:
            wraps = not node.dtype.is_floating_point and self.sizes.of(node) is None
            found = None if wraps else self._interval(node)
            if found is not None and not node.dtype.is_floating_point:
                low = as_dtype(found.low, I64)
                found = Interval(low, low if found.exact else as_dtype(found.high, I64))
            self._intervals[node] = found
        return self._intervals[node]

    def _interval(self, node: Node) -> Interval | None:
        match node.op:
            case "input":
                return self._input(str(node.payload))
            case "const":
                return Interval(node, node)
            case "load":
                return self._small(node, self._load(node))
            case "cast":
                return self._cast(node)
            case "where":
                return self._number_choice(node)
            case "and":
                return self._low_bits(node)
        if not node.dtype.is_floating_point and node.op in ("add", "sub", "neg", "mul", "shl"):
            return self._sum_interval(sum_of(node))
        args = [self.interval(arg) for arg in node.args]
        known = [arg for arg in args if arg is not None]
        if len(known) < len(args):
            return None
        if all(arg.exact for arg in known):
            dtype = node.dtype if node.dtype.is_floating_point else I64
            same = simplest(Node(node.op, tuple(arg.low for arg in known), dtype))
            return Interval(same, same)
        return intervals.apply(node, known)

    def _input(self, name: str) -> Interval | None:
        if name in ("b", "h"):
            same = Node("input", (), I64, name)
            return Interval(same, same)
        return self.ends.get(name)

    def _cast(self, node: Node) -> Interval | None:
        (source,) = node.args
        if source.dtype == BOOL:
            can, must = self.truth(source)
            one, zero = const(1, node.dtype), const(0, node.dtype)
            return Interval(term("where", must, one, zero), term("where", can, one, zero))
        if source.dtype.is_floating_point and not node.dtype.is_floating_point:
            return None
        found = self.interval(source)
        if found is None or not node.dtype.is_floating_point:
            return found
        low = as_dtype(found.low, node.dtype)
        return Interval(low, low if found.exact else as_dtype(found.high, node.dtype))

    def _number_choice(self, node: Node) -> Interval | None:
        a, b = self.interval(node.args[1]), self.interval(node.args[2])
        if a is None or b is None:
            return None
        return intervals.number_choice(self.truth(node.args[0]), a, b)

    def _low_bits(self, node: Node) -> Interval | None:
        """x & (2**n - 1) is x % 2**n."""
        x, mask = node.args
        if mask.op != "const" or not isinstance(mask.payload, int) or mask.payload < 0:
            return None
        period = mask.payload + 1
        found = self.interval(x)
        if period & mask.payload or found is None:
            return None
        return intervals.remainder(found, whole(period))

    # --- sums of integers

    def _difference(self, a: Node, b: Node) -> Interval | None:
        if not self.sizes.difference_fits(a, b):
            return None
        return self._sum_interval(added(sum_of(a), sum_of(b), -1))

    def _sum_interval(self, parts: Sum) -> Interval | None:
        """The interval of a sum, in int64."""
        if any(abs(times) >= FAR for times in parts.values()):
            return None
        low = high = whole(parts.get(None, 0))
        for part, times in parts.items():
            if part is None or times == 0:
                continue
            found = self._product(part) if part.op in ("mul", "shl") else self.interval(part)
            if found is None:
                return None
            first, last = found if times > 0 else (found.high, found.low)
            same = found.exact and low is high
            low = plus(low, first, times)
            high = low if same else plus(high, last, times)
        return Interval(low, high)

    def _product(self, node: Node) -> Interval | None:
        """The interval of a product, or of a shift, which is a product with a power of two."""
        a, b = map(self.interval, node.args)
        return None if a is None or b is None else intervals.corners(node.op, a, b)

    # --- captured tensors

    def _small(self, node: Node, found: Interval | None) -> Interval | None:
        """The interval of a captured integer; bounds are sure only if it is below LARGEST."""
        if found is not None and node.dtype in LARGEST:
            limit = LARGEST[node.dtype]
            above = term("lt", const(-limit, node.dtype), found.low)
            below = term("lt", found.high, const(limit, node.dtype))
            self.sure = both(self.sure, both(above, below))
        return found

    def _inside(self, index: Interval, length: int) -> None:
        """Make bounds sure only if an index is in range; otherwise the mask itself reports it."""
        above = term("le", whole(-length), index.low)
        self.sure = both(self.sure, both(above, term("lt", index.high, whole(length))))

    def _load(self, node: Node) -> Interval | None:
        assert isinstance(node.payload, int)
        if not node.args:
            return Interval(node, node)
        indices = [self.interval(arg) for arg in node.args]
        if any(index is None for index in indices):
            return None
        known = [index for index in indices if index is not None]
        for index, length in zip(known, self.shapes[node.payload], strict=True):
            self._inside(index, length)
        moving = [dim for dim, index in enumerate(known) if not index.exact]
        if not moving:
            same = Node("load", tuple(index.low for index in known), node.dtype, node.payload)
            return Interval(same, same)
        shape = self.shapes[node.payload]
        axes = axes_of(shape, moving, node.dtype.itemsize)
        levels = min(self.levels, _levels_of(len(axes)))
        places = [entries_of(known[axis.dim], axis, shape[axis.dim], levels) for axis in axes]
        ends = []
        for largest in (False, True):
            pyramid = Pyramid(node.payload, axes, largest)
            slot = len(self.shapes) + self.pyramids.setdefault(pyramid, len(self.pyramids))
            parts = []
            for entry in itertools.product(*places):
                at = dict(zip(moving, entry, strict=True))
                place = tuple(at.get(dim, index.low) for dim, index in enumerate(known))
                parts.append(Node("load", place, node.dtype, slot))
            combine = functools.partial(term, "max" if largest else "min")
            ends.append(functools.reduce(combine, parts))
        return Interval(*ends)


def _levels_of(axes: int) -> int:
    """The most levels for MOST_LOADS loads; the number of loads is a product over the axes."""
    return (int(MOST_LOADS ** (1 / axes)) - 2) // 2
