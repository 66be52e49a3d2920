"""Graph to graph: the derivatives of a score_mod by the score and by captured tensors.

    out = tanh(score / 20) * 20 + bias[h]

    d out / d score     1 - tanh(score / 20) ** 2
    d out / d bias[h]   1

`push` goes the other way: given the tangents of score and loads, it returns that of the result.

    d out    (1 - tanh(score / 20) ** 2) * d score + d bias[h]

A derivative is a graph of the same ops, so whatever evaluates mods evaluates it, too. The rules are
those of autograd: at a tie, min and max give each side half; rounding and comparisons have the
derivative 0; integers and bools are constants.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from quire.ir.graph import Node, cast, const, walk
from quire.ir.simplify import simplest
from quire.ir.terms import as_dtype, term

Slopes: TypeAlias = Sequence[Node | None]
"""For each operand what is added to its slope, the derivative of the root by it; None for 0."""


class Derivatives(NamedTuple):
    """The derivative of a graph by its input `score`, and by each of its loads."""

    score: Node | None
    loads: dict[Node, Node]


def differentiate(root: Node) -> Derivatives:
    """The derivatives of `root`, a float, by the score and by every float that it loads."""
    slopes: dict[Node, Node] = {root: const(1.0, root.dtype)}
    loads: dict[Node, Node] = {}
    score = None
    for node in reversed(list(walk(root))):
        slope = slopes.get(node)
        if slope is None or not node.dtype.is_floating_point:
            continue
        if node.op == "load":
            loads[node] = slope
        elif node.op == "input":
            score = slope
        elif node.op != "const":
            for arg, part in zip(node.args, RULES[node.op](node, slope), strict=True):
                if part is not None and arg.dtype.is_floating_point:
                    slopes[arg] = term("add", slopes[arg], part) if arg in slopes else part
    return Derivatives(score, loads)


def push(root: Node, tangents: Mapping[Node, Node]) -> Node | None:
    """The tangent of `root`, given those of some nodes; None if it is 0 everywhere.

    Tangents of loads are widened before they are multiplied, as autograd does in forward mode.
    """
    found: dict[Node, Node | None] = {}
    for node in walk(root):
        if node in tangents:
            found[node] = tangents[node]
        else:
            moved = [found[arg] for arg in node.args]
            floats = node.dtype.is_floating_point and any(part is not None for part in moved)
            found[node] = _pushed(node, moved) if floats else None
    return found[root]


@functools.lru_cache(maxsize=512)
def score_tangent(score: Node, moves: bool, captured: tuple[bool, ...]) -> Node | None:
    """Return the tangent of a score_mod as a graph, with the tangent of the score as an input.

    `moves` says whether the score has one, `captured` which captured tensors have one. These are
    loaded from behind the captured tensors, in their order.
    """
    moved = (slot for slot, has in enumerate(captured) if has)
    slots: dict[object, int] = {slot: number for number, slot in enumerate(moved)}
    given: dict[Node, Node] = {}
    for node in walk(score):
        if node.op == "load" and node.payload in slots and node.dtype.is_floating_point:
            slot = len(captured) + slots[node.payload]
            given[node] = Node("load", node.args, node.dtype, slot)
        elif moves and node.op == "input" and node.payload == "score":
            given[node] = Node("input", (), node.dtype, "tangent")
    return push(score, given)


def _pushed(node: Node, tangents: Slopes) -> Node | None:
    """The tangent of a node, given those of its operands; one of them is not None."""
    if node.op == "cast":
        (only,) = tangents
        return None if only is None else as_dtype(only, node.dtype)
    if node.op == "where":  # not a product: the operand that is not chosen may be infinite
        _, *sides = (_zero(node) if part is None else part for part in tangents)
        return term("where", node.args[0], *sides)
    total = None
    for slope, tangent in zip(RULES[node.op](node, const(1.0, node.dtype)), tangents, strict=True):
        if slope is not None and tangent is not None:
            part = term("mul", slope, tangent)
            total = part if total is None else term("add", total, part)
    return total


def _times(slope: Node, number: float) -> Node:
    return term("mul", slope, const(number, slope.dtype))


def _zero(like: Node) -> Node:
    return const(0.0, like.dtype)


def _none(node: Node, slope: Node) -> Slopes:
    return [None] * len(node.args)


def _mul(node: Node, slope: Node) -> Slopes:
    a, b = node.args
    return [term("mul", slope, b), term("mul", slope, a)]


def _div(node: Node, slope: Node) -> Slopes:
    _, b = node.args
    return [term("div", slope, b), term("neg", term("div", term("mul", slope, node), b))]


def _extreme(node: Node, slope: Node) -> Slopes:
    """The smaller, or larger, operand gets the slope; at a tie each gets half."""
    a, b = node.args
    first, second = (a, b) if node.op == "min" else (b, a)
    half = _times(slope, 0.5)

    def share(wins: Node) -> Node:
        return term("where", term("eq", a, b), half, term("where", wins, slope, _zero(slope)))

    return [share(term("lt", first, second)), share(term("lt", second, first))]


def _pow(node: Node, slope: Node) -> Slopes:
    base, exponent = node.args
    zero, one = _zero(slope), const(1.0, slope.dtype)
    lower = term("pow", base, term("sub", exponent, one))
    by_base = term("mul", slope, term("mul", exponent, lower))
    by_base = term("where", term("eq", exponent, zero), zero, by_base)
    by_exponent = term("mul", slope, term("mul", node, term("log", base)))
    flat = term("and", term("eq", base, zero), term("le", zero, exponent))
    return [by_base, term("where", flat, zero, by_exponent)]


def _mod(node: Node, slope: Node) -> Slopes:
    a, b = node.args
    return [slope, term("neg", term("mul", slope, term("floor", term("div", a, b))))]


def _cast(node: Node, slope: Node) -> Slopes:
    (arg,) = node.args
    return [simplest(cast(slope, arg.dtype)) if arg.dtype.is_floating_point else None]


def _choice(node: Node, slope: Node) -> Slopes:
    condition = node.args[0]
    zero = _zero(slope)
    return [None, term("where", condition, slope, zero), term("where", condition, zero, slope)]


def _unary(rule: Callable[[Node, Node], Node]) -> Callable[[Node, Node], Slopes]:
    """`rule(x, y)` gives the derivative of the node y by its operand x."""
    return lambda node, slope: [term("mul", slope, rule(node.args[0], node))]


def _one_minus(x: Node) -> Node:
    return term("sub", const(1.0, x.dtype), x)


def _erf(x: Node, _: Node) -> Node:
    return _times(term("exp", term("neg", term("mul", x, x))), 2.0 / math.sqrt(math.pi))


_CONSTANT = "floordiv sign floor ceil round trunc lt le eq and or xor not shl shr bits"

RULES: dict[str, Callable[[Node, Node], Slopes]] = {
    **dict.fromkeys(_CONSTANT.split(), _none),
    "cast": _cast,
    "add": lambda node, slope: [slope, slope],
    "sub": lambda node, slope: [slope, term("neg", slope)],
    "mul": _mul,
    "div": _div,
    "mod": _mod,
    "pow": _pow,
    "min": _extreme,
    "max": _extreme,
    "neg": lambda node, slope: [term("neg", slope)],
    "abs": _unary(lambda x, y: term("sign", x)),
    "where": _choice,
    "exp": _unary(lambda x, y: y),
    "exp2": _unary(lambda x, y: _times(y, math.log(2.0))),
    "log": lambda node, slope: [term("div", slope, node.args[0])],
    "log2": lambda node, slope: [term("div", slope, _times(node.args[0], math.log(2.0)))],
    "sqrt": lambda node, slope: [term("div", slope, _times(node, 2.0))],
    "tanh": _unary(lambda x, y: _one_minus(term("mul", y, y))),
    "sigmoid": _unary(lambda x, y: term("mul", y, _one_minus(y))),
    "erf": _unary(_erf),
    "sin": _unary(lambda x, y: term("cos", x)),
    "cos": _unary(lambda x, y: term("neg", term("sin", x))),
}
"""(node, its slope) -> what is added to the slopes of its operands."""
