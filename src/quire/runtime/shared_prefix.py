"""Finds sequences that begin with the same pages, so that their keys are loaded once for all.

Only whole pieces of keys are shared, so that results do not depend on the other sequences.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from quire.codegen.convention import KEYS_OF_PIECE
from quire.memory.tables import Numbers, Sequences

MOST_MEMBERS = 16
"""The most sequences of a group: their rows must fit the cache of a core."""


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
    groups: dict[tuple[int, bytes], list[int]] = {}
    alone: list[int] = []
    for index in order.tolist():
        if whole[index]:
            row = table[sequences.b[index]]
            key = int(sequences.q_len[index]), row[:pages].tobytes()
            groups.setdefault(key, []).append(index)
        else:
            alone.append(index)
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


def _num_shared(rows: Numbers, most: int, page: int) -> int:
    """Return how many pieces, at most `most`, are the same in all rows of a page table."""
    used = rows[:, : -(-most * KEYS_OF_PIECE // page)]
    differ = np.flatnonzero((used != used[0]).any(axis=0))
    same = int(differ[0]) if len(differ) else used.shape[1]
    return min(most, same * page // KEYS_OF_PIECE)
