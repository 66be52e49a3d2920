"""The end of every softmax: from a row's running maximum and sum to lse and probabilities.

Kernels compute 4**x, so scores are multiplied by log4(e) until here. For 2**x they would have to be
multiplied by log2(e), and the largest scores would overflow.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from quire.codegen.convention import Record
from quire.codegen.llvm import vecmath
from quire.codegen.llvm.builder import Function, Value
from quire.codegen.llvm.types import F32, F64
from quire.codegen.phases.tiles import TileShape

LN_4 = math.log(4.0)
LOG4_E = 1.0 / LN_4

FINITE = {F32: torch.finfo(torch.float32).max, F64: torch.finfo(torch.float64).max}
"""The largest number of a type."""


EPS = {F32: torch.finfo(torch.float32).eps, F64: torch.finfo(torch.float64).eps}
"""How far the next number is from 1."""


class Closed(NamedTuple):
    """A row, or a vector of rows, all of whose keys have been read."""

    lse: Value
    peak: Value  # the largest score
    share: Value  # the factor from weights to probabilities; given weights are divided by it
    kept: Value  # the factor of the running sum; below 1 if the sink is above the maximum
    log_share: Value  # log4 of the largest probability
    sunk: Value  # the probability of the sink


def close(
    f: Function,
    best: Value,
    total: Value,
    sink: Value,
    *,
    stays_open: Value | None = None,
    weighted: bool = False,
) -> Closed:
    """From the maximum and sum of weights; a sink is one more score, without a value.

    With `stays_open`, out is not divided, and lse and peak are `total` and `best` as they are. If
    scores are `weighted`, they always are, and there is no sink.
    """
    closed = _closed_weights(f, best, total) if weighted else _closed_softmax(f, best, total, sink)
    if stays_open is None:
        return closed
    as_it_is = {"lse": total, "peak": best, "share": f.value(1.0, best.type)}
    chosen = {
        name: f.select(stays_open.differs(0), x, getattr(closed, name))
        for name, x in as_it_is.items()
    }
    return closed._replace(**chosen)


def _closed_weights(f: Function, best: Value, total: Value) -> Closed:
    one, nothing = f.value(1.0, best.type), f.value(0.0, best.type)
    divisor = f.select(total.equals(0.0), math.inf, total)  # 1 / total may overflow
    return Closed(total, best, divisor, kept=one, log_share=nothing, sunk=nothing)


def _closed_softmax(f: Function, best: Value, total: Value, sink: Value) -> Closed:
    top = f.maximum(best, sink)
    shift = f.select(f.intrinsic("fabs", top).equals(math.inf), 0.0, top)
    kept = vecmath.exp4(f, best - shift)
    sunk = vecmath.exp4(f, sink - shift)
    whole = f.fma(total, kept, sunk)
    log_sum = vecmath.log2(f, whole) * 0.5
    return Closed(
        lse=in_nats(f, shift + log_sum),
        peak=f.select(f.is_nan(total), total, in_nats(f, best)),
        share=f.select(whole.equals(0.0), 0.0, kept / whole),
        kept=kept,
        log_share=best - shift - log_sum,
        sunk=f.select(whole.equals(0.0), 0.0, sunk / whole),
    )


def in_nats(f: Function, x: Value) -> Value:
    """x * log(4), undoing the factor log4(e); the largest numbers must not become infinite."""
    size = f.intrinsic("fabs", x)
    most = f.value(FINITE[x.type.scalar], x.type)
    bounded = f.intrinsic("copysign", f.minimum(most, size * LN_4), x)
    return f.select(size.equals(math.inf), x, bounded)


def sink_of(f: Function, tile: TileShape, arg: Record, head: Value) -> Value:
    """The sink of a head in all lanes; -inf if there is none."""
    (sink,) = f.choose(
        arg["sink"].differs(f.null()),
        lambda: [f.load(tile.element, arg["sink"], head) * LOG4_E],
        lambda: [f.value(-math.inf, tile.element)],
    )
    return f.splat(sink, tile.vector)
