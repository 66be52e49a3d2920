"""Finds sequences that begin with the same pages, so that their keys are loaded once for all.

Only whole pieces of keys are shared, so that results do not depend on the other sequences.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.codegen.convention import KEYS_OF_PIECE
from quire.memory.tables import Numbers, Sequences

MOST_MEMBERS = 16
"""The most sequences of a group: their rows must fit the cache of a core."""

ODD = 0x9E3779B97F4A7C15
"""A number whose multiples look random in 64 bits."""


def shared_pieces(
    sequences: Sequences, page_table: Tensor, page: int, order: Numbers
) -> tuple[Numbers, Numbers | None, Numbers | None]:
    """Return the order of sequences, group after group, and their columns `shared` and `members`.

    `shared` is the number of pieces that the sequences of a group have in common. `members` is the
    size of the group for its first sequence, 0 for the others, and 1 for a sequence without group.
    Both are None if there is no group.
    """
    whole = np.where(sequences.kv_begin == 0, sequences.kv_end // KEYS_OF_PIECE, 0)
    if np.count_nonzero(whole) < 2 or (KEYS_OF_PIECE % page and page % KEYS_OF_PIECE):
        return order, None, None
    table = page_table.numpy()
    pages = max(1, KEYS_OF_PIECE // page)  # of one piece
    may_share = _have_equals(table[sequences.b, :pages]) & (whole > 0)
    if not may_share.any():
        return order, None, None
    groups: dict[tuple[int, bytes], list[int]] = {}
    alone = [*order[whole[order] == 0].tolist(), *order[(whole > 0)[order] & ~may_share[order]]]
    for index in order[may_share[order]].tolist():
        row = table[sequences.b[index]]
        key = int(sequences.q_len[index]), row[:pages].tobytes()
        groups.setdefault(key, []).append(index)
    new_order: list[int] = []
    shared: list[int] = []
    members: list[int] = []
    for group in groups.values():
        for first in range(0, len(group), MOST_MEMBERS):
            part = group[first : first + MOST_MEMBERS]
            if len(part) == 1:
                alone.append(part[0])
                continue
            count = _num_shared(table[sequences.b[part]], int(whole[part].min()), page)
            new_order += part
            shared += [count] * len(part)
            members += [len(part), *[0] * (len(part) - 1)]
    if not members:
        return order, None, None
    new_order += alone
    shared += [0] * len(alone)
    members += [1] * len(alone)
    return np.array(new_order), np.array(shared), np.array(members)


def _have_equals(rows: Numbers) -> NDArray[np.bool_]:
    """Return which rows seem to be there twice: quickly, by a sum that few other rows have."""
    factors = np.arange(1, 2 * rows.shape[1], 2).astype(np.uint64) * np.uint64(ODD)
    sums = (rows.astype(np.uint64) * factors).sum(1)
    _, place, counts = np.unique(sums, return_inverse=True, return_counts=True)
    several: NDArray[np.bool_] = counts[place] > 1
    return several


def _num_shared(rows: Numbers, most: int, page: int) -> int:
    """Return how many pieces, at most `most`, are the same in all rows of a page table."""
    used = rows[:, : -(-most * KEYS_OF_PIECE // page)]
    differ = np.flatnonzero((used != used[0]).any(axis=0))
    same = int(differ[0]) if len(differ) else used.shape[1]
    return min(most, same * page // KEYS_OF_PIECE)
