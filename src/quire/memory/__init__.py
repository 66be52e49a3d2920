"""Where keys and values are: `Dense`, `Ragged` or `Paged` memory.

A memory checks the tensors of a call (`check`), and returns where the rows of each sequence are, as
a `Placed`, which every backend reads (`place`). `place` does not need `check` if tensors of the
same layout have passed it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from quire import checks
from quire.errors import ArgumentError, ShapeError
from quire.memory.positions import TOP_LEFT, Integers, One, Queries
from quire.memory.tables import (
    KNOWN,
    Holes,
    Numbers,
    PageTables,
    ReadTables,
    Sequences,
    content_of,
    first_positions,
    packed,
    query_spans,
    spans,
    unpacked,
)
from quire.results import Result, working_dtype


class Placed(NamedTuple):
    """The operands of a call, and which of their rows belong to which sequence.

                 query               key and value          rows
        dense    [B, Hq, L, D]       [B or 1, Hkv, S, D]    One, for every batch entry
        ragged   [1, Hq, total, D]   [1, Hkv, total, D]     a table of sequences
        paged    [1, Hq, total, D]   [P, Hkv, page, D]      a table of sequences

    Position p of sequence b is row `p % page` of page `page_table[b, p // page]`. Pages of int8
    have scales [P, Hkv, page], and those of float8 may. `content` identifies the content of all
    tables: equal means equal tables. It is None if the tables cannot be compared. In pages,
    `positions` is the length of the longest sequence, with the holes after its last page.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    rows: One | Sequences
    page_table: Tensor | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    content: object = None
    holes: Holes | None = None
    positions: int = 0

    @property
    def is_dense(self) -> bool:
        """Return whether all batch entries have the same positions."""
        return isinstance(self.rows, One)

    @property
    def sequences(self) -> Sequences:
        """Return the table of sequences; for dense memory, it has one entry."""
        rows = self.rows
        return rows if isinstance(rows, Sequences) else Sequences.one(*rows[:5])

    @property
    def one(self) -> One:
        """Return the positions of dense memory."""
        assert isinstance(self.rows, One), "dense memory"
        return self.rows

    @property
    def batches(self) -> int:
        """Return how many batch entries each sequence of the table stands for; it may be 0."""
        return self.query.shape[0] if self.is_dense else 1

    @property
    def lengths(self) -> tuple[int, int]:
        """Return the most queries of a sequence, and how far keys reach from the `kv_origin`."""
        rows = self.rows
        if isinstance(rows, One):
            return rows.q_len, rows.kv_end - rows.kv_origin
        return longest(rows.q_len), longest(rows.kv_end)

    @property
    def end(self) -> int:
        """Return a number above all positions."""
        rows = self.rows
        if isinstance(rows, One):
            return max(rows.kv_end, rows.q_start + rows.q_len)
        return max(longest(rows.kv_end), longest(rows.q_start + rows.q_len))

    @property
    def dtype(self) -> torch.dtype:
        """Return the working dtype."""
        dtype = self.query.dtype
        return dtype if dtype == torch.float32 else working_dtype(dtype)

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value."""
        return self.query, self.key, self.value

    def on(self, query: Tensor, key: Tensor, value: Tensor) -> Placed:
        """Return the same rows of other tensors."""
        return self._replace(query=query, key=key, value=value)

    def with_all_positions(self, result: Result) -> Result:
        """Return results with the positions of holes after the last page of all sequences."""
        mass = result.key_mass
        if mass is None or mass.shape[2] >= self.positions:
            return result
        padded = mass.new_zeros((*mass.shape[:2], self.positions))
        padded[..., : mass.shape[2]] = mass
        return result._replace(key_mass=padded)

    def each(self) -> Iterator[tuple[Placed, slice, slice]]:
        """Yield each sequence as dense memory, with the slices of its query rows and key rows.

        Sequences without queries are skipped. Keys and values must not be in pages.
        """
        rows = self.rows
        if isinstance(rows, One):
            yield self, slice(0, self.query.shape[2]), slice(0, self.key.shape[2])
            return
        assert self.page_table is None, "keys must not be in pages"
        query, key, value = self.operands
        columns = (column.tolist() for column in rows)
        for b, q_len, q_start, kv_begin, kv_end, q_row, kv_row in zip(*columns, strict=True):
            if q_len == 0:
                continue
            queries, keys = slice(q_row, q_row + q_len), slice(kv_row + kv_begin, kv_row + kv_end)
            one = One(q_len, q_start, kv_begin, kv_end, b)
            dense = Placed(query[:, :, queries], key[:, :, keys], value[:, :, keys], one)
            yield dense, queries, keys


def output_layout(query: Tensor, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of the output [B, Hq, L, Dv] for a query [B, Hq, L, D].

    It is contiguous in memory, and its dimensions are in the order of the query's strides. As in
    PyTorch, the head dimension always has stride 1.
    """
    shape = (*query.shape[:-1], head_dim)
    inner_first = sorted(range(4), key=lambda dim: (query.stride(dim), -dim))
    strides = _dense_strides(shape, inner_first)
    if strides[-1] != 1:
        inner_first.remove(3)
        strides = _dense_strides(shape, [3, *inner_first])
    return shape, strides


def _dense_strides(shape: tuple[int, ...], inner_first: list[int]) -> tuple[int, ...]:
    strides, step = [0] * len(shape), 1
    for dim in inner_first:
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def longest(lengths: Numbers) -> int:
    """Return the largest of `lengths` [B], or 0 if B is 0."""
    return int(lengths.max(initial=0))


@dataclass(frozen=True, eq=False)
class Dense:
    """`key` [B, Hkv, S, D] and `value` [B, Hkv, S, Dv] with any strides. B may be 1.

    `Dense(key, value, start=4096)` is a shard: its first key has position 4096.
    """

    key: Tensor
    value: Tensor
    start: int = 0

    def check(self, query: Tensor, queries: Queries) -> None:
        """Check query [B, Hq, L, D], keys and values."""
        if queries.offsets is not None or queries.lengths is not None:
            raise ArgumentError(
                "q_offsets and q_lengths must be None for Dense memory, but one is given. Leave "
                "them out, or use Ragged(key, value, offsets) for sequences in one tensor."
            )
        checks.check_operands(query, self.key, self.value)

    def place(self, query: Tensor, queries: Queries) -> Placed:
        """Return where the rows of query [B, Hq, L, D], keys and values are."""
        begin = self.start
        if type(begin) is not int or not 0 <= begin < checks.POSITIONS:
            begin = checks.check_position("Dense.start", begin)
        q_len, end = query.size(2), begin + self.key.size(2)
        first = queries.start
        if type(first) is not int or not 0 <= first < checks.POSITIONS:
            first = self.first_position(query, first)
        rows = One(q_len, first, begin, end, kv_origin=begin)
        return Placed(query, self.key, self.value, rows)

    def first_position(self, query: Tensor, start: object) -> int:
        """Return the position of the first query: `start`, if it is given.

        Otherwise the last query of `query` [B, Hq, L, D] has the position of the last key.
        """
        if start is None:
            return max(0, self.start + self.key.size(2) - query.size(2))
        return checks.check_position("q_start", start)

    def as_given(self, query: Tensor, rows: Tensor) -> Tensor:
        """Return `rows` [B, Hq, L, ...] unchanged: `query` [B, Hq, L, D] has this layout."""
        return rows

    def as_placed(self, query: Tensor, given: Tensor) -> Tensor:
        """Return `given` [B, Hq, L, ...] unchanged: `query` [B, Hq, L, D] has this layout."""
        return given

    def keys_as_given(self, keys: Tensor) -> Tensor:
        """Return `keys` [B, H, S, ...] unchanged: the user's keys have this layout."""
        return keys


@dataclass(frozen=True, eq=False)
class Ragged:
    """`key` [total, Hkv, D] and `value` [total, Hkv, Dv] of sequences one after the other.

    offsets = [0, 5, 5, 12]     [B + 1], three sequences: rows 0 to 4, no rows, rows 5 to 11
    lengths = [3, 0, 7]         [B], the first sequence has rows 0 to 2; rows 3 and 4 are unused

    Tensors may have any strides. A query reads only keys of its own sequence.
    """

    key: Tensor
    value: Tensor
    offsets: Integers
    lengths: Integers | None = None

    def check(self, query: Tensor, queries: Queries) -> None:
        """Check query [total, Hq, D], keys and values."""
        checks.check_packed(query, self.key, self.value)

    def place(self, query: Tensor, queries: Queries) -> Placed:
        """Return where the rows of query [total, Hq, D], keys and values are.

        Without q_offsets, queries have the offsets of the keys.
        """
        keys = spans(("offsets", "lengths"), self.offsets, self.lengths, len(self.key))
        offsets, lengths = queries.offsets, queries.lengths
        if offsets is None:
            if len(query) != len(self.key):
                raise ShapeError(
                    f"query must have {len(self.key)} rows, as the keys whose offsets it shares, "
                    f"but has {len(query)}. Give q_offsets, the offsets of the queries."
                )
            offsets = self.offsets
        rows = keys
        if queries.offsets is not None or lengths is not None:
            rows = spans(("q_offsets", "q_lengths"), offsets, lengths, len(query))
        count = len(rows.first)
        if count != len(keys.first):
            raise ArgumentError(
                f"q_offsets and offsets must be for the same number of sequences, but are for "
                f"{count} and {len(keys.first)}. Both hold one number more than there are "
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
        """Return `rows` [1, Hq, total, ...] as [total, Hq, ...], like `query` [total, Hq, D]."""
        return unpacked(rows)

    def as_placed(self, query: Tensor, given: Tensor) -> Tensor:
        """Return `given` [total, Hq, ...], like `query` [total, Hq, D], as [1, Hq, total, ...]."""
        return packed(given)

    def keys_as_given(self, keys: Tensor) -> Tensor:
        """Return `keys` [1, H, total, ...] as [total, H, ...], like the user's keys."""
        return unpacked(keys)


@dataclass(frozen=True, eq=False)
class Paged:
    """`key` [P, Hkv, page, D] and `value` [P, Hkv, page, Dv] in pages, which sequences may share.

    page_table = [[7, 2, 4], [5, 2, -1]]    with pages of 16, position 20 of sequence 1 is row 4 of
                                            page 2
    lengths    = [40, 30]                   sequence 1 has 30 keys, with those of the new tokens
    first_page = [1, 0]                     page 7 was released: sequence 0 begins at position 16

    page_table [B, most], lengths and first_page [B]. Tensors may have any strides. Entries of the
    table after the last page of a sequence are ignored. An entry of -1 before it is a hole: there
    are no keys at these positions, and the other keys keep theirs. Pages of int8 have scales
    `key_scale` and `value_scale` [P, Hkv, page], and pages of float8 may: a row is its numbers
    times its scale.
    """

    key: Tensor
    value: Tensor
    page_table: Tensor
    lengths: Integers
    first_page: Integers | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    def check(self, query: Tensor, queries: Queries) -> None:
        """Check query [B, Hq, L, D] or [total, Hq, D], pages and scales."""
        checks.check_paged(query, self.key, self.value)
        checks.check_scales(self.key, self.key_scale, self.value, self.value_scale)
        if isinstance(self.page_table, Tensor):
            checks.check_unmapped("page_table", self.page_table)

    def place(self, query: Tensor, queries: Queries) -> Placed:
        """Return where the rows of query [B, Hq, L, D] or [total, Hq, D] and of keys are.

        Tables that were read before are not read again: all layers of a step share them.
        """
        given = PageTables(self.page_table, self.lengths, self.first_page)
        pages, _, page, _ = self.key.shape
        plain = query.dim() == 4 and queries == (None, None, None)
        content = content_of(given, (pages, page, *query.shape[::2])) if plain else None
        known = None if content is None else KNOWN.get(content)
        if known is None:
            known = self._read(given, query, queries)
            if content is not None and content == content_of(given, content[0]):
                KNOWN.keep(content, known)
            else:  # the tables cannot be compared, or another thread has changed one meanwhile
                content = None
        return Placed(
            query=self.as_placed(query, query),
            key=self.key,
            value=self.value,
            rows=known.sequences,
            page_table=known.numbers if content is None or known.holes else self.page_table,
            key_scale=self.key_scale,
            value_scale=self.value_scale,
            content=content,
            holes=known.holes,
            positions=known.length,
        )

    def _read(self, given: PageTables, query: Tensor, queries: Queries) -> ReadTables:
        """Check the tables and return their content."""
        filled, ends = given.checked(len(self.key), self.key.shape[2])
        rows = query_spans(query, queries.offsets, queries.lengths, len(ends))
        sequences = Sequences(
            b=np.arange(len(ends)),
            q_len=rows.lengths,
            q_start=first_positions(queries.start, rows.lengths, ends),
            kv_begin=filled.begins,
            kv_end=filled.ends,
            q_row=rows.first,
            kv_row=np.zeros_like(ends),
        )
        return ReadTables(sequences, filled.table, longest(ends), filled.holes)

    def as_given(self, query: Tensor, rows: Tensor) -> Tensor:
        """Return `rows` [1, Hq, total, ...] like `query` [B, Hq, L, D] or [total, Hq, D]."""
        if query.dim() == 3:
            return unpacked(rows)
        batch, _, q_len, _ = query.shape
        if q_len == 1:
            return rows.transpose(0, 2)
        rows = unpacked(rows)
        return rows.view(batch, q_len, *rows.shape[1:]).transpose(1, 2)

    def as_placed(self, query: Tensor, given: Tensor) -> Tensor:
        """Return `given` as [1, Hq, total, ...].

        It has the first dimensions of `query` [B, Hq, L, D] or [total, Hq, D].
        """
        if query.dim() == 3:
            return packed(given)
        if query.shape[2] == 1 and given.dim() > 2:
            return given.transpose(0, 2)
        return packed(given.transpose(1, 2).flatten(0, 1))

    def keys_as_given(self, keys: Tensor) -> Tensor:
        """Return `keys` [P, Hkv, page, ...] or [B, Hq, positions] unchanged."""
        return keys


Memory: TypeAlias = Dense | Ragged | Paged
"""The second argument of `attention`."""

__all__ = ["TOP_LEFT", "Dense", "Integers", "Memory", "One", "Paged", "Placed", "Queries"]
__all__ += ["Ragged", "longest"]
