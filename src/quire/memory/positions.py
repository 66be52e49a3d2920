"""The positions of queries, as a user gives them, and those of a dense call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor

Integers: TypeAlias = Tensor | Sequence[int]


class Queries(NamedTuple):
    """Which rows of the query belong to each sequence, and the position of its first query.

    The arguments q_start, q_offsets [B + 1] and q_lengths [B] of `attention`.
    """

    start: int | Integers | None = None
    offsets: Integers | None = None
    lengths: Integers | None = None


TOP_LEFT = Queries(start=0)
"""The first query and the first key have the same position."""


class One(NamedTuple):
    """The positions of a dense call, the same in every batch entry.

    Queries have the positions q_start, q_start + 1, ... and keys [kv_begin, kv_end). Mods get the
    batch indices b, b + 1, ... A block mask counts keys from `kv_origin`: from the first one, or
    from position 0 if these are the positions of one sequence of a table.
    """

    q_len: int
    q_start: int
    kv_begin: int
    kv_end: int
    b: int = 0
    kv_origin: int = 0
