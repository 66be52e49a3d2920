"""The function that computes the argmax and the entropy of each row, tile by tile.

    observe(scores, running_sum, best, place, surprise, first, keys)

A kernel calls it through a pointer, if the caller wants an argmax or an entropy: after the mods and
before scores become weights. Scores are multiplied by log4(e). `first` is the number of the tile's
first key, counted from the first key of the row. The rest is the state of a row:

    running_sum   the sum of the weights exp4(score - best) of the tiles before
    best, place   the largest score so far and the number of its key, the first of equals; NaN
                  counts as larger than all. They start at -inf and -1
    surprise      the sum of weight * (score - best), from which the entropy is computed

In a panel every vector of queries has a vector of state. In the decode kernel lanes run over keys,
and each lane has its own state; `first_of_best` combines them at the end.

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
from quire.codegen.phases.softmax import LN_4, Closed
from quire.codegen.phases.tiles import TileShape, across


def write_observe(form: Form, tile: TileShape) -> Module:
    """A module that exports an OBSERVE function for a form of kernel."""
    module = Module()
    write = _write_panel if form == "panel" else _write_row
    with module.function(OBSERVE.name, OBSERVE.parameters) as f:
        write(f, tile)
    return module


def _write_panel(f: Function, tile: TileShape) -> None:
    *pointers, first, keys = f.parameters

    with f.range(0, tile.width, tile.lanes) as at:
        scores, *state = (f.offset(pointer, at, tile.element) for pointer in pointers)

        def score(j: Value) -> Value:
            return tile.load(f, scores, j * tile.width)

        def number(j: Value) -> Value:
            place = f.convert(first + j, tile.element.as_int)
            return f.splat(place, tile.vector.as_int)

        _observe(f, tile, state, score, number, keys=keys)


def _write_row(f: Function, tile: TileShape) -> None:
    scores, *state, first, keys = f.parameters

    def score(j: Value) -> Value:
        return tile.load(f, scores, j)

    def number(j: Value) -> Value:
        place = f.convert(first + j, tile.element.as_int)
        return f.splat(place, tile.vector.as_int) + f.iota(tile.vector.as_int)

    def best_of_row(best: Value) -> Value:
        return across(f, best, f.maximum)

    _observe(f, tile, state, score, number, keys=keys, step=tile.lanes, of_softmax=best_of_row)


def _observe(
    f: Function,
    tile: TileShape,
    state: list[Value],
    score: Callable[[Value], Value],
    number: Callable[[Value], Value],
    *,
    keys: Value,
    step: int = 1,
    of_softmax: Callable[[Value], Value] = lambda best: best,
) -> None:
    """Update the state of one vector by the scores of some keys.

    `score(j)` and `number(j)` are those of the keys from j on. `of_softmax` turns the largest score
    of each lane into the maximum that the softmax subtracts.
    """
    running_sum, best, place, surprise = state

    def look(j: Value, carried: list[Value]) -> list[Value]:
        here, (best, place) = score(j), carried
        higher = (here > best) | (f.is_nan(here) & ~f.is_nan(best))
        return [f.select(higher, here, best), f.select(higher, number(j), place)]

    old = tile.load(f, best)
    start = [old, _load_places(f, tile, place)]
    new, at = f.loop(0, keys, look, carry=start, step=step)
    before, after = of_softmax(old), of_softmax(new)
    shift = f.select(f.intrinsic("fabs", after).equals(math.inf), 0.0, after)

    def add(j: Value, sums: list[Value]) -> list[Value]:
        above = score(j) - shift
        weight = vecmath.exp4(f, above)
        return [f.fma(weight, f.select(weight.equals(0.0), 0.0, above), sums[0])]

    nothing = f.value(0.0, tile.vector)
    (terms,) = f.loop(0, keys, add, carry=[nothing], step=step)
    alpha = vecmath.exp4(f, before - shift)
    moved = alpha * f.fma(tile.load(f, running_sum), before - shift, tile.load(f, surprise))
    tile.store(f, new, best)
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


def first_of_best(f: Function, tile: TileShape, state: State) -> Value:
    """The number of the key with the largest score of all lanes; the first of equals."""
    best, place = tile.load(f, state.best), _load_places(f, tile, state.place)
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
    return f.extract(place, 0)
