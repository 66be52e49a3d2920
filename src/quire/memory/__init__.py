"""Where keys and values live. A memory answers one question: where are the rows of sequence b?

A memory checks the tensors of a call (`check`), and says where their rows are, in the one form that
backends read (`place`, which gives a `Placed`). `place` does not need `check` for tensors that lie
as others did that were checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from quire import checks
from quire.errors import ArgumentError, ShapeError
from quire.memory.tables import (
    KNOWN,
    Numbers,
    PageTables,
    ReadTables,
    Sequences,
    Spans,
    checked_counts,
    content_of,
    first_positions,
    spans,
)
from quire.results import working_dtype

Integers: TypeAlias = Tensor | Sequence[int]


class Queries(NamedTuple):
    """Where queries are: their sequences, and the position of the first of each."""

    start: int | Integers | None = None
    offsets: Integers | None = None
    lengths: Integers | None = None


TOP_LEFT = Queries(start=0)
"""The first query and the first key are at the same position."""


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
        dtype = self.query.dtype
        return dtype if dtype == torch.float32 else working_dtype(dtype)

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
        begin = self.start
        if type(begin) is not int or begin < 0:
            begin = checks.check_position("Dense.start", begin)
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
        if type(start) is int and start >= 0:
            return start
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
        given = PageTables(self.page_table, self.lengths, self.first_page)
        sizes = len(self.key), self.key.shape[2]
        plain = query.dim() == 4 and queries == (None, None, None)
        content = content_of(given, (*sizes, *query.shape[::2])) if plain else None
        known = None if content is None else KNOWN.get(content)
        if known is None:
            known = self._read(given, query, queries)
            if content is not None and content == content_of(given, content[0]):
                KNOWN.keep(content, known)
            else:  # another thread has changed a table meanwhile, or its content is not known
                content = None
        return Placed(
            query=self.as_placed(query, query),
            key=self.key,
            value=self.value,
            rows=known.sequences,
            page_table=self.page_table if content is not None else known.numbers,
            key_scale=self.key_scale,
            value_scale=self.value_scale,
            content=content,
        )

    def _read(self, given: PageTables, query: Tensor, queries: Queries) -> ReadTables:
        """Check the tables, and read them."""
        table, begins, ends = given.checked(len(self.key), self.key.shape[2])
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
        return ReadTables(sequences, table)

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
        """Return results [1, Hq, B * L, ...] in the layout of the user's query."""
        if query.dim() == 3:
            return unpacked(rows)
        batch, _, q_len, _ = query.shape
        if q_len == 1:
            return rows.transpose(0, 2)
        rows = unpacked(rows)
        return rows.view(batch, q_len, *rows.shape[1:]).transpose(1, 2)

    def as_placed(self, query: Tensor, given: Tensor) -> Tensor:
        """The other way round."""
        if query.dim() == 3:
            return packed(given)
        if query.shape[2] == 1 and given.dim() > 2:
            return given.transpose(0, 2)
        return packed(given.transpose(1, 2).flatten(0, 1))

    def keys_as_given(self, keys: Tensor) -> Tensor:
        """What there is for each key: by page, or by position of each sequence."""
        return keys


Memory: TypeAlias = Dense | Ragged | Paged
"""What `attention` takes."""
