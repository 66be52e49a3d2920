"""Ways to divide the blocks of a sequence among ranks: layouts.

    contiguous    rank 0 has the first blocks, rank 1 the next ones
    zigzag        2R equal pieces; rank r has piece r from the start and piece r from the end
    documents     each rank has a part of a document with much work, and light ones
    paired        each rank has heavy neighbours, as at the end of a long document, and light ones
    greedy        rank after rank takes the blocks that need the fewest new keys, heavy and light

Every rank gets as many blocks as every other, give or take one; the greedy layout counts units of a
few blocks. Memory and all other layers of a model depend on that. A layout decides which blocks,
and so the work of each rank and the keys it must receive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from quire.distributed.reads import Flags, Numbers, Reads, union

LayoutName: TypeAlias = Literal["contiguous", "zigzag", "documents", "paired", "greedy"]
LAYOUTS: tuple[LayoutName, ...] = get_args(LayoutName)


class Division(NamedTuple):
    """The blocks of a sequence among ranks, and what each rank computes and receives."""

    layout: str
    owner: Numbers  # the rank of each block
    work: Numbers  # of each rank, in pairs of blocks
    needs: Flags  # [ranks, entries, blocks]: the blocks of keys that its queries read

    @staticmethod
    def of(layout: LayoutName, reads: Reads, num_ranks: int, width: int = 1) -> Division:
        """Return the blocks of each rank by a layout, which gives `width` blocks away together."""
        work, unit = reads.work(), np.arange(reads.num_blocks) // width
        owners = _LAYOUTS[layout](
            reads.in_units(width), np.bincount(unit, work).astype(np.int64), num_ranks
        )
        owner = owners[unit]
        load = np.bincount(owner, work, num_ranks).astype(np.int64)
        return Division(layout, owner, load, reads.of_ranks(owner, num_ranks))

    @property
    def balance(self) -> float:
        """Return the largest work of a rank over the mean."""
        return float(self.work.max() / self.work.mean()) if self.work.any() else 1.0

    @property
    def arrives(self) -> Flags:
        """Return the blocks that each rank receives: [ranks, entries, blocks]."""
        return arrivals(self.owner, self.needs)

    @property
    def received(self) -> Numbers:
        """Return how many blocks each rank receives, for one batch entry on average."""
        counts: Numbers = -(-self.arrives.sum((1, 2)) // self.needs.shape[1])
        return counts


def arrivals(owner: Numbers, needs: Flags) -> Flags:
    """Return which of the blocks that each rank needs another one has: [ranks, entries, blocks]."""
    foreign = owner != np.arange(len(needs))[:, None]
    arrives: Flags = needs & foreign[:, None]
    return arrives


ALIKE = 1.02
"""Balances that differ by less are alike: the keys that travel decide."""

MOST_UNITS = 1024  # that the greedy layout gives away
MOST_TESTS = 2**24  # cells that it looks at
UNITS_OF_RANK = 8  # it is left out if a rank would get fewer units of several blocks


def compared(reads: Reads, num_ranks: int, width: int = 1) -> list[Division]:
    """Return the division by every layout, the best first.

    Of the layouts that are about as balanced as the best, the best lets its ranks receive least.
    """
    names, units = list(LAYOUTS), -(-reads.num_blocks // width)
    several = unit_width(units, num_ranks)
    if several > 1 and units < UNITS_OF_RANK * num_ranks * several:
        names.remove("greedy")
    found = [Division.of(name, reads, num_ranks, width) for name in names]
    limit = ALIKE * min(each.balance for each in found)

    def cost(each: Division) -> tuple[float, int, int]:
        return max(limit, each.balance), int(each.received.max()), int(each.received.sum())

    return sorted(found, key=cost)


def share_sizes(num_blocks: int, num_shares: int) -> Numbers:
    """Return the sizes of shares of `num_blocks`, which differ by at most one."""
    sizes = np.full(num_shares, num_blocks // num_shares)
    sizes[: num_blocks % num_shares] += 1
    return sizes


def _contiguous(reads: Reads, work: Numbers, num_ranks: int) -> Numbers:
    return np.repeat(np.arange(num_ranks), share_sizes(reads.num_blocks, num_ranks))


def _zigzag(reads: Reads, work: Numbers, num_ranks: int) -> Numbers:
    there = np.arange(num_ranks)
    ranks = np.concatenate([there, there[::-1]])
    sizes = share_sizes(reads.num_blocks, num_ranks)
    halves = np.concatenate([-(-sizes // 2), (sizes // 2)[::-1]])
    return np.repeat(ranks, halves)


def _documents(reads: Reads, work: Numbers, num_ranks: int) -> Numbers:
    """Sort documents by their density, and let each rank take blocks from both ends.

    The density of a document is its mean work per block. The end of a document comes first, since
    there a causal mask reads most. So a rank gets a part of a dense document and light ones whole.
    """
    document = reads.documents()
    density = np.bincount(document, work) / np.bincount(document)
    order = np.lexsort((-np.arange(len(work)), document, -density[document]))
    sums = np.concatenate([[0], np.cumsum(work[order])])
    owner, front, back = np.empty_like(order), 0, len(order)
    for rank, size in enumerate(share_sizes(len(order), num_ranks)):
        taken = np.arange(size + 1)  # from the front
        reached = sums[front + taken] - sums[front] + sums[back] - sums[back - size + taken]
        mean = (sums[back] - sums[front]) / (num_ranks - rank)
        best = int(np.abs(reached - mean).argmin())
        owner[order[front : front + best]] = owner[order[back - size + best : back]] = rank
        front, back = front + best, back - size + best
    return owner


def _paired(reads: Reads, work: Numbers, num_ranks: int) -> Numbers:
    """Let each rank take the next heavy blocks and the next light ones, to the mean work.

    Heavy blocks have more work than the mean of all blocks, light ones at most that. So some number
    of heavy blocks, with light ones for the rest, is the mean work of a rank, to half a block.
    Light blocks are taken from the first on or from the last on, whichever lets ranks receive less.
    """
    is_heavy = work > work.mean()
    heavy, light = is_heavy.nonzero()[0], (~is_heavy).nonzero()[0]
    found = [_in_pairs(heavy, each, work, num_ranks) for each in (light, light[::-1])]

    def received(owner: Numbers) -> int:
        needs = reads.of_ranks(owner, num_ranks)
        return int(arrivals(owner, needs).sum((1, 2)).max())

    return min(found, key=received)


def _in_pairs(heavy: Numbers, light: Numbers, work: Numbers, num_ranks: int) -> Numbers:
    """Return the rank of each block if ranks take the next of both lists, to the mean work."""
    sums = [np.concatenate([[0], np.cumsum(work[blocks])]) for blocks in (heavy, light)]
    owner, at, to = np.empty_like(work), 0, 0
    for rank, size in enumerate(share_sizes(len(work), num_ranks)):
        left = sums[0][-1] - sums[0][at] + sums[1][-1] - sums[1][to]
        first = max(0, size - (len(light) - to))
        taken = np.arange(first, min(size, len(heavy) - at) + 1)
        reached = sums[0][at + taken] - sums[0][at] + sums[1][to + size - taken] - sums[1][to]
        best = int(taken[np.abs(reached - left / (num_ranks - rank)).argmin()])
        owner[heavy[at : at + best]] = owner[light[to : to + size - best]] = rank
        at, to = at + best, to + size - best
    return owner


def unit_width(num_blocks: int, num_ranks: int) -> int:
    """Return how many neighbouring blocks the greedy layout gives away together."""
    return -(-num_blocks // max(1, min(MOST_UNITS, int((MOST_TESTS / num_ranks) ** 0.5))))


def _greedy(reads: Reads, work: Numbers, num_ranks: int) -> Numbers:
    """Fill rank after rank, unit by unit: always that which needs the fewest new keys.

    A unit is a few neighbouring blocks. While a rank has less work per block than the mean, it
    takes a unit that has more, and otherwise one that has less, if there is any.
    """
    count, mean = reads.num_blocks, work.mean()
    width = unit_width(count, num_ranks)
    unit = np.arange(count) // width
    units = int(unit[-1]) + 1
    needs = union(unit[reads.rows()], reads.runs, (units, units), width)
    weight, size = np.bincount(unit, work), np.bincount(unit)
    is_heavy, total = weight > mean * size, needs.sum(1)
    owner = np.full(units, -1)
    ends = np.cumsum(share_sizes(units, num_ranks))
    for rank, end in enumerate(ends):
        new, held, excess = total.copy(), np.zeros(units, np.bool_), 0.0
        for _ in range(end - (ends[rank - 1] if rank else 0)):
            free = owner < 0
            fitting = free & (is_heavy == (excess <= 0))
            best = int(np.where(fitting if fitting.any() else free, new, units + 1).argmin())
            owner[best] = rank
            arrives = needs[best] & ~held
            arrives[best] |= not held[best]
            new = new - needs[:, arrives].sum(1)
            held |= arrives
            excess += weight[best] - mean * size[best]
    owners: Numbers = owner[unit]
    return owners


_LAYOUTS: dict[LayoutName, Callable[[Reads, Numbers, int], Numbers]] = {
    "contiguous": _contiguous,
    "zigzag": _zigzag,
    "documents": _documents,
    "paired": _paired,
    "greedy": _greedy,
}
