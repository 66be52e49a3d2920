"""The functions that a kernel calls for a user's score_mod and mask_mod.

A mod function rewrites one panel of scores in place, after keys and queries were multiplied:

    rewrite(scores, maxima, arguments, b, h, q_idx, queries, kv_idx, keys)

    scores[key, query]   the panel, `keys` rows; set to -inf where the mask is false
    maxima[query]        set to the maximum of each query, for the running softmax
    arguments            constants and captured tensors, packed by `ModArguments`
    q_idx, kv_idx        the positions of the first query and the first key
    queries              how many queries exist; nobody reads the lanes after them

A row function does the same for one query; its lanes run over keys:

    rewrite_row(scores, arguments, b, h, q_idx, kv_idx, keys, skipped)

where the first `skipped` keys do not exist.

An extent function tells which keys of a panel are read at all, before anything is multiplied:

    extent(arguments, b, h, q_idx, queries, kv_idx, keys) -> first | last << 16 | every << 32

where `every` is 1 if every query reads every key, so that no mask is needed.

A verdict function computes the bounds of the mask (`ir/bound.py`) over the positions from low to
high, both included, and returns EMPTY, PARTIAL or PLAIN:

    verdict(arguments, b, h, q_low, q_high, kv_low, kv_high)

Constants and captured tensors are arguments, so another window or bias runs the same code. Scores
are multiplied by log4(e) at the end, since the kernel computes powers of four.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from quire.codegen.convention import EMPTY, EXTENT, PARTIAL, PLAIN, REWRITE, ROW_REWRITE, VERDICT
from quire.codegen.llvm.builder import Function, Module, Value
from quire.codegen.llvm.types import I1, I64
from quire.codegen.mods.arguments import ModArguments
from quire.codegen.mods.loads import Lanes
from quire.codegen.mods.lower import ELEMENT, KEY, ROW, UNIFORM, Scope
from quire.codegen.mods.proofs import distinct, proof, provable
from quire.codegen.phases.softmax import LOG4_E
from quire.codegen.phases.tiles import TileShape
from quire.ir.graph import Node


def write_rewrite(
    module: Module,
    name: str,
    tile: TileShape,
    arguments: ModArguments,
    score: Node | None,
    masks: Sequence[Node],
    *,
    unit: float = LOG4_E,
) -> None:
    """Write a function that applies a score_mod, if any, multiplies by `unit`, and masks."""
    with module.function(name, REWRITE.parameters) as f:
        scores, kv_idx, keys = (f.given[name] for name in ("scores", "kv_idx", "keys"))
        rows, flag = scopes_of_rows(f, tile, arguments, queries_of_panel(f, tile))
        panel = Panel(f, tile, rows, masks=tuple(masks), score=score, unit=unit)
        exists = existing(f, tile)
        wrong_at_once = panel.compute_rows()

        def rewrite_key(j: Value, carried: list[Value]) -> list[Value]:
            best, wrong = carried[: len(rows)], carried[len(rows) :]
            before = tile.load_row(f, scores, j)
            after, wrong = panel.rewrite(Lanes(kv_idx + j), before, exists, wrong)
            tile.store_row(f, after, scores, j)
            return [*(f.maximum(b, s) for b, s in zip(best, after, strict=True)), *wrong]

        carry = [*tile.row(f, -math.inf), *panel.nothing_wrong()]
        ends = Lanes(kv_idx), Lanes(kv_idx + (keys - 1))
        carried = panel.choose(ends, lambda: f.loop(0, keys, rewrite_key, carry=carry))
        tile.store_row(f, carried[: len(rows)], f.given["maxima"])
        report(f, flag, wrong_at_once, carried[len(rows) :])


def write_row_rewrite(
    module: Module,
    name: str,
    tile: TileShape,
    arguments: ModArguments,
    score: Node | None,
    masks: Sequence[Node],
    *,
    unit: float = LOG4_E,
) -> None:
    """Write the same function for the scores of one query."""
    with module.function(name, ROW_REWRITE.parameters) as f:
        scores, kv_idx, keys = (f.given[name] for name in ("scores", "kv_idx", "keys"))
        skipped = f.given["skipped"]
        rows, flag = scopes_of_rows(f, tile, arguments, [Lanes(f.given["q_idx"])])
        panel = Panel(f, tile, rows, masks=tuple(masks), score=score, unit=unit)
        wrong_at_once = panel.compute_rows()

        def rewrite_keys(j: Value, wrong: list[Value]) -> list[Value]:
            exists = lanes_below(f, tile, keys - j) & ~lanes_below(f, tile, skipped - j)
            before = [tile.load(f, scores, j)]
            after, wrong = panel.rewrite(Lanes(kv_idx + j, 1), before, [exists], wrong)
            tile.store(f, f.select(exists, after[0], -math.inf), scores, j)
            return wrong

        nothing, step = panel.nothing_wrong(), tile.lanes
        first, last = skipped & -step, (keys - 1) & -step
        ends = Lanes(kv_idx + first, 1), Lanes(kv_idx + last, 1)
        loop = functools.partial(f.loop, first, keys, rewrite_keys, carry=nothing, step=step)
        wrong = panel.choose(ends, loop)
        report(f, flag, wrong_at_once, wrong)


def write_extent(
    module: Module, name: str, tile: TileShape, arguments: ModArguments, masks: Sequence[Node]
) -> None:
    """Write a function that tells which keys of a panel are read at all, and whether all are."""
    with module.function(name, EXTENT.parameters, EXTENT.returns) as f:
        kv_idx, keys = f.given["kv_idx"], f.given["keys"]
        rows, _ = scopes_of_rows(f, tile, arguments, queries_of_panel(f, tile))
        panel = Panel(f, tile, rows, masks=tuple(masks))
        exists = existing(f, tile)
        wrong_at_once = panel.compute_rows()

        def one_key(j: Value, carried: list[Value]) -> list[Value]:
            first, last, missed = carried
            some, unread = panel.reads(Lanes(kv_idx + j), exists)
            first = f.select(some, f.minimum(first, j), first)
            return [first, f.select(some, j + 1, last), missed | unread]

        carry = [keys, f.value(0, I64), f.value(0, tile.vector.as_int)]
        first, last, missed = f.loop(0, keys, one_key, carry=carry)
        every = f.convert(~f.any_lane(missed.differs(0)), I64)
        for wrong in wrong_at_once:  # report all keys as read, so that `rewrite` sets the flag
            first, last = f.select(wrong, 0, first), f.select(wrong, keys, last)
            every = f.select(wrong, 0, every)
        f.give_back(first | (last << 16) | (every << 32))


def write_verdict(
    module: Module, name: str, tile: TileShape, arguments: ModArguments, can: Node, must: Node
) -> None:
    """Write a function that tells the kind of a tile, from the bounds of its mask."""
    with module.function(name, VERDICT.parameters, VERDICT.returns) as f:
        parameters, captured, _ = arguments.read(f, f.given["arguments"])
        inputs = {name: Lanes(end) for name, end in f.given.items() if name != "arguments"}
        scope = Scope(f, tile.lanes, inputs, parameters.get, captured)
        some, every = (scope.as_scalar(scope.lower(node)) for node in (can, must))
        f.give_back(
            f.select(every, f.value(PLAIN, I64), f.select(some, f.value(PARTIAL, I64), EMPTY))
        )


def queries_of_panel(f: Function, tile: TileShape) -> list[Lanes]:
    """The positions of a panel's queries, vector by vector."""
    return [Lanes(f.given["q_idx"] + v * tile.lanes, 1) for v in range(tile.target.vectors)]


def scopes_of_rows(
    f: Function, tile: TileShape, arguments: ModArguments, queries: Sequence[Lanes]
) -> tuple[list[Scope], Value]:
    """A scope for each vector of queries, and the address of the mistake flag."""
    parameters, captured, flag = arguments.read(f, f.given["arguments"])
    inputs = {name: Lanes(f.given[name]) for name in ("b", "h")}
    scope = Scope(f, tile.lanes, inputs, parameters.get, captured)
    return [scope.inside({"q_idx": q_idx}, ROW, KEY, ELEMENT) for q_idx in queries], flag


def existing(f: Function, tile: TileShape) -> list[Value]:
    """For each vector of a panel, which lanes hold a query."""
    queries = f.given["queries"]
    return [lanes_below(f, tile, queries - v) for v in range(0, tile.width, tile.lanes)]


def lanes_below(f: Function, tile: TileShape, count: Value) -> Value:
    """The lanes whose number is below `count`."""
    lanes = tile.vector.as_int  # as wide as scores, so that no mask has to be converted
    limit = f.convert(f.maximum(f.minimum(count, tile.lanes), 0), lanes.scalar)
    return f.iota(lanes) < f.splat(limit, lanes)


def report(f: Function, flag: Value, at_once: Sequence[Value], in_lanes: Sequence[Value]) -> None:
    """Set the mistake flag if something went wrong."""
    wrong = f.value(False, I1)
    for condition in (*at_once, *(f.any_lane(lanes.differs(0)) for lanes in in_lanes)):
        wrong = wrong | condition
    with f.when(wrong):
        f.store(f.value(1, I64), flag)


@dataclass
class Panel:
    """Applies mods to a panel, vector by vector, each in the scope of its queries.

    The indices of a mask must be in range for every query that exists; those of a score_mod only
    where the masks hold. So masks are computed first, and mistakes are counted in between.
    """

    f: Function
    tile: TileShape
    rows: Sequence[Scope]
    masks: tuple[Node, ...]
    score: Node | None = None
    unit: float = 1.0
    tangent: Node | None = None
    _mask_mistakes: list[int] = field(default_factory=list)
    _proven: frozenset[Node] = frozenset()

    def compute_rows(self) -> list[Value]:
        """Compute what does not depend on keys; returns the mistakes that concern all queries."""
        for row in self.rows:
            row.lower_all(self.masks, [UNIFORM, ROW])
            self._mask_mistakes.append(len(row.mistakes[ROW]))
            row.lower_all(self._scores, [UNIFORM, ROW])
        return self.rows[0].mistakes[UNIFORM]

    @property
    def _scores(self) -> list[Node]:
        return [node for node in (self.score, self.tangent) if node is not None]

    def nothing_wrong(self) -> list[Value]:
        """No mistake in any lane."""
        return [self.f.value(0, self.tile.vector.as_int)] * len(self.rows)

    def choose(self, ends: tuple[Lanes, Lanes], loop: Callable[[], list[Value]]) -> list[Value]:
        """Write `loop` twice: without bounds checks, if both ends prove them, and with them."""
        nodes = provable([*self.masks, *self._scores])
        scopes = [
            replace(row.inside({"kv_idx": end}, KEY, ELEMENT), proven=frozenset(nodes))
            for row in self.rows
            for end in ends
        ]
        proofs = [proof(scope, node) for scope in scopes for node in distinct(nodes)]
        safe = self.f.value(True, I1)
        for each in proofs:
            if each is None:
                return loop()
            safe = safe & each
        if not nodes:
            return loop()

        def unchecked() -> list[Value]:
            self._proven = frozenset(nodes)
            results = loop()
            self._proven = frozenset()
            return results

        return self.f.choose(safe, unchecked, loop)

    def rewrite(
        self,
        kv_idx: Lanes,
        before: Sequence[Value],
        exists: Sequence[Value],
        wrong: Sequence[Value],
    ) -> tuple[list[Value], list[Value]]:
        """The scores after the mods, and the lanes with mistakes so far."""
        return self.rewritten(list(self.at_key(kv_idx, before)), before, exists, wrong)

    def rewritten(
        self,
        scopes: Sequence[Scope],
        before: Sequence[Value],
        exists: Sequence[Value],
        wrong: Sequence[Value],
    ) -> tuple[list[Value], list[Value]]:
        """The same, given the scope of each vector at a key."""
        f = self.f
        live = self.mask(scopes, exists)
        wrong = self._with_mistakes(wrong, scopes, self._mask_mistakes, exists)
        after = list(before)
        if self.score is not None:
            after = [self.modified(scope) for scope in scopes]
            counts = [len(scope.mistakes[ROW]) for scope in scopes]
            wrong = self._with_mistakes(wrong, scopes, counts, live)
        if self.masks:
            after = [f.select(x, s, -math.inf) for x, s in zip(live, after, strict=True)]
        return after, wrong

    def reads(self, kv_idx: Lanes, exists: Sequence[Value]) -> tuple[Value, Value]:
        """Whether any query of the panel reads a key, and which queries do not (a lane mask).

        On a bad index in a mask the key counts as partly read, so that `rewrite` sets the flag.
        """
        f = self.f
        scopes = list(self.at_key(kv_idx, None))
        live = self.mask(scopes, exists)
        some, unread = (
            f.value(False, I1.vector(self.tile.lanes)),
            f.value(0, self.tile.vector.as_int),
        )
        for v, (holds, there) in enumerate(zip(live, exists, strict=True)):
            some = some | holds
            unread = unread | self._lane_mask(there & ~holds)
            for mistake in self._mistakes(scopes[v], self._mask_mistakes[v], there):
                some, unread = some | mistake, unread | self._lane_mask(mistake)
        return f.any_lane(some), unread

    def at_key(
        self, kv_idx: Lanes, scores: Sequence[Value] | None, **more: Sequence[Value]
    ) -> Iterator[Scope]:
        """The scope of each vector at one key; they share what depends on the key alone.

        The inputs of each vector are its scores, and whatever else is given by name.
        """
        given = more if scores is None else {"score": scores, **more}
        shared: Scope | None = None
        for v, row in enumerate(self.rows):
            inputs = {name: Lanes(vector=vectors[v]) for name, vectors in given.items()}
            inputs["kv_idx"] = kv_idx
            here = replace(row.inside(inputs, KEY, ELEMENT), proven=self._proven)
            if shared is not None:
                here.values[KEY], here.mistakes[KEY] = shared.values[KEY], shared.mistakes[KEY]
                here.places[KEY] = shared.places[KEY]
            shared = here
            yield here

    def mask(self, scopes: Sequence[Scope], exists: Sequence[Value]) -> list[Value]:
        """For each vector, the lanes that exist and whose masks hold."""
        live = []
        for scope, held in zip(scopes, exists, strict=True):
            for mask in self.masks:
                held = held & scope.as_vector(scope.lower(mask))
            live.append(held)
        return live

    def _lane_mask(self, condition: Value) -> Value:
        """A condition as 0 or -1 in lanes as wide as scores, to be carried around a loop.

        LLVM would unpack a vector of truth values each time.
        """
        return self.f.select(condition, self.f.value(-1, self.tile.vector.as_int), 0)

    def modified(self, scope: Scope) -> Value:
        """A score after the score_mod, times `unit`."""
        assert self.score is not None, "there is a score_mod"
        score = scope.as_vector(scope.lower(self.score))
        return score if self.unit == 1.0 else score * self.unit

    def pushed(self, scope: Scope) -> Value:
        """The tangent of a score after the score_mod, times `unit` like the score."""
        assert self.tangent is not None, "there is a tangent"
        moved = self.f.convert(scope.as_vector(scope.lower(self.tangent)), self.tile.element)
        return moved if self.score is None or self.unit == 1.0 else moved * self.unit

    def _with_mistakes(
        self,
        wrong: Sequence[Value],
        scopes: Sequence[Scope],
        row_mistakes: Sequence[int],
        live: Sequence[Value],
    ) -> list[Value]:
        """`wrong`, and the live lanes in which an index was out of range so far."""
        result = []
        for known, scope, count, lanes in zip(wrong, scopes, row_mistakes, live, strict=True):
            for mistake in self._mistakes(scope, count, lanes):
                known = known | self._lane_mask(mistake)
            result.append(known)
        return result

    def _mistakes(self, scope: Scope, row_mistakes: int, lanes: Value) -> Iterator[Value]:
        """The mistakes of a scope so far, restricted to some lanes."""
        of_rows = scope.mistakes[ROW][:row_mistakes]
        for mistake in (*of_rows, *scope.mistakes[KEY], *scope.mistakes[ELEMENT]):
            yield (mistake if mistake.type.lanes else self.f.splat(mistake, lanes.type)) & lanes
