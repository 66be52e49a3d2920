"""Pieces to one result: how a piece of keys is added to the pieces before it."""

from __future__ import annotations

import math
from typing import NamedTuple

from quire.codegen.convention import PARTIAL_STATES
from quire.codegen.llvm import vecmath
from quire.codegen.llvm.builder import Function, Module
from quire.codegen.llvm.types import typed
from quire.codegen.llvm.values import Value
from quire.codegen.phases import observe
from quire.codegen.phases.tiles import TileShape

STATES = (*PARTIAL_STATES, "out")


class Joined(NamedTuple):
    """The common maximum of two parts of a row, and the factors of what each has."""

    after: Value
    shift: Value  # what both subtract from their scores
    before: Value  # the factor of the part before
    behind: Value

    def add(self, f: Function, mine: Value, its: Value) -> Value:
        """What both have together: a sum of weights, or columns of out."""
        factors = (x if mine.type.lanes else f.extract(x, 0) for x in (self.before, self.behind))
        before, behind = factors
        return f.fma(mine, before, its * behind)


def join(f: Function, best: Value, other: Value, *, weighted: bool = False) -> Joined:
    """From the maxima of a part of a row and of the keys behind it."""
    after = f.maximum(best, other)
    if weighted:
        one = f.value(1.0, best.type)
        return Joined(after, f.value(0.0, best.type), one, one)
    shift = f.select(f.intrinsic("fabs", after).equals(math.inf), 0.0, after)
    return Joined(after, shift, vecmath.exp4(f, best - shift), vecmath.exp4(f, other - shift))


def write_merge(module: Module, tile: TileShape, step: int, *, weighted: bool = False) -> Function:
    """The function that adds the result of a piece to what some vectors of rows have so far.

    Parameters are the addresses of both, those of the piece with `piece_` before their names. `out`
    has a vector at every `step` up to `end`, in elements. That of the next of `count` rows is
    `stride` elements further, and all else is a vector further. Nobody reads what was observed if
    `observe` is null.
    """
    names = [*STATES, *(f"piece_{name}" for name in STATES)]
    parameters = typed(f"ptr {' '.join(names)} observe, i64 end count stride")
    with (
        module.function("merge", parameters, internal=True) as f,
        f.range(0, f.given["count"]) as n,
    ):
        given = {
            name: f.offset(f.given[name], n * f.given["stride"], tile.element)
            if name in ("out", "piece_out")
            else f.offset(f.given[name], n * tile.lanes, tile.element)
            for name in names
        }
        _merge_row(f, tile, given, step, weighted=weighted)
    return f


def _merge_row(
    f: Function, tile: TileShape, given: dict[str, Value], step: int, *, weighted: bool
) -> None:
    theirs = {name: given[f"piece_{name}"] for name in STATES}
    before, other = (tile.load(f, of["running_max"]) for of in (given, theirs))
    joined = join(f, before, other, weighted=weighted)
    mine, its = (tile.load(f, of["running_sum"]) for of in (given, theirs))
    tile.store(f, joined.after, given["running_max"])
    tile.store(f, joined.add(f, mine, its), given["running_sum"])
    with f.when(f.given["observe"].differs(f.null())):
        my_state, their_state = (
            observe.State(*(of[name] for name in observe.State._fields)) for of in (given, theirs)
        )
        below = before - joined.shift, other - joined.shift
        here = observe.ObservedPart(my_state, mine, below[0], joined.before)
        there = observe.ObservedPart(their_state, its, below[1], joined.behind)
        observe.merge(f, tile, here, there)
    with f.range(0, f.given["end"], step) as d:
        both = tile.load(f, given["out"], d), tile.load(f, theirs["out"], d)
        tile.store(f, joined.add(f, *both), given["out"], d)
