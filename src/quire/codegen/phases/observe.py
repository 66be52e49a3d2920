"""The function that computes the argmax and the entropy of each row, tile by tile.

    observe(chains, scores, running_sum, best, place, surprise, first, keys, lead)

A kernel calls it through a pointer, if the caller wants an argmax or an entropy: after the mods and
before scores become weights. Scores are multiplied by log4(e). `first` is the number of the tile's
first key, counted from the first key of the row. `chains` is memory for the chains of a panel, and
`lead` is the chain of the first key (`order.py`). In the decode kernel scores begin with a block:
the first `lead` of `keys` numbers belong to no key. The rest is the state of a row:

    running_sum   the sum of the weights exp4(score - best) of the tiles before
    best, place   the largest score so far and the number of its key, the first of equals; NaN
                  counts as larger than all. They start at -inf and -1
    surprise      the sum of weight * (score - best), from which the entropy is computed

In a panel every vector of queries has a vector of state. In the decode kernel lanes run over keys,
and a row's state is the same in all lanes.

A key that is not read adds 0, so results do not depend on which tiles are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from quire.codegen.convention import OBSERVE, Form
from quire.codegen.llvm import vecmath
from quire.codegen.llvm.builder import Function, Module, Value
from quire.codegen.llvm.types import I64
from quire.codegen.phases.order import over_chains, sum_of_block
from quire.codegen.phases.softmax import LN_4, Closed
from quire.codegen.phases.tiles import TileShape, is_unread


def write_observe(form: Form, tile: TileShape, *, weighted: bool = False) -> Module:
    """A module that exports an OBSERVE function for a form of kernel.

    In panels that are `weighted`, scores are weights, and UNREAD marks keys that are not read.
    """
    module = Module()
    with module.function(OBSERVE.name, OBSERVE.parameters) as f:
        if form == "panel":
            _write_panel(f, tile, weighted=weighted)
        else:
            _write_row(f, tile)
    return module


def _write_panel(f: Function, tile: TileShape, *, weighted: bool) -> None:
    chains, *pointers, first, keys, lead = f.parameters
    with f.range(0, tile.width, tile.lanes) as at:
        scores, *state = (f.offset(pointer, at, tile.element) for pointer in pointers)

        def score(j: Value) -> Value:
            found = tile.load(f, scores, j * tile.width)
            return f.select(is_unread(f, found), -math.inf, found) if weighted else found

        def look(j: Value, best: list[Value]) -> list[Value]:
            place = f.convert(first + j, tile.element.as_int)
            return _higher(f, best, score(j), f.splat(place, tile.vector.as_int))

        def surprise(shift: Value) -> Value:
            def terms(places: list[Value]) -> list[Value]:
                return [_surprise(f, score(j) - shift) for j in places]

            return over_chains(f, tile, chains, count=keys, lead=lead, terms=terms)

        seen = f.loop(0, keys, look, carry=_best(f, tile, state))
        _update(f, tile, state, seen, surprise)


def _write_row(f: Function, tile: TileShape) -> None:
    """Scores are those of a whole block of keys, -inf where there is no key."""
    _, scores, *state, first, keys, lead = f.parameters

    def look(j: Value, best: list[Value]) -> list[Value]:
        place = f.convert(first + j - lead, tile.element.as_int)
        numbers = f.splat(place, tile.vector.as_int) + f.iota(tile.vector.as_int)
        return _higher(f, best, tile.load(f, scores, j), numbers)

    def surprise(shift: Value) -> Value:
        return sum_of_block(f, tile, lambda j: _surprise(f, tile.load(f, scores, j) - shift))

    start, step = _best(f, tile, state), tile.lanes
    seen = f.loop(lead & -step, keys, look, carry=start, step=step)
    _update(f, tile, state, _first_of_best(f, tile, seen), surprise)


def _higher(f: Function, best: list[Value], score: Value, number: Value) -> list[Value]:
    """The larger of the best scores so far and some others, and the numbers of their keys."""
    higher = (score > best[0]) | (f.is_nan(score) & ~f.is_nan(best[0]))
    return [f.select(higher, score, best[0]), f.select(higher, number, best[1])]


def _surprise(f: Function, above: Value) -> Value:
    """exp4(x) * x; 0 where that power is 0."""
    weight = vecmath.exp4(f, above)
    return weight * f.select(weight.equals(0.0), 0.0, above)


def _best(f: Function, tile: TileShape, state: list[Value]) -> list[Value]:
    return [tile.load(f, state[1]), _load_places(f, tile, state[2])]


def _update(
    f: Function,
    tile: TileShape,
    state: list[Value],
    seen: list[Value],
    surprise_of: Callable[[Value], Value],
) -> None:
    """Store what has been `seen`: the best scores and their places, and the surprise."""
    running_sum, best, place, surprise = state
    before, (after, at) = tile.load(f, best), seen
    shift = f.select(f.intrinsic("fabs", after).equals(math.inf), 0.0, after)
    terms = surprise_of(shift)
    alpha = vecmath.exp4(f, before - shift)
    moved = alpha * f.fma(tile.load(f, running_sum), before - shift, tile.load(f, surprise))
    tile.store(f, after, best)
    tile.store(f, at, place)
    tile.store(f, f.select(alpha.equals(0.0), 0.0, moved) + terms, surprise)


# --- in the kernels ------------------------------------------------------------------------------


def _load_places(f: Function, tile: TileShape, pointer: Value) -> Value:
    return f.load(tile.vector.as_int, pointer, align=tile.target.vector_bits // 8)


class State(NamedTuple):
    """The addresses of what a row has for the argmax and the entropy."""

    best: Value
    place: Value
    surprise: Value


class ObservedPart(NamedTuple):
    """Some keys of a row: their state, and by how much their weights shrink as parts are merged."""

    state: State
    total: Value  # the sum of their weights
    below: Value  # their maximum less the common one
    factor: Value  # exp4 of that


def forget(f: Function, tile: TileShape, state: State) -> None:
    """Reset the state of one vector of rows: no key has been seen."""
    tile.store(f, f.value(-math.inf, tile.vector), state.best)
    tile.store(f, f.value(-1, tile.vector.as_int), state.place)
    tile.store(f, f.value(0.0, tile.vector), state.surprise)


def merge(f: Function, tile: TileShape, mine: ObservedPart, theirs: ObservedPart) -> None:
    """Add what later keys have seen to the state of the keys before."""
    state = mine.state
    best, other = tile.load(f, state.best), tile.load(f, theirs.state.best)
    higher = (other > best) | (f.is_nan(other) & ~f.is_nan(best))
    tile.store(f, f.select(higher, other, best), state.best)
    there, here = (_load_places(f, tile, part.state.place) for part in (theirs, mine))
    tile.store(f, f.select(higher, there, here), state.place)
    total = f.value(0.0, tile.vector)
    for part in (mine, theirs):
        surprise = tile.load(f, part.state.surprise)
        moved = part.factor * f.fma(part.total, part.below, surprise)
        total = total + f.select(part.factor.equals(0.0), 0.0, moved)
    tile.store(f, total, state.surprise)


def entropy(f: Function, surprise: Value, total: Value, row: Closed) -> Value:
    """The entropy of a row's probabilities, in nats; `total` is the sum of its weights."""
    terms = f.select(row.kept.equals(0.0), 0.0, f.fma(total, row.log_share, surprise))
    nats = 0.0 - row.share * terms * LN_4
    return f.select(nats < 0.0, 0.0, nats)


def position(f: Function, number: Value, kv_begin: Value) -> Value:
    """The position of a key by its number in the row; -1 stays -1."""
    wide = f.convert(number, I64)
    return f.select(wide < 0, wide, wide + kv_begin)


def _first_of_best(f: Function, tile: TileShape, seen: list[Value]) -> list[Value]:
    """The largest score of all lanes and the number of its key, in all lanes; first of equals."""
    best, place = seen
    step = 1
    while step < tile.lanes:
        picks = [lane ^ step for lane in range(tile.lanes)]
        other, there = f.shuffle(best, best, picks), f.shuffle(place, place, picks)
        odd, other_odd = f.is_nan(best), f.is_nan(other)
        higher = (other > best) | (other_odd & ~odd)
        equal = other.equals(best) | (other_odd & odd)
        take = higher | (equal & (there < place))
        best, place = f.select(take, other, best), f.select(take, there, place)
        step *= 2
    return [best, place]
