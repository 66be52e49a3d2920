"""Statistics of a cache, a map of who holds which page, and a check that all counts are right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quire.errors import PageError
from quire.kv.groups import LayerGroup
from quire.kv.handles import Roster
from quire.kv.page_map import FREE, KEPT, OWNED, SHARED, PageMap
from quire.kv.prefix import PrefixCache
from quire.kv.table import PageTable, spread
from quire.memory.tables import Numbers


class Statistics(NamedTuple):
    """What a cache holds. A waste of 0.04 means that 4 % of the rows of held pages are empty."""

    sequences: int
    tokens: int  # of all sequences
    pages: int  # in all groups, like the three numbers below
    free: int
    shared: int  # held more than once
    kept: int  # held for later prompts, by `keep`
    waste: float
    num_bytes: int  # the memory of all pages


def statistics(
    groups: Sequence[LayerGroup], roster: Roster, prefix: PrefixCache | None
) -> Statistics:
    """Return what a cache holds now."""
    pools = [group.pool for group in groups]
    filled = np.concatenate([_filled(group.table, roster, prefix) for group in groups])
    return Statistics(
        sequences=len(roster.living),
        tokens=int(roster.lengths.sum()),
        pages=sum(pool.num_pages for pool in pools),
        free=sum(pool.num_free for pool in pools),
        shared=sum(pool.num_shared for pool in pools),
        kept=0 if prefix is None else len(prefix),
        waste=1 - float(filled.mean()) / groups[0].table.page_size if len(filled) else 0.0,
        num_bytes=sum(group.num_bytes for group in groups),
    )


def _filled(table: PageTable, roster: Roster, prefix: PrefixCache | None) -> Numbers:
    """Return the number of rows that hold a token, for each held page."""
    rows, size = np.arange(len(roster)), table.page_size
    first, end = table.first[rows], table.end[rows]
    which, columns = spread(rows, first, end - first)
    filled = np.zeros(table.pool.num_pages, np.int64)
    in_page = np.minimum(size, roster.lengths[which] - columns * size)
    np.maximum.at(filled, table.pages[which, columns], in_page)
    if prefix is not None:
        filled[prefix.pages] = size
    return filled[filled > 0]


def page_map(table: PageTable, roster: Roster, prefix: PrefixCache | None) -> PageMap:
    """Return who holds which page of a group now."""
    owners = np.full(table.pool.num_pages, FREE, np.int64)
    if prefix is not None:
        owners[prefix.pages] = KEPT
    held = {sequence.serial: table.held(sequence.row).copy() for sequence in roster.living}
    for serial, pages in held.items():
        owners[pages] = OWNED + serial
    everything = np.arange(table.pool.num_pages, dtype=np.int32)
    owners[table.pool.references(everything) > 1] = SHARED
    return PageMap(owners, table.page_size, held)


def check_integrity(
    groups: Sequence[LayerGroup], roster: Roster, prefix: PrefixCache | None
) -> None:
    """Raise PageError unless each page is free, or is held as often as its count says."""
    rows = [handle.row for handle in roster.living]
    for group in groups:
        held = [group.table.held(row) for row in rows]
        if prefix is not None:
            held.append(prefix.pages)
        group.pool.check_integrity(np.concatenate([np.zeros(0, np.int32), *held]))
        needed = -(-roster.lengths[rows] // group.table.page_size)
        if not np.array_equal(group.table.end[rows], needed):
            raise PageError(
                "a sequence must have the pages that its tokens need, but one has others. Report "
                "this bug."
            )
    if prefix is not None:
        prefix.check_integrity()
