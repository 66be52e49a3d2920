"""Where rows live, as the kernel is told: strides, sequences and pages of a memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Several
from typing import NamedTuple

import torch
from torch import Tensor

from quire.codegen.convention import MOST_ROWS, SEQUENCE, Form, num_items
from quire.codegen.staging import ENDLESS
from quire.memory import Dense, Paged, Ragged


class Sequence(NamedTuple):
    """One sequence: its number, its rows in the tensors and the positions they stand for."""

    b: int
    q_len: int
    q_start: int
    kv_begin: int
    kv_end: int
    q_row: int = 0
    kv_row: int = 0

    @property
    def form(self) -> Form:
        """How its queries are computed. It depends on nothing but its own length."""
        return "row" if self.q_len <= MOST_ROWS else "panel"

    def record(self, first_item: int, slices: int = 1) -> bytes:
        """As the kernel reads it."""
        b, q_len, q_start, kv_begin, kv_end, q_row, kv_row = self
        return SEQUENCE.pack_in_order(
            b, first_item, 0, q_row, q_len, q_start, kv_row, kv_begin, kv_end, slices
        )


class Addressing(NamedTuple):
    """The operands of a launch.

    query [B, Hq, rows, D], key and value [B, Hkv, rows, D] or, with a page table, pages
    [P, Hkv, page, D]. One sequence stands for every one of `copies` batch entries; several are
    packed into rows of the only one, or have a row each of the page table.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    sequences: tuple[Sequence, ...]
    copies: int | None = None
    page_table: Tensor | None = None

    @property
    def batches(self) -> int:
        """How many batch entries each sequence stands for; there may be none."""
        return 1 if self.copies is None else self.copies

    @property
    def lengths(self) -> tuple[int, int]:
        """The longest query and the largest number of keys."""
        q_len = max((s.q_len for s in self.sequences), default=0)
        return q_len, max((s.kv_end - s.kv_begin for s in self.sequences), default=0)

    @property
    def longest(self) -> int:
        """A bound of all positions."""
        ends = [max(s.kv_end, s.q_start + s.q_len) for s in self.sequences]
        return max(ends, default=0)

    def by_form(self) -> list[tuple[Form, tuple[Sequence, ...]]]:
        """The sequences that are computed in the same form, together."""
        first = self.sequences[0].form if self.sequences else "panel"
        if all(s.form == first for s in self.sequences):
            return [(first, self.sequences)]
        forms: tuple[Form, Form] = ("row", "panel")
        return [(form, tuple(s for s in self.sequences if s.form == form)) for form in forms]

    def num_rows(self, sequences: Several[Sequence]) -> int:
        """How many query rows there are in all heads."""
        return sum(s.q_len for s in sequences) * self.query.shape[1] * self.batches

    def work(self, sequences: Several[Sequence]) -> int:
        """About how many multiplications there are."""
        _, heads, _, head_dim = self.query.shape
        count = sum(s.q_len * (s.kv_end - s.kv_begin) for s in sequences)
        return count * self.batches * heads * head_dim

    def records(self, sequences: Several[Sequence], heads: int, block_q: int) -> tuple[bytes, int]:
        """The sequences as the kernel reads them, and how many items there are of `heads`."""
        packed, items = [], 0
        for sequence in sequences:
            packed.append(sequence.record(items))
            items += num_items(sequence.q_len, heads, block_q)
        return b"".join(packed), items * self.batches

    def layout(self) -> dict[str, int]:
        """The part of a plan that says where rows live."""
        query, key, value, table = self.query, self.key, self.value, self.page_table
        result = dict(zip(_NAMES["query"], strides(query), strict=True))
        for name, tensor in (("key", key), ("value", value)):
            batch, head, row, column = strides(tensor)
            page = tensor.stride(0) if table is not None else 0
            steps = (batch if table is None else 0, head, page, row, column)
            result.update(zip(_NAMES[name], steps, strict=True))
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


def dense(query: Tensor, memory: Dense, q_start: int) -> Addressing:
    """query [B, Hq, L, D], whose first row sits at `q_start` in every batch entry."""
    first, last = memory.start, memory.start + memory.key.shape[2]
    sequence = Sequence(0, query.shape[2], q_start, first, last, kv_row=-first)
    return Addressing(query, memory.key, memory.value, (sequence,), query.shape[0])


def ragged(query: Tensor, memory: Ragged, q_offsets: Tensor) -> Addressing:
    """query [total, Hq, D] in sequences of their own; each ends where its keys end."""
    starts = zip(q_offsets.tolist(), memory.offsets.tolist(), strict=True)
    sequences = []
    for b, ((q_row, kv_row), (q_end, kv_end)) in enumerate(itertools.pairwise(starts)):
        q_len, kv_len = q_end - q_row, kv_end - kv_row
        sequences.append(Sequence(b, q_len, kv_len - q_len, 0, kv_len, q_row, kv_row))
    key, value = packed(memory.key), packed(memory.value)
    return Addressing(packed(query), key, value, tuple(sequences))


def packed(rows: Tensor) -> Tensor:
    """Rows [total, H, D] as one batch entry [1, H, total, D]."""
    return rows.transpose(0, 1).unsqueeze(0)


def paged(query: Tensor, memory: Paged) -> Addressing:
    """query [B, Hq, L, D], the last L positions of each sequence."""
    q_len = query.shape[2]
    sequences = [
        Sequence(b, q_len, length - q_len, 0, length)
        for b, length in enumerate(memory.lengths.tolist())
    ]
    table = memory.page_table.to(torch.int32).contiguous()
    return Addressing(query, memory.key, memory.value, tuple(sequences), page_table=table)
