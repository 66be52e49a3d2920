"""Launches a kernel: fills its record, its table of sequences, and allocates its scratch memory.

A launcher is made once (`prepare.py`) and used many times. It takes the operands (`Placed`), the
results to fill, and the tensors that mods load from. It does not depend on the number of keys, so a
KV cache that grows at every step needs one launcher.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.codegen.contract import ALIGNED, Terms
from quire.codegen.convention import (
    CALL_PART,
    KEYS_OF_PIECE,
    MOST_ROWS,
    PLAN_PART,
    SEQUENCE,
    Form,
    KernelSpec,
    num_items,
    num_pieces,
)
from quire.codegen.llvm import jit
from quire.codegen.phases.tiles import TileShape
from quire.ir.pyramid import Pyramid
from quire.memory import One, Placed, longest
from quire.memory.tables import Numbers, Sequences
from quire.results import Result
from quire.runtime import pyramids
from quire.runtime.interrupt import LONG_WORK, launch_stoppable
from quire.runtime.launch import launch, num_threads
from quire.runtime.mods import ModCode
from quire.runtime.shared_prefix import shared_pieces
from quire.runtime.tile_lists import NO_LISTS, TileLists

SMALL_WORK = 2**19
"""The most multiplications of a call for which starting threads costs more than it saves."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """A compiled kernel, and the tile sizes that it was compiled for."""

    form: Form
    spec: KernelSpec
    tile: TileShape
    code: jit.Code
    address: int


class Launcher(NamedTuple):
    """A kernel, the code of the mods, and the part of its record that is the same in all calls."""

    kernel: Kernel
    code: ModCode
    heads: int  # heads / heads of an item
    block_q: int
    partial_bytes: int  # of one slot
    record: bytes
    pyramids: tuple[Pyramid, ...]
    terms: Terms

    def records(self, placed: Placed, rows: One | Sequences) -> Records:
        """Return the table of sequences for this kernel."""
        if isinstance(rows, One):
            return self.only(rows, placed.query.numel(), placed.query.shape[0])
        return _table(placed, rows, self.kernel.form, self.heads, self.block_q)

    def only(self, rows: One, products: int, batch: int) -> Records:
        """Return the table of the one sequence of dense memory; `products` are those of a key."""
        q_len, q_start, begin, end, b = rows
        pieces = 1
        if self.kernel.form == "row":
            pieces = max(1, -(-end // KEYS_OF_PIECE) - begin // KEYS_OF_PIECE)
        items = -(-q_len // self.block_q) * self.heads * pieces * batch
        fields = (b, 0, 0, 0, q_len, q_start, -begin, begin, end, pieces, pieces, 0, 1, 0)
        table = SEQUENCE.pack_in_order(*fields)
        return Records(table, 1, products * (end - begin), items, items if pieces > 1 else 0)

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
        """Run the kernel from item `first` on. Return whether a mod used an index out of range.

        `gradients` is the part of the record that only the backward kernel reads.
        """
        table, num_sequences, products, items, slots, members = records
        if items == first:
            return False
        query, key, value, _, page_table, key_scale, value_scale, _ = placed
        out, lse, max_scores, argmax, entropy, _ = results
        threads = min(num_threads(), items - first) if products > SMALL_WORK else 1
        if self.pyramids:
            captures = [*captures, *pyramids.build(captures, self.pyramids, products)]
        arguments = self.code.arguments
        counters = _COUNTERS + len(gradients)
        flag, sequences = counters + _FLAG, counters + _SEQUENCES
        block = ctypes.create_string_buffer(sequences + len(table) + arguments.size)
        start = ctypes.addressof(block)
        scratch_bytes = self.terms.scratch_bytes(members)
        with Scratch(threads, scratch_bytes, slots * self.partial_bytes, slots * 8) as scratch:
            if slots:
                ctypes.memset(scratch.arrivals, 0, slots * 8)
            call = (
                query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(),
                0 if lse is None else lse.data_ptr(),
                0 if max_scores is None else max_scores.data_ptr(),
                0 if argmax is None else argmax.data_ptr(),
                0 if entropy is None else entropy.data_ptr(),
                0 if sink is None else sink.data_ptr(),
                start + sequences, num_sequences, items,
                0 if page_table is None else page_table.data_ptr(),
                0 if key_scale is None else key_scale.data_ptr(),
                0 if value_scale is None else value_scale.data_ptr(),
                lists.offsets_address, lists.entries_address, start + sequences + len(table),
                scratch.address, scratch.each, members, scratch.partials, scratch.arrivals,
                start + counters,
            )  # fmt: skip
            self.terms.check_call(call)
            packed = arguments.pack(captures, start + flag)
            parts = (CALL_PART.pack_in_order(*call), self.record, gradients)
            content = b"".join((*parts, first.to_bytes(8, sys.byteorder), _ZEROS, table, packed))
            ctypes.memmove(start, content, len(content))
            if products > LONG_WORK:
                counter = ctypes.c_int64.from_buffer(block, counters)
                launch_stoppable(self.kernel.address, start, threads, counter)
            else:
                launch(self.kernel.address, start, threads)
        return block[flag] != b"\0"


# A launch has one block of memory:
# [ call | plan | gradients, if any | counters, the first is the next item | flag: an index was out
#   of range | table of sequences | arguments of the mods ]
_COUNTERS = CALL_PART.size + PLAN_PART.size  # from the start of the block, without gradients
_FLAG = 16 * 8  # from the first counter
_SEQUENCES = _FLAG + 8
_ZEROS = bytes(_SEQUENCES - 8)  # all counters but the first, and the flag


_free: deque[Tensor] = deque(maxlen=8)


class Scratch:
    """Working memory for one call. The next call may reuse it.

    Every thread has its own `each` bytes; pieces of rows share `partials` and `arrivals`.
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


# --- sequences ------------------------------------------------------------------------------------


class Records(NamedTuple):
    """The table of sequences for one launch, and the numbers of its sequences and items.

    An item may be for several sequences, its members. If one is, or if keys are in several pieces,
    each piece of a sequence has a slot. `products` estimates the number of multiplications.
    """

    table: bytes
    num_sequences: int
    products: int
    items: int
    slots: int = 0
    members: int = 1


class Cut(NamedTuple):
    """The number of pieces of keys of each sequence [B], and how many of them are shared.

    The first sequence of a group computes the first `shared` pieces for all its `members`.
    """

    pieces: Numbers
    shared: Numbers
    members: Numbers

    @property
    def slices(self) -> Numbers:
        """Return the number of pieces that each sequence computes itself."""
        return np.where(self.members == 0, self.pieces - self.shared, self.pieces)

    @property
    def columns(self) -> dict[str, Numbers]:
        """Return the columns of the table of sequences."""
        return {**self._asdict(), "slices": self.slices}


def by_form(rows: One | Sequences) -> list[tuple[Form, One | Sequences]]:
    """Split sequences by the kernel that computes them: "row" for few queries, else "panel".

    The kernel of a sequence depends only on its own length.
    """
    if isinstance(rows, One):
        return [("row" if rows.q_len <= MOST_ROWS else "panel", rows)]
    few = rows.q_len <= MOST_ROWS
    if not few.any():
        return [("panel", rows)]
    if few.all():
        return [("row", rows)]
    return [("row", rows.where(few)), ("panel", rows.where(~few))]


def num_products(placed: Placed, rows: One | Sequences) -> int:
    """Estimate the number of multiplications for some sequences."""
    batch, heads, _, head_dim = placed.query.shape
    if isinstance(rows, One):
        return batch * heads * head_dim * rows.q_len * (rows.kv_end - rows.kv_begin)
    return int(np.vdot(rows.q_len, rows.kv_len)) * heads * head_dim


def _table(placed: Placed, rows: Sequences, form: Form, heads: int, block_q: int) -> Records:
    """Return the table of many sequences. The largest come first, so that no thread ends late."""
    pieces = np.ones_like(rows.q_len)
    if form == "row":
        pieces = np.maximum(1, num_pieces(rows.kv_begin, rows.kv_end))
    order = rows.largest_first()
    shared = members = None
    if form == "row" and placed.page_table is not None and longest(rows.kv_end) >= KEYS_OF_PIECE:
        page = placed.key.shape[2]
        order, shared, members = shared_pieces(rows, placed.page_table, page, order)
    rows, pieces = rows.where(order), pieces[order]
    cut = Cut(pieces, np.zeros_like(pieces), np.ones_like(pieces))
    if shared is not None and members is not None:
        cut = Cut(pieces, shared, members)
    each = num_items(rows.q_len, heads, block_q)
    items, slots = each * cut.slices, each * pieces
    columns = cut.columns | {"first_slot": np.cumsum(slots) - slots}
    most_members = longest(cut.members)
    needs_slots = longest(pieces) > 1 or most_members > 1
    return Records(
        table=table_of(rows, np.cumsum(items) - items, columns),
        num_sequences=rows.num,
        products=num_products(placed, rows),
        items=int(items.sum()),
        slots=int(slots.sum()) if needs_slots else 0,
        members=most_members,
    )


def table_of(sequences: Sequences, first_item: Numbers, columns: dict[str, Numbers]) -> bytes:
    """Return the table of sequences, with more `columns`; a field without a column is 0."""
    columns = sequences._asdict() | {"first_item": first_item} | columns
    zeros = np.zeros_like(first_item)
    return np.stack([columns.get(name, zeros) for name in SEQUENCE.fields], axis=1).tobytes()


def record(rows: One, pieces: int = 1, slices: int = 1) -> bytes:
    """Return the table of a dense call, with as many pieces of keys or slices of queries."""
    q_len, q_start, kv_begin, kv_end, b = rows
    positions = (q_len, q_start, -kv_begin, kv_begin, kv_end)
    fields = (b, 0, 0, 0, *positions, max(slices, pieces), pieces, 0, 1, 0)  # as in SEQUENCE
    return SEQUENCE.pack_in_order(*fields)
