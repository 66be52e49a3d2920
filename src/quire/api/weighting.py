"""Weights that are not a softmax, and mods on the probabilities of one that is.

    computed(request, WeightOptions(weight, normalise, prob_mod))

A weight function is the last part of the score_mod. A prob_mod that multiplies the probability is
computed in one pass, with dropout: it multiplies weights behind the softmax. Any other takes two
passes. The first gives the log-sum-exp of each row. In the second, a score becomes the probability
exp(score - lse), the prob_mod changes it, and the result is the weight of the value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.aux_outputs import NO_AUX
from quire.errors import ArgumentError, ModResultError, OptionError
from quire.ir.multiples import is_multiple
from quire.ir.trace import Mod, Traced, check_signature, mod_name, trace
from quire.memory import Dense
from quire.mods import weights
from quire.mods.compose import ScoreChange, chain
from quire.operator.dynamo import MULTIPLE
from quire.plans import compute, over_ranks
from quire.request import Request, check
from quire.results import Result, is_far, working_dtype
from quire.support.dynamo import never_traced, traced_as
from quire.support.torch_private import is_in_a_graph, is_transformed
from quire.support.torch_private.tracing import know_entries


@ScoreChange
def _unchanged(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score


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
        shift, share = _normaliser(request, result.lse)
        return first, result._replace(out=compute(make(shift, share)).out)
    if first.weighting == "softmax" or result.lse is None:
        return first, result
    return first, result._replace(lse=_log_of_sums(result.lse))


def _log_of_sums(total: Tensor) -> Tensor:
    """Return the log of sums of weights. For a sum of 0 it is -inf with gradient 0, not NaN."""
    nothing = total == 0.0
    return torch.where(nothing, -torch.inf, torch.log(torch.where(nothing, 1.0, total)))


def passes(
    request: Request, options: WeightOptions
) -> tuple[Request] | tuple[Request, Callable[[Tensor, Tensor | None], Request]]:
    """Return the request of the first pass, and a function that makes the second if there is one.

    It takes what `_normaliser` returns. Results besides the output are those of the first.
    """
    weight, normalise, prob_mod = options
    _check(request, options)
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
    multiple = _multiple(request, prob_mod)
    if multiple is not None:
        return (request._replace(prob_mod=multiple),)
    first = request._replace(aux=request.aux._replace(lse=True), dropout_p=0.0)
    return first, functools.partial(_second_pass, request, prob_mod)


def _unchecked(request: Request, options: WeightOptions) -> None:
    """Do nothing: Dynamo has its own words for a function that cannot be called."""


@traced_as(_unchecked)
def _check(request: Request, options: WeightOptions) -> None:
    """Raise unless the mods can be called, under the names that the user gave them."""
    if getattr(options.weight, "function", None) is weights.softmax_one.function:
        check(request)  # its sink is made of the request
    if not isinstance(options.normalise, bool):
        raise ArgumentError(
            f"normalise must be True or False, but is {options.normalise!r}. With True, weights "
            f"are divided by their sum."
        )
    for name in ("weight", "prob_mod"):
        mod = getattr(options, name)
        if mod is not None:
            check_signature(mod, "score", name)
    # A second pass would load the lse of a query by its position in the whole sequence.
    if options.prob_mod is not None and over_ranks.get() is not None:
        raise OptionError(
            "prob_mod must be None inside of context_parallel, since it is not computed over "
            "ranks, but one is given. Leave it out, or call quire.attention in one process."
        )


def _multiple_in_graph(request: Request, prob_mod: Mod) -> Any:
    """Return the prob_mod if one pass can compute it. Dynamo traces it when it writes the call."""
    query = request.query
    if query.device.type != "cpu" or request.backend == "inductor":
        return None
    know_entries()
    return prob_mod if MULTIPLE(prob_mod, query) else None


@traced_as(_multiple_in_graph)
def _multiple(request: Request, prob_mod: Mod) -> Traced | None:
    """Return the traced prob_mod if one pass can compute it: a multiple of the probability."""
    query = request.query
    if not isinstance(query, Tensor):  # the first pass says what it must be
        return None
    if query.device.type != "cpu" or request.backend == "inductor":
        return None
    try:
        found = trace(
            prob_mod, "score", score_dtype=working_dtype(query.dtype), device=query.device
        )
    except Exception:  # the second pass runs into it again, and says what is wrong
        return None
    return found if is_multiple(found.output) else None


def _lse_as_it_is(request: Request, lse: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return lse: a graph is made, and no number can be looked at."""
    return lse, None


@traced_as(_lse_as_it_is)
def _normaliser(request: Request, lse: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return shift and share of each row: a probability is exp(score - shift) * share.

    They are lse and None, unless an lse is so far from 0 that its rounding spoils the softmax. Then
    these rows have their largest score and 1 / sum of exp(score - largest), the others lse and 1.
    The gradient of the shift is that of lse.
    """
    if is_transformed() or is_in_a_graph(lse):
        return lse, None
    far = is_far(lse.detach())
    if not bool(far.any()):
        return lse, None
    plain = request._replace(dropout_p=0.0)
    with torch.no_grad():
        as_weights = plain._replace(
            score_mod=chain(plain.score_mod, _unchanged),
            weighting="sums",
            sink=None,
            aux=NO_AUX._replace(max_scores=True),
        )
        top = compute(as_weights).max_scores
        assert top is not None, "it was asked for"
        logit = None
        if request.sink is not None:
            heads = request.sink.to(lse.dtype)
            logit = heads.view(1, -1, 1) if lse.dim() == 3 else heads
            top = torch.maximum(top, logit)
        shift = torch.where(far, top, lse)
        sums = _second_pass(plain, _unchanged, shift)._replace(aux=NO_AUX._replace(lse=True))
        total = compute(sums).lse
        assert total is not None, "it was asked for"
        if logit is not None:
            total = total + torch.exp(logit - shift)
        share = torch.where(far, 1.0 / total, 1.0)
        moved = torch.where(far, shift - lse, 0.0)
    return torch.where(far, lse + moved, lse), share


def _weighted(request: Request, weight: Mod, normalise: bool) -> Request:
    """Return a request with a weight function. Both kinds of softmax keep their running maximum."""
    kind, sink = getattr(weight, "function", None), request.sink
    if normalise and kind is weights.softmax.function:
        return request
    if normalise and kind is weights.softmax_one.function:
        zero = request.query.new_zeros(request.query.shape[1], dtype=torch.float32)
        one = zero if sink is None else torch.logaddexp(sink, torch.zeros_like(sink))
        return request._replace(sink=one)
    if sink is not None:
        raise ArgumentError(
            "a sink is one more score of a softmax, but weight= gives other weights. Leave one of "
            "them out."
        )
    if request.score_mod is not None:
        weight = ScoreChange(_of_read, mod_name(weight), weight=weight)
    score_mod = chain(request.score_mod, weight)
    return request._replace(score_mod=score_mod, weighting="shares" if normalise else "sums")


def _of_read(
    score: Tensor,
    b: Tensor,
    h: Tensor,
    q_idx: Tensor,
    kv_idx: Tensor,
    *,
    weight: Callable[..., Tensor],
) -> Tensor:
    """Return the weight of a key, which is not read if the score_mod gave it a score of -inf."""
    return torch.where(score == -torch.inf, -torch.inf, weight(score, b, h, q_idx, kv_idx))


def _second_pass(
    request: Request, prob_mod: Mod, lse: Tensor, share: Tensor | None = None
) -> Request:
    """Return the request of the second pass, with `lse` and `share` in the layout of the query.

    A probability is exp(score - lse) * share. Without `share` it is exp(score - lse).
    """
    memory, query = request.memory, request.query
    first = _first_row(request)
    tables = [None if x is None else memory.as_placed(query, x) for x in (lse, share)]
    if isinstance(first, Tensor):
        tables = [None if x is None else x[0] for x in tables]
    table = {"lse": tables[0], "share": tables[1], "first": first}
    weight = ScoreChange(_of_row, "prob_mod", prob_mod=prob_mod, **table)
    return request._replace(
        score_mod=chain(request.score_mod, weight), weighting="sums", sink=None, aux=NO_AUX
    )


def _first_row(request: Request) -> int | Tensor:
    """Return the first position of dense memory, or the row of position 0 of each sequence."""
    if isinstance(request.memory, Dense):
        return request.memory.place(request.query, request.queries).one.q_start
    return _first_rows(request)


@never_traced
def _first_rows(request: Request) -> Tensor:
    rows = request.memory.place(request.query, request.queries).sequences
    return torch.from_numpy(rows.q_row - rows.q_start)


def _of_row(
    score: Tensor,
    b: Tensor,
    h: Tensor,
    q_idx: Tensor,
    kv_idx: Tensor,
    *,
    prob_mod: Callable[..., Tensor],
    lse: Tensor,
    share: Tensor | None,
    first: int | Tensor,
) -> Tensor:
    """Return the weight of a key.

    With `lse` and `share` [B, Hq, L], `first` is the position of the first query. With [Hq, total],
    it is the row of position 0 [B].
    """
    packed = isinstance(first, Tensor)
    row = (h, first[b] + q_idx) if packed else (b, h, q_idx - first)  # type: ignore[index]
    prob = torch.exp(score - lse[row])
    if share is not None:
        prob = prob * share[row]
    return _unless_unread(score, prob_mod(prob, b, h, q_idx, kv_idx), prob_mod)


def _unless_unread(score: Tensor, weight: Any, prob_mod: Mod) -> Tensor:
    if weight is None or isinstance(weight, str | tuple | list | dict):
        raise ModResultError(
            f"prob_mod {mod_name(prob_mod)!r} must return one scalar for each element, but "
            f"returned {type(weight).__name__}. Return what the value is multiplied by."
        )
    return torch.where(score == -torch.inf, -torch.inf, weight)
