"""Where rows live, as the kernel is told: strides, sequences and pages of a memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from quire.codegen.convention import MOST_ROWS, SEQUENCE, Form, num_items, num_pieces
from quire.codegen.phases.staging import ENDLESS
from quire.memory import Dense
from quire.runtime.common import common_pieces
from quire.sequences import Numbers, Sequences


class Records(NamedTuple):
    """Sequences as a kernel reads them, and how many items they have.

    An item may be for several sequences. If one is, or if keys are in several pieces, each piece of
    a sequence has a slot.
    """

    table: bytes
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


class Addressing(NamedTuple):
    """The operands of a launch.

    query [B, Hq, rows, D], key and value [B, Hkv, rows, D] or, with a page table, pages
    [P, Hkv, page, D]. One sequence stands for every one of `copies` batch entries; several are
    packed into rows of the only one, or have a row each of the page table.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    sequences: Sequences
    copies: int | None = None
    page_table: Tensor | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    @property
    def batches(self) -> int:
        """How many batch entries each sequence stands for; there may be none."""
        return 1 if self.copies is None else self.copies

    @property
    def lengths(self) -> tuple[int, int]:
        """The longest query and the largest number of keys."""
        return longest(self.sequences.q_len), longest(self.sequences.kv_len)

    @property
    def longest(self) -> int:
        """A bound of all positions."""
        q_end = self.sequences.q_start + self.sequences.q_len
        return max(longest(self.sequences.kv_end), longest(q_end))

    def by_form(self) -> list[tuple[Form, Sequences]]:
        """The sequences that are computed in the same form, together.

        The form of a sequence depends on nothing but its own length.
        """
        few = self.sequences.q_len <= MOST_ROWS
        if not few.any():
            return [("panel", self.sequences)]
        if few.all():
            return [("row", self.sequences)]
        return [("row", self.sequences.where(few)), ("panel", self.sequences.where(~few))]

    def num_rows(self, sequences: Sequences) -> int:
        """How many query rows there are in all heads."""
        return int(sequences.q_len.sum()) * self.query.shape[1] * self.batches

    def work(self, sequences: Sequences) -> int:
        """About how many multiplications there are."""
        _, heads, _, head_dim = self.query.shape
        count = int(np.vdot(sequences.q_len, sequences.kv_len))
        return count * self.batches * heads * head_dim

    def records(self, sequences: Sequences, heads: int, block_q: int, form: Form) -> Records:
        """The sequences as the kernel reads them, and the items of so many heads.

        Threads take items in this order: large ones come first, so that none is left for the end.
        """
        pieces = np.ones_like(sequences.q_len)
        if form == "row":
            pieces = np.maximum(1, num_pieces(sequences.kv_begin, sequences.kv_end))
        if sequences.num == 1:
            count = num_items(int(sequences.q_len[0]), heads, block_q) * int(pieces[0])
            table, count = only_record(sequences, pieces=int(pieces[0])), count * self.batches
            return Records(table, count, count if pieces[0] > 1 else 0)
        order = sequences.largest_first()
        shared = group = None
        if form == "row" and self.page_table is not None:
            page = self.key.shape[2]
            order, shared, group = common_pieces(sequences, self.page_table, page, order)
        sequences, pieces = sequences.where(order), pieces[order]
        cut = Cut(pieces, np.zeros_like(pieces), np.ones_like(pieces))
        if shared is not None and group is not None:
            cut = Cut(pieces, shared, group)
        each = num_items(sequences.q_len, heads, block_q)
        items, slots = each * cut.slices, each * pieces
        columns = cut.columns | {"first_slot": np.cumsum(slots) - slots}
        table = records(sequences, np.cumsum(items) - items, columns)
        members = longest(cut.members)
        total = int(slots.sum()) * self.batches if max(longest(pieces), members) > 1 else 0
        return Records(table, int(items.sum()) * self.batches, total, members)

    def layout(self) -> dict[str, int]:
        """The part of a plan that says where rows live."""
        query, key, value, table = self.query, self.key, self.value, self.page_table
        result = dict(zip(_NAMES["query"], strides(query), strict=True))
        for name, tensor in (("key", key), ("value", value)):
            batch, head, row, column = strides(tensor)
            page = tensor.stride(0) if table is not None else 0
            steps = (batch if table is None else 0, head, page, row, column)
            result.update(zip(_NAMES[name], steps, strict=True))
        for name, scale in (("key_scale", self.key_scale), ("value_scale", self.value_scale)):
            page, head, row = (0, 0, 0) if scale is None else scale.stride()
            result |= {f"{name}_head": head, f"{name}_page": page, f"{name}_row": row}
        return result | {
            "head_dim": query.shape[3],
            "value_dim": value.shape[3],
            "sequence_stride": 0 if self.copies is not None else 1,
            "page_table_stride": 0 if table is None else table.stride(0),
            "page_size": ENDLESS if table is None else key.shape[2],
        }


_NAMES = {
    name: [f"{name}_{axis}" for axis in axes]
    for name, axes in {
        "query": ("batch", "head", "row", "column"),
        "key": ("batch", "head", "page", "row", "column"),
        "value": ("batch", "head", "page", "row", "column"),
    }.items()
}


def strides(tensor: Tensor) -> tuple[int, ...]:
    """From row to row. A first dimension of 1 is shared by all batches, and by all sequences."""
    steps = tensor.stride()
    return steps if tensor.shape[0] > 1 else (0, *steps[1:])


def longest(lengths: Numbers) -> int:
    """The largest of some lengths; 0 where there are none."""
    return int(lengths.max(initial=0))


def records(sequences: Sequences, first_item: Numbers, more: dict[str, Numbers]) -> bytes:
    """As the kernel reads them, each with the number of its first item; what is not said is 0."""
    columns = sequences._asdict() | {"first_item": first_item} | more
    nothing = np.zeros_like(first_item)
    return np.stack([columns.get(name, nothing) for name in SEQUENCE.fields], axis=1).tobytes()


def only_record(sequences: Sequences, slices: int = 1, pieces: int = 1) -> bytes:
    """The same of a single sequence, sooner."""
    b, q_len, q_start, kv_begin, kv_end, q_row, kv_row = (int(column[0]) for column in sequences)
    items = max(slices, pieces)
    return SEQUENCE.pack_in_order(
        *(b, 0, 0, q_row, q_len, q_start, kv_row, kv_begin, kv_end, items, pieces, 0, 1, 0)
    )


def record(q_len: int, q_start: int, kv_len: int, pieces: int = 1) -> bytes:
    """One sequence of dense memory that begins at position 0."""
    return SEQUENCE.pack_in_order(
        *(0, 0, 0, 0, q_len, q_start, 0, 0, kv_len, pieces, pieces, 0, 1, 0)
    )


def dense(query: Tensor, memory: Dense, q_start: int, b_start: int = 0) -> Addressing:
    """query [B, Hq, L, D], whose first row sits at `q_start` in every batch entry.

    With a `b_start` there is one entry, of that number.
    """
    kv_end = memory.start + memory.key.shape[2]
    sequence = Sequences.one(query.shape[2], q_start, memory.start, kv_end, b_start)
    copies = query.shape[0] if b_start == 0 else None
    return Addressing(query, memory.key, memory.value, sequence, copies)
