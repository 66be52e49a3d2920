"""Builds pyramids of minima and maxima (`ir/pyramid.py`) at the speed of reading a tensor.

    min(source, sizes.., strides.., leaves.., grains.., missing, into, spare)

    source[row, column]   a tensor of two dimensions, or of one as a single row
    into[i, j]            its pyramid: 2 * leaves of rows by 2 * leaves of columns
    missing               a number that is never the minimum, for leaves without elements
    spare                 memory for a row of the source, if leaves have several elements

A row of leaves is first the extremes of 2**grain rows of the source. Then neighbours are combined:
until the row has as many entries as leaves, and further for the entries above. Rows are combined
last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire.codegen.llvm.builder import Function, Module, Value
from quire.codegen.llvm.types import I64, Type, typed
from quire.codegen.mods.rules import MEMORY, RULES
from quire.ir.graph import Node

NAMES = ("min", "max")
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
PYRAMID_DTYPES = (torch.bool, *_INTEGERS, torch.float32, torch.float64)
"""The dtypes that pyramids are built for."""

PARAMETERS = {
    **typed("ptr source, i64 rows columns row_stride column_stride"),
    **typed("i64 row_leaves column_leaves row_grain column_grain, ptr missing into spare"),
}

_VECTOR_BYTES = 32


def write_pyramid(dtype: torch.dtype) -> Module:
    """A module with the functions min and max, see above."""
    module = Module()
    for name in NAMES:
        with module.function(name, PARAMETERS) as f:
            given = f.given
            into, spare = given["into"], given["spare"]
            row_leaves, row_grain = given["row_leaves"], given["row_grain"]
            column_leaves, column_grain = given["column_leaves"], given["column_grain"]
            extremes = _Extremes(f, name, dtype)
            entries = column_leaves * 2  # of a row
            halvings = f.value(63, I64) - f.leading_zeros(column_leaves)
            with f.range(0, row_leaves) as i:
                row = f.offset(into, (row_leaves + i) * entries, extremes.element)
                leaves = f.offset(row, column_leaves, extremes.element)
                coarse = column_grain.differs(0)
                wide = f.select(coarse, spare, leaves)
                extremes.fill(wide, column_leaves << column_grain, given["missing"])
                first = i << row_grain
                stop = f.minimum((i + 1) << row_grain, given["rows"])
                with f.range(first, stop) as r:
                    line = f.offset(given["source"], r * given["row_stride"], extremes.element)
                    extremes.add(wide, line, given["columns"], given["column_stride"])
                with f.range(0, column_grain) as k:
                    left = column_grain - k - 1
                    shorter = f.select(left.equals(0), leaves, spare)
                    extremes.halve(wide, shorter, column_leaves << left)
                with f.range(0, halvings) as k:
                    half = column_leaves >> (k + 1)
                    below, above = (
                        f.offset(row, start, extremes.element) for start in (half * 2, half)
                    )
                    extremes.halve(below, above, half)
            with f.range(1, row_leaves) as i:
                place = row_leaves - i
                above, left, right = (
                    f.offset(into, at * entries, extremes.element)
                    for at in (place, place * 2, place * 2 + 1)
                )
                extremes.combine(above, left, right, entries)
    return module


@dataclass
class _Extremes:
    """Rows of minima, or of maxima, a vector at a time."""

    f: Function
    name: str
    dtype: torch.dtype

    @property
    def element(self) -> Type:
        """The type of a number in memory."""
        return MEMORY[self.dtype]

    @property
    def _vector(self) -> Type:
        return self.element.vector(_VECTOR_BYTES // self.element.size)

    def _across(self, count: Value, body: Callable[[Value, Type], None]) -> None:
        """Call `body(i, type)` for `count` numbers: vectors first, then scalars."""
        f, lanes = self.f, self._vector.lanes
        whole = count & -lanes
        with f.range(0, whole, lanes) as i:
            body(i, self._vector)
        with f.range(whole, count) as i:
            body(i, self.element)

    def fill(self, row: Value, count: Value, number: Value) -> None:
        """Set a row to one number."""
        f = self.f
        same = f.load(self.element, number, 0)
        self._across(count, lambda i, type: f.store(f.splat(same, type), row, i))

    def combine(self, into: Value, a: Value, b: Value, count: Value) -> None:
        """The extremes of two rows, element by element."""
        f = self.f

        def body(i: Value, type: Type) -> None:
            f.store(self._extreme(f.load(type, a, i), f.load(type, b, i)), into, i)

        self._across(count, body)

    def add(self, row: Value, other: Value, count: Value, stride: Value) -> None:
        """Combine a row with another one, which may have a stride."""
        f, apart = self.f, stride.differs(1)
        with f.when(~apart):
            self.combine(row, row, other, count)
        with f.range(0, f.select(apart, count, 0)) as i:
            pair = f.load(self.element, row, i), f.load(self.element, other, i * stride)
            f.store(self._extreme(*pair), row, i)

    def halve(self, row: Value, into: Value, count: Value) -> None:
        """Combine `count` pairs of neighbours; `into` may be the row itself."""
        f = self.f

        def body(i: Value, type: Type) -> None:
            if not type.lanes:
                pair = [f.load(type, row, i * 2 + k) for k in (0, 1)]
            else:
                a, b = (f.load(type, row, i * 2 + start) for start in (0, type.lanes))
                pair = [f.shuffle(a, b, range(k, 2 * type.lanes, 2)) for k in (0, 1)]
            f.store(self._extreme(*pair), into, i)

        self._across(count, body)

    def _extreme(self, a: Value, b: Value) -> Value:
        unused = Node("const", (), self.dtype, 0.0)
        return RULES[self.name](self.f, Node(self.name, (unused, unused), self.dtype), a, b)
