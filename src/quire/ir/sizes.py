"""Between which numbers integers lie wherever they are, and which of them might wrap around."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from quire.ir.graph import Node
from quire.ir.narrow import RULES, Range
from quire.ir.terms import BOOL

LARGEST = {torch.int64: 2**40, torch.int32: 2**30}
"""From where on captured integers make bounds unknown, so that sums of smaller ones do not wrap."""

FAR = 2**62
"""No number of a sum reaches this, so that int64 holds all of them and their sum."""

_ANYTHING = ("or", "xor", "not", "floor", "ceil", "round", "trunc")


@dataclass
class Sizes:
    """The sizes of all integers of a graph, each found once, its inputs being in `ranges`."""

    ranges: Mapping[str, Range]
    _known: dict[Node, Range | None] = field(default_factory=dict)

    def of(self, node: Node) -> Range | None:
        """The smallest and the largest value; None for a float and for what might wrap."""
        if node not in self._known:
            self._known[node] = self._found(node)
        return self._known[node]

    def difference_fits(self, a: Node, b: Node) -> bool:
        """Whether int64 holds a - b and what it is made of."""
        first, second = self.of(a), self.of(b)
        if first is None or second is None:
            return False
        return max(first[1] - second[0], second[1] - first[0]) < FAR

    def _found(self, node: Node) -> Range | None:
        if node.dtype == BOOL:
            return (0, 1)
        if node.dtype.is_floating_point:
            return None
        if node.op == "input":
            return self.ranges[str(node.payload)]
        if node.op == "const" and isinstance(node.payload, int):
            return (node.payload, node.payload)
        info = torch.iinfo(node.dtype)
        smallest, largest = int(info.min), int(info.max)
        if node.op == "load":
            limit = LARGEST.get(node.dtype)
            return (smallest, largest) if limit is None else (1 - limit, limit - 1)
        sizes = [self.of(arg) for arg in node.args]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            return None
        if node.op in _ANYTHING:
            return (smallest, largest)
        found = self._applied(node.op, known)
        fits = found is not None and smallest <= found[0] and found[1] <= largest
        return found if fits else None

    def _applied(self, op: str, sizes: list[Range]) -> Range | None:
        match op, sizes:
            case "cast", _:
                return sizes[0]
            case "shl", (number, (first, last)):
                fits = first >= 0 and last < 32
                return RULES["mul"](number, (1 << first, 1 << last)) if fits else None
            case "shr", ((low, high), _):
                return min(low, 0), max(high, 0)
            case "and", _:  # bits that are missing in one are missing
                highs = [high for low, high in sizes if low >= 0]
                return (0, min(highs)) if highs else None
        return RULES[op](*sizes) if op in RULES else None
