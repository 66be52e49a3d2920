"""Attention over all stripes, without a record for autograd."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from quire.aux_outputs import NO_AUX, AuxRequest
from quire.eager.key_mass import key_mass
from quire.eager.observe import Observed
from quire.eager.tile import Operands, Tile, by_group, subtrahend, weighted_sum
from quire.eager.tiling import Sizes, Stripe, stripes
from quire.problem import Problem

NOTHING = torch.empty(0, device="cpu")


class Result(NamedTuple):
    """Attention, what is known about each row, and what about each key.

    out [B, Hq, L, Dv], key_mass [B, Hq, S], the others [B, Hq, L]. What nobody wants may be an
    empty tensor.
    """

    out: Tensor
    lse: Tensor
    max_scores: Tensor
    argmax: Tensor
    entropy: Tensor
    key_mass: Tensor = NOTHING


def forward(
    problem: Problem,
    operands: Operands,
    sink: Tensor | None,
    wanted: AuxRequest = NO_AUX,
) -> Result:
    """Compute a stripe at a time, in the working dtype.

    The output lies in memory as the query does.
    """
    query, key, value = operands
    shape, strides = output_layout(query, value.shape[-1])
    out = torch.empty_strided(shape, strides, dtype=operands.dtype, device=query.device)
    lse = out.new_empty(query.shape[:-1])
    observed = query.shape[:-1] if wanted.argmax or wanted.entropy else (0,)
    argmax = torch.empty(observed, dtype=torch.int64, device=query.device)
    result = Result(out, lse, torch.empty_like(lse), argmax, out.new_empty(observed))
    for stripe in stripes(problem, Sizes.of(query, key)):
        part = forward_stripe(problem, operands, stripe, sink, wanted)
        for whole, rows in zip(result, part, strict=True):
            if whole.dim() > 1:
                whole[stripe.rows] = rows
    if wanted.key_mass:
        result = result._replace(key_mass=key_mass(problem, operands, lse, sink))
    return result


def forward_stripe(
    problem: Problem,
    operands: Operands,
    stripe: Stripe,
    sink: Tensor | None,
    wanted: AuxRequest = NO_AUX,
) -> Result:
    """Online softmax: `sums` and `total` are relative to exp(peak), the maximum so far."""
    rows = operands.query[stripe.rows].to(operands.dtype)
    peak = rows.new_full((*rows.shape[:-1], 1), -math.inf)
    total = torch.zeros_like(peak)
    sums = rows.new_zeros((*rows.shape[:-1], operands.value.shape[-1]))
    observed = Observed.nothing(peak) if wanted.argmax or wanted.entropy else None
    for keys in stripe.tiles:
        tile = Tile(problem, operands, stripe, keys)
        if tile.is_empty:
            continue
        scores = tile.masked(tile.modified(tile.raw_scores(rows)))
        higher = torch.maximum(peak, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - subtrahend(higher))
        rescale = torch.exp(peak - subtrahend(higher))
        read = by_group(scores != -math.inf, tile.values)
        if observed is not None:
            shift = subtrahend(higher)
            observed = observed.after(scores, tile.indices[3], weights, peak, total, shift)
        tile_sums = weighted_sum(by_group(tile.dropped(weights), tile.values), tile.values, read)
        total = total * rescale + weights.sum(-1, keepdim=True)
        sums = sums * rescale + tile_sums.view_as(sums)
        peak = higher
    sink = None if sink is None else sink[stripe.heads]
    return _normalised(sums, total, peak, sink, observed)


def _normalised(
    sums: Tensor, total: Tensor, peak: Tensor, sink: Tensor | None, observed: Observed | None
) -> Result:
    """Divide by the sum of weights, which the sink joins once."""
    top, kept = peak, total
    if sink is not None:
        logit = sink.to(sums.dtype).view(1, -1, 1, 1)
        top = torch.maximum(peak, logit)
        rescale = torch.exp(peak - subtrahend(top))
        total = total * rescale + torch.exp(logit - subtrahend(top))
        sums = sums * rescale
    lse = torch.where(top.isinf(), top, top + torch.log(total))
    out = torch.where(top == -math.inf, 0.0, sums / total)
    place = entropy = total.new_empty(0, 1)
    if observed is not None:
        place, entropy = observed.place, observed.entropy(kept, total, peak - subtrahend(top))
    return Result(*(out, *(x.squeeze(-1) for x in (lse, peak, place, entropy))))


def output_layout(query: Tensor, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The output's shape and strides: dense, its dimensions in the order of the query's.

    As in PyTorch the head dimension is the innermost, whatever the query's is.
    """
    shape = (*query.shape[:-1], head_dim)
    inner_first = sorted(range(4), key=lambda dim: (query.stride(dim), -dim))
    strides = _dense_strides(shape, inner_first)
    if strides[-1] != 1:
        inner_first.remove(3)
        strides = _dense_strides(shape, [3, *inner_first])
    return shape, strides


def _dense_strides(shape: tuple[int, ...], inner_first: list[int]) -> tuple[int, ...]:
    strides, step = [0] * len(shape), 1
    for dim in inner_first:
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)
