"""Pieces to one result: the function that adds a piece of keys to the pieces before it."""

from __future__ import annotations

import math

from quire.codegen.convention import PARTIAL_STATES
from quire.codegen.llvm import vecmath
from quire.codegen.llvm.builder import Function, Module
from quire.codegen.llvm.types import typed
from quire.codegen.llvm.values import Value
from quire.codegen.phases import observe
from quire.codegen.phases.tiles import TileShape

STATES = (*PARTIAL_STATES, "out")


def write_merge(module: Module, tile: TileShape, step: int) -> Function:
    """The function that adds the result of a piece to what a vector of rows has so far.

    Parameters are the addresses of both, those of the piece with `piece_` before their names. `out`
    has a vector at every `step` up to `end`, in elements.
    """
    names = [*STATES, *(f"piece_{name}" for name in STATES)]
    parameters = typed(f"ptr {' '.join(names)}, i64 end")
    with module.function("merge", parameters, internal=True) as f:
        given = f.given
        theirs = {name: given[f"piece_{name}"] for name in STATES}
        before, other = (tile.load(f, of["running_max"]) for of in (given, theirs))
        after = f.maximum(before, other)
        shift = f.select(f.intrinsic("fabs", after).equals(math.inf), 0.0, after)
        moved, joined = vecmath.exp4(f, before - shift), vecmath.exp4(f, other - shift)

        def add(mine: Value, its: Value) -> Value:
            return f.fma(mine, moved, its * joined)

        mine, its = (tile.load(f, of["running_sum"]) for of in (given, theirs))
        tile.store(f, after, given["running_max"])
        tile.store(f, add(mine, its), given["running_sum"])
        my_state, their_state = (
            observe.State(*(of[name] for name in observe.State._fields)) for of in (given, theirs)
        )
        here = observe.ObservedPart(my_state, mine, before - shift, moved)
        there = observe.ObservedPart(their_state, its, other - shift, joined)
        observe.merge(f, tile, here, there)
        with f.range(0, given["end"], step) as d:
            total = add(tile.load(f, given["out"], d), tile.load(f, theirs["out"], d))
            tile.store(f, total, given["out"], d)
    return f
