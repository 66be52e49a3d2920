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

_ANYTHING = ("shr", "and", "or", "xor", "not", "floor", "ceil", "round", "trunc")


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
        if op == "cast":
            return sizes[0]
        if op == "shl":
            first, last = sizes[1]
            return (
                RULES["mul"](sizes[0], (1 << first, 1 << last)) if 0 <= first <= last < 32 else None
            )
        return RULES[op](*sizes) if op in RULES else None
