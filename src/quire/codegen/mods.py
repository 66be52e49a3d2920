"""The user's code as functions that the kernel calls through pointers.

A mod function rewrites one panel of scores in place, once the keys have been multiplied:

    rewrite(scores, maxima, arguments, b, h, q_idx, queries, kv_idx, keys)

    scores[key, query]   the panel, `keys` rows; becomes -inf where the mask does not hold
    maxima[query]        the maximum of each column, for the running softmax
    arguments            what `ModArguments` packs: constants and captured tensors
    q_idx, kv_idx        positions of the panel's first query and key
    queries              how many queries of the panel exist; the other lanes are never read

An extent function says which keys of a panel any query reads, before anything is multiplied:

    extent(arguments, b, h, q_idx, queries, kv_idx, keys) -> first | last << 16 | every << 32

where `every` is 1 if every query reads every key, so that no mask is needed.

Constants and captured tensors are arguments, so that another window or bias runs the same code.
Scores leave in units of log 2, as the kernel computes powers of two.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.codegen.builder import Function, Module, Value
from quire.codegen.lower import (
    ELEMENT,
    KEY,
    ROW,
    UNIFORM,
    Captured,
    Lanes,
    Scope,
)
from quire.codegen.rules import REGISTER
from quire.codegen.tiles import Tile
from quire.codegen.types import F64, I1, I64, PTR, Type
from quire.ir.graph import Node, constants

LOG2_E = math.log2(math.e)

PARAMETERS: dict[str, Type] = {
    "scores": PTR,
    "maxima": PTR,
    "arguments": PTR,
    "b": I64,
    "h": I64,
    "q_idx": I64,
    "queries": I64,
    "kv_idx": I64,
    "keys": I64,
}


EXTENT_PARAMETERS: dict[str, Type] = {
    name: type for name, type in PARAMETERS.items() if name not in ("scores", "maxima")
}


@dataclass(frozen=True)
class CaptureShape:
    """What generated code knows of a captured tensor: its rank, and which stride is 1."""

    rank: int
    unit: int | None

    @staticmethod
    def of(tensor: Tensor) -> CaptureShape:
        """Read off a tensor."""
        units = [dim for dim, stride in enumerate(tensor.stride()) if stride == 1]
        return CaptureShape(tensor.dim(), units[-1] if units else None)


@dataclass(frozen=True)
class ModArguments:
    """The record that a mod function reads its constants and captured tensors from.

    Eight bytes a slot: the address of the mistake flag, the constants (integers as they are,
    floats as doubles), then for each captured tensor its address, sizes and strides.
    """

    constants: tuple[Node, ...]
    captures: tuple[CaptureShape, ...]

    @staticmethod
    def of(roots: Sequence[Node], captures: Sequence[CaptureShape]) -> ModArguments:
        """The record for some graphs that share their captured tensors."""
        variable = tuple(node for node in constants(*roots) if not is_literal(node))
        return ModArguments(variable, tuple(captures))

    def pack(self, captures: Sequence[Tensor], flag: int) -> bytes:
        """The bytes of the record: these constants, and tensors of these shapes."""
        slots = [struct.pack("=q", flag)]
        for node in self.constants:
            assert isinstance(node.payload, int | float)
            slots.append(struct.pack("=d" if node.dtype.is_floating_point else "=q", node.payload))
        for tensor in captures:
            shape, stride = tensor.shape, tensor.stride()
            count = 1 + 2 * tensor.dim()
            slots.append(struct.pack(f"={count}q", tensor.data_ptr(), *shape, *stride))
        return b"".join(slots)

    def read(self, f: Function, record: Value) -> tuple[dict[Node, Value], list[Captured], Value]:
        """The constants, captured tensors and the flag's address, in a function's first lines."""
        flag, slot = f.load(PTR, record, 0), 1
        parameters = {}
        for node in self.constants:
            held = F64 if node.dtype.is_floating_point else I64
            parameters[node] = f.convert(f.load(held, record, slot), REGISTER[node.dtype])
            slot += 1
        captured = []
        for shape in self.captures:
            pointer = f.load(PTR, record, slot)
            numbers = [f.load(I64, record, slot + 1 + i) for i in range(2 * shape.rank)]
            sizes, strides = numbers[: shape.rank], numbers[shape.rank :]
            captured.append(Captured(pointer, sizes, strides, shape.unit))
            slot += 1 + 2 * shape.rank
        return parameters, captured, flag


def is_literal(node: Node) -> bool:
    """Whether a constant is part of the code: truth values, 0, 1, -1 and infinities are."""
    return node.dtype == torch.bool or node.payload in (0, 1, -1, math.inf, -math.inf)


def write_rewrite(
    module: Module,
    name: str,
    tile: Tile,
    arguments: ModArguments,
    score: Node | None,
    masks: Sequence[Node],
    *,
    unit: float = LOG2_E,
) -> None:
    """A function that applies a score_mod, if any, times `unit`, and the masks."""
    with module.function(name, PARAMETERS) as f:
        scores, maxima, record, b, h, q_idx, queries, kv_idx, keys = f.parameters
        rows, flag = _scopes(f, tile, arguments, (record, b, h, q_idx))
        panel = Panel(f, tile, score, unit, tuple(masks), rows, _existing(f, tile, queries))
        wrong_at_once = panel.compute_rows()
        best = tile.row(f, -math.inf)
        right = [f.value(0, lane_mask(tile))] * len(rows)
        carried = f.loop(
            0,
            keys,
            lambda j, carried: panel.rewrite_row(scores, j, kv_idx + j, carried),
            carry=[*best, *right],
        )
        tile.store_row(f, carried[: len(best)], maxima)
        wrong = [f.any_lane(lanes.differs(0)) for lanes in carried[len(best) :]]
        with f.when(_any(f, [*wrong_at_once, *wrong])):
            f.store(f.value(1, I64), flag)


def write_extent(
    module: Module, name: str, tile: Tile, arguments: ModArguments, masks: Sequence[Node]
) -> None:
    """A function that says which keys of a panel are read at all, and whether every one is."""
    with module.function(name, EXTENT_PARAMETERS, I64) as f:
        record, b, h, q_idx, queries, kv_idx, keys = f.parameters
        rows, _ = _scopes(f, tile, arguments, (record, b, h, q_idx))
        panel = Panel(f, tile, None, 1.0, tuple(masks), rows, _existing(f, tile, queries))
        panel.compute_rows()

        def one_key(j: Value, carried: list[Value]) -> list[Value]:
            first, last, missed = carried
            some, unread = panel.reads(kv_idx + j)
            first = f.select(some, f.minimum(first, j), first)
            return [first, f.select(some, j + 1, last), missed | unread]

        carry = [keys, f.value(0, I64), f.value(0, lane_mask(tile))]
        first, last, missed = f.loop(0, keys, one_key, carry=carry)
        every = f.convert(~f.any_lane(missed.differs(0)), I64)
        f.give_back(first | (last << 16) | (every << 32))


def _scopes(
    f: Function, tile: Tile, arguments: ModArguments, place: tuple[Value, Value, Value, Value]
) -> tuple[list[Scope], Value]:
    """A scope for each vector of a panel, and the address of the mistake flag."""
    record, b, h, q_idx = place
    parameters, captured, flag = arguments.read(f, record)
    scope = Scope(f, tile.lanes, {"b": Lanes(b), "h": Lanes(h)}, parameters.get, captured)
    rows = [
        scope.inside({"q_idx": Lanes(q_idx + v * tile.lanes, 1)}, ROW, KEY, ELEMENT)
        for v in range(tile.target.vectors)
    ]
    return rows, flag


def tile_condition(tile: Tile) -> Type:
    """One truth value per lane."""
    return I1.vector(tile.lanes)


def lane_mask(tile: Tile) -> Type:
    """Truth values as vector registers hold them, as wide as scores: 0 and -1."""
    return tile.element.as_int.vector(tile.lanes)


def _existing(f: Function, tile: Tile, queries: Value) -> list[Value]:
    """For each vector of a panel, which lanes hold a query."""
    lanes = lane_mask(tile)  # as wide as scores, so that no mask has to be converted
    count = f.convert(f.minimum(queries, tile.width), lanes.scalar)
    firsts = range(0, tile.width, tile.lanes)
    return [f.iota(lanes) < f.splat(count - first, lanes) for first in firsts]


def _any(f: Function, conditions: Sequence[Value]) -> Value:
    result = f.value(False, I1)
    for condition in conditions:
        result = result | condition
    return result


@dataclass
class Panel:
    """One row of scores at a time, each vector in the scope of its queries.

    An index of a mask may be out of range for no query that exists, one of the score_mod for none
    whose masks hold. So masks are computed first, and what went wrong is looked at in between.
    """

    f: Function
    tile: Tile
    score: Node | None
    unit: float
    masks: tuple[Node, ...]
    rows: Sequence[Scope]
    exists: Sequence[Value]
    _mask_mistakes: list[int] = field(default_factory=list)

    def compute_rows(self) -> list[Value]:
        """Compute what does not depend on keys; returns the mistakes that concern every query."""
        scores = [] if self.score is None else [self.score]
        for row in self.rows:
            row.lower_all(self.masks, [UNIFORM, ROW])
            self._mask_mistakes.append(len(row.mistakes[ROW]))
            row.lower_all(scores, [UNIFORM, ROW])
        return self.rows[0].mistakes[UNIFORM]

    def rewrite_row(
        self, scores: Value, j: Value, kv_idx: Value, carried: list[Value]
    ) -> list[Value]:
        """Apply the mods to one key's scores. Carried: the maxima, and which lanes went wrong."""
        f, count = self.f, self.tile.target.vectors
        best, wrong = carried[:count], carried[count:]
        before = self.tile.load_row(f, scores, j)
        scopes = list(self._at_key(kv_idx, before))
        live = self._mask(scopes)
        wrong = self._with_mistakes(wrong, scopes, self._mask_mistakes, self.exists)
        after = before
        if self.score is not None:
            after = [self._modified(scope) for scope in scopes]
            counts = [len(scope.mistakes[ROW]) for scope in scopes]
            wrong = self._with_mistakes(wrong, scopes, counts, live)
        if self.masks:
            after = [f.select(x, s, -math.inf) for x, s in zip(live, after, strict=True)]
        self.tile.store_row(f, after, scores, j)
        return [*(f.maximum(b, s) for b, s in zip(best, after, strict=True)), *wrong]

    def reads(self, kv_idx: Value) -> tuple[Value, Value]:
        """Whether any query of the panel reads a key, and which queries do not (a lane mask)."""
        f = self.f
        live = self._mask(list(self._at_key(kv_idx, None)))
        some, unread = f.value(False, tile_condition(self.tile)), f.value(0, lane_mask(self.tile))
        for holds, exists in zip(live, self.exists, strict=True):
            some = some | holds
            unread = unread | self._lane_mask(exists & ~holds)
        return f.any_lane(some), unread

    def _at_key(self, kv_idx: Value, scores: Sequence[Value] | None) -> Iterator[Scope]:
        """The scope of each vector at one key; what depends on the key alone is shared."""
        shared: Scope | None = None
        for v, row in enumerate(self.rows):
            inputs = {"kv_idx": Lanes(kv_idx)}
            if scores is not None:
                inputs["score"] = Lanes(vector=scores[v])
            here = row.inside(inputs, KEY, ELEMENT)
            if shared is not None:
                here.values[KEY], here.mistakes[KEY] = shared.values[KEY], shared.mistakes[KEY]
            shared = here
            yield here

    def _mask(self, scopes: Sequence[Scope]) -> list[Value]:
        """For each vector, the lanes that exist and whose masks hold."""
        live = []
        for scope, held in zip(scopes, self.exists, strict=True):
            for mask in self.masks:
                held = held & scope.as_vector(scope.lower(mask))
            live.append(held)
        return live

    def _lane_mask(self, condition: Value) -> Value:
        """A condition that goes around a loop: as truth values it would be unpacked each time."""
        return self.f.select(condition, self.f.value(-1, lane_mask(self.tile)), 0)

    def _modified(self, scope: Scope) -> Value:
        assert self.score is not None, "there is a score_mod"
        score = scope.as_vector(scope.lower(self.score))
        return score if self.unit == 1.0 else score * self.unit

    def _with_mistakes(
        self,
        wrong: Sequence[Value],
        scopes: Sequence[Scope],
        row_mistakes: Sequence[int],
        live: Sequence[Value],
    ) -> list[Value]:
        """`wrong` with the live lanes that have had an index out of range so far."""
        result = []
        for known, scope, count, lanes in zip(wrong, scopes, row_mistakes, live, strict=True):
            found = (*scope.mistakes[ROW][:count], *scope.mistakes[KEY], *scope.mistakes[ELEMENT])
            for mistake in found:
                each = mistake if mistake.type.lanes else self.f.splat(mistake, lanes.type)
                known = known | self._lane_mask(each & lanes)
            result.append(known)
        return result
