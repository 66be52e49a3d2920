"""Adds to the gradients of captured tensors, at the indices at which `loads.py` reads.

Several lanes may have the same index: they are added one after the other. Lanes with neighbouring
indices are added as a vector. An index out of range adds 0 at index 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.codegen.llvm.builder import Function, Value
from quire.codegen.llvm.types import I64, PTR, VOID, Type
from quire.codegen.llvm.values import Signature
from quire.codegen.mods.loads import Captured, Lanes, column, is_of_row, neighbours, place_of
from quire.codegen.mods.lower import Scope
from quire.codegen.phases.tiles import across
from quire.ir.graph import Node


def densely(scope: Scope, captured: Captured, pointer: Value) -> Captured:
    """The gradient of a captured tensor: contiguous, with the tensor's sizes."""
    strides: list[Value] = []
    step = scope.f.value(1, I64)
    for size in reversed(captured.sizes):
        strides.insert(0, step)
        step = step * size
    rank = len(captured.sizes)
    return Captured(pointer, captured.sizes, strides, rank - 1 if rank else None)


def add(scope: Scope, node: Node, into: Captured, amounts: Sequence[Value]) -> None:
    """into[i, j, ...] += amount, for every lane at its own indices of the load `node`.

    If all lanes have the same indices, there may be several vectors of amounts.
    """
    f, element = scope.f, amounts[0].type.scalar
    into, args = column(f, into, node, element)
    indices = [scope.lower(arg) for arg in args]
    moving = [dim for dim, index in enumerate(indices) if not index.is_uniform]
    if moving and moving == [into.unit] and indices[moving[0]].step in (1, -1):
        _add_contiguously(scope, into, indices, moving[0], amounts[0])
        return
    places, key = scope.places[scope.rate(node)], ("gradient", node.payload, args)
    if key not in places:
        places[key] = place_of(scope, into, indices)
    if moving:
        (amount,) = amounts
        if is_of_row(scope, node):
            f.call(_scatter(f, amount.type), into.pointer, places[key].offset, amount)
        else:
            _add_lanes(f, into.pointer, places[key].offset, amount)
        return
    total = amounts[0]
    for other in amounts[1:]:
        total = total + other
    total, offset = f.extract(across(f, total, lambda a, b: a + b), 0), places[key].offset
    f.store(f.load(element, into.pointer, offset) + total, into.pointer, offset)


def _add_contiguously(
    scope: Scope, into: Captured, indices: Sequence[Lanes], dim: int, amount: Value
) -> None:
    """Lanes with neighbouring indices: as a vector, or lane by lane at a tensor's edges."""
    f = scope.f
    low, inside, base, _ = neighbours(scope, into, indices, dim)

    def at_once() -> None:
        vector = amount
        if indices[dim].step == -1:
            vector = f.shuffle(vector, vector, list(reversed(range(scope.lanes))))
        old = f.load(vector.type, into.pointer, base + low)
        f.store(old + vector, into.pointer, base + low)

    def one_by_one() -> None:
        _add_lanes(f, into.pointer, place_of(scope, into, indices).offset, amount)

    f.choose(inside, at_once, one_by_one)


def _add_lanes(f: Function, pointer: Value, offsets: Value, amount: Value) -> None:
    """Add each lane by itself."""
    for lane in range(amount.type.lanes):
        offset = f.extract(offsets, lane)
        old = f.load(amount.type.scalar, pointer, offset)
        f.store(old + f.extract(amount, lane), pointer, offset)


def _scatter(f: Function, vector: Type) -> Signature:
    """A function that adds lane by lane."""
    parameters = {"pointer": PTR, "offsets": I64.vector(vector.lanes), "amount": vector}
    return f.helper("scatter", parameters, VOID, lambda g: _add_lanes(g, *g.parameters))
