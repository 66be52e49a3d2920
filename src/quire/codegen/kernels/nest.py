"""What all kernels begin with: their record, their items, and the scratch of a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from quire.codegen.convention import ENTRY, KERNEL, KernelSpec, Record, belongs_to
from quire.codegen.kernels.items import Items, QueryBlock
from quire.codegen.kernels.visits import Visits
from quire.codegen.llvm.builder import Function, Module, Value
from quire.codegen.llvm.types import F32, I8, I32, I64, PTR, Layout
from quire.codegen.phases.staging import ENDLESS, PLACEMENT, padded, scratch_stride
from quire.codegen.phases.storage import storage
from quire.codegen.phases.tiles import TileShape
from quire.codegen.scratch import Regions


@contextmanager
def entry(module: Module) -> Iterator[Function]:
    """The function `ENTRY` of a kernel: void(its record), called by every thread."""
    with module.function(ENTRY, {"args": PTR}) as f:
        yield f


class Nest:
    """The loop nest of a kernel while it is written.

    `regions` divides the scratch of a thread, given the record. `operands` are the tensors that
    have a PLACEMENT record in scratch. `stride` is the distance between rows of keys and values
    in scratch, `depth` how wide such a row is.
    """

    def __init__(
        self,
        spec: KernelSpec,
        f: Function,
        regions: Callable[[Record], Regions[Value]],
        operands: Sequence[str],
        *,
        layout: Layout = KERNEL,
        stride: Callable[[TileShape, Value], Value] = scratch_stride,
    ) -> None:
        self.spec, self.f, self.tile = spec, f, spec.tile
        self.arg = arg = Record(f, layout, f.given["args"])
        self.items = Items(f, arg)
        self.visits = Visits(f, spec, self.items)
        self.thread = f.atomic_add(f.offset(arg["counters"], 8, I64), 1)
        base = f.offset(arg["scratch"], self.thread * arg["scratch_bytes"], I8)
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
        """The numbers of the items that this thread takes off the counter."""
        with self.f.forever() as leave:
            number = self.f.atomic_add(self.arg["counters"], 1)
            leave(number >= self.arg["num_items"])
            yield number

    def wanted(self, name: str) -> Value:
        """Whether an address of the record is not null."""
        return self.arg[name].differs(self.f.null())

    def place(self, queries: QueryBlock, name: str) -> None:
        """Fill in the PLACEMENT of query, key, value, out, or of a gradient or tangent of one."""
        f, arg, record, of = self.f, self.arg, self.placements[name], belongs_to(name)
        in_memory = of in ("key", "value")
        head = queries.key_head if in_memory else queries.h
        row = queries.kv_row if in_memory else queries.q_row
        start = queries.b * arg[f"{name}_batch"] + head * arg[f"{name}_head"]
        stored = storage(self.spec.dtype_of(name))
        pages = f.offset(arg["page_table"], queries.b * arg["page_table_stride"], I32)
        paged = self.wanted("page_table")
        fields = {
            "base": f.offset(arg[name], start + row * arg[f"{name}_row"], stored.memory),
            "table": f.select(paged, pages, f.null()) if in_memory else f.null(),
            "page_size": arg["page_size"] if in_memory else ENDLESS,
            "page_stride": arg[f"{name}_page"] if in_memory else 0,
            "row_stride": arg[f"{name}_row"],
            "column_stride": arg[f"{name}_column"],
            "width": arg["head_dim" if of in ("query", "key") else "value_dim"],
        }
        for field, value in fields.items():
            f.set_field(PLACEMENT, record, field, value)
        if in_memory and stored.has_scales and name == of:
            at = f.offset(arg[f"{name}_scale"], head * arg[f"{name}_scale_head"], F32)
            f.set_field(PLACEMENT, record, "scales", at)
            f.set_field(PLACEMENT, record, "scale_page_stride", arg[f"{name}_scale_page"])
            f.set_field(PLACEMENT, record, "scale_row_stride", arg[f"{name}_scale_row"])
