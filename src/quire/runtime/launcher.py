"""Launching a kernel: its record, its scratch memory, and the table of sequences that it reads.

Comes in: where rows live (`Placed`), results to fill, and the tensors that mods load from. A
launcher is made once (`prepare.py`) and used many times. The number of keys is no part of it, so a
cache that grows by a token at every step is read by the same launcher at every step.
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
"""Multiplications below which starting threads costs more than it saves."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """The kernel of a form for some dtypes, and what follows from its shape."""

    form: Form
    spec: KernelSpec
    tile: TileShape
    code: jit.Code
    address: int


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
        if isinstance(rows, One):
            return self.only(placed, rows)
        return _table(placed, rows, self.kernel.form, self.heads, self.block_q)

    def only(self, placed: Placed, rows: One) -> Records:
        """The sequence of dense memory as this kernel reads it."""
        q_len, q_start, begin, end, b = rows
        batch, heads, _, head_dim = placed.query.shape
        pieces = 1
        if self.kernel.form == "row":
            pieces = max(1, -(-end // KEYS_OF_PIECE) - begin // KEYS_OF_PIECE)
        items = -(-q_len // self.block_q) * self.heads * pieces * batch
        products = batch * heads * head_dim * q_len * (end - begin)
        # fmt: off
        table = SEQUENCE.pack_in_order(
            b, 0, 0, 0, q_len, q_start, -begin, begin, end, pieces, pieces, 0, 1, 0
        )
        # fmt: on
        return Records(table, 1, products, items, items if pieces > 1 else 0)

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
        query, key, value, _, page_table, key_scale, value_scale, _ = placed
        out, lse, max_scores, argmax, entropy, _ = results
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
            # fmt: off
            call = (
                query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(),
                0 if lse is None else lse.data_ptr(),
                0 if max_scores is None else max_scores.data_ptr(),
                0 if argmax is None else argmax.data_ptr(),
                0 if entropy is None else entropy.data_ptr(),
                0 if sink is None else sink.data_ptr(),
                address + _SEQUENCES, num_sequences, items,
                0 if page_table is None else page_table.data_ptr(),
                0 if key_scale is None else key_scale.data_ptr(),
                0 if value_scale is None else value_scale.data_ptr(),
                lists.offsets_address, lists.entries_address,
                address + _SEQUENCES + len(table),
                scratch.address, scratch.each, members, scratch.partials, scratch.arrivals,
                address + _COUNTERS,
            )
            # fmt: on
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


# --- sequences ------------------------------------------------------------------------------------


class Records(NamedTuple):
    """What a launch is told about sequences: a table, how many there are, and their items.

    An item may be for several sequences, its members. If one is, or if keys are in several pieces,
    each piece of a sequence has a slot. `products` is about how many multiplications there are.
    """

    table: bytes
    num_sequences: int
    products: int
    items: int
    slots: int = 0
    members: int = 1


class Cut(NamedTuple):
    """Into how many pieces the keys of sequences are cut, and how many of these are shared.

    The first `shared` are computed for all `members` of a group by its first sequence.
    """

    pieces: Numbers
    shared: Numbers
    members: Numbers

    @property
    def slices(self) -> Numbers:
        """How many pieces a sequence has items for."""
        return np.where(self.members == 0, self.pieces - self.shared, self.pieces)

    @property
    def columns(self) -> dict[str, Numbers]:
        """As records name them."""
        return {**self._asdict(), "slices": self.slices}


def by_form(rows: One | Sequences) -> list[tuple[Form, One | Sequences]]:
    """The sequences that are computed in the same form, together.

    The form of a sequence depends on nothing but its own length.
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
    """About how many multiplications some sequences take."""
    batch, heads, _, head_dim = placed.query.shape
    if isinstance(rows, One):
        return batch * heads * head_dim * rows.q_len * (rows.kv_end - rows.kv_begin)
    return int(np.vdot(rows.q_len, rows.kv_len)) * heads * head_dim


def _table(placed: Placed, rows: Sequences, form: Form, heads: int, block_q: int) -> Records:
    """Threads take items in this order: large ones come first, so that none is left for the end."""
    pieces = np.ones_like(rows.q_len)
    if form == "row":
        pieces = np.maximum(1, num_pieces(rows.kv_begin, rows.kv_end))
    order = rows.largest_first()
    shared = group = None
    if form == "row" and placed.page_table is not None and longest(rows.kv_end) >= KEYS_OF_PIECE:
        page = placed.key.shape[2]
        order, shared, group = shared_pieces(rows, placed.page_table, page, order)
    rows, pieces = rows.where(order), pieces[order]
    cut = Cut(pieces, np.zeros_like(pieces), np.ones_like(pieces))
    if shared is not None and group is not None:
        cut = Cut(pieces, shared, group)
    each = num_items(rows.q_len, heads, block_q)
    items, slots = each * cut.slices, each * pieces
    columns = cut.columns | {"first_slot": np.cumsum(slots) - slots}
    table = table_of(rows, np.cumsum(items) - items, columns)
    members = longest(cut.members)
    total = int(slots.sum()) if max(longest(pieces), members) > 1 else 0
    return Records(
        table,
        rows.num,
        num_products(placed, rows),
        items=int(items.sum()),
        slots=total,
        members=members,
    )


def table_of(sequences: Sequences, first_item: Numbers, more: dict[str, Numbers]) -> bytes:
    """As the kernel reads them, each with the number of its first item; what is not said is 0."""
    columns = sequences._asdict() | {"first_item": first_item} | more
    nothing = np.zeros_like(first_item)
    return np.stack([columns.get(name, nothing) for name in SEQUENCE.fields], axis=1).tobytes()


def record(rows: One, pieces: int = 1, slices: int = 1) -> bytes:
    """A single sequence as the kernel reads it: its items are pieces of keys, or slices."""
    q_len, q_start, kv_begin, kv_end, b = rows
    items = max(slices, pieces)
    return SEQUENCE.pack_in_order(
        *(b, 0, 0, 0, q_len, q_start, -kv_begin, kv_begin, kv_end, items, pieces, 0, 1, 0)
    )
