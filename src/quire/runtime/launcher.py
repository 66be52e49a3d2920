"""What a launch needs, apart from where its tensors are and how long: made once, used many times.

The number of keys is no part of it, so a cache that grows by a token at every step is read by the
same launcher at every step.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections import deque
from collections.abc import Sequence as Several
from typing import NamedTuple

import torch
from torch import Tensor

from quire.block_mask import BlockMask
from quire.codegen.contract import ALIGNED, Terms
from quire.codegen.convention import (
    CALL_PART,
    FULL,
    OBSERVE,
    PARTIAL,
    PLAN_PART,
    Form,
    choose_block_q,
    choose_heads,
    partial_stride,
)
from quire.codegen.softmax import LOG4_E
from quire.codegen.target import Target
from quire.codegen.tiles import Tile
from quire.codegen.types import F32, F64
from quire.ir.pyramid import Pyramid
from quire.memory.placed import One, Placed, longest
from quire.memory.sequences import Sequences
from quire.results import Result
from quire.runtime import pyramids
from quire.runtime.interrupt import LONG_WORK, launch_stoppable
from quire.runtime.kernels import Kernel, ModCode, ModGraphs, kernel, mod_code, observer
from quire.runtime.launch import launch, num_threads
from quire.runtime.records import Records, num_rows, records_of, row_layout, strides
from quire.runtime.tile_lists import NO_LISTS, TileLists

SMALLEST_BLOCK = 64
SMALL_WORK = 2**19
"""Multiplications below which starting threads costs more than it saves."""


class Launcher(NamedTuple):
    """A kernel, the code of the mods, and the part of its record that stays the same."""

    kernel: Kernel
    code: ModCode
    heads: int  # that items are counted by
    block_q: int
    partial_bytes: int
    record: bytes
    pyramids: tuple[Pyramid, ...]
    terms: Terms

    def records(self, placed: Placed, rows: One | Sequences) -> Records:
        """Sequences as this kernel reads them."""
        return records_of(placed, rows, self.kernel.form, heads=self.heads, block_q=self.block_q)

    def launch(
        self,
        placed: Placed,
        records: Records,
        results: Result,
        captures: Several[Tensor],
        *,
        sink: Tensor | None = None,
        lists: TileLists = NO_LISTS,
        gradients: bytes = b"",
        first: int = 0,
    ) -> bool:
        """Run the kernel; whether an index into a captured tensor was out of range.

        The backward kernel reads a third part of its record. Items are those from `first` on.
        """
        table, num_sequences, products, items, slots, members = records
        if items == first:
            return False
        threads = min(num_threads(), items - first) if products > SMALL_WORK else 1
        if self.pyramids:
            captures = [*captures, *pyramids.build(captures, self.pyramids, products)]
        arguments, more = self.code.arguments, len(gradients)
        block = ctypes.create_string_buffer(_SEQUENCES + more + len(table) + arguments.size)
        address = ctypes.addressof(block) + more
        each = self.terms.scratch_bytes(members)
        with Scratch(threads, each, slots * self.partial_bytes, slots * 8) as scratch:
            if slots:
                ctypes.memset(scratch.arrivals, 0, slots * 8)
            call = (
                placed.query.data_ptr(),
                placed.key.data_ptr(),
                placed.value.data_ptr(),
                results.out.data_ptr(),
                address_of(results.lse),
                address_of(results.max_scores),
                address_of(results.argmax),
                address_of(results.entropy),
                address_of(sink),
                address + _SEQUENCES,
                num_sequences,
                items,
                address_of(placed.page_table),
                address_of(placed.key_scale),
                address_of(placed.value_scale),
                lists.offsets_address,
                lists.entries_address,
                address + _SEQUENCES + len(table),
                scratch.address,
                scratch.each,
                members,
                scratch.partials,
                scratch.arrivals,
                address + _COUNTERS,
            )
            self.terms.check_call(call)
            packed = arguments.pack(captures, address + _FLAG)
            start = first.to_bytes(8, sys.byteorder)
            parts = (CALL_PART.pack_in_order(*call), self.record, gradients, start, _ZEROS)
            content = b"".join((*parts, table, packed))
            ctypes.memmove(address - more, content, len(content))
            if products > LONG_WORK:
                counter = ctypes.c_int64.from_buffer(block, _COUNTERS + more)
                launch_stoppable(self.kernel.address, address - more, threads, counter)
            else:
                launch(self.kernel.address, address - more, threads)
        return block[_FLAG + more] != b"\0"


# One piece of memory for each launch:
# [ call | plan | gradients, if any | counters: 16 x i64 | mistake flag: i64 | sequences
#   | arguments of the mods ]
_COUNTERS = CALL_PART.size + PLAN_PART.size
_FLAG = _COUNTERS + 16 * 8
_SEQUENCES = _FLAG + 8
_ZEROS = bytes(_SEQUENCES - _COUNTERS - 8)


def address_of(tensor: Tensor | None) -> int:
    """Where a tensor is; 0 where there is none."""
    return 0 if tensor is None else tensor.data_ptr()


def make_launcher(
    form: Form,
    placed: Placed,
    results: Result,
    graphs: ModGraphs,
    captures: Several[Tensor],
    *,
    scale: float,
    block_q: int,
    lists: TileLists = NO_LISTS,
    item_heads: int = 1,
) -> Launcher:
    """What launches a kernel for operands and results that lie like these."""
    query, key, value = placed.operands
    heads, value_dim = query.shape[1], value.shape[3]
    dtypes = (query.dtype, key.dtype, value.dtype, results.out.dtype)
    made = kernel(form, dtypes, head_dim=query.shape[3], value_dim=value_dim)
    built = graphs.pyramids
    code = mod_code(form, made.tile, graphs, pyramids.capture_shapes(captures, built))
    group = max(1, heads // key.shape[1])  # also of no heads at all
    row_group = item_heads
    if form == "row":  # the queries of an item's heads share each block of keys
        row_group = 1 if lists.per_head or graphs.judges_heads else group
        group = group // row_group
    record = {
        **row_layout(placed),
        **_result_layout(results),
        "scale": scale * (LOG4_E if graphs.score is None else 1.0),
        "heads": heads // row_group,
        "group": group,
        "row_group": row_group,
        "block_q": block_q,
        "tile_batch_stride": lists.batch_stride,
        "tile_per_head": lists.per_head,
        "tile_kind": FULL if graphs.always is None else PARTIAL,
        **_functions(code, form, made.tile, results),
    }
    partial_bytes = partial_stride(made.tile, value_dim) * made.tile.element.size
    return Launcher(
        kernel=made,
        code=code,
        heads=heads // row_group,
        block_q=block_q,
        partial_bytes=partial_bytes * block_q * row_group,
        record=PLAN_PART.pack(record),
        pyramids=built,
        terms=Terms.of(form, made.spec, record),
    )


def _result_layout(results: Result) -> dict[str, int]:
    """From row to row of the output, and of what has one number for each query."""
    numbers = next((x for name, x in results.by_query.items() if name != "out"), None)
    steps = (0, 0, 0) if numbers is None else strides(numbers)
    return {
        **dict(
            zip(
                ("out_batch", "out_head", "out_row", "out_column"),
                strides(results.out),
                strict=True,
            )
        ),
        **dict(zip(("lse_batch", "lse_head", "lse_row"), steps, strict=True)),
    }


def _functions(code: ModCode, form: Form, tile: Tile, results: Result) -> dict[str, int]:
    """The addresses of what the kernel calls."""
    observes = results.argmax is not None or results.entropy is not None
    return {
        "plain_mod": code.addresses["plain"],
        "full_mod": code.addresses["full"],
        "partial_mod": code.addresses["partial"],
        "weights_mod": code.addresses["drop"],
        "extent": code.addresses["extent"],
        "verdict": code.addresses["verdict"],
        "observe": observer(form, tile).address(OBSERVE.name) if observes else 0,
    }


def queries_of_item(
    form: Form, placed: Placed, rows: One | Sequences, mask: BlockMask | None
) -> int:
    """How many queries are computed together."""
    if form == "row":
        return max(1, rows.q_len if isinstance(rows, One) else longest(rows.q_len))
    query, value = placed.query, placed.value
    tile = Tile(Target.host(), F64 if query.dtype == torch.float64 else F32)
    count = num_rows(placed, rows)
    block_q = choose_block_q(tile, query.shape[3], value.shape[3], count, num_threads())
    if mask is None:
        return block_q
    # Blocks of queries that do not straddle the blocks of a mask, unless they became tiny.
    divisor = math.gcd(block_q, mask.BLOCK_SIZE[0])
    return divisor if divisor >= SMALLEST_BLOCK else block_q


def heads_of_item(form: Form, placed: Placed, rows: One | Sequences, block_q: int) -> int:
    """How many heads are computed one after the other."""
    if form == "row":
        return 1
    sequences = rows if isinstance(rows, Sequences) else Sequences.one(*rows)
    products = sequences.q_len * sequences.kv_len
    alike = int(products.sum()) // max(1, longest(products)) * placed.batches
    heads = placed.query.shape[1]
    return choose_heads(heads, longest(sequences.q_len), alike, block_q, num_threads())


_free: deque[Tensor] = deque(maxlen=8)


class Scratch:
    """Working memory for one call. What a call gives back, the next one may have.

    Every thread has a part, `each` bytes after the one before; pieces of rows share the rest.
    """

    __slots__ = ("_memory", "_sizes", "address", "arrivals", "each", "partials")

    def __init__(self, threads: int, each: int, partial_bytes: int, arrival_bytes: int) -> None:
        self.each, self._sizes = each, (threads * each, partial_bytes, arrival_bytes)

    def __enter__(self) -> Scratch:
        working, partial_bytes, arrival_bytes = self._sizes
        size = working + partial_bytes + arrival_bytes + ALIGNED
        try:
            memory = _free.pop()
        except IndexError:
            memory = None
        if memory is None or memory.nbytes < size:
            memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._memory = memory
        self.address = address = (memory.data_ptr() + ALIGNED - 1) // ALIGNED * ALIGNED
        self.partials = partials = address + working
        self.arrivals = partials + partial_bytes
        return self

    def __exit__(self, *exception: object) -> None:
        _free.append(self._memory)
