"""Where rows live, as the kernel is told: strides, sequences and pages of a memory."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.codegen.convention import SEQUENCE, num_items
from quire.codegen.staging import ENDLESS
from quire.memory import Dense, Paged, Ragged


@dataclass(frozen=True, eq=False)
class Sequence:
    """One sequence: its rows in the tensors and the positions they stand for."""

    q_len: int
    q_start: int
    kv_begin: int
    kv_end: int
    q_row: int = 0
    kv_row: int = 0


@dataclass(frozen=True, eq=False)
class Addressing:
    """The operands of a launch.

    query [B, Hq, rows, D], key and value [B, Hkv, rows, D] or, with a page table, pages
    [P, Hkv, page, D]. One sequence stands for every batch entry; several are packed into rows of
    the only one, or have a row each of the page table.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    sequences: tuple[Sequence, ...]
    page_table: Tensor | None = None

    @property
    def shared(self) -> bool:
        """Whether one sequence describes all."""
        return len(self.sequences) == 1 and self.page_table is None

    @property
    def q_len(self) -> int:
        """The longest query."""
        return max((s.q_len for s in self.sequences), default=0)

    @property
    def kv_len(self) -> int:
        """The largest number of keys."""
        return max((s.kv_end - s.kv_begin for s in self.sequences), default=0)

    @property
    def longest(self) -> int:
        """A bound of all positions."""
        ends = (max(s.kv_end, s.q_start + s.q_len) for s in self.sequences)
        return max(ends, default=0)

    @property
    def work(self) -> int:
        """About how many multiplications there are."""
        count = sum(s.q_len * (s.kv_end - s.kv_begin) for s in self.sequences)
        batches = self.query.shape[0] if self.shared else 1
        return count * batches * self.query.shape[1] * self.query.shape[3]

    @property
    def num_rows(self) -> int:
        """How many query rows there are in all heads."""
        count = sum(s.q_len for s in self.sequences) * self.query.shape[1]
        return count * (self.query.shape[0] if self.shared else 1)

    def num_items(self, block_q: int) -> int:
        """How many pieces of work the threads share."""
        heads = self.query.shape[1]
        count = sum(num_items(s.q_len, heads, block_q) for s in self.sequences)
        return count * (self.query.shape[0] if self.shared else 1)

    def fields(self, block_q: int) -> dict[str, int]:
        """The part of the kernel's record that says where rows live."""
        query, key, value = self.query, self.key, self.value
        heads = query.shape[1]
        records, first_item = b"", 0
        for s in self.sequences:
            records += SEQUENCE.pack(
                {
                    "first_item": first_item,
                    "tile_row": 0,
                    "q_row": s.q_row,
                    "q_len": s.q_len,
                    "q_start": s.q_start,
                    "kv_row": s.kv_row,
                    "kv_begin": s.kv_begin,
                    "kv_end": s.kv_end,
                }
            )
            first_item += num_items(s.q_len, heads, block_q)
        packed = ctypes.create_string_buffer(records)
        self._keep(packed)
        paged = self.page_table is not None
        result = strides("query", query, "batch", "head", "row", "column")
        for name, tensor in (("key", key), ("value", value)):
            axes = ("page" if paged else "batch", "head", "row", "column")
            unused = f"{name}_batch" if paged else f"{name}_page"
            result |= strides(name, tensor, *axes) | {unused: 0}
        return result | {
            "heads": heads,
            "group": heads // key.shape[1],
            "head_dim": query.shape[3],
            "value_dim": value.shape[3],
            "sequences": ctypes.addressof(packed),
            "sequence_stride": 0 if self.shared else 1,
            "num_sequences": len(self.sequences),
            "page_table": 0 if self.page_table is None else self.page_table.data_ptr(),
            "page_table_stride": 0 if self.page_table is None else self.page_table.stride(0),
            "page_size": key.shape[2] if paged else ENDLESS,
        }

    def _keep(self, packed: Any) -> None:
        object.__setattr__(self, "_packed", packed)


def dense(query: Tensor, memory: Dense, q_start: int) -> Addressing:
    """query [B, Hq, L, D], whose first row sits at `q_start` in every batch entry."""
    first, last = memory.start, memory.start + memory.key.shape[2]
    sequence = Sequence(query.shape[2], q_start, first, last, kv_row=-first)
    return Addressing(query, memory.key, memory.value, (sequence,))


def ragged(query: Tensor, memory: Ragged, q_offsets: Tensor) -> Addressing:
    """query [total, Hq, D] in sequences of their own; each ends where its keys end."""
    starts = zip(q_offsets.tolist(), memory.offsets.tolist(), strict=True)
    sequences = tuple(
        Sequence(
            q_end - q_row, (kv_end - kv_row) - (q_end - q_row), 0, kv_end - kv_row, q_row, kv_row
        )
        for (q_row, kv_row), (q_end, kv_end) in itertools.pairwise(starts)
    )
    key, value = packed(memory.key), packed(memory.value)
    return Addressing(packed(query), key, value, sequences)


def packed(rows: Tensor) -> Tensor:
    """Rows [total, H, D] as one batch entry [1, H, total, D]."""
    return rows.transpose(0, 1).unsqueeze(0)


def paged(query: Tensor, memory: Paged) -> Addressing:
    """query [B, Hq, L, D], the last L positions of each sequence."""
    q_len = query.shape[2]
    sequences = tuple(
        Sequence(q_len, length - q_len, 0, length) for length in memory.lengths.tolist()
    )
    table = memory.page_table.to(torch.int32).contiguous()
    return Addressing(query, memory.key, memory.value, sequences, table)


def strides(name: str, tensor: Tensor, *axes: str) -> dict[str, int]:
    """A tensor's address and strides, as the kernel's record names them.

    A first dimension of 1 is shared by all batches, and by all sequences.
    """
    fields = {f"{name}_{axis}": s for axis, s in zip(axes, tensor.stride(), strict=True)}
    if tensor.shape[0] == 1:
        fields[f"{name}_{axes[0]}"] = 0
    return {name: tensor.data_ptr(), **fields}
