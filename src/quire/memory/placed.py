"""Where the rows of a call live: one value for every memory, from the checks to the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from quire.memory.sequences import Numbers, Sequences
from quire.results import working_dtype


class One(NamedTuple):
    """A single sequence in plain numbers. Its rows are all rows of a batch entry.

    Queries are at positions q_start, q_start + 1, ... and keys at [kv_begin, kv_end). Mods see the
    batch entries as b, b + 1, ...
    """

    q_len: int
    q_start: int
    kv_begin: int
    kv_end: int
    b: int = 0


class Placed(NamedTuple):
    """The operands of a call, and which of their rows belong to which sequence.

                 query               key and value          rows
        dense    [B, Hq, L, D]       [B or 1, Hkv, S, D]    one sequence, the same in every entry
        ragged   [1, Hq, total, D]   [1, Hkv, total, D]     a table of sequences
        paged    [1, Hq, total, D]   [P, Hkv, page, D]      a table of sequences

    Row `p % page` of page `page_table[b, p // page]` is position p of sequence b. Pages of int8
    have a factor for each row of each head, [P, Hkv, page]. `content` stands for all that the
    tables hold: where it is equal, they are. It is None if nobody can tell.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    rows: One | Sequences
    page_table: Tensor | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    content: object = None

    @property
    def is_dense(self) -> bool:
        """Whether one sequence stands for every batch entry."""
        return isinstance(self.rows, One)

    @property
    def sequences(self) -> Sequences:
        """The table of sequences; that of dense memory has one entry."""
        rows = self.rows
        return rows if isinstance(rows, Sequences) else Sequences.one(*rows)

    @property
    def one(self) -> One:
        """The sequence of dense memory."""
        assert isinstance(self.rows, One), "dense memory"
        return self.rows

    @property
    def batches(self) -> int:
        """How many batch entries each sequence stands for; there may be none."""
        return self.query.shape[0] if self.is_dense else 1

    @property
    def lengths(self) -> tuple[int, int]:
        """The longest query and the largest number of keys."""
        rows = self.rows
        if isinstance(rows, One):
            return rows.q_len, rows.kv_end - rows.kv_begin
        return longest(rows.q_len), longest(rows.kv_len)

    @property
    def end(self) -> int:
        """A bound of all positions."""
        rows = self.rows
        if isinstance(rows, One):
            return max(rows.kv_end, rows.q_start + rows.q_len)
        return max(longest(rows.kv_end), longest(rows.q_start + rows.q_len))

    @property
    def dtype(self) -> torch.dtype:
        """The working dtype."""
        return working_dtype(self.query.dtype)

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    def on(self, query: Tensor, key: Tensor, value: Tensor) -> Placed:
        """The same places in other tensors."""
        return self._replace(query=query, key=key, value=value)

    def each(self) -> Iterator[tuple[Placed, slice, slice]]:
        """Every sequence as dense memory of its own, with the slices of its query and key rows.

        Sequences without queries are left out. Keys and values must not be in pages.
        """
        rows = self.rows
        if isinstance(rows, One):
            yield self, slice(0, self.query.shape[2]), slice(0, self.key.shape[2])
            return
        assert self.page_table is None, "keys are in rows"
        query, key, value = self.operands
        columns = (column.tolist() for column in rows)
        for b, q_len, q_start, kv_begin, kv_end, q_row, kv_row in zip(*columns, strict=True):
            if q_len == 0:
                continue
            mine, keys = slice(q_row, q_row + q_len), slice(kv_row + kv_begin, kv_row + kv_end)
            alone = One(q_len, q_start, kv_begin, kv_end, b)
            yield (
                Placed(query[:, :, mine], key[:, :, keys], value[:, :, keys], alone),
                mine,
                keys,
            )


def longest(lengths: Numbers) -> int:
    """The largest of some lengths; 0 where there are none."""
    return int(lengths.max(initial=0))
