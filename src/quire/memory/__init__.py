"""Where keys and values live. A memory answers one question: where are the rows of sequence b?

A memory checks the tensors of a call (`check`), and says where their rows are in the one form that
backends read (`place`, see `placed.py`). `place` may be called without `check` for tensors that lie
as others did that were checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from quire import checks
from quire.bounded import BoundedDict
from quire.errors import ArgumentError, ShapeError
from quire.memory.page_table import checked_page_table, first_keys
from quire.memory.placed import One, Placed
from quire.memory.sequences import Sequences, Spans, checked_counts, first_positions, spans

Integers: TypeAlias = Tensor | Sequence[int]


class Queries(NamedTuple):
    """Where queries are: their sequences, and the position of the first of each."""

    start: int | Integers | None = None
    offsets: Integers | None = None
    lengths: Integers | None = None


TOP_LEFT = Queries(start=0)
"""The first query and the first key are at the same position."""


@dataclass(frozen=True, eq=False)
class Dense:
    """Keys [B, Hkv, S, D] and values [B, Hkv, S, Dv] in any strides.

    `Dense(key, value, start=4096)` is a shard: its first key sits at position 4096.
    """

    key: Tensor
    value: Tensor
    start: int = 0

    def check(self, query: Tensor, queries: Queries) -> None:
        """query [B, Hq, L, D]."""
        if queries.offsets is not None or queries.lengths is not None:
            raise ArgumentError(
                "q_offsets and q_lengths say where sequences lie that are packed into one tensor, "
                "but memory is Dense. Leave them out, or use Ragged(key, value, offsets)."
            )
        checks.check_operands(query, self.key, self.value)

    def place(self, query: Tensor, queries: Queries) -> Placed:
        """All batch entries are alike."""
        begin = checks.check_position("Dense.start", self.start)
        rows = One(
            query.shape[2],
            self.first_position(query, queries.start),
            begin,
            begin + self.key.shape[2],
        )
        return Placed(query, self.key, self.value, rows)

    def first_position(self, query: Tensor, start: object) -> int:
        """Where the first query sits: where it is said to, or so that the last is at the end."""
        if start is None:
            return max(0, self.start + self.key.shape[2] - query.shape[2])
        return checks.check_position("q_start", start)

    def as_given(self, query: Tensor, rows: Tensor) -> Tensor:
        """What there is for each query, laid out as the user's query is."""
        return rows

    def as_placed(self, query: Tensor, given: Tensor) -> Tensor:
        """The other way round."""
        return given

    def keys_as_given(self, keys: Tensor) -> Tensor:
        """What there is for each key, laid out as the user's keys are."""
        return keys


@dataclass(frozen=True, eq=False)
class Ragged:
    """Keys [total, Hkv, D] and values [total, Hkv, Dv] of sequences that lie one after the other.

    offsets = [0, 5, 5, 12]     three sequences: rows 0 to 4, none, rows 5 to 11
    lengths = [3, 0, 7]         of which the first has only rows 0 to 2: nobody reads rows 3 and 4

    Any strides will do. A sequence reads its own keys alone.
    """

    key: Tensor
    value: Tensor
    offsets: Integers
    lengths: Integers | None = None

    def check(self, query: Tensor, queries: Queries) -> None:
        """query [total, Hq, D]."""
        checks.check_packed(query, self.key, self.value)

    def place(self, query: Tensor, queries: Queries) -> Placed:
        """Without offsets of their own, queries are in the sequences that the keys are in."""
        keys = spans(("offsets", "lengths"), self.offsets, self.lengths, len(self.key))
        offsets, lengths = queries.offsets, queries.lengths
        if offsets is None:
            if len(query) != len(self.key):
                raise ShapeError(
                    f"query must have the {len(self.key)} rows of the keys, whose offsets it "
                    f"shares, but has {len(query)}. Give q_offsets for sequences of its own."
                )
            offsets = self.offsets
        rows = keys
        if queries.offsets is not None or lengths is not None:
            rows = spans(("q_offsets", "q_lengths"), offsets, lengths, len(query))
        count = len(rows.first)
        if count != len(keys.first):
            raise ArgumentError(
                f"query and keys must be in as many sequences, but q_offsets are for {count} and "
                f"offsets for {len(keys.first)}. Both hold one number more than there are "
                f"sequences."
            )
        sequences = Sequences(
            b=np.arange(count),
            q_len=rows.lengths,
            q_start=first_positions(queries.start, rows.lengths, keys.lengths),
            kv_begin=np.zeros(count, np.int64),
            kv_end=keys.lengths,
            q_row=rows.first,
            kv_row=keys.first,
        )
        return Placed(packed(query), packed(self.key), packed(self.value), sequences)

    def as_given(self, query: Tensor, rows: Tensor) -> Tensor:
        """What there is for each query, laid out as the user's query is."""
        return unpacked(rows)

    def as_placed(self, query: Tensor, given: Tensor) -> Tensor:
        """The other way round."""
        return packed(given)

    def keys_as_given(self, keys: Tensor) -> Tensor:
        """What there is for each key, laid out as the user's keys are."""
        return unpacked(keys)


def packed(rows: Tensor) -> Tensor:
    """Rows [total, H, D] as one batch entry [1, H, total, D]; or numbers [total, H]."""
    return rows.transpose(0, 1).unsqueeze(0) if rows.dim() > 1 else rows


def unpacked(entry: Tensor) -> Tensor:
    """The other way round."""
    return entry[0].transpose(0, 1)


@dataclass(frozen=True, eq=False)
class Paged:
    """Keys [P, Hkv, page, D] and values [P, Hkv, page, Dv] in pages that sequences own or share.

    page_table = [[7, 2, 4], [5, 2, -1]]    with pages of 16: position 20 of sequence 1 is row 4 of
    lengths    = [40, 30]                   page 2; it has 30 keys, the newest ones among them
    first_page = [1, 0]                     page 7 was released: sequence 0 begins at position 16

    Any strides will do. Entries for pages that a sequence does not have are not looked at. Pages of
    int8 have factors `key_scale` and `value_scale` [P, Hkv, page]: a row is its numbers times that.
    """

    key: Tensor
    value: Tensor
    page_table: Tensor
    lengths: Integers
    first_page: Integers | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    def check(self, query: Tensor, queries: Queries) -> None:
        """query [B, Hq, L, D]; or [total, Hq, D], where `q_offsets` say which rows are whose."""
        checks.check_paged(query, self.key, self.value)
        checks.check_scales(self.key, self.key_scale, self.value, self.value_scale)

    def place(self, query: Tensor, queries: Queries) -> Placed:
        """Tables that were met lately are not checked again: all layers of a step share them."""
        content = self._content(query) if queries == Queries() else None
        known = None if content is None else _known_tables.get(content)
        if known is None:
            known = self._tables(query, queries)
            if content is not None:
                unchanged = self._content(query) == content  # by another thread meanwhile
                content = content if unchanged else None
            if content is not None:
                _known_tables.keep(content, known._replace(numbers=None))
        numbers = self.page_table if known.numbers is None else known.numbers
        return Placed(
            query=self.as_placed(query, query),
            key=self.key,
            value=self.value,
            rows=known.sequences,
            page_table=numbers,
            key_scale=self.key_scale,
            value_scale=self.value_scale,
            content=content,
        )

    def _tables(self, query: Tensor, queries: Queries) -> _Tables:
        """Check the tables, and read them."""
        page = self.key.shape[2]
        table, ends = checked_page_table(self.page_table, self.lengths, len(self.key), page)
        begins = first_keys(self.first_page, ends, page)
        table.check_used(begins // page, -(-ends // page))
        rows = self._query_rows(query, queries, len(ends))
        sequences = Sequences(
            b=np.arange(len(ends)),
            q_len=rows.lengths,
            q_start=first_positions(queries.start, rows.lengths, ends),
            kv_begin=begins,
            kv_end=ends,
            q_row=rows.first,
            kv_row=np.zeros_like(ends),
        )
        return _Tables(sequences, table.numbers)

    def _content(self, query: Tensor) -> object:
        """All that `place` depends on; None where it cannot be told, or is large."""
        table = self.page_table
        if query.dim() != 4 or not checks.is_ordinary(table) or not _is_plain_table(table):
            return None
        batch, _, q_len, _ = query.shape
        content: list[object] = [batch, q_len, len(self.key), self.key.shape[2]]
        for numbers in (table, self.lengths, self.first_page):
            if numbers is None:
                content.append(None)
            elif checks.is_ordinary(numbers) and numbers.nbytes <= MOST_BYTES:
                content += (numbers.shape, numbers.dtype, numbers.numpy().tobytes())
            else:
                return None
        return tuple(content)

    def _query_rows(self, query: Tensor, queries: Queries, count: int) -> Spans:
        offsets, lengths = queries.offsets, queries.lengths
        if query.dim() == 3:
            if offsets is None:
                raise ArgumentError(
                    f"query [total, Hq, D] must come with q_offsets, the first row of each of "
                    f"{count} sequences and the end of the last. For as many queries in each, give "
                    f"query [B, Hq, L, D]."
                )
            rows = spans(("q_offsets", "q_lengths"), offsets, lengths, len(query))
        elif offsets is not None:
            raise ArgumentError(
                "q_offsets say where sequences lie in query [total, Hq, D], but it has 4 "
                "dimensions. Leave them out, or pack the rows of all sequences."
            )
        else:
            batch, _, q_len, _ = query.shape
            first = np.arange(batch) * q_len
            room = np.full(batch, q_len)
            if lengths is not None:
                room = checked_counts("q_lengths", lengths, room)
            rows = Spans(first, room)
        if len(rows.first) != count:
            raise ArgumentError(
                f"query must be for the {count} sequences of the page table, but is for "
                f"{len(rows.first)}. Give each a row of the table, also where it has no query."
            )
        return rows

    def as_given(self, query: Tensor, rows: Tensor) -> Tensor:
        """What there is for each query, laid out as the user's query is."""
        rows = unpacked(rows)
        if query.dim() == 3:
            return rows
        batch, _, q_len, _ = query.shape
        return rows.view(batch, q_len, *rows.shape[1:]).transpose(1, 2)

    def as_placed(self, query: Tensor, given: Tensor) -> Tensor:
        """The other way round."""
        return packed(given if query.dim() == 3 else given.transpose(1, 2).flatten(0, 1))

    def keys_as_given(self, keys: Tensor) -> Tensor:
        """What there is for each key: by page, or by position of each sequence."""
        return keys


class _Tables(NamedTuple):
    """Tables that were checked. Where they are known by content, the page table is the user's."""

    sequences: Sequences
    numbers: Tensor | None


MOST_BYTES = 2**16
"""The size of a table up to which it is known by its content."""

_known_tables: BoundedDict[object, _Tables] = BoundedDict(16)


def _is_plain_table(table: Tensor) -> bool:
    """Whether a page table is read as it is."""
    return table.dtype == torch.int32 and table.dim() == 2 and table.is_contiguous()


Memory: TypeAlias = Dense | Ragged | Paged
"""What `attention` takes."""
