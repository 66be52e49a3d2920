"""The smallest and the largest value of integer nodes, from what the inputs of a graph can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from quire.ir.graph import Node

Range: TypeAlias = tuple[int, int]
"""The smallest and the largest value."""

Rule: TypeAlias = Callable[..., Range | None]

LARGEST = {torch.int64: 2**40, torch.int32: 2**30}
"""Captured integers from here on make a bound unknown. Sums of smaller ones do not wrap around."""

FAR = 2**62
"""No number of a sum reaches this, so int64 holds all of them and their sum."""


def _corners(combine: Callable[[int, int], int]) -> Callable[[Range, Range], Range]:
    def rule(a: Range, b: Range) -> Range:
        values = [combine(x, y) for x in a for y in b]
        return min(values), max(values)

    return rule


_product = _corners(lambda x, y: x * y)


def _quotient(a: Range, b: Range) -> Range | None:
    return _corners(lambda x, y: x // y)(a, b) if b[0] > 0 else None


def _remainder(a: Range, b: Range) -> Range | None:
    return (0, b[1] - 1) if b[0] > 0 else None


def _absolute(a: Range) -> Range:
    least = 0 if a[0] <= 0 <= a[1] else min(abs(a[0]), abs(a[1]))
    return least, max(abs(a[0]), abs(a[1]))


def _shifted_left(a: Range, b: Range) -> Range | None:
    return _product(a, (1 << b[0], 1 << b[1])) if b[0] >= 0 and b[1] < 32 else None


def _common_bits(*operands: Range) -> Range | None:
    """a & b has only bits that a and b have, so it is at most each of them that is not negative."""
    highs = [high for low, high in operands if low >= 0]
    return (0, min(highs)) if highs else None


RULES: dict[str, Rule] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _product,
    "floordiv": _quotient,
    "mod": _remainder,
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "neg": lambda a: (-a[1], -a[0]),
    "abs": _absolute,
    "sign": lambda a: (-1, 1),
    "bits": lambda a: (0, max(a[1], 0).bit_length()),
    "where": lambda _, a, b: (min(a[0], b[0]), max(a[1], b[1])),
}
"""The range of an op from the ranges of its operands; None where it can be anything."""

BIT_RULES: dict[str, Rule] = {
    "shl": _shifted_left,
    "shr": lambda a, _: (min(a[0], 0), max(a[1], 0)),
    "and": _common_bits,
}
"""The same for ops that stay int64; only bounds ask about these."""

_WITHIN_DTYPE = ("or", "xor", "not", "floor", "ceil", "round", "trunc")


def limits(dtype: torch.dtype) -> Range:
    """The range of a dtype."""
    if dtype == torch.bool:
        return 0, 1
    info = torch.iinfo(dtype)
    return int(info.min), int(info.max)


@dataclass
class Ranges:
    """The ranges of the integer and bool nodes of a graph, each found once. Floats have none.

    A node that might wrap around, or that no rule knows, has the range of its dtype. With `sure`,
    it has no range, and neither has a node that is computed from it. Captured integers then count
    as below LARGEST.
    """

    inputs: Mapping[str, Range]
    sure: bool = False
    _known: dict[Node, Range | None] = field(default_factory=dict)

    def of(self, node: Node) -> Range | None:
        """The range of a node; never too small."""
        if node not in self._known:
            self._known[node] = None if node.dtype.is_floating_point else self._checked(node)
        return self._known[node]

    def _checked(self, node: Node) -> Range | None:
        found, (low, high) = self._find(node), limits(node.dtype)
        if found is not None and low <= found[0] and found[1] <= high:
            return found
        return None if self.sure else (low, high)

    def _find(self, node: Node) -> Range | None:
        if self.sure and node.dtype == torch.bool:
            return (0, 1)
        if node.op == "input":
            return self.inputs[str(node.payload)]
        if node.op == "const":
            assert isinstance(node.payload, int)
            return (node.payload, node.payload)
        if node.op == "load" and self.sure:
            limit = LARGEST.get(node.dtype)
            return limits(node.dtype) if limit is None else (1 - limit, limit - 1)
        operands = [self.of(arg) for arg in node.args]
        if None in operands:
            return None
        if node.op == "cast":
            return operands[0]
        if self.sure and node.op in _WITHIN_DTYPE:
            return limits(node.dtype)
        rules = RULES | BIT_RULES if self.sure else RULES
        return rules[node.op](*operands) if node.op in rules else None

    def difference_fits(self, a: Node, b: Node) -> bool:
        """Whether int64 holds a - b and everything that it is made of."""
        first, second = self.of(a), self.of(b)
        if first is None or second is None:
            return False
        return max(first[1] - second[0], second[1] - first[0]) < FAR
