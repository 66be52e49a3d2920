"""Interval arithmetic on graphs: the interval of an op from the intervals of its operands.

    [a, b] - [c, d]  is  [a - d, b - c]        |[a, b]|  is  [max(a, -b, 0), max(-a, b)]

The ends are graphs of the ends of a tile, so one interval serves all tiles. Rounding keeps the
order of floats; functions that are not quite monotone are widened. If a number can be NaN, both
ends are NaN, and comparisons with them are false. A rule returns None if nothing is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from quire.ir.graph import Node, const
from quire.ir.terms import FALSE, TRUE, both, denied, either, term


class Interval(NamedTuple):
    """The smallest and the largest that a number can be in a tile."""

    low: Node
    high: Node

    @property
    def exact(self) -> bool:
        """Whether the number is the same everywhere in a tile."""
        return self.low is self.high


class Truth(NamedTuple):
    """Whether something can hold in a tile, and whether it must."""

    can: Node
    must: Node


UNKNOWN = Truth(TRUE, FALSE)

_NEARLY = ("exp", "exp2", "log", "log2", "tanh", "sigmoid", "erf")
_MONOTONE = ("floor", "ceil", "round", "trunc", "sqrt", *_NEARLY)
_NOT_BELOW_0 = ("sqrt", "log", "log2")
_TINY = 1e-30


# --- truth values


def compared(op: str, a: Interval, b: Interval) -> Truth:
    """lt, le or eq. They are false for NaN, so `can` is written as "not excluded"."""
    if op == "eq":
        apart = either(term("lt", a.high, b.low), term("lt", b.high, a.low))
        same = both(term("eq", a.low, b.high), term("eq", a.high, b.low))
        return Truth(denied(apart), same)
    opposite = "le" if op == "lt" else "lt"
    return Truth(denied(term(opposite, b.high, a.low)), term(op, a.high, b.low))


def nonzero(a: Interval) -> Truth:
    """Whether a number is not 0."""
    zero = const(0, a.low.dtype)
    always_zero = both(term("eq", a.low, zero), term("eq", a.high, zero))
    return Truth(denied(always_zero), either(term("lt", zero, a.low), term("lt", a.high, zero)))


def logic(op: str, a: Truth, b: Truth) -> Truth:
    """and, or, xor or eq of truth values."""
    if op == "and":
        return Truth(both(a.can, b.can), both(a.must, b.must))
    if op == "or":
        return Truth(either(a.can, b.can), either(a.must, b.must))
    apart = Truth(
        either(both(a.can, denied(b.must)), both(denied(a.must), b.can)),
        either(both(a.must, denied(b.can)), both(denied(a.can), b.must)),
    )
    return apart if op == "xor" else inverse(apart)


def inverse(a: Truth) -> Truth:
    """not."""
    return Truth(denied(a.must), denied(a.can))


def choice(condition: Truth, a: Truth, b: Truth) -> Truth:
    """where(condition, a, b) of truth values."""
    yes, no = condition.can, denied(condition.must)
    can = either(both(yes, a.can), both(no, b.can))
    must = both(either(denied(yes), a.must), either(denied(no), b.must))
    return Truth(can, must)


# --- numbers


def number_choice(condition: Truth, a: Interval, b: Interval) -> Interval:
    """where(condition, a, b) of numbers."""

    def end(op: str, yes: Node, no: Node) -> Node:
        either_of = term("where", condition.can, term(op, yes, no), no)
        return term("where", condition.must, yes, either_of)

    return Interval(end("min", a.low, b.low), end("max", a.high, b.high))


def apply(node: Node, args: Sequence[Interval]) -> Interval | None:
    """The interval of an op whose operands are not all exact."""
    op = node.op
    if op in ("min", "max"):
        a, b = args
        return Interval(term(op, a.low, b.low), term(op, a.high, b.high))
    if op in ("add", "sub"):  # of floats
        a, b = args
        low, high = (b.low, b.high) if op == "add" else (b.high, b.low)
        found = Interval(term(op, a.low, low), term(op, a.high, high))
        return _unless_nan(found, term(op, a.low, high), term(op, a.high, low))  # inf - inf
    if op == "mul":  # of floats
        infinite = (term("sub", end, end) for arg in args for end in arg)
        return _unless_nan(corners(op, args[0], args[1]), *infinite)  # 0 * inf
    if op == "div":
        return _quotient(args[0], args[1])
    if op == "neg":
        return Interval(term("neg", args[0].high), term("neg", args[0].low))
    if op == "abs":
        return _absolute(args[0])
    if op == "sign":
        return Interval(term("sign", args[0].low), term("sign", args[0].high))
    if op in ("floordiv", "mod", "shr"):
        return _divided(op, args[0], args[1])
    if op in _MONOTONE:
        low, high = (term(op, end) for end in args[0])
        if op in _NEARLY:
            low, high = _widened(low, -1), _widened(high, 1)
        found = Interval(low, high)
        return _unless_nan(found, low) if op in _NOT_BELOW_0 else found
    if op in ("sin", "cos"):
        one = const(1.0, node.dtype)
        unbounded = term("sub", args[0].high, args[0].low)  # NaN or infinite where an argument is
        zero = term("mul", unbounded, const(0.0, node.dtype))
        return Interval(term("sub", zero, one), term("add", zero, one))
    return None


def corners(op: str, a: Interval, b: Interval) -> Interval:
    """The smallest and the largest result of an op on the ends of two intervals."""
    first, *others = (term(op, x, y) for x in _ends(a) for y in _ends(b))
    low = high = first
    for corner in others:
        low, high = term("min", low, corner), term("max", high, corner)
    return Interval(low, high)


def _ends(interval: Interval) -> tuple[Node, ...]:
    """The ends of an interval; one if they are the same."""
    return (interval.low,) if interval.exact else (interval.low, interval.high)


def _quotient(a: Interval, b: Interval) -> Interval | None:
    """Division by a number that is the same everywhere in the tile."""
    if not b.exact:
        return None
    zero = const(0, b.low.dtype)
    return _unless_nan(corners("div", a, b), term("div", zero, b.low))


def _unless_nan(found: Interval, *doubts: Node) -> Interval:
    """The interval, with both ends NaN if one of `doubts` is: then a number inside may be NaN."""
    low, high = found
    for doubt in doubts:
        if doubt.dtype.is_floating_point:
            sound = term("eq", doubt, doubt)
            low, high = term("where", sound, low, doubt), term("where", sound, high, doubt)
    return Interval(low, high)


def _absolute(a: Interval) -> Interval:
    zero = const(0, a.low.dtype)
    flipped = term("neg", a.low)
    least = term("max", term("max", a.low, term("neg", a.high)), zero)
    return Interval(least, term("max", flipped, a.high))


def _divided(op: str, a: Interval, b: Interval) -> Interval | None:
    """Integers divided by a constant, rounded down."""
    divisor = b.low
    if a.low.dtype.is_floating_point or divisor.op != "const" or not b.exact:
        return None
    assert isinstance(divisor.payload, int)
    if op == "shr":
        return Interval(term(op, a.low, divisor), term(op, a.high, divisor))
    if divisor.payload < 0:  # as Python rounds, a // -d is -a // d, and a % -d is -(-a % d)
        turned = Interval(term("neg", a.high), term("neg", a.low))
        result = _divided(op, turned, Interval(*[const(-divisor.payload, divisor.dtype)] * 2))
        if result is None or op == "floordiv":
            return result
        return Interval(term("neg", result.high), term("neg", result.low))
    if divisor.payload == 0:
        return None
    if op == "mod":
        return remainder(a, divisor)
    return Interval(term("floordiv", a.low, divisor), term("floordiv", a.high, divisor))


def remainder(a: Interval, period: Node) -> Interval:
    """a % period: all remainders, unless the interval lies within one period."""
    within = term("eq", term("floordiv", a.low, period), term("floordiv", a.high, period))
    zero, top = const(0, period.dtype), term("sub", period, const(1, period.dtype))
    low, high = term("mod", a.low, period), term("mod", a.high, period)
    return Interval(term("where", within, low, zero), term("where", within, high, top))


def _widened(end: Node, direction: int) -> Node:
    """An end of an interval moved outwards by more than the error of our functions."""
    steps = 16 * torch.finfo(end.dtype).eps
    room = term(
        "add", term("mul", term("abs", end), const(steps, end.dtype)), const(_TINY, end.dtype)
    )
    moved = term("sub" if direction < 0 else "add", end, room)
    infinite = term("eq", term("abs", end), const(math.inf, end.dtype))
    return term("where", infinite, end, moved)
