"""The order in which a row adds: the same in both kernels, for every width of vectors.

What a query computes follows from its own numbers, its position and the keys that it reads. It does
not matter which kernel computes it, how many queries come with it, or how its keys are stored:

    score      one chain of multiply-adds over the head dim in ascending order, from 0; then times
               the scale of the key, if keys have 8 bits
    maximum    is updated once for each block of 128 keys; sums and out so far then shrink by alpha
    sum        of the weights of a block: 16 chains, from 0, to which keys belong in turn by their
               position; then chains i and i + 8, i and i + 4, i and i + 2, and the last two. The
               sum so far, times alpha, is added to that
    out        one chain of multiply-adds over the keys of a block in ascending order, from 0. What
               there is so far, times alpha, is added to that
    piece      every 1,024 keys all of this starts anew. Pieces are merged in ascending order

Blocks and pieces begin at multiples of their size, counted from position 0. A key that is not
read has the weight 0 and adds nothing, so it does not matter either which keys are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.codegen.llvm import vecmath
from quire.codegen.llvm.builder import Function, Operand, Value

if TYPE_CHECKING:
    from quire.codegen.phases.tiles import TileShape

CHAINS = 16  # as many as the widest vector has lanes


def over_chains(
    f: Function,
    tile: TileShape,
    chains: Value,
    *,
    count: Value,
    lead: Value,
    terms: Callable[[list[Value]], list[Value]],
) -> Value:
    """The sum of a block's keys where lanes run over queries.

    `terms` gives what some keys add. The first of `count` keys belongs to the chain `lead`. The
    chains are kept in memory, at `chains`: they would take too many registers.
    """
    nothing = f.value(0.0, tile.vector)
    for chain in range(CHAINS):
        tile.store(f, nothing, chains, chain * tile.lanes)

    def add(keys: list[Value]) -> None:
        found = terms(keys)
        at = ((lead + keys[0]) & (CHAINS - 1)) * tile.lanes
        total = tile.load(f, chains, at)
        for term in found:
            total = total + term
        tile.store(f, total, chains, at)

    pairs = count & -(2 * CHAINS)  # keys of one chain that follow each other
    with f.range(0, pairs, 2 * CHAINS) as first, f.range(first, first + CHAINS) as j:
        add([j, j + CHAINS])
    with f.range(pairs, count) as j:
        add([j])
    return _folded([tile.load(f, chains, chain * tile.lanes) for chain in range(CHAINS)])


def sum_of_block(
    f: Function, tile: TileShape, terms: Callable[[Value], Value], end: Operand = 0
) -> Value:
    """The same sum where lanes run over keys, in all lanes; `terms(j)`: of the keys from j on.

    The block has keys before `end`, a multiple of CHAINS, or as many as a block has.
    """
    return sums_of_block(f, tile, lambda j: [terms(j)], 1, end)[0]


def sums_of_block(
    f: Function, tile: TileShape, terms: Callable[[Value], list[Value]], rows: int, end: Operand = 0
) -> list[Value]:
    """The same for some rows, of each of which `terms` gives a vector."""
    places = range(0, CHAINS, tile.lanes)

    def add(j: Value, chains: list[Value]) -> list[Value]:
        found = [term for at in places for term in terms(j + at)]
        return [chain + term for chain, term in zip(chains, found, strict=True)]

    nothing = [f.value(0.0, tile.vector)] * (len(places) * rows)
    last = end if isinstance(end, Value) else tile.target.block_kv
    chains = f.loop(0, last, add, carry=nothing, step=CHAINS)
    return [_in_all_lanes(f, tile, _folded(chains[row::rows])) for row in range(rows)]


def _in_all_lanes(f: Function, tile: TileShape, total: Value) -> Value:
    step = tile.lanes
    while step := step // 2:
        others = f.shuffle(total, total, [lane ^ step for lane in range(tile.lanes)])
        total = total + others
    return total


def _folded(chains: list[Value]) -> Value:
    """Chains to one: the second half is added to the first, until one is left."""
    while len(chains) > 1:
        half = len(chains) // 2
        chains = [a + b for a, b in zip(chains[:half], chains[half:], strict=True)]
    return chains[0]


def exp4_carefully(f: Function, x: Value) -> Value:
    """4**x for every x, and for x <= 0 exactly what `exp4_nonpositive` gives."""
    return f.select(x > 0.0, vecmath.exp4(f, x), vecmath.exp4_nonpositive(f, x))
