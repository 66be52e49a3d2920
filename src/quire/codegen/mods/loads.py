"""Loads from captured tensors: one number, a vector, or lane by lane.

A negative index counts from the end. An index out of range is a mistake, which the scope notes; the
load goes on with index 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from quire.codegen.llvm.builder import Function, Value
from quire.codegen.llvm.types import F32, I1, I16, I64, PTR, Type
from quire.codegen.llvm.values import Signature
from quire.codegen.mods.rules import MEMORY
from quire.codegen.phases.storage import storage
from quire.ir.graph import Node
from quire.ir.vector import LONGEST

if TYPE_CHECKING:
    from quire.codegen.mods.lower import Scope


class Lanes(NamedTuple):
    """One number per lane: a scalar, a scalar plus `step` for each lane, or a vector."""

    scalar: Value | None = None
    step: int = 0
    vector: Value | None = None

    @property
    def is_uniform(self) -> bool:
        """True if every lane has the same number, held as a scalar."""
        return self.scalar is not None and self.step == 0


class Captured(NamedTuple):
    """A captured tensor in generated code: its address, sizes and strides.

    `unit` is the dimension with stride 1, which is known when the code is written.
    """

    pointer: Value
    sizes: Sequence[Value]
    strides: Sequence[Value]
    unit: int | None

    def only(self, dims: Sequence[int]) -> Captured:
        """The tensor with only some of its dimensions; the others have index 0."""
        sizes, strides = ([values[dim] for dim in dims] for values in (self.sizes, self.strides))
        return Captured(self.pointer, sizes, strides, None)


class Address(NamedTuple):
    """Where a load reads: an offset for all lanes or one for each, and which indices are wrong."""

    offset: Value
    wrong: Value


def load(scope: Scope, node: Node) -> Lanes:
    """captured[i, j, ...], for every lane at its own indices."""
    assert isinstance(node.payload, int)
    memory = MEMORY[node.dtype]
    captured, args = column(scope.f, scope.captures[node.payload], node, memory)
    indices = [scope.lower(arg) for arg in args]
    moving = [dim for dim, index in enumerate(indices) if not index.is_uniform]
    if node in scope.proven:
        value = _proven(scope, captured, indices, memory)
    elif moving == [captured.unit] and indices[moving[0]].step in (1, -1):
        value, wrong = _contiguous(scope, captured, indices, moving[0], memory)
        scope.mistakes[scope.rate(node)].append(wrong)
    else:
        value = _from_place(scope, captured, node, indices, memory)
    number = widened(scope.f, value, node.dtype)
    return Lanes(vector=number) if moving else Lanes(number)


def fixed_index(node: Node) -> int | None:
    """The last index of a load, if it is one of few constants, as those of a vector are.

    It is written into the code. So other code must see that the tensor is as long as that.
    """
    if node.op != "load" or len(node.args) < 2:
        return None
    index = node.args[-1].payload if node.args[-1].op == "const" else None
    return index if isinstance(index, int) and 0 <= index < LONGEST else None


def row_of(node: Node) -> tuple[Node, ...]:
    """The indices of a load that have to be computed: without the last one if that is fixed."""
    return node.args if fixed_index(node) is None else node.args[:-1]


def column(
    f: Function, captured: Captured, node: Node, memory: Type
) -> tuple[Captured, tuple[Node, ...]]:
    """The tensor that a load reads, and its indices; without the last one if that is known.

    The elements of a row then differ only in where the tensor begins, and share all other code.
    """
    fixed = fixed_index(node)
    if fixed is None:
        return captured, node.args
    last = len(node.args) - 1
    offset = fixed if captured.unit == last or not fixed else captured.strides[last] * fixed
    pointer = f.offset(captured.pointer, offset, memory)
    unit = None if captured.unit == last else captured.unit
    rest = Captured(pointer, captured.sizes[:last], captured.strides[:last], unit)
    return rest, row_of(node)


def _from_place(
    scope: Scope, captured: Captured, node: Node, indices: Sequence[Lanes], memory: Type
) -> Value:
    """A load that may be wrong: from one place, or lane by lane."""
    key = (node.payload, node.args[: len(indices)])
    known = scope.places[scope.rate(node)]
    if key not in known:
        known[key] = place_of(scope, captured, indices)
        if node.args:
            scope.mistakes[scope.rate(node)].append(known[key].wrong)
    pointer, offset = captured.pointer, known[key].offset
    if offset.type.lanes and is_of_row(scope, node):
        return scope.f.call(_gather(scope.f, memory, scope.lanes), pointer, offset)
    return _read(scope.f, pointer, offset, memory)


def is_of_row(scope: Scope, node: Node) -> bool:
    """Whether a load is one of many like it, outside of loops, so that code is best shared."""
    return fixed_index(node) is not None and not scope.differs_by_key(node)


def place_of(scope: Scope, captured: Captured, indices: Sequence[Lanes]) -> Address:
    """Where the lanes read; a wrong index is taken for 0."""
    f, wide = scope.f, scope.vector_type(I64)
    moving = [dim for dim, index in enumerate(indices) if not index.is_uniform]
    rest = [dim for dim in range(len(indices)) if dim not in moving]
    offset, wrong = uniform_offset(scope, captured.only(rest), [indices[dim] for dim in rest])
    if not moving:
        return Address(offset, wrong)
    offsets, wrong = (
        (f.splat(offset, wide), f.splat(wrong, scope.vector_type(I1)))
        if rest
        else (f.value(0, wide), f.value(False, scope.vector_type(I1)))
    )
    for dim in moving:
        position = f.convert(scope.as_vector(indices[dim]), I64)
        position, outside = wrapped(f, position, f.splat(captured.sizes[dim], wide))
        offsets = offsets + position * f.splat(captured.strides[dim], wide)
        wrong = wrong | outside
    return Address(offsets, wrong)


def _read(f: Function, pointer: Value, offset: Value, memory: Type) -> Value:
    """One number, or one for each lane of the offsets."""
    lanes = offset.type.lanes
    if not lanes:
        return f.load(memory, pointer, offset)
    result = f.value(0, memory.vector(lanes))
    for lane in range(lanes):
        element = f.load(memory, pointer, f.extract(offset, lane))
        result = f.insert(result, element, lane)
    return result


def _gather(f: Function, memory: Type, lanes: int) -> Signature:
    """A function that reads lane by lane."""
    parameters = {"pointer": PTR, "offsets": I64.vector(lanes)}

    def write(g: Function) -> None:
        pointer, offsets = g.parameters
        g.give_back(_read(g, pointer, offsets, memory))

    return f.helper(f"gather_{memory}", parameters, memory.vector(lanes), write)


def widened(f: Function, value: Value, dtype: torch.dtype) -> Value:
    """A number that was loaded, in the type in which its dtype is computed."""
    if dtype == torch.bool:
        return value.differs(0)
    if dtype == torch.uint8:
        return f.zero_extend(value, I16)
    if dtype in (torch.float16, torch.bfloat16):
        return storage(str(dtype).removeprefix("torch.")).read(f, value, F32)
    return value


def uniform_offset(
    scope: Scope, captured: Captured, indices: Sequence[Lanes]
) -> tuple[Value, Value]:
    """The offset of an element, and whether an index was out of range."""
    f = scope.f
    offset, wrong = f.value(0, I64), f.value(False, I1)
    for index, size, stride in zip(indices, captured.sizes, captured.strides, strict=True):
        position, outside = wrapped(f, f.convert(scope.as_scalar(index), I64), size)
        offset, wrong = offset + position * stride, wrong | outside
    return offset, wrong


def wrapped(f: Function, index: Value, size: Value) -> tuple[Value, Value]:
    """An index counted from the start of a dimension, and whether it is out of range (then 0)."""
    from_start = f.select(index < 0, index + size, index)
    outside = (from_start < 0) | (from_start >= size)
    return f.select(outside, 0, from_start), outside


def neighbours(
    scope: Scope, captured: Captured, indices: Sequence[Lanes], dim: int
) -> tuple[Value, Value, Value, Value]:
    """Lanes with neighbouring indices in one dimension: the lowest, and whether all are in range.

    Then the offset of the other dimensions' indices, and whether one of those is out of range.
    """
    f, lanes, index = scope.f, scope.lanes, indices[dim]
    assert index.scalar is not None, "a contiguous index has a first lane"
    first = f.convert(index.scalar, I64)
    low = first if index.step == 1 else first - (lanes - 1)
    inside = (low >= 0) & (low + lanes <= captured.sizes[dim])
    rest = [other for other in range(len(indices)) if other != dim]
    base, wrong = uniform_offset(scope, captured.only(rest), [indices[i] for i in rest])
    return low, inside, base, wrong


def _contiguous(
    scope: Scope, captured: Captured, indices: Sequence[Lanes], dim: int, memory: Type
) -> tuple[Value, Value]:
    """Lanes with neighbouring indices: one vector load, or lane by lane at a tensor's edges."""
    f, lanes, step = scope.f, scope.lanes, indices[dim].step
    low, inside, base, wrong = neighbours(scope, captured, indices, dim)
    condition = scope.vector_type(I1)

    def at_once() -> list[Value]:
        vector = f.load(memory.vector(lanes), captured.pointer, base + low)
        if step == -1:
            vector = f.shuffle(vector, vector, list(reversed(range(lanes))))
        return [vector, f.splat(wrong, condition)]

    def one_by_one() -> list[Value]:
        place = place_of(scope, captured, indices)
        return [_read(f, captured.pointer, place.offset, memory), place.wrong]

    vector, mistaken = f.choose(inside, at_once, one_by_one)
    return vector, mistaken


def _proven(scope: Scope, captured: Captured, indices: Sequence[Lanes], memory: Type) -> Value:
    """A load whose indices are proven to be in range and not negative."""
    f = scope.f
    offset, steps = f.value(0, I64), []
    for dim, index in enumerate(indices):
        assert index.scalar is not None, "an irregular index is never proven"
        offset = offset + f.convert(index.scalar, I64) * captured.strides[dim]
        if index.step:
            steps.append((dim, index.step))
    if not steps:
        return f.load(memory, captured.pointer, offset)
    if len(steps) == 1 and steps[0][0] == captured.unit and abs(steps[0][1]) == 1:
        backward = steps[0][1] == -1
        low = offset - (scope.lanes - 1) if backward else offset
        vector = f.load(memory.vector(scope.lanes), captured.pointer, low)
        order = list(reversed(range(scope.lanes)))
        return f.shuffle(vector, vector, order) if backward else vector
    stride = f.value(0, I64)
    for dim, step in steps:
        stride = stride + captured.strides[dim] * step
    result = f.value(0, memory.vector(scope.lanes))
    for lane in range(scope.lanes):
        element = f.load(memory, captured.pointer, offset + stride * lane)
        result = f.insert(result, element, lane)
    return result
