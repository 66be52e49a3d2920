"""Adds to the gradients of captured tensors, at the indices at which `loads.py` reads.

Several lanes may have the same index: they are added one after the other. Lanes with neighbouring
indices are added as a vector. An index out of range adds 0 at index 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.codegen.llvm.builder import Value
from quire.codegen.llvm.types import I64, Type
from quire.codegen.mods.loads import Captured, Lanes, neighbours, uniform_offset, wrapped
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
    indices = [scope.lower(arg) for arg in node.args]
    moving = [dim for dim, index in enumerate(indices) if not index.is_uniform]
    if not moving:
        offset, _ = uniform_offset(scope, into, indices)
        total = amounts[0]
        for other in amounts[1:]:
            total = total + other
        total = f.extract(across(f, total, lambda a, b: a + b), 0)
        f.store(f.load(element, into.pointer, offset) + total, into.pointer, offset)
        return
    (amount,) = amounts
    if moving == [into.unit] and indices[moving[0]].step in (1, -1):
        _add_contiguously(scope, into, indices, moving[0], amount)
    else:
        _add_lanes(scope, into, indices, amount, element)


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
        _add_lanes(scope, into, indices, amount, amount.type.scalar)

    f.choose(inside, at_once, one_by_one)


def _add_lanes(
    scope: Scope, into: Captured, indices: Sequence[Lanes], amount: Value, element: Type
) -> None:
    """Add each lane by itself."""
    f, wide = scope.f, scope.vector_type(I64)
    offsets = f.value(0, wide)
    for index, size, stride in zip(indices, into.sizes, into.strides, strict=True):
        position = f.convert(scope.as_vector(index), I64)
        position, _ = wrapped(f, position, f.splat(size, wide))
        offsets = offsets + position * f.splat(stride, wide)
    for lane in range(scope.lanes):
        offset = f.extract(offsets, lane)
        old = f.load(element, into.pointer, offset)
        f.store(old + f.extract(amount, lane), into.pointer, offset)
