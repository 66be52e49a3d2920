"""Graph to graph: what a mask can be, and what it must be, anywhere in a tile.

    q_idx >= kv_idx    over q_idx in [q_low, q_high] and kv_idx in [kv_low, kv_high]

    can:   kv_low <= q_high         some element may hold; false: the tile is empty
    must:  kv_high <= q_low         every element holds; the tile is full

A number becomes an interval, a pair of graphs; a truth value becomes `can` and `must`. Sums of
integers are kept as sums, so that what occurs twice cancels: q_idx - (q_idx - kv_idx) is kv_idx. A
load along a moving index becomes the minimum and maximum of a range, which two loads from a pyramid
of minima or maxima give. What no rule knows is unknown: it can be true and need not be.

Bounds are never wrong. Float operations round monotonously, and those that are only nearly monotone
are widened; NaN fails every comparison, so `can` is written as the denial of what rules it out.
Integers that might wrap around are unknown; so is everything where a captured integer is LARGEST.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from quire.ir.graph import Node, cast, const, walk
from quire.ir.narrow import RULES as RANGES
from quire.ir.narrow import Range
from quire.ir.pyramid import Pyramid
from quire.ir.simplify import simplest

LARGEST = {torch.int64: 2**40, torch.int32: 2**30}
"""From where on captured integers make bounds unknown, so that sums of smaller ones do not wrap."""

BOOL, I64 = torch.bool, torch.int64


class Interval(NamedTuple):
    """Two graphs of a number's dtype: it is never below the first nor above the second."""

    low: Node
    high: Node

    @property
    def exact(self) -> bool:
        """Whether the number is the same everywhere in a tile."""
        return self.low is self.high


class Truth(NamedTuple):
    """Two graphs of truth values: whether it can hold, and whether it must, in a tile."""

    can: Node
    must: Node


class Bounds(NamedTuple):
    """What a mask can and must be. Loads beyond its captured tensors are from `pyramids`."""

    can: Node
    must: Node
    pyramids: tuple[Pyramid, ...]


def bound(
    root: Node, shapes: Sequence[Sequence[int]], ranges: Mapping[str, Range], levels: int = 0
) -> Bounds:
    """Bounds of a mask that loads from tensors of `shapes`, its inputs being in `ranges`.

    With `levels` ranges of loads are exact up to 2**levels elements, wherever they begin.
    """
    pyramids: dict[Pyramid, int] = {}
    can, must = FALSE, TRUE
    for part in _parts(root):
        tile = _Tile(shapes, ranges, levels, part.ends, pyramids)
        here = tile.truth(root)
        can = _either(can, _both(part.exists, _either(here.can, _no(tile.sure))))
        must = _both(must, _either(_no(part.exists), _both(here.must, tile.sure)))
    return Bounds(can, must, tuple(pyramids))


class _Part(NamedTuple):
    """A part of a tile: the ends of its queries and keys, and whether the tile has any of it."""

    ends: dict[str, Interval]
    exists: Node


def _parts(root: Node) -> list[_Part]:
    """A tile in up to four parts, cut where the graph compares a position with a constant.

    Positions may mean something else beyond such a place, as they do in a sequence that is there
    twice. Only graphs that choose or count in periods gain by it.
    """
    axes = {"q_idx": "q", "kv_idx": "kv"}
    nodes = list(walk(root))
    cuts: dict[str, int] = {}
    if any(node.op in ("mod", "where") for node in nodes):
        for node in nodes:
            if node.op in ("lt", "le"):
                for place, (index, limit) in enumerate((node.args, node.args[::-1])):
                    if index.op == "input" and limit.op == "const" and index.dtype == I64:
                        assert isinstance(limit.payload, int)
                        # index < c and c <= index part below c, the two others above it.
                        above = (node.op == "le") == (place == 0)
                        cuts.setdefault(str(index.payload), limit.payload + above)
    parts = [_Part({}, TRUE)]
    for name, stem in axes.items():
        low, high = (Node("input", (), I64, f"{stem}_{end}") for end in ("low", "high"))
        if name not in cuts:
            parts = [_Part({**part.ends, name: Interval(low, high)}, part.exists) for part in parts]
            continue
        cut = const(cuts[name], I64)
        before = Interval(low, _op("min", high, _op("sub", cut, const(1, I64))))
        after = Interval(_op("max", low, cut), high)
        parts = [
            _Part({**part.ends, name: ends}, _both(part.exists, _op("le", ends.low, ends.high)))
            for part in parts
            for ends in (before, after)
        ]
    return parts


def _op(op: str, *args: Node) -> Node:
    dtype = BOOL if op in ("lt", "le", "eq") else args[-1].dtype
    return simplest(Node(op, args, dtype))


def _as_int64(node: Node) -> Node:
    return node if node.dtype == I64 else simplest(cast(node, I64))


def _both(a: Node, b: Node) -> Node:
    return _op("and", a, b)


def _either(a: Node, b: Node) -> Node:
    return _op("or", a, b)


def _no(a: Node) -> Node:
    return _op("not", a)


def _where(condition: Node, a: Node, b: Node) -> Node:
    return simplest(Node("where", (condition, a, b), a.dtype))


TRUE, FALSE = const(True, BOOL), const(False, BOOL)
UNKNOWN = Truth(TRUE, FALSE)

_MONOTONE = ("floor", "ceil", "round", "trunc", "sqrt")
_NEARLY_MONOTONE = ("exp", "exp2", "log", "log2", "tanh", "sigmoid", "erf")


@dataclass
class _Tile:
    """The bounds of all nodes of one graph, each found once."""

    shapes: Sequence[Sequence[int]]
    ranges: Mapping[str, Range]
    levels: int
    ends: Mapping[str, Interval]
    pyramids: dict[Pyramid, int]
    sure: Node = TRUE  # captured integers are small enough, and indices of them in range
    _truths: dict[Node, Truth] = field(default_factory=dict)
    _intervals: dict[Node, Interval | None] = field(default_factory=dict)
    _sizes: dict[Node, Range | None] = field(default_factory=dict)

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
                return self._logic(node.op, *map(self.truth, node.args))
            case "mul" | "min":
                return self._logic("and", *map(self.truth, node.args))
            case "add" | "max":
                return self._logic("or", *map(self.truth, node.args))
            case "not":
                can, must = self.truth(node.args[0])
                return Truth(_no(must), _no(can))
            case "where":
                return self._choice(*map(self.truth, node.args))
            case "cast":
                return self._nonzero(node.args[0])
            case "load":
                found = self._load(node)
                return UNKNOWN if found is None else Truth(found.high, found.low)
        return UNKNOWN

    def _logic(self, op: str, a: Truth, b: Truth) -> Truth:
        if op == "and":
            return Truth(_both(a.can, b.can), _both(a.must, b.must))
        if op == "or":
            return Truth(_either(a.can, b.can), _either(a.must, b.must))
        apart = Truth(
            _either(_both(a.can, _no(b.must)), _both(_no(a.must), b.can)),
            _either(_both(a.must, _no(b.can)), _both(_no(a.can), b.must)),
        )
        return apart if op == "xor" else Truth(_no(apart.must), _no(apart.can))

    def _choice(self, condition: Truth, a: Truth, b: Truth) -> Truth:
        yes, no = condition.can, _no(condition.must)
        can = _either(_both(yes, a.can), _both(no, b.can))
        must = _both(_either(_no(yes), a.must), _either(_no(no), b.must))
        return Truth(can, must)

    def _nonzero(self, node: Node) -> Truth:
        if node.dtype == BOOL:
            return self.truth(node)
        found = self.interval(node)
        if found is None:
            return UNKNOWN
        zero = const(0, node.dtype)
        always_zero = _both(_op("eq", found.low, zero), _op("eq", found.high, zero))
        return Truth(
            _no(always_zero), _either(_op("lt", zero, found.low), _op("lt", found.high, zero))
        )

    def _comparison(self, node: Node) -> Truth:
        a, b = node.args
        if not a.dtype.is_floating_point:
            difference = self._difference(a, b)
            if difference is not None:
                zero = const(0, I64)
                return self._compared(node.op, difference, Interval(zero, zero))
        left, right = self.interval(a), self.interval(b)
        return UNKNOWN if left is None or right is None else self._compared(node.op, left, right)

    def _compared(self, op: str, a: Interval, b: Interval) -> Truth:
        if op == "eq":
            apart = _either(_op("lt", a.high, b.low), _op("lt", b.high, a.low))
            same = _both(_op("eq", a.low, b.high), _op("eq", a.high, b.low))
            return Truth(_no(apart), same)
        opposite = "le" if op == "lt" else "lt"
        return Truth(_no(_op(opposite, b.high, a.low)), _op(op, a.high, b.low))

    # --- numbers

    def interval(self, node: Node) -> Interval | None:
        """The interval of a number; None where nothing is known."""
        if node not in self._intervals:
            wraps = not node.dtype.is_floating_point and self._size(node) is None
            found = None if wraps else self._interval(node)
            if found is not None and not node.dtype.is_floating_point:
                low = _as_int64(found.low)
                found = Interval(low, low if found.exact else _as_int64(found.high))
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
            return self._sum_interval(self._sum(node))
        args = [self.interval(arg) for arg in node.args]
        known = [arg for arg in args if arg is not None]
        if len(known) < len(args):
            return None
        if all(arg.exact for arg in known):
            dtype = node.dtype if node.dtype.is_floating_point else I64
            same = simplest(Node(node.op, tuple(arg.low for arg in known), dtype))
            return Interval(same, same)
        return _apply(node, known)

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
            return Interval(_where(must, one, zero), _where(can, one, zero))
        if source.dtype.is_floating_point and not node.dtype.is_floating_point:
            return None
        found = self.interval(source)
        if found is None or not node.dtype.is_floating_point:
            return found
        low = simplest(Node("cast", (found.low,), node.dtype))
        return Interval(
            low, low if found.exact else simplest(Node("cast", (found.high,), node.dtype))
        )

    def _number_choice(self, node: Node) -> Interval | None:
        can, must = self.truth(node.args[0])
        a, b = self.interval(node.args[1]), self.interval(node.args[2])
        if a is None or b is None:
            return None

        def end(op: str, yes: Node, no: Node) -> Node:
            return _where(must, yes, _where(can, _op(op, yes, no), no))

        return Interval(end("min", a.low, b.low), end("max", a.high, b.high))

    def _low_bits(self, node: Node) -> Interval | None:
        """x & (2**n - 1) is the remainder of 2**n."""
        x, mask = node.args
        if mask.op != "const" or not isinstance(mask.payload, int) or mask.payload < 0:
            return None
        period = mask.payload + 1
        found = self.interval(x)
        if period & mask.payload or found is None:
            return None
        return _remainder(found, const(period, I64))

    # --- sums of integers

    def _sum(self, node: Node) -> dict[Node | None, int]:
        """An integer as a sum: how often each part is added, None standing for 1."""
        match node.op:
            case "const" if isinstance(node.payload, int):
                return {None: node.payload}
            case "add":
                return _added(self._sum(node.args[0]), self._sum(node.args[1]), 1)
            case "sub":
                return _added(self._sum(node.args[0]), self._sum(node.args[1]), -1)
            case "neg":
                return _added({}, self._sum(node.args[0]), -1)
            case "cast" if node.args[0].dtype in (torch.int64, torch.int32):
                return self._sum(node.args[0])
            case "mul" | "shl":
                for part, factor in (node.args, node.args[::-1]):
                    if factor.op == "const" and isinstance(factor.payload, int):
                        if node.op == "mul":
                            return _added({}, self._sum(part), factor.payload)
                        if part is node.args[0] and 0 <= factor.payload < 32:
                            return _added({}, self._sum(part), 1 << factor.payload)
        return {node: 1}

    def _difference(self, a: Node, b: Node) -> Interval | None:
        if self._size(a) is None or self._size(b) is None:
            return None
        return self._sum_interval(_added(self._sum(a), self._sum(b), -1))

    def _sum_interval(self, parts: dict[Node | None, int]) -> Interval | None:
        """The interval of a sum, in int64."""
        low = high = const(parts.get(None, 0), I64)
        for part, times in parts.items():
            if part is None or times == 0:
                continue
            found = self._product(part) if part.op == "mul" else self.interval(part)
            if found is None:
                return None
            first, last = found if times > 0 else (found.high, found.low)
            same = found.exact and low is high
            low = _plus(low, first, times)
            high = low if same else _plus(high, last, times)
        return Interval(low, high)

    def _product(self, node: Node) -> Interval | None:
        a, b = map(self.interval, node.args)
        if a is None or b is None:
            return None
        return _corners("mul", a, b)

    def _size(self, node: Node) -> Range | None:
        """Between which numbers an integer lies, wherever it is; None where it might wrap."""
        if node not in self._sizes:
            self._sizes[node] = self._known_size(node)
        return self._sizes[node]

    def _known_size(self, node: Node) -> Range | None:
        if node.dtype == BOOL:
            return (0, 1)
        if node.dtype.is_floating_point:
            return None
        info = torch.iinfo(node.dtype)
        found: Range | None = (int(info.min), int(info.max))
        if node.op == "input":
            return self.ranges[str(node.payload)]
        if node.op == "const" and isinstance(node.payload, int):
            return (node.payload, node.payload)
        if node.op == "load":
            largest = LARGEST.get(node.dtype)
            return found if largest is None else (-largest, largest)
        sizes = [self._size(arg) for arg in node.args]
        if any(size is None for size in sizes):
            return None
        if node.op == "cast":
            found = sizes[0]
        elif node.op == "shl":
            limits = sizes[1]
            assert sizes[0] is not None and limits is not None
            if limits[0] < 0 or limits[1] > 31:
                return None
            found = RANGES["mul"](sizes[0], (1 << limits[0], 1 << limits[1]))
        elif node.op in ("shr", "and", "or", "xor", "not", "floor", "ceil", "round", "trunc"):
            return found
        elif node.op in RANGES:
            found = RANGES[node.op](*sizes)
        else:
            return None
        if found is None or found[0] < info.min or found[1] > info.max:
            return None
        return found

    # --- captured tensors

    def _small(self, node: Node, found: Interval | None) -> Interval | None:
        """A captured integer, on the condition that it is below LARGEST."""
        if found is not None and node.dtype in LARGEST:
            limit = LARGEST[node.dtype]
            above = _op("lt", const(-limit, node.dtype), found.low)
            below = _op("lt", found.high, const(limit, node.dtype))
            self.sure = _both(self.sure, _both(above, below))
        return found

    def _inside(self, index: Interval, length: int) -> None:
        """Nothing is sure where an index is out of range: the mask itself has to meet it."""
        above = _op("le", const(-length, I64), index.low)
        self.sure = _both(self.sure, _both(above, _op("lt", index.high, const(length, I64))))

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
        if len(moving) > 1:
            return None
        (dim,) = moving
        length = self.shapes[node.payload][dim]
        leaves = 1 << max(0, length - 1).bit_length()
        places = _places(known[dim], length, leaves, self.levels)
        ends = []
        for largest in (False, True):
            pyramid = Pyramid(node.payload, dim, largest, leaves)
            slot = len(self.shapes) + self.pyramids.setdefault(pyramid, len(self.pyramids))
            parts = [
                Node(
                    "load",
                    tuple(place if d == dim else i.low for d, i in enumerate(known)),
                    node.dtype,
                    slot,
                )
                for place in places
            ]
            combine = functools.partial(_op, "max" if largest else "min")
            ends.append(functools.reduce(combine, parts))
        return Interval(*ends)


def _places(index: Interval, length: int, leaves: int, levels: int) -> list[Node]:
    """Entries of a pyramid that cover a range of indices, exactly if it has up to 2**levels.

    A range that is a whole entry, or two, needs no levels to be covered exactly.
    """
    zero, one = const(0, I64), const(1, I64)
    first, last = (_op("add", end, const(leaves, I64)) for end in index)
    inside, places = first, []
    for _ in range(levels):  # from below: an entry that is no left, or no right, half stands alone
        left = _both(_op("le", first, last), _op("eq", _op("and", first, one), one))
        right = _both(_op("le", first, last), _op("eq", _op("and", last, one), zero))
        places += [_where(left, first, inside), _where(right, last, inside)]
        first = _op("shr", _op("add", first, one), one)
        last = _op("shr", _op("sub", last, one), one)
    if levels:
        rest = _op("le", first, last)
        first, last = _where(rest, first, inside), _where(rest, last, inside)
    level = simplest(Node("bits", (_op("sub", last, first),), I64))
    places += [Node("shr", (end, level), I64) for end in (first, last)]
    # Counted from the end: the whole. Out of range nothing is sure.
    end = const(length - 1, I64)
    strange = FALSE
    for place in index:  # both, as a part that does not exist may end before it begins
        strange = _either(strange, _either(_op("lt", place, zero), _op("lt", end, place)))
    return [_where(strange, one, place) for place in places]


def _plus(total: Node, part: Node, times: int) -> Node:
    """total + times * part."""
    if times < 0:
        return _op("sub", total, _op("mul", part, const(-times, I64)))
    return _op("add", total, _op("mul", part, const(times, I64)))


def _added(
    a: Mapping[Node | None, int], b: Mapping[Node | None, int], times: int
) -> dict[Node | None, int]:
    """a + times * b."""
    total = dict(a)
    for part, count in b.items():
        total[part] = total.get(part, 0) + times * count
    return total


def _apply(node: Node, args: Sequence[Interval]) -> Interval | None:
    """An op of intervals that are not all exact."""
    op = node.op
    if op in ("min", "max"):
        a, b = args
        return Interval(_op(op, a.low, b.low), _op(op, a.high, b.high))
    if op in ("add", "sub"):  # of floats
        a, b = args
        low, high = (b.low, b.high) if op == "add" else (b.high, b.low)
        return Interval(_op(op, a.low, low), _op(op, a.high, high))
    if op in ("mul", "div"):
        return _quotient(args[0], args[1]) if op == "div" else _corners(op, args[0], args[1])
    if op == "neg":
        return Interval(_op("neg", args[0].high), _op("neg", args[0].low))
    if op == "abs":
        return _absolute(args[0])
    if op == "sign":
        return Interval(_op("sign", args[0].low), _op("sign", args[0].high))
    if op in ("floordiv", "mod", "shr"):
        return _divided(op, args[0], args[1])
    if op in _MONOTONE:
        return Interval(_op(op, args[0].low), _op(op, args[0].high))
    if op in _NEARLY_MONOTONE:
        return Interval(_widened(_op(op, args[0].low), -1), _widened(_op(op, args[0].high), 1))
    if op in ("sin", "cos"):
        one = const(1.0, node.dtype)
        unbounded = _op("sub", args[0].high, args[0].low)  # NaN or infinite where an argument is
        zero = _op("mul", unbounded, const(0.0, node.dtype))
        return Interval(_op("sub", zero, one), _op("add", zero, one))
    return None


def _corners(op: str, a: Interval, b: Interval) -> Interval:
    """The least and the greatest of an op at the four corners."""
    corners = [_op(op, x, y) for x in set_of(a) for y in set_of(b)]
    low = high = corners[0]
    for corner in corners[1:]:
        low, high = _op("min", low, corner), _op("max", high, corner)
    return Interval(low, high)


def set_of(interval: Interval) -> tuple[Node, ...]:
    """Its ends, once where they are the same."""
    return (interval.low,) if interval.exact else (interval.low, interval.high)


def _quotient(a: Interval, b: Interval) -> Interval | None:
    """Division by a number that is the same everywhere in the tile."""
    return _corners("div", a, b) if b.exact else None


def _absolute(a: Interval) -> Interval:
    zero = const(0, a.low.dtype)
    flipped = _op("neg", a.low)
    least = _op("max", _op("max", a.low, _op("neg", a.high)), zero)
    return Interval(least, _op("max", flipped, a.high))


def _divided(op: str, a: Interval, b: Interval) -> Interval | None:
    """Integers divided by a constant, rounded down."""
    divisor = b.low
    if a.low.dtype.is_floating_point or divisor.op != "const" or not b.exact:
        return None
    assert isinstance(divisor.payload, int)
    if op == "shr":
        return Interval(_op(op, a.low, divisor), _op(op, a.high, divisor))
    if divisor.payload < 0:  # as Python rounds, a // -d is -a // d, and a % -d is -(-a % d)
        turned = Interval(_op("neg", a.high), _op("neg", a.low))
        result = _divided(op, turned, Interval(*[const(-divisor.payload, divisor.dtype)] * 2))
        if result is None or op == "floordiv":
            return result
        return Interval(_op("neg", result.high), _op("neg", result.low))
    if divisor.payload == 0:
        return None
    if op == "mod":
        return _remainder(a, divisor)
    return Interval(_op("floordiv", a.low, divisor), _op("floordiv", a.high, divisor))


def _remainder(a: Interval, period: Node) -> Interval:
    """A whole period, unless the range lies within one."""
    within = _op("eq", _op("floordiv", a.low, period), _op("floordiv", a.high, period))
    zero, top = const(0, period.dtype), _op("sub", period, const(1, period.dtype))
    low, high = _op("mod", a.low, period), _op("mod", a.high, period)
    return Interval(_where(within, low, zero), _where(within, high, top))


def _widened(end: Node, direction: int) -> Node:
    """An end of an interval moved outwards by more than our functions err."""
    steps = 16 * torch.finfo(end.dtype).eps
    room = _op("add", _op("mul", _op("abs", end), const(steps, end.dtype)), const(_TINY, end.dtype))
    moved = _op("sub" if direction < 0 else "add", end, room)
    infinite = _op("eq", _op("abs", end), const(math.inf, end.dtype))
    return _where(infinite, end, moved)


_TINY = 1e-30
