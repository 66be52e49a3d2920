"""Which sequences begin with the same pages, so that their keys are loaded once for all of them.

Whole pieces of keys are shared, or none: what a row computes does not depend on its neighbours.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from quire.codegen.convention import KEYS_OF_PIECE
from quire.memory.tables import Numbers, Sequences

MOST_MEMBERS = 16
"""Sequences whose rows are in the cache of a core at once."""


def shared_pieces(
    sequences: Sequences, page_table: Tensor, page: int, order: Numbers
) -> tuple[Numbers, Numbers | None, Numbers | None]:
    """The sequences in an order in which groups are neighbours, and what each has in common.

    `shared` are pieces that all of a group begin with; `members` is how many these are for the
    first of a group, 0 for the others and 1 for who is alone.
    """
    whole = np.where(sequences.kv_begin == 0, sequences.kv_end // KEYS_OF_PIECE, 0)
    if np.count_nonzero(whole) < 2 or (KEYS_OF_PIECE % page and page % KEYS_OF_PIECE):
        return order, None, None
    table = page_table.numpy()
    pages = max(1, KEYS_OF_PIECE // page)  # of one piece
    groups: dict[tuple[int, bytes], list[int]] = {}
    alone: list[int] = []
    for place in order.tolist():
        if whole[place]:
            row = table[sequences.b[place]]
            key = int(sequences.q_len[place]), row[:pages].tobytes()
            groups.setdefault(key, []).append(place)
        else:
            alone.append(place)
    new_order: list[int] = []
    shared: list[int] = []
    members: list[int] = []
    for group in groups.values():
        for first in range(0, len(group), MOST_MEMBERS):
            part = group[first : first + MOST_MEMBERS]
            if len(part) == 1:
                alone.append(part[0])
                continue
            count = _shared(table[sequences.b[part]], int(whole[part].min()), page)
            new_order += part
            shared += [count] * len(part)
            members += [len(part), *[0] * (len(part) - 1)]
    if not members:
        return order, None, None
    new_order += alone
    shared += [0] * len(alone)
    members += [1] * len(alone)
    return np.array(new_order), np.array(shared), np.array(members)


def _shared(rows: Numbers, most: int, page: int) -> int:
    """How many pieces all rows of a page table begin with."""
    used = rows[:, : -(-most * KEYS_OF_PIECE // page)]
    differ = np.flatnonzero((used != used[0]).any(axis=0))
    same = int(differ[0]) if len(differ) else used.shape[1]
    return min(most, same * page // KEYS_OF_PIECE)
