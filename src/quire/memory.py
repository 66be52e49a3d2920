"""Where keys and values live. A memory answers one question: where are the rows of sequence b?"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Dense:
    """Keys [B, Hkv, S, D] and values [B, Hkv, S, Dv] in any strides.

    `Dense(key, value, start=4096)` is a shard: its first key sits at position 4096.
    """

    key: Tensor
    value: Tensor
    start: int = 0


@dataclass(frozen=True, eq=False)
class Ragged:
    """Keys [total, Hkv, D] and values [total, Hkv, Dv] of sequences that lie one after the other.

    offsets = [0, 5, 5, 12]     three sequences: rows 0 to 4, none, rows 5 to 11
    """

    key: Tensor
    value: Tensor
    offsets: Tensor


@dataclass(frozen=True, eq=False)
class Paged:
    """Keys [P, Hkv, page, D] and values [P, Hkv, page, Dv] in pages that sequences own.

    Row t of sequence b is row t % page of page page_table[b, t // page]; it has lengths[b] rows.
    """

    key: Tensor
    value: Tensor
    page_table: Tensor
    lengths: Tensor
