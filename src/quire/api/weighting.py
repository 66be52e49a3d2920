"""Weights that are not a softmax, and mods on the probabilities of one that is.

    computed(request, WeightOptions(weight, normalise, prob_mod))

A weight function is the last part of the score_mod. A prob_mod takes two passes. The first gives
the log-sum-exp of each row. In the second, a score becomes the probability exp(score - lse), the
prob_mod changes it, and the result is the weight of the value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quire.aux_outputs import NO_AUX
from quire.errors import ArgumentError
from quire.ir.trace import Mod
from quire.memory import One
from quire.mods import weights
from quire.mods.compose import ScoreChange, chain
from quire.plans import compute
from quire.request import Request
from quire.results import Result


class WeightOptions(NamedTuple):
    """The user's arguments about weights."""

    weight: Mod | None = None
    normalise: bool = True
    prob_mod: Mod | None = None


def computed(request: Request, options: WeightOptions) -> tuple[Request, Result]:
    """Compute a request with other weights than those of a softmax, or with a prob_mod.

    Return the request of the first pass, and the result. The lse of weights that are not a softmax
    is the log of their sum.
    """
    first, *second = passes(request, options)
    result = compute(first)
    for make in second:
        assert result.lse is not None, "the first pass was asked for it"
        return first, result._replace(out=compute(make(result.lse)).out)
    if first.weighting == "softmax" or result.lse is None:
        return first, result
    return first, result._replace(lse=torch.log(result.lse))


def passes(
    request: Request, options: WeightOptions
) -> tuple[Request] | tuple[Request, Callable[[Tensor], Request]]:
    """Return the request of the first pass and, for a prob_mod, a function that makes the second.

    It takes the log-sum-exp of the first pass. Results besides the output are those of the first.
    """
    weight, normalise, prob_mod = options
    if weight is not None:
        request = _weighted(request, weight, normalise)
    elif not normalise:
        raise ArgumentError(
            "normalise=False needs weight=, but that is None. Give weight=quire.weights.exp, whose "
            "weights divided by their sum are the softmax."
        )
    if prob_mod is None:
        return (request,)
    if request.weighting != "softmax":
        raise ArgumentError(
            "prob_mod must follow a softmax, but weight= gives other weights. Put what it does "
            "into the weight function."
        )
    first = request._replace(aux=request.aux._replace(lse=True), dropout_p=0.0)
    return first, functools.partial(_second_pass, request, prob_mod)


def _weighted(request: Request, weight: Mod, normalise: bool) -> Request:
    """Return a request with a weight function. Both kinds of softmax keep their running maximum."""
    kind, sink = getattr(weight, "function", None), request.sink
    if normalise and kind is weights.softmax.function:
        return request
    if normalise and kind is weights.softmax_one.function:
        heads = request.query.shape[1]
        one = torch.zeros(heads) if sink is None else torch.logaddexp(sink, torch.zeros_like(sink))
        return request._replace(sink=one)
    if sink is not None:
        raise ArgumentError(
            "a sink is one more score of a softmax, but weight= gives other weights. Leave one of "
            "them out."
        )
    score_mod = chain(request.score_mod, weight)
    return request._replace(score_mod=score_mod, weighting="shares" if normalise else "sums")


def _second_pass(request: Request, prob_mod: Mod, lse: Tensor) -> Request:
    """Return the request of the second pass, with `lse` in the layout of the query."""
    memory, query = request.memory, request.query
    placed = memory.place(query, request.queries)
    rows = placed.rows
    if isinstance(rows, One):
        table = {"lse": lse, "first": rows.q_start}
        weight = ScoreChange(_of_dense_row, "prob_mod", prob_mod=prob_mod, **table)
    else:
        first = torch.from_numpy(rows.q_row - rows.q_start)
        table = {"lse": memory.as_placed(query, lse)[0], "first": first}
        weight = ScoreChange(_of_packed_row, "prob_mod", prob_mod=prob_mod, **table)
    return request._replace(
        score_mod=chain(request.score_mod, weight), weighting="sums", sink=None, aux=NO_AUX
    )


def _of_dense_row(
    score: Tensor,
    b: Tensor,
    h: Tensor,
    q_idx: Tensor,
    kv_idx: Tensor,
    *,
    prob_mod: Callable[..., Tensor],
    lse: Tensor,
    first: int,
) -> Tensor:
    """Return the weight of a key, with `lse` [B, Hq, L] and the position of the first query."""
    prob = torch.exp(score - lse[b, h, q_idx - first])
    return _unless_unread(score, prob_mod(prob, b, h, q_idx, kv_idx))


def _of_packed_row(
    score: Tensor,
    b: Tensor,
    h: Tensor,
    q_idx: Tensor,
    kv_idx: Tensor,
    *,
    prob_mod: Callable[..., Tensor],
    lse: Tensor,
    first: Tensor,
) -> Tensor:
    """Return the weight of a key, with `lse` [Hq, total] and the row of position 0 [B]."""
    prob = torch.exp(score - lse[h, first[b] + q_idx])
    return _unless_unread(score, prob_mod(prob, b, h, q_idx, kv_idx))


def _unless_unread(score: Tensor, weight: Tensor) -> Tensor:
    return torch.where(score == -torch.inf, -torch.inf, weight)
