"""Where keys and values live. A memory answers one question: where are the rows of sequence b?

A memory checks the operands of a call and puts them into the one form that backends read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from torch import Tensor

from quire import checks
from quire.errors import ArgumentError, ShapeError
from quire.sequences import Sequences, first_positions, spans

Integers: TypeAlias = Tensor | Sequence[int]


class Queries(NamedTuple):
    """Where queries are: their sequences, and the position of the first of each."""

    start: int | Integers | None = None
    offsets: Integers | None = None
    lengths: Integers | None = None


TOP_LEFT = Queries(start=0)
"""The first query and the first key are at the same position."""


class Placed(NamedTuple):
    """The operands of a call, each [B, heads, rows, dim].

    Positions begin at `q_start` and `kv_start`; or there is one batch, of which `sequences` says
    whose rows are whose.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    q_start: int = 0
    kv_start: int = 0
    sequences: Sequences | None = None


@dataclass(frozen=True, eq=False)
class Dense:
    """Keys [B, Hkv, S, D] and values [B, Hkv, S, Dv] in any strides.

    `Dense(key, value, start=4096)` is a shard: its first key sits at position 4096.
    """

    key: Tensor
    value: Tensor
    start: int = 0

    def place(self, query: Tensor, queries: Queries) -> Placed:
        """query [B, Hq, L, D]."""
        if queries.offsets is not None or queries.lengths is not None:
            raise ArgumentError(
                "q_offsets and q_lengths say where sequences lie that are packed into one tensor, "
                "but memory is Dense. Leave them out, or use Ragged(key, value, offsets)."
            )
        checks.check_operands(query, self.key, self.value)
        kv_start = checks.check_position("Dense.start", self.start)
        q_start = self.first_position(query, queries.start)
        return Placed(query, self.key, self.value, q_start, kv_start)

    def first_position(self, query: Tensor, start: object) -> int:
        """Where the first query sits: where it is said to, or so that the last is at the end."""
        if start is None:
            return max(0, self.start + self.key.shape[2] - query.shape[2])
        return checks.check_position("q_start", start)

    def as_given(self, result: Tensor) -> Tensor:
        """A result for each query, laid out as the user's query is."""
        return result

    def as_placed(self, given: Tensor) -> Tensor:
        """The other way round."""
        return given


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

    def place(self, query: Tensor, queries: Queries) -> Placed:
        """query [total, Hq, D]; where nothing else is said, in the sequences that the keys are."""
        checks.check_packed(query, self.key, self.value)
        keys = spans(("offsets", "lengths"), self.offsets, self.lengths, len(self.key))
        offsets, lengths = queries.offsets, queries.lengths
        if offsets is None:
            if len(query) != len(self.key):
                raise ShapeError(
                    f"query must have the {len(self.key)} rows of the keys, whose offsets it "
                    f"shares, but has {len(query)}. Give q_offsets for sequences of its own."
                )
            offsets, lengths = self.offsets, self.lengths if lengths is None else lengths
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
        return Placed(packed(query), packed(self.key), packed(self.value), sequences=sequences)

    def as_given(self, result: Tensor) -> Tensor:
        """A result for each query, laid out as the user's query is."""
        return result[0].transpose(0, 1) if result.dim() > 2 else result

    def as_placed(self, given: Tensor) -> Tensor:
        """The other way round."""
        return packed(given) if given.dim() > 1 else given


def packed(rows: Tensor) -> Tensor:
    """Rows [total, H, D] as one batch entry [1, H, total, D]."""
    return rows.transpose(0, 1).unsqueeze(0)


@dataclass(frozen=True, eq=False)
class Paged:
    """Keys [P, Hkv, page, D] and values [P, Hkv, page, Dv] in pages that sequences own.

    Row t of sequence b is row t % page of page page_table[b, t // page]; it has lengths[b] rows.
    """

    key: Tensor
    value: Tensor
    page_table: Tensor
    lengths: Tensor


Memory: TypeAlias = Dense | Ragged
"""What `attention` takes."""
