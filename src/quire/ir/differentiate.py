"""Graph to graph, in reverse: how a mod's result moves with the score and with captured tensors.

    out = tanh(score / 20) * 20 + bias[h]

    d out / d score     1 - tanh(score / 20) ** 2
    d out / d bias[h]   1

A derivative is a graph of the same ops, so whatever evaluates mods evaluates derivatives. The rules
are those of autograd: at a tie of min and max each side gets half, rounding and comparing have no
slope, and what is not a float is a constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch

from quire.ir.graph import Node, cast, const, walk
from quire.ir.simplify import simplest

Slopes: TypeAlias = Sequence[Node | None]
"""For each operand what it adds to the slope below it; None for nothing."""


class Derivatives(NamedTuple):
    """The slope of a graph along its input `score`, and along each of its loads."""

    score: Node | None
    loads: dict[Node, Node]


def differentiate(root: Node) -> Derivatives:
    """How `root`, a float, depends on the score and on every float that it loads."""
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
                    slopes[arg] = _op("add", slopes[arg], part) if arg in slopes else part
    return Derivatives(score, loads)


def _op(op: str, *args: Node) -> Node:
    dtype = torch.bool if op in ("lt", "le", "eq") else args[-1].dtype
    return simplest(Node(op, args, dtype))


def _times(slope: Node, number: float) -> Node:
    return _op("mul", slope, const(number, slope.dtype))


def _where(condition: Node, yes: Node, no: Node) -> Node:
    return simplest(Node("where", (condition, yes, no), yes.dtype))


def _zero(like: Node) -> Node:
    return const(0.0, like.dtype)


def _none(node: Node, slope: Node) -> Slopes:
    return [None] * len(node.args)


def _mul(node: Node, slope: Node) -> Slopes:
    a, b = node.args
    return [_op("mul", slope, b), _op("mul", slope, a)]


def _div(node: Node, slope: Node) -> Slopes:
    _, b = node.args
    return [_op("div", slope, b), _op("neg", _op("div", _op("mul", slope, node), b))]


def _extreme(node: Node, slope: Node) -> Slopes:
    """The side that wins has the slope; at a tie each has half of it."""
    a, b = node.args
    first, second = (a, b) if node.op == "min" else (b, a)
    half = _times(slope, 0.5)

    def share(wins: Node) -> Node:
        return _where(_op("eq", a, b), half, _where(wins, slope, _zero(slope)))

    return [share(_op("lt", first, second)), share(_op("lt", second, first))]


def _pow(node: Node, slope: Node) -> Slopes:
    base, exponent = node.args
    zero, one = _zero(slope), const(1.0, slope.dtype)
    lower = _op("pow", base, _op("sub", exponent, one))
    by_base = _op("mul", slope, _op("mul", exponent, lower))
    by_base = _where(_op("eq", exponent, zero), zero, by_base)
    by_exponent = _op("mul", slope, _op("mul", node, _op("log", base)))
    flat = _op("and", _op("eq", base, zero), _op("le", zero, exponent))
    return [by_base, _where(flat, zero, by_exponent)]


def _mod(node: Node, slope: Node) -> Slopes:
    a, b = node.args
    return [slope, _op("neg", _op("mul", slope, _op("floor", _op("div", a, b))))]


def _cast(node: Node, slope: Node) -> Slopes:
    (arg,) = node.args
    return [simplest(cast(slope, arg.dtype)) if arg.dtype.is_floating_point else None]


def _choice(node: Node, slope: Node) -> Slopes:
    condition = node.args[0]
    zero = _zero(slope)
    return [None, _where(condition, slope, zero), _where(condition, zero, slope)]


def _unary(rule: Callable[[Node, Node], Node]) -> Callable[[Node, Node], Slopes]:
    """`rule(x, y)` is the derivative of y, the node, at its operand x."""
    return lambda node, slope: [_op("mul", slope, rule(node.args[0], node))]


def _one_minus(x: Node) -> Node:
    return _op("sub", const(1.0, x.dtype), x)


def _erf(x: Node, _: Node) -> Node:
    return _times(_op("exp", _op("neg", _op("mul", x, x))), 2.0 / math.sqrt(math.pi))


RULES: dict[str, Callable[[Node, Node], Slopes]] = {
    "cast": _cast,
    "add": lambda node, slope: [slope, slope],
    "sub": lambda node, slope: [slope, _op("neg", slope)],
    "mul": _mul,
    "div": _div,
    "floordiv": _none,
    "mod": _mod,
    "pow": _pow,
    "min": _extreme,
    "max": _extreme,
    "neg": lambda node, slope: [_op("neg", slope)],
    "abs": _unary(lambda x, y: _op("sign", x)),
    "sign": _none,
    "floor": _none,
    "ceil": _none,
    "round": _none,
    "trunc": _none,
    "lt": _none,
    "le": _none,
    "eq": _none,
    "and": _none,
    "or": _none,
    "xor": _none,
    "not": _none,
    "shl": _none,
    "shr": _none,
    "bits": _none,
    "where": _choice,
    "exp": _unary(lambda x, y: y),
    "exp2": _unary(lambda x, y: _times(y, math.log(2.0))),
    "log": lambda node, slope: [_op("div", slope, node.args[0])],
    "log2": lambda node, slope: [_op("div", slope, _times(node.args[0], math.log(2.0)))],
    "sqrt": lambda node, slope: [_op("div", slope, _times(node, 2.0))],
    "tanh": _unary(lambda x, y: _one_minus(_op("mul", y, y))),
    "sigmoid": _unary(lambda x, y: _op("mul", y, _one_minus(y))),
    "erf": _unary(_erf),
    "sin": _unary(lambda x, y: _op("cos", x)),
    "cos": _unary(lambda x, y: _op("neg", _op("sin", x))),
}
"""What each op adds to the slopes of its operands, from its own: (node, slope) -> slopes."""
