"""What the loop nests of all kernels begin with: their record, their work, a thread's scratch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from quire.codegen.builder import Function, Module, Value
from quire.codegen.convention import ENTRY, FORWARD, ForwardSpec
from quire.codegen.items import Record, Work
from quire.codegen.staging import PLACEMENT, padded, scratch_stride
from quire.codegen.tiles import Tile
from quire.codegen.types import I8, I64, PTR, Layout

Regions: TypeAlias = Callable[[Record], Iterator[tuple[str, Value]]]
"""The parts of a thread's scratch and where they start, from a kernel's arguments."""


@contextmanager
def entry(module: Module) -> Iterator[Function]:
    """The function `ENTRY` of a kernel: void(its record), run by every thread."""
    with module.function(ENTRY, {"args": PTR}) as f:
        yield f


class Nest:
    """A loop nest, being written into one function.

    `placements` are PLACEMENT records in scratch for the operands and results that are read and
    written by rows. `stride` is the distance between rows of keys and values in scratch, `depth`
    the width of a row.
    """

    def __init__(
        self,
        spec: ForwardSpec,
        f: Function,
        regions: Regions,
        operands: Sequence[str],
        *,
        layout: Layout = FORWARD,
        stride: Callable[[Tile, Value], Value] = scratch_stride,
    ) -> None:
        self.spec, self.f, self.tile = spec, f, spec.tile
        self.work = Work(f, spec, f.parameters[0], layout)
        self.arg = arg = self.work.arg
        thread = f.atomic_add(f.offset(arg["counters"], 8, I64), 1)
        base = f.offset(arg["scratch"], thread * arg["scratch_bytes"], I8)
        self.scratch = {name: f.offset(base, at, self.tile.element) for name, at in regions(arg)}
        self.placements = {
            name: f.offset(self.scratch["records"], place * PLACEMENT.size, I8)
            for place, name in enumerate(operands)
        }
        widths = {"key": arg["head_dim"], "value": arg["value_dim"]}
        self.stride = {name: stride(self.tile, width) for name, width in widths.items()}
        self.depth = {name: padded(self.tile, width) for name, width in widths.items()}

    @contextmanager
    def numbers(self) -> Iterator[Value]:
        """The items that this thread takes off the counter that all threads share."""
        with self.f.forever() as leave:
            number = self.f.atomic_add(self.arg["counters"], 1)
            leave(number >= self.arg["num_items"])
            yield number
