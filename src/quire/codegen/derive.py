"""The derivative of the user's code as a function that the backward kernel calls.

    derive(scores, slopes, shift, delta, arguments, captured, b, h, key_head, slice,
           q_idx, queries, kv_idx, keys)

    scores[key, query]   comes in as the product of keys and queries, leaves as the weight that a
                         value was multiplied by: exp4(mod(score) - shift), after dropout
    slopes[key, query]   comes in as the product of values and the gradient of out, leaves as the
                         gradient of the score
    captured             for each load that has a gradient, where it is summed

With P the weight before dropout, z what dropout multiplies it by and dP what came in:

    dS = P (dP z - delta)          slope = dS d mod / d score          captured += dS d mod / d load

All of them are 0 where a score is not read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quire.codegen import vecmath
from quire.codegen.arguments import ModArguments
from quire.codegen.builder import Function, Module, Value
from quire.codegen.convention import CAPTURED, DERIVE
from quire.codegen.loads import Captured, Lanes
from quire.codegen.lower import ELEMENT, KEY, ROW, UNIFORM, Scope
from quire.codegen.mods import Panel, existing, queries_of_panel, scopes_of_rows
from quire.codegen.scatter import add, densely
from quire.codegen.scratch import weights_stride
from quire.codegen.softmax import LOG4_E
from quire.codegen.tiles import Tile
from quire.codegen.types import I8
from quire.ir.graph import Node


@dataclass(frozen=True)
class Derived:
    """A score_mod with its derivatives, the masks around it, and dropout.

    `slope` is that along the score, None for 1. `loads` have a gradient, each with its slope.
    """

    score: Node | None
    slope: Node | None
    loads: tuple[tuple[Node, Node], ...]
    masks: tuple[Node, ...]
    drop: Node | None

    @property
    def roots(self) -> list[Node]:
        """All graphs but those of the masks."""
        nodes = (self.score, self.slope, self.drop, *(slope for _, slope in self.loads))
        return [node for node in nodes if node is not None]


def write_derive(
    module: Module, name: str, tile: Tile, arguments: ModArguments, derived: Derived
) -> None:
    """The function for one kind of tile."""
    with module.function(name, DERIVE.parameters) as f:
        _Derive(f, tile, arguments, derived).write()


class _Derive:
    """One function, being written."""

    def __init__(self, f: Function, tile: Tile, arguments: ModArguments, derived: Derived) -> None:
        self.f, self.tile, self.derived = f, tile, derived
        self.given = f.given
        rows, _ = scopes_of_rows(f, tile, arguments, queries_of_panel(f, tile))
        self.panel = Panel(f, tile, rows, masks=derived.masks, score=derived.score, unit=LOG4_E)
        self.panel.compute_rows()
        for row in rows:
            row.lower_all([*derived.roots, *self._index_roots], [UNIFORM, ROW])
        self.exists = existing(f, tile)
        self.shift = tile.load_row(f, self.given["shift"])
        self.delta = tile.load_row(f, self.given["delta"])
        self.sums = [self._sums(number, load) for number, (load, _) in enumerate(derived.loads)]

    @property
    def _index_roots(self) -> list[Node]:
        return [index for load, _ in self.derived.loads for index in load.args]

    def write(self) -> None:
        """Every key, and then what was summed over all of them."""
        f, given = self.f, self.given
        kept = [load for load, _ in self.derived.loads if not self._rate(load) & KEY]
        nothing = [f.value(0.0, self.tile.vector)] * (len(kept) * self.tile.target.vectors)
        ends = Lanes(given["kv_idx"]), Lanes(given["kv_idx"] + (given["keys"] - 1))
        totals = self.panel.choose(ends, lambda: f.loop(0, given["keys"], self._key, carry=nothing))
        for load, vectors in zip(kept, self.tile.rows(totals), strict=True):
            self._add(load, self.panel.rows, vectors)

    def _rate(self, load: Node) -> int:
        """On what the place of a load depends."""
        rate = UNIFORM
        for arg in load.args:
            rate |= self.panel.rows[0].rate(arg)
        return rate

    def _sums(self, number: int, load: Node) -> Captured:
        """Where the gradient of a load is summed in this share."""
        f, given, scope = self.f, self.given, self.panel.rows[0]
        record = f.offset(given["captured"], number * CAPTURED.size, I8)
        base, batch, head, slice = (f.field(CAPTURED, record, name) for name in CAPTURED.fields)
        offset = given["b"] * batch + given["key_head"] * head + given["slice"] * slice
        assert isinstance(load.payload, int)
        pointer = f.offset(base, offset, self.tile.element)
        return densely(scope, scope.captures[load.payload], pointer)

    def _add(self, load: Node, scopes: Sequence[Scope], amounts: Sequence[Value]) -> None:
        """Amounts of all vectors of the panel, to where they belong."""
        number = [each for each, _ in self.derived.loads].index(load)
        if self._rate(load) & ROW:
            for scope, amount in zip(scopes, amounts, strict=True):
                add(scope, load, self.sums[number], [amount])
        else:
            add(scopes[0], load, self.sums[number], amounts)

    def _key(self, j: Value, totals: list[Value]) -> list[Value]:
        """One key of the panel."""
        f, tile, given, derived = self.f, self.tile, self.given, self.derived
        step = weights_stride(tile)
        before, products = (tile.load_row(f, given[name], j, step) for name in ("scores", "slopes"))
        scopes = list(self.panel.at_key(Lanes(given["kv_idx"] + j), before))
        scores, live = self._scores(scopes, before)
        weights, slopes, by_load = [], [], []
        for v, scope in enumerate(scopes):
            below = f.minimum(f.value(0.0, tile.vector), scores[v] - self.shift[v])  # as rounded
            weight = vecmath.exp4_nonpositive(f, below)
            product, kept = products[v], weight
            if derived.drop is not None:
                # Dropout of the weight 1 is what it multiplies any weight by.
                one = scope.inside({"score": Lanes(vector=f.value(1.0, tile.vector))}, ELEMENT)
                factor = one.as_vector(one.lower(derived.drop))
                product, kept = product * factor, weight * factor
            slope = weight * (product - self.delta[v])
            by_load.append([self._times(scope, slope, node, live[v]) for _, node in derived.loads])
            weights.append(self._times(scope, kept, None, live[v]))
            slopes.append(self._times(scope, slope, derived.slope, live[v]))
        tile.store_row(f, weights, given["scores"], j, step)
        tile.store_row(f, slopes, given["slopes"], j, step)
        return self._gather(scopes, by_load, totals)

    def _scores(
        self, scopes: Sequence[Scope], before: Sequence[Value]
    ) -> tuple[list[Value], list[Value | None]]:
        """Modified scores, and where they are read; None for everywhere."""
        derived = self.derived
        if derived.score is None and not derived.masks:
            return list(before), [None] * len(before)
        scores = list(before)
        live = self.panel.mask(scopes, self.exists)
        if derived.score is not None:
            scores = [self.panel.modified(scope) for scope in scopes]
        return scores, [x & s.differs(-math.inf) for x, s in zip(live, scores, strict=True)]

    def _times(self, scope: Scope, slope: Value, node: Node | None, live: Value | None) -> Value:
        """A number times a derivative, if any, and 0 where the score is not read."""
        if node is not None:
            slope = slope * self.f.convert(scope.as_vector(scope.lower(node)), self.tile.element)
        return slope if live is None else self.f.select(live, slope, 0.0)

    def _gather(
        self, scopes: Sequence[Scope], by_load: Sequence[Sequence[Value]], totals: list[Value]
    ) -> list[Value]:
        """Add what belongs to this key, and carry on what does not."""
        result = []
        for number, (load, _) in enumerate(self.derived.loads):
            amounts = [vector[number] for vector in by_load]
            if self._rate(load) & KEY:
                self._add(load, scopes, amounts)
            else:
                known, totals = totals[: len(amounts)], totals[len(amounts) :]
                result += [a + b for a, b in zip(known, amounts, strict=True)]
        return result
