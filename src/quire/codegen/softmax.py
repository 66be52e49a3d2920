"""The end of every softmax: from a row's running maximum and sum to what it is asked for."""

from __future__ import annotations

import math
from typing import NamedTuple

from quire.codegen import vecmath
from quire.codegen.builder import Function, Value
from quire.codegen.items import Arguments
from quire.codegen.tiles import Tile

LN_2 = math.log(2.0)
LOG2_E = math.log2(math.e)


class Closed(NamedTuple):
    """A row whose keys have all been seen; scores are in units of log 2 until here."""

    lse: Value
    peak: Value  # the largest score
    share: Value  # what a weight is multiplied by to be a probability
    kept: Value  # what the running sum was multiplied by, a sink being larger than the maximum
    log_share: Value  # log2 of the share


def close(f: Function, best: Value, total: Value, sink: Value) -> Closed:
    """A sink is one more score of every row, without a value."""
    top = f.maximum(best, sink)
    shift = f.select(f.intrinsic("fabs", top).equals(math.inf), 0.0, top)
    kept = vecmath.exp2(f, best - shift)
    whole = f.fma(total, kept, vecmath.exp2(f, sink - shift))
    log_sum = vecmath.log2(f, whole)
    return Closed(
        lse=(shift + log_sum) * LN_2,
        peak=f.select(f.is_nan(total), total, best * LN_2),
        share=f.select(whole.equals(0.0), 0.0, kept / whole),
        kept=kept,
        log_share=best - shift - log_sum,
    )


def sink_of(f: Function, tile: Tile, arg: Arguments, head: Value) -> Value:
    """The sink of a head in all lanes; -inf where there is none."""
    (sink,) = f.choose(
        arg["sink"].differs(f.null()),
        lambda: [f.load(tile.element, arg["sink"], head) * LOG2_E],
        lambda: [f.value(-math.inf, tile.element)],
    )
    return f.splat(sink, tile.vector)
