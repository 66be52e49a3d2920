"""The end of every softmax: from a row's running maximum and sum to what it is asked for.

Scores are in units of log 4 until here, since the kernels compute powers. In units of log 2 they
would overflow: a float holds s * log4(e) for every score s, but not s * log2(e).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from quire.codegen import vecmath
from quire.codegen.builder import Function, Value
from quire.codegen.items import Record
from quire.codegen.tiles import Tile
from quire.codegen.types import F32, F64

LN_4 = math.log(4.0)
LOG4_E = 1.0 / LN_4


FINITE = {F32: torch.finfo(torch.float32).max, F64: torch.finfo(torch.float64).max}
"""The largest number of a type."""


class Closed(NamedTuple):
    """A row whose keys have all been seen; scores are in units of log 4 until here."""

    lse: Value
    peak: Value  # the largest score
    share: Value  # what a weight is multiplied by to be a probability
    kept: Value  # what the running sum was multiplied by, a sink being larger than the maximum
    log_share: Value  # log4 of the share


def close(f: Function, best: Value, total: Value, sink: Value) -> Closed:
    """A sink is one more score of every row, without a value."""
    top = f.maximum(best, sink)
    shift = f.select(f.intrinsic("fabs", top).equals(math.inf), 0.0, top)
    kept = vecmath.exp4(f, best - shift)
    whole = f.fma(total, kept, vecmath.exp4(f, sink - shift))
    log_sum = vecmath.log2(f, whole) * 0.5
    return Closed(
        lse=in_nats(f, shift + log_sum),
        peak=f.select(f.is_nan(total), total, in_nats(f, best)),
        share=f.select(whole.equals(0.0), 0.0, kept / whole),
        kept=kept,
        log_share=best - shift - log_sum,
    )


def in_nats(f: Function, x: Value) -> Value:
    """A number in units of log 4 as it was before; the largest ones must not round to infinity."""
    size = f.intrinsic("fabs", x)
    most = f.value(FINITE[x.type.scalar], x.type)
    bounded = f.intrinsic("copysign", f.minimum(most, size * LN_4), x)
    return f.select(size.equals(math.inf), x, bounded)


def sink_of(f: Function, tile: Tile, arg: Record, head: Value) -> Value:
    """The sink of a head in all lanes; -inf where there is none."""
    (sink,) = f.choose(
        arg["sink"].differs(f.null()),
        lambda: [f.load(tile.element, arg["sink"], head) * LOG4_E],
        lambda: [f.value(-math.inf, tile.element)],
    )
    return f.splat(sink, tile.vector)
