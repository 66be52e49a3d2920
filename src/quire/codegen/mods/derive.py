"""The function that the backward kernel calls for the derivative of a user's mods.

    derive(scores, slopes, shift, delta, arguments, captured, b, h, key_head, slice,
           q_idx, queries, kv_idx, keys)

    scores[key, query]   in: the product of keys and queries; out: the weight that the value was
                         multiplied by, exp4(mod(score) - shift), after prob_mod and dropout
    slopes[key, query]   in: the product of values and grad_out; out: the gradient of the score
    captured             a CAPTURED_GRADIENT record for each load that has a gradient

With P the weight before prob_mod and dropout, z the factor of both and dP the incoming slope:

    dS = P (dP z - delta)          slope = dS d mod / d score          captured += dS d mod / d load
                                                                       captured += dP P d z / d load

If the mod returns weights, `shift` is a factor: P = mod(score) shift, dS = shift (dP z - delta).
All of them are 0 if the query does not read the key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quire.codegen.convention import CAPTURED_GRADIENT, DERIVE
from quire.codegen.llvm import vecmath
from quire.codegen.llvm.builder import Function, Module, Value
from quire.codegen.llvm.types import I8
from quire.codegen.mods.arguments import ModArguments
from quire.codegen.mods.functions import Panel, existing, queries_of_panel, scopes_of_rows
from quire.codegen.mods.loads import Captured, Lanes
from quire.codegen.mods.lower import ELEMENT, KEY, ROW, UNIFORM, Scope
from quire.codegen.mods.scatter import add, densely
from quire.codegen.mods.weigh import POSITIVE
from quire.codegen.phases.softmax import LOG4_E
from quire.codegen.phases.tiles import TileShape
from quire.codegen.scratch import weights_stride
from quire.ir.graph import Node


@dataclass(frozen=True)
class Derived:
    """A score_mod with its derivatives, the masks, and `drop`: prob_mod and dropout.

    `slope` is the derivative by the score; None means 1. `of_score` are loads with a gradient, each
    with the derivative by it, and `of_drop` are those of `drop`. If it is `weighted`, the score_mod
    returns weights.
    """

    score: Node | None
    slope: Node | None
    of_score: tuple[tuple[Node, Node], ...]
    masks: tuple[Node, ...]
    drop: Node | None
    of_drop: tuple[tuple[Node, Node], ...] = ()
    weighted: bool = False

    @property
    def loads(self) -> tuple[tuple[Node, Node], ...]:
        """All loads with a gradient."""
        return (*self.of_score, *self.of_drop)

    @property
    def roots(self) -> list[Node]:
        """All graphs except the masks."""
        nodes = (self.score, self.slope, self.drop, *(slope for _, slope in self.loads))
        return [node for node in nodes if node is not None]


def write_derive(
    module: Module, name: str, tile: TileShape, arguments: ModArguments, derived: Derived
) -> None:
    """Write the function for one kind of tile."""
    with module.function(name, DERIVE.parameters) as f:
        _Derive(f, tile, arguments, derived).write()


class _Derive:
    """The function while it is written."""

    def __init__(
        self, f: Function, tile: TileShape, arguments: ModArguments, derived: Derived
    ) -> None:
        self.f, self.tile, self.derived = f, tile, derived
        self.given = f.given
        rows, _ = scopes_of_rows(f, tile, arguments, queries_of_panel(f, tile))
        unit = 1.0 if derived.weighted else LOG4_E
        self.panel = Panel(f, tile, rows, masks=derived.masks, score=derived.score, unit=unit)
        self.panel.compute_rows()
        for row in rows:
            row.lower_all([*derived.roots, *self._index_roots], [UNIFORM, ROW])
        self.exists = existing(f, tile)
        self.shift = tile.load_row(f, self.given["shift"])
        self.delta = tile.load_row(f, self.given["delta"])
        self.sums: dict[object, Captured] = {}
        for number, (load, _) in enumerate(derived.loads):
            if load.payload not in self.sums:
                self.sums[load.payload] = self._sums(number, load)

    @property
    def _index_roots(self) -> list[Node]:
        return [index for load, _ in self.derived.loads for index in load.args]

    def write(self) -> None:
        """Compute every key, then add what was summed over all keys."""
        f, given = self.f, self.given
        kept = [load for load, _ in self.derived.loads if not self._rate(load) & KEY]
        nothing = [f.value(0.0, self.tile.vector)] * (len(kept) * self.tile.target.vectors)
        ends = Lanes(given["kv_idx"]), Lanes(given["kv_idx"] + (given["keys"] - 1))
        totals = self.panel.choose(ends, lambda: f.loop(0, given["keys"], self._key, carry=nothing))
        for load, vectors in zip(kept, self.tile.rows(totals), strict=True):
            self._add(load, self.panel.rows, vectors)

    def _rate(self, load: Node) -> int:
        """The rate of a load's indices: whether they depend on queries and keys."""
        rate = UNIFORM
        for arg in load.args:
            rate |= self.panel.rows[0].rate(arg)
        return rate

    def _sums(self, number: int, load: Node) -> Captured:
        """The sums of the gradient of a load's tensor in this share."""
        f, given, scope = self.f, self.given, self.panel.rows[0]
        record = f.offset(given["captured"], number * CAPTURED_GRADIENT.size, I8)
        base, batch, head, slice = (
            f.field(CAPTURED_GRADIENT, record, name) for name in CAPTURED_GRADIENT.fields
        )
        offset = given["b"] * batch + given["key_head"] * head + given["slice"] * slice
        assert isinstance(load.payload, int)
        pointer = f.offset(base, offset, self.tile.element)
        return densely(scope, scope.captures[load.payload], pointer)

    def _add(self, load: Node, scopes: Sequence[Scope], amounts: Sequence[Value]) -> None:
        """Add the amounts of all vectors of the panel to the gradient of a load."""
        sums = self.sums[load.payload]
        if self._rate(load) & ROW:
            for scope, amount in zip(scopes, amounts, strict=True):
                add(scope, load, sums, [amount])
        else:
            add(scopes[0], load, sums, amounts)

    def _key(self, j: Value, totals: list[Value]) -> list[Value]:
        """Compute one key of the panel; `totals` are sums over keys."""
        f, tile, given, derived = self.f, self.tile, self.given, self.derived
        step = weights_stride(tile)
        before, products = (tile.load_row(f, given[name], j, step) for name in ("scores", "slopes"))
        scopes = list(self.panel.at_key(Lanes(given["kv_idx"] + j), before))
        scores, live = self._scores(scopes, before)
        weights, slopes, by_load = [], [], []
        for v, scope in enumerate(scopes):
            weight, by_score = self._weight(scores[v], self.shift[v])
            product, kept, weighed = products[v], weight, scope
            if derived.drop is not None:
                # Its factor is what it makes of the weight 1.
                one = self._at_weight(scope, f.value(1.0, tile.vector))
                factor = one.as_vector(one.lower(derived.drop))
                product, kept = product * factor, weight * factor
                weighed = self._at_weight(scope, weight)
            slope = by_score * (product - self.delta[v])
            by_load.append(
                [self._times(scope, slope, node, live[v]) for _, node in derived.of_score]
                + [self._times(weighed, products[v], node, live[v]) for _, node in derived.of_drop]
            )
            weights.append(self._times(scope, kept, None, live[v]))
            slopes.append(self._times(scope, slope, derived.slope, live[v]))
        tile.store_row(f, weights, given["scores"], j, step)
        tile.store_row(f, slopes, given["slopes"], j, step)
        return self._gather(scopes, by_load, totals)

    def _at_weight(self, scope: Scope, weight: Value) -> Scope:
        """A scope in which prob_mod and dropout get this weight."""
        return scope.inside({"score": Lanes(vector=weight)}, ELEMENT)

    def _weight(self, score: Value, shift: Value) -> tuple[Value, Value]:
        """The weight of a score, divided as in the forward pass, and its derivative by the score.

        If scores are weights, `shift` is the factor by which they are divided.
        """
        if self.derived.weighted:
            return score * shift, shift
        nothing = self.f.value(0.0, self.tile.vector)
        below = self.f.minimum(nothing, score - shift)  # above 0 only by rounding
        weight = vecmath.exp4_nonpositive(self.f, below)
        return weight, weight

    def _scores(
        self, scopes: Sequence[Scope], before: Sequence[Value]
    ) -> tuple[list[Value], list[Value | None]]:
        """Scores after the mods, and where they are read; None means everywhere."""
        derived = self.derived
        if derived.score is None and not derived.masks:
            return list(before), [None] * len(before)
        scores = list(before)
        if derived.score is not None:
            scores = [self.panel.modified(scope) for scope in scopes]
            if derived.weighted and derived.score.op in POSITIVE and not derived.masks:
                return scores, [None] * len(before)  # a query that does not exist has the shift 0
        live = self.panel.mask(scopes, self.exists)
        return scores, [x & s.differs(-math.inf) for x, s in zip(live, scores, strict=True)]

    def _times(self, scope: Scope, slope: Value, node: Node | None, live: Value | None) -> Value:
        """A number times a derivative, if any; 0 where the score is not read."""
        if node is not None:
            slope = slope * self.f.convert(scope.as_vector(scope.lower(node)), self.tile.element)
        return slope if live is None else self.f.select(live, slope, 0.0)

    def _gather(
        self, scopes: Sequence[Scope], by_load: Sequence[Sequence[Value]], totals: list[Value]
    ) -> list[Value]:
        """Add gradients of loads that depend on the key; carry on the sums of all others."""
        result = []
        for number, (load, _) in enumerate(self.derived.loads):
            amounts = [vector[number] for vector in by_load]
            if self._rate(load) & KEY:
                self._add(load, scopes, amounts)
            else:
                known, totals = totals[: len(amounts)], totals[len(amounts) :]
                result += [a + b for a, b in zip(known, amounts, strict=True)]
        return result
