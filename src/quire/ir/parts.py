"""Cuts a tile where a mask compares positions with a constant, for sharper bounds."""

from __future__ import annotations

from typing import NamedTuple

from quire.ir.graph import Node, walk
from quire.ir.intervals import Interval
from quire.ir.ranges import FAR
from quire.ir.terms import I64, TRUE, both, term, whole


class TilePart(NamedTuple):
    """A part of a tile: the ends of its queries and keys, and whether it is not empty."""

    ends: dict[str, Interval]
    exists: Node


def _ends(stem: str) -> Interval:
    return Interval(*(Node("input", (), I64, f"{stem}_{end}") for end in ("low", "high")))


TILE = {"q_idx": _ends("q"), "kv_idx": _ends("kv")}
"""The ends of the queries and keys of a whole tile."""


def parts_of(root: Node) -> list[TilePart]:
    """A tile in up to four parts, cut where the graph compares a position with a constant.

    Beyond such a position the mask may follow another rule, as in `where(q_idx < n, ...)`. Only
    graphs with `where` or `mod` are cut, since others gain nothing.
    """
    cuts = _cuts(root)
    parts = [TilePart(dict(TILE), TRUE)]
    for name, (low, high) in TILE.items():
        if name not in cuts:
            continue
        cut = whole(cuts[name])
        before = Interval(low, term("min", high, term("sub", cut, whole(1))))
        after = Interval(term("max", low, cut), high)
        parts = [
            TilePart({**part.ends, name: ends}, both(part.exists, term("le", ends.low, ends.high)))
            for part in parts
            for ends in (before, after)
        ]
    return parts


def _cuts(root: Node) -> dict[str, int]:
    """The position at which the second part begins, for each axis that is cut."""
    cuts: dict[str, int] = {}
    nodes = list(walk(root))
    if not any(node.op in ("mod", "where") for node in nodes):
        return cuts
    for node in nodes:
        if node.op not in ("lt", "le"):
            continue
        for place, (index, limit) in enumerate((node.args, node.args[::-1])):
            if index.op == "input" and limit.op == "const" and index.dtype == I64:
                assert isinstance(limit.payload, int)
                # index < c and c <= index cut before c; index <= c and c < index cut after c.
                above = (node.op == "le") == (place == 0)
                if abs(limit.payload) < FAR:
                    cuts.setdefault(str(index.payload), limit.payload + above)
    return cuts
