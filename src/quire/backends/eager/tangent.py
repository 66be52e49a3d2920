"""The derivative of dense memory in a direction. It computes the scores of each tile again.

P is the softmax and X' the tangent of X. With S the scores after the mods:

    mean = sum(P * S')      out' = dropped(P * S') V + dropped(P) V' - mean * out      lse' = mean

If scores are weights W, then P * S' is share * W', with share = 1 / sum(W) or 1, lse' is the sum of
W', and without a division the last term of out' is missing.

Every step is a torch operation, so that autograd can record it, and forward mode can go on from it.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from quire.backends.eager.backward import checkpointed
from quire.backends.eager.far import normaliser
from quire.backends.eager.tile import Tile, by_group, probabilities, weigh, weighted_sum
from quire.backends.eager.tiling import Keys, Stripe, stripes
from quire.block_mask.blocks import BlockRows
from quire.ir.differentiate import score_tangent
from quire.ir.trace import Traced
from quire.ir.vectorise import evaluate_tangent
from quire.memory import Placed
from quire.request import Problem
from quire.results import Above, Result, Tangents, divisor_of


class MovingRows(NamedTuple):
    """Rows of a stripe: queries and their tangents [b, h, rows, D], shift and share [.., rows, 1].

    A probability is exp(score - shift) * share.
    """

    query: Tensor
    query_tangent: Tensor | None
    shift: Tensor
    share: Tensor | None


class Part(NamedTuple):
    """What one tile adds: dropped(P * S') V + dropped(P) V', and sum(P * S')."""

    out: Tensor
    mean: Tensor


def tangent(
    problem: Problem, placed: Placed, blocks: BlockRows | None, above: Above, along: Tangents
) -> Result:
    """Return the tangents of out [B, Hq, L, Dv] and lse [B, Hq, L], in the working dtype.

    `above` has the results of the forward pass. `blocks` are those of the mask at that time.
    """
    out, lse, sink = above.out, above.lse, above.sink
    softmax = problem.weighting == "softmax"
    found = normaliser(problem, placed, blocks, lse, sink)
    shift, share = (
        (lse if softmax else divisor_of(problem.weighting, lse), None) if found is None else found
    )
    sums, mean = torch.zeros_like(out), torch.zeros_like(lse)
    compute = checkpointed(functools.partial(_part, problem, placed, along))
    for stripe in stripes(problem, placed, blocks):
        rows = MovingRows(
            placed.query[stripe.rows].to(placed.dtype),
            None if along.query is None else along.query[stripe.rows].to(placed.dtype),
            shift[stripe.rows].unsqueeze(-1),
            None if share is None else share[stripe.rows].unsqueeze(-1),
        )
        for keys in stripe.tiles:
            part = compute(stripe, keys, rows)
            if part is not None:
                sums[stripe.rows] += part.out
                mean[stripe.rows] += part.mean
    if sink is not None and along.sink is not None:
        mean = mean + _of_sink(sink, along.sink, shift, share)
    scores = (along.query, along.key, along.sink, *along.captures)
    moved = mean * lse if problem.weighting == "shares" else mean  # the tangent of lse
    if problem.weighting == "sums" or all(x is None for x in scores):
        return Result(sums, moved)  # 0 times an output of inf would be NaN
    return Result(sums - mean.unsqueeze(-1) * out, moved)


def _of_sink(sink: Tensor, tangent: Tensor, shift: Tensor, share: Tensor | None) -> Tensor:
    """Return the probability of the sink times its tangent: [B, Hq, L]."""
    logit, moved = (x.to(shift.dtype).view(1, -1, 1) for x in (sink, tangent))
    weight = probabilities(logit.expand_as(shift), shift)
    return (weight if share is None else weight * share) * moved


def _part(
    problem: Problem,
    placed: Placed,
    along: Tangents,
    stripe: Stripe,
    key_range: Keys,
    rows: MovingRows,
) -> Part | None:
    """Return what one tile adds; None if its mask is false everywhere."""
    tile = Tile(problem, placed, stripe, key_range)
    if tile.is_empty:
        return None
    moved = Tile(problem, _moved(placed, along), stripe, key_range)
    raw = tile.raw_scores(rows.query)
    scores = tile.masked(tile.modified(raw))
    read = scores != -math.inf
    weights, slope = weigh(problem, scores, rows.shift)
    if rows.share is not None:
        weights, slope = weights * rows.share, slope * rows.share
    pushed, out = None, torch.zeros_like(rows.query[..., :1])
    seen = by_group(read, tile.values)
    raw_tangent = _raw_tangent(tile, moved, rows, along)
    score_tangent = _through_mod(tile, raw, raw_tangent, along.captures)
    if score_tangent is not None:
        pushed = slope * torch.where(read, score_tangent, 0.0)
    changed = _through_prob_mod(tile, weights, pushed, along.captures)
    if changed is not None:
        kept = by_group(tile.dropped(changed), tile.values)
        out = weighted_sum(kept, tile.values, seen).view(*rows.query.shape[:-1], -1)
    if along.value is not None:
        kept = by_group(tile.reweighed(weights), tile.values)
        out = out + weighted_sum(kept, moved.values, seen).view(*rows.query.shape[:-1], -1)
    return Part(out, (torch.zeros_like(weights) if pushed is None else pushed).sum(-1))


def _moved(placed: Placed, along: Tangents) -> Placed:
    """Return the tangents of keys and values in their place. Those that are 0 are not read."""
    key = placed.key if along.key is None else along.key
    value = placed.value if along.value is None else along.value
    return placed.on(placed.query, key, value)


def _raw_tangent(tile: Tile, moved: Tile, rows: MovingRows, along: Tangents) -> Tensor | None:
    """Return the tangent of the scaled scores, before any mod; None for 0."""
    by_query = None if rows.query_tangent is None else tile.raw_scores(rows.query_tangent)
    if along.key is None:
        return by_query
    by_key = moved.raw_scores(rows.query)
    return by_key if by_query is None else by_query + by_key


# --- through mods --------------------------------------------------------------------------------


def _through_mod(
    tile: Tile, raw: Tensor, raw_tangent: Tensor | None, captures: tuple[Tensor | None, ...]
) -> Tensor | None:
    """Return the tangent of the scores after the score_mod; None for 0."""
    mod = tile.problem.score_mod
    if mod is None:
        return raw_tangent
    own = captures[: len(mod.captures)]
    if raw_tangent is None and all(x is None for x in own):
        return None
    if not isinstance(mod, Traced):
        return evaluate_tangent(mod, tile.indices, raw, (raw_tangent, *own), live=tile.mask)
    graph = score_tangent(mod.output, raw_tangent is not None, tuple(x is not None for x in own))
    if graph is None:
        return None
    loaded = (*mod.captures, *(x for x in own if x is not None))
    given = {} if raw_tangent is None else {"tangent": raw_tangent}
    found = tile.of_graph(graph, loaded, {"score": raw, **given})
    return found.to(raw.dtype).broadcast_to(raw.shape)


def _through_prob_mod(
    tile: Tile, weights: Tensor, pushed: Tensor | None, captures: tuple[Tensor | None, ...]
) -> Tensor | None:
    """Return the tangent of the weights after the prob_mod, from that before it; None for 0."""
    problem, mod = tile.problem, tile.problem.prob_mod
    if mod is None:
        return pushed
    others = (problem.score_mod, problem.mask_mod)
    first = sum(len(other.captures) for other in others if other is not None)
    own = captures[first : first + len(mod.captures)]
    graph = score_tangent(mod.output, pushed is not None, tuple(x is not None for x in own))
    if graph is None:
        return None
    loaded = (*mod.captures, *(x for x in own if x is not None))
    given = {} if pushed is None else {"tangent": pushed}
    found = tile.of_graph(graph, loaded, {"score": weights, **given})
    return torch.where(weights != 0, found.to(weights.dtype), 0.0)
