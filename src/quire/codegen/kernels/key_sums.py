"""Where a backward kernel adds up the gradients of keys and values, and which rows it has touched.

A share that is one slice adds to its own sums. A share that is all slices of a sequence adds each
slice to the part of its thread, which begins at zero, and then moves the part to its sums:

    part of the thread    0 | slice 0 | 0 | slice 1 | 0 | ...
    sums of the share     0           s0            s0 + s1

Only rows that a slice has touched are moved, so a window costs no more than its keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quire.codegen.convention import SEQUENCE
from quire.codegen.kernels.items import Share, Slice
from quire.codegen.kernels.nest import Nest
from quire.codegen.kernels.visits import KeyBlock
from quire.codegen.llvm.builder import Value
from quire.codegen.llvm.types import I64
from quire.codegen.llvm.values import Operand
from quire.codegen.phases.staging import ENDLESS


class KeySums:
    """The sums of a loop nest while it is written."""

    def __init__(self, nest: Nest) -> None:
        self._nest, self._f, self._arg = nest, nest.f, nest.arg

    def begin(self) -> None:
        """Forget what was touched."""
        self._set_touched(ENDLESS, 0)

    def touch(self, block: KeyBlock) -> None:
        """Note that the slice adds to a block of keys."""
        f = self._f
        first, end = self._touched()
        self._set_touched(
            f.minimum(first, block.origin + block.begin), f.maximum(end, block.origin + block.end)
        )

    def of_head(self, share: Share, slot: Value, head: Value, name: str) -> Value:
        """The address of the sums of a head, for one share or one slice."""
        arg = self._arg
        at = slot * arg[f"{name}_slice"] + share.b * arg[f"{name}_batch"]
        return self._f.offset(arg[name], at + head * arg[f"{name}_head"], self._nest.tile.element)

    def of_keys(self, slice: Slice, name: str) -> tuple[Value, Value]:
        """The sums of a share and the part of the thread: where their position 0 is."""
        f, arg, share, element = self._f, self._arg, slice.share, self._nest.tile.element
        field, step = self._nest.items.sequence_fields(share.sequence), arg[f"grad_{name}_row"]
        slot = f.select(arg["whole"].differs(0), 0, slice.slot)
        total = self.of_head(share, slot, share.key_head, f"grad_{name}")
        at = self._nest.thread * arg[f"part_{name}_thread"] - field["kv_begin"] * step
        part = f.offset(arg[f"part_{name}"], at, element)
        return f.offset(total, field["kv_row"] * step, element), part

    @contextmanager
    def touched_rows(self, slice: Slice, name: str) -> Iterator[tuple[Value, Value, Value]]:
        """Where the touched rows begin, in the sums and in the part, and their number, if any."""
        f, element, step = self._f, self._nest.tile.element, self._arg[f"grad_{name}_row"]
        first, end = self._touched()
        with f.when((first < end) & self._nest.wanted(f"grad_{name}")):
            total, part = (f.offset(x, first * step, element) for x in self.of_keys(slice, name))
            yield total, part, end - first

    def tell_touched(self, share: Share) -> None:
        """Write the rows that an item has touched, if somebody wants to know."""
        f, row = self._f, self._f.field(SEQUENCE, share.sequence, "kv_row")
        with f.when(self._nest.wanted("touched")):
            for side, position in enumerate(self._touched()):
                f.store(row + position, self._arg["touched"], share.number * 2 + side)

    def _touched(self) -> list[Value]:
        """The first and the end of the positions that the slice has touched."""
        return [self._f.load(I64, self._nest.scratch["touched"], side) for side in (0, 1)]

    def _set_touched(self, *ends: Operand) -> None:
        for side, end in enumerate(ends):
            self._f.store(self._f.value(end, I64), self._nest.scratch["touched"], side)
