"""attention_piece() and merge_pieces(): one sequence in several places, with the bits of one call.

    pieces = [
        attention_piece(query, shard, mask=causal, q_start=0)
        for shard in (Dense(key[:, :, :1024], value[:, :, :1024]),
                      Dense(key[:, :, 1024:], value[:, :, 1024:], start=1024))
    ]
    out, lse = merge_pieces(pieces)

`merge_attention` takes outputs and log-sum-exps, has gradients, and is exact up to rounding. An
`AttentionPiece` holds what a kernel holds in the middle of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire import checks
from quire.aux_outputs import AuxRequest
from quire.backends import jit
from quire.codegen.phases.softmax import LOG4_E
from quire.errors import ArgumentError, DtypeError, ShapeError
from quire.ir.trace import Mod
from quire.memory import Integers, Memory, Queries
from quire.plans import CallPlan
from quire.request import Call, Mask, Request, checked_call
from quire.results import Result
from quire.runtime import pieces as runtime
from quire.support.dynamo import never_traced


class AttentionPiece(NamedTuple):
    """Attention over some of the keys of a sequence, to be merged with that over others.

    `out` [B, Hq, L, Dv] is the sum of weights times values, `sums` [B, Hq, L] that of the weights
    exp(score - maximum), and `maxima` [B, Hq, L] has these maxima times log4(e). All are float32,
    or float64 for float64 queries. If queries are packed, they are [total, Hq, Dv] and [total, Hq].
    """

    out: Tensor
    sums: Tensor
    maxima: Tensor


@never_traced
def attention_piece(
    query: Tensor,
    memory: Memory,
    *,
    score_mod: Mod | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    q_start: int | Integers | None = None,
    q_offsets: Integers | None = None,
    q_lengths: Integers | None = None,
) -> AttentionPiece:
    """Compute attention over `memory`, one piece of all keys, without gradients.

    The parameters are those of `attention`: `query` [B, Hq, L, D], or [total, Hq, D] with
    `q_offsets` [B + 1] and `q_lengths` [B]; `q_start` is a position or [B] of them. Give a sink to
    `merge_pieces`.
    """
    call = checked_call(
        Request(
            query,
            memory,
            Queries(q_start, q_offsets, q_lengths),
            score_mod=score_mod,
            masks=() if mask is None else (mask,),
            scale=scale,
            aux=AuxRequest(lse=True, max_scores=True),
        )
    )
    with torch.no_grad():
        found = None if jit.obstacle(call) else runtime.compute_open(call)
        out, sums, maxima, *_ = _in_torch(call) if found is None else found
    assert sums is not None and maxima is not None, "they were requested"
    return AttentionPiece(*(memory.as_given(query, x) for x in (out, sums, maxima)))


def _in_torch(call: Call) -> Result:
    """Return the same from the finished results: one weight of 1 at a score of lse."""
    out, lse, *_ = CallPlan(call, "eager").forward(call)
    assert lse is not None, "it was requested"
    return Result(out.to(call.placed.dtype), (lse != -math.inf).to(lse.dtype), lse * LOG4_E)


@never_traced
def merge_pieces(
    pieces: Sequence[AttentionPiece],
    *,
    sink: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `(out, lse)` of attention over the keys of all pieces.

        out, lse = merge_pieces([piece_a, piece_b, piece_c])

    Kernels start anew every 1,024 keys and merge what they have in ascending order. So if a piece
    has keys of one such range of positions, from a multiple of 1,024 up to the next one, and pieces
    are given in ascending order, `out` and `lse` have the bits of one call over all keys. The first
    piece may have several ranges. Other cuts are exact up to rounding.

    `sink` [Hq] is that of `attention`. `out` has the dtype of the pieces, or `dtype`.
    """
    _check(pieces)
    outs, sums, maxima = (
        [x.contiguous() for x in each] for each in zip(*map(tuple, pieces), strict=True)
    )
    packed = sums[0].dim() == 2
    sinks = torch.full_like(sums[0], -math.inf)
    if sink is not None:
        sinks[:] = sink if packed else sink[:, None]
    with torch.no_grad():
        out, lse = runtime.merge(outs, sums, maxima, sinks)
    return out.to(dtype or out.dtype), lse


def _check(pieces: Sequence[AttentionPiece]) -> None:
    if not pieces:
        raise ArgumentError("pieces must have one piece or more, but is empty. Give a piece.")
    out = pieces[0].out
    for piece in pieces:
        for name, tensor in piece._asdict().items():
            checks.check_strided(name, tensor)
            shape = out.shape if name == "out" else out.shape[:-1]
            if tensor.shape != shape:
                raise ShapeError(
                    f"{name} of a piece must have shape {list(shape)} as in the first piece, but "
                    f"has {list(tensor.shape)}. Give pieces for the same queries."
                )
            if tensor.dtype != out.dtype or out.dtype not in (torch.float32, torch.float64):
                raise DtypeError(
                    f"pieces must be float32, or all float64, but {name} is {tensor.dtype} and the "
                    f"first piece {out.dtype}. Give what attention_piece returned."
                )
