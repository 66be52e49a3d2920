"""What a launch needs, apart from where its tensors are and how long: made once, used many times.

A plan is keyed without the lengths of keys, so a cache that grows by a token at every step has the
same plan at every step.
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
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import F32, F64
from quire.codegen.phases.softmax import LOG4_E
from quire.codegen.phases.tiles import Tile
from quire.ir.pyramid import Pyramid
from quire.runtime import pyramids
from quire.runtime.addressing import Addressing, Records, longest, strides
from quire.runtime.interrupt import LONG_WORK, launch_stoppable
from quire.runtime.kernels import Kernel, ModCode, ModRoots, kernel, mod_code, observer
from quire.runtime.launch import launch, num_threads
from quire.runtime.tile_lists import NO_LISTS, TileLists
from quire.sequences import Sequences

SMALLEST_BLOCK = 64
SMALL_WORK = 2**19
"""Multiplications below which starting threads costs more than it saves."""

NOTHING = torch.empty(0, device="cpu")


class Rows(NamedTuple):
    """What a kernel gives for each query: out [.., Dv], and of the rest what is wanted."""

    out: Tensor
    lse: Tensor = NOTHING
    max_scores: Tensor = NOTHING
    argmax: Tensor = NOTHING
    entropy: Tensor = NOTHING

    @property
    def number_strides(self) -> tuple[int, ...]:
        """From row to row of what has one number for each query."""
        given = (tensor for tensor in self[1:] if tensor is not NOTHING)
        return next(map(strides, given), (0, 0, 0))


class Plan(NamedTuple):
    """A kernel, the code of the mods, and the part of its record that stays the same."""

    kernel: Kernel
    code: ModCode
    heads: int  # that items are counted by
    block_q: int
    partial_bytes: int
    record: bytes
    pyramids: tuple[Pyramid, ...]
    terms: Terms

    def launch(
        self,
        memory: Addressing,
        sequences: Sequences,
        captures: Several[Tensor],
        sink: Tensor | None,
        lists: TileLists,
        results: Rows,
    ) -> bool:
        """Run the kernel; whether an index into a captured tensor was out of range."""
        form = self.kernel.form
        records = memory.records(sequences, self.heads, self.block_q, form)
        if records.items == 0:
            return False
        if sink is not None:
            sink = sink.to(wide_dtype(memory.query)).contiguous()
        table = memory.page_table
        addresses = (
            memory.query.data_ptr(),
            memory.key.data_ptr(),
            memory.value.data_ptr(),
            results.out.data_ptr(),
            results.lse.data_ptr(),
            results.max_scores.data_ptr(),
            results.argmax.data_ptr(),
            results.entropy.data_ptr(),
            0 if sink is None else sink.data_ptr(),
        )
        pages = 0 if table is None else table.data_ptr()
        factors = memory.key_scale, memory.value_scale
        scales = (address_of(factors[0]), address_of(factors[1]))
        work = memory.work(sequences)
        return self.launch_at(
            addresses, records, sequences.num, work, captures, lists, pages, scales
        )

    def launch_at(
        self,
        addresses: tuple[int, ...],
        records: Records,
        num_sequences: int,
        work: int,
        captures: Several[Tensor],
        lists: TileLists = NO_LISTS,
        page_table: int = 0,
        scales: tuple[int, int] = (0, 0),
        gradients: bytes = b"",
        first: int = 0,
    ) -> bool:
        """The same, `addresses` being those of query, key, value, the five of Rows and sink.

        The backward kernel reads a third part of its record. Items are those from `first` on.
        """
        table, items, slots, members = records
        threads = min(num_threads(), items - first) if work > SMALL_WORK else 1
        if self.pyramids:
            captures = [*captures, *pyramids.build(captures, self.pyramids, work)]
        arguments, more = self.code.arguments, len(gradients)
        block = ctypes.create_string_buffer(_SEQUENCES + more + len(table) + arguments.size)
        address = ctypes.addressof(block) + more
        each = self.terms.scratch_bytes(members)
        with Scratch(threads, each, slots * self.partial_bytes, slots * 8) as scratch:
            if slots:
                ctypes.memset(scratch.arrivals, 0, slots * 8)
            call = (
                *addresses,
                address + _SEQUENCES,
                num_sequences,
                items,
                page_table,
                *scales,
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
            if work > LONG_WORK:
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


def wide_dtype(query: Tensor) -> torch.dtype:
    """What lse, max_scores, entropies and sinks are held in."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def make_plan(
    form: Form,
    memory: Addressing,
    roots: ModRoots,
    captures: Several[Tensor],
    lists: TileLists,
    block_q: int,
    scale: float,
    results: Rows,
    item_heads: int = 1,
) -> Plan:
    """The plan for operands and results that are laid out like these."""
    query, key, value, out = memory.query, memory.key, memory.value, results.out
    heads, head_dim, value_dim = query.shape[1], query.shape[3], value.shape[3]
    made = kernel(form, query.dtype, key.dtype, value.dtype, out.dtype, head_dim, value_dim)
    built = roots.pyramids
    code = mod_code(form, made.tile, roots, pyramids.capture_shapes(captures, built))
    group = max(1, heads // key.shape[1])  # also of no heads at all
    row_group = item_heads
    if form == "row":  # the queries of an item's heads share each block of keys
        row_group = 1 if lists.per_head or roots.judges_heads else group
        group = group // row_group
    observes = results.argmax is not NOTHING or results.entropy is not NOTHING
    record = {
        **memory.layout(),
        **dict(zip(("out_batch", "out_head", "out_row", "out_column"), strides(out), strict=True)),
        **dict(zip(("lse_batch", "lse_head", "lse_row"), results.number_strides, strict=True)),
        "scale": scale * (LOG4_E if roots.score is None else 1.0),
        "heads": heads // row_group,
        "group": group,
        "row_group": row_group,
        "block_q": block_q,
        "tile_batch_stride": lists.batch_stride,
        "tile_per_head": lists.per_head,
        "tile_kind": FULL if roots.always is None else PARTIAL,
        "plain_mod": code.addresses["plain"],
        "full_mod": code.addresses["full"],
        "partial_mod": code.addresses["partial"],
        "weights_mod": code.addresses["drop"],
        "extent": code.addresses["extent"],
        "verdict": code.addresses["verdict"],
        "observe": observer(form, made.tile).address(OBSERVE.name) if observes else 0,
    }
    terms = Terms.of(form, made.spec, record)
    partial_bytes = partial_stride(made.tile, value_dim) * made.tile.element.size
    return Plan(
        *(made, code, heads // row_group, block_q, partial_bytes * block_q * row_group),
        *(PLAN_PART.pack(record), built, terms),
    )


def queries_of_item(
    form: Form, memory: Addressing, sequences: Sequences, mask: BlockMask | None
) -> int:
    """How many queries are computed together."""
    if form == "row":
        return max(1, longest(sequences.q_len))
    query, value = memory.query, memory.value
    tile = Tile(Target.host(), F64 if query.dtype == torch.float64 else F32)
    rows = memory.num_rows(sequences)
    block_q = choose_block_q(tile, query.shape[3], value.shape[3], rows, num_threads())
    if mask is None:
        return block_q
    # Blocks of queries that do not straddle the blocks of a mask, unless they became tiny.
    divisor = math.gcd(block_q, mask.BLOCK_SIZE[0])
    return divisor if divisor >= SMALLEST_BLOCK else block_q


def heads_of_item(form: Form, memory: Addressing, sequences: Sequences, block_q: int) -> int:
    """How many heads are computed one after the other."""
    if form == "row":
        return 1
    work = sequences.q_len * sequences.kv_len
    alike = int(work.sum()) // max(1, longest(work)) * memory.batches
    heads = memory.query.shape[1]
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
            memory = NOTHING
        if memory.nbytes < size:
            memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._memory = memory
        self.address = address = (memory.data_ptr() + ALIGNED - 1) // ALIGNED * ALIGNED
        self.partials = partials = address + working
        self.arrivals = partials + partial_bytes
        return self

    def __exit__(self, *exception: object) -> None:
        _free.append(self._memory)
