"""How generated code adds to the gradients of captured tensors: where `loads.py` reads, it adds.

Lanes that add to one place are added one after the other, so any index will do, and lanes that lie
side by side are added as a vector. An index out of range has an amount of 0 and goes to index 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.codegen.builder import Value
from quire.codegen.loads import Captured, Lanes, uniform_offset, wrapped
from quire.codegen.lower import Scope
from quire.codegen.tiles import across
from quire.codegen.types import I64, Type
from quire.ir.graph import Node


def densely(scope: Scope, captured: Captured, pointer: Value) -> Captured:
    """The sums for a captured tensor: its sizes, one number after the other."""
    strides: list[Value] = []
    step = scope.f.value(1, I64)
    for size in reversed(captured.sizes):
        strides.insert(0, step)
        step = step * size
    rank = len(captured.sizes)
    return Captured(pointer, captured.sizes, strides, rank - 1 if rank else None)


def add(scope: Scope, node: Node, into: Captured, amounts: Sequence[Value]) -> None:
    """into[i, j, ...] += amount, each lane at its own index of a load.

    Where all lanes have one index there may be several vectors of amounts.
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
    """Lanes that lie side by side: as a vector, or lane by lane at a tensor's edges."""
    f, lanes, index = scope.f, scope.lanes, indices[dim]
    assert index.scalar is not None, "a contiguous index has a first lane"
    first = f.convert(index.scalar, I64)
    low = first if index.step == 1 else first - (lanes - 1)
    inside = (low >= 0) & (low + lanes <= into.sizes[dim])
    rest = [other for other in range(len(indices)) if other != dim]
    base, _ = uniform_offset(scope, into.only(rest), [indices[i] for i in rest])

    def at_once() -> list[Value]:
        vector = amount
        if index.step == -1:
            vector = f.shuffle(vector, vector, list(reversed(range(lanes))))
        old = f.load(vector.type, into.pointer, base + low)
        f.store(old + vector, into.pointer, base + low)
        return []

    def one_by_one() -> list[Value]:
        _add_lanes(scope, into, indices, amount, amount.type.scalar)
        return []

    f.choose(inside, at_once, one_by_one)


def _add_lanes(
    scope: Scope, into: Captured, indices: Sequence[Lanes], amount: Value, element: Type
) -> None:
    """Each lane at its own place."""
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
