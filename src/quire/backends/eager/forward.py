"""The forward pass of dense memory, without autograd."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.aux_outputs import NO_AUX, AuxRequest
from quire.backends.eager.far import normaliser
from quire.backends.eager.observe import Observed
from quire.backends.eager.tile import (
    by_group,
    scored_tiles,
    subtrahend,
    weigh,
    weighted_sum,
)
from quire.backends.eager.tiling import Stripe, stripes
from quire.memory import Placed, output_layout
from quire.request import Problem
from quire.results import Result, divisor_of


def forward(
    problem: Problem, placed: Placed, sink: Tensor | None, wanted: AuxRequest = NO_AUX
) -> Result:
    """Return the results of dense memory in the working dtype. The output has the query's layout.

    query [B, Hq, L, D], key [B or 1, Hkv, S, D], value [B or 1, Hkv, S, Dv], sink [Hq].
    """
    query = placed.query
    shape, strides = output_layout(query, placed.value.shape[-1])
    out = torch.empty_strided(shape, strides, dtype=placed.dtype, device=query.device)
    result = Result(
        out,
        **{
            name: out.new_empty(query.shape[:-1], dtype=torch.int64 if name == "argmax" else None)
            for name, asked in wanted._replace(lse=True, key_mass=False)._asdict().items()
            if asked
        },
    )
    for stripe in stripes(problem, placed):
        part = forward_stripe(problem, placed, stripe, sink, wanted).by_query
        for name, rows in result.by_query.items():
            rows[stripe.rows] = part[name]
    if wanted.key_mass:
        assert result.lse is not None, "lse is always computed"
        result = result._replace(key_mass=_key_mass(problem, placed, result.lse, sink))
    return result


def forward_stripe(
    problem: Problem,
    placed: Placed,
    stripe: Stripe,
    sink: Tensor | None,
    wanted: AuxRequest = NO_AUX,
) -> Result:
    """Return the results of one stripe by online softmax.

    `peak` is the largest score so far; `sums` and `total` are divided by exp(peak).
    """
    if problem.weighting != "softmax":
        return _weighted_stripe(problem, placed, stripe)
    rows = placed.query[stripe.rows]
    peak = rows.new_full((*rows.shape[:-1], 1), -math.inf, dtype=placed.dtype)
    total = torch.zeros_like(peak)
    sums = peak.new_zeros((*peak.shape[:-1], placed.value.shape[-1]))
    observed = Observed.before(peak) if wanted.argmax or wanted.entropy else None
    for tile, scores in scored_tiles(problem, placed, stripe):
        higher = torch.maximum(peak, scores.amax(-1, keepdim=True))
        shift = subtrahend(higher)
        weights = torch.exp(scores - shift)
        rescale = torch.exp(peak - shift)
        read = by_group(scores != -math.inf, tile.values)
        if observed is not None:
            observed = observed.after(
                scores, tile.indices[3], weights, peak=peak, total=total, shift=shift
            )
        tile_sums = weighted_sum(by_group(tile.reweighed(weights), tile.values), tile.values, read)
        total = total * rescale + weights.sum(-1, keepdim=True)
        sums = sums * rescale + tile_sums.view_as(sums)
        peak = higher
    sink = None if sink is None else sink[stripe.heads]
    return _normalised(sums, total, peak, sink, observed)


def _normalised(
    sums: Tensor, total: Tensor, peak: Tensor, sink: Tensor | None, observed: Observed | None
) -> Result:
    """Add the sink to the sum of weights, and divide by it."""
    top, total_of_keys = peak, total
    if sink is not None:
        logit = sink.to(sums.dtype).view(1, -1, 1, 1)
        top = torch.maximum(peak, logit)
        rescale = torch.exp(peak - subtrahend(top))
        total = total * rescale + torch.exp(logit - subtrahend(top))
        sums = sums * rescale
    lse = torch.where(top.isinf(), top, top + torch.log(total))
    out = torch.where(top == -math.inf, 0.0, sums / total)
    result = Result(out, lse.squeeze(-1), peak.squeeze(-1))
    if observed is None:
        return result
    entropy = observed.entropy(total_of_keys, total, peak - subtrahend(top))
    return result._replace(argmax=observed.place.squeeze(-1), entropy=entropy.squeeze(-1))


def _weighted_stripe(problem: Problem, placed: Placed, stripe: Stripe) -> Result:
    """Return the results of one stripe whose scores are weights: `lse` has their sums."""
    rows = placed.query[stripe.rows]
    peak = rows.new_full((*rows.shape[:-1], 1), -math.inf, dtype=placed.dtype)
    place = torch.full_like(peak, -1, dtype=torch.int64)
    total = torch.zeros_like(peak)
    sums = peak.new_zeros((*peak.shape[:-1], placed.value.shape[-1]))
    for tile, scores in scored_tiles(problem, placed, stripe):
        best, at = scores.max(-1, keepdim=True)
        higher = (best > peak) | (best.isnan() & ~peak.isnan())
        place = torch.where(higher, tile.indices[3][at], place)
        peak = torch.maximum(peak, best)
        read = scores != -math.inf
        weights = torch.where(read, scores, 0.0)
        kept, seen = (by_group(x, tile.values) for x in (tile.reweighed(weights), read))
        sums = sums + weighted_sum(kept, tile.values, seen).view_as(sums)
        total = total + weights.sum(-1, keepdim=True)
    out = sums / divisor_of(problem.weighting, total)
    return Result(out, *(x.squeeze(-1) for x in (total, peak, place)))


def _key_mass(problem: Problem, placed: Placed, lse: Tensor, sink: Tensor | None) -> Tensor:
    """Return the probabilities before dropout, summed over the queries of each head: [B, Hq, S].

    They need `lse` [B, Hq, L], a result of the whole forward pass, so all tiles are computed again.
    """
    query, key, _ = placed.operands
    mass = lse.new_zeros((*query.shape[:2], key.shape[2]))
    if problem.weighting != "softmax":
        lse = divisor_of(problem.weighting, lse)
    found = normaliser(problem, placed, None, lse, sink)
    divisor, share = found or (lse, torch.ones_like(lse))
    with torch.no_grad():
        for stripe in stripes(problem, placed):
            below, part = (x[stripe.rows].unsqueeze(-1) for x in (divisor, share))
            for tile, scores in scored_tiles(problem, placed, stripe):
                here = mass[stripe.batch, stripe.heads, tile.key_range.positions]
                here += (weigh(problem, scores, below).probabilities * part).sum(-2)
    return mass
