"""A mod on probabilities: what a query does with the softmax of its scores.

    compute(request, prob_mod)    two passes over the keys

The first pass gives the log-sum-exp of each row. In the second pass a score becomes the
probability exp(score - lse), `prob_mod` changes it, and the result is the weight of the value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.aux_outputs import NO_AUX
from quire.errors import ArgumentError
from quire.ir.trace import Mod
from quire.memory import One
from quire.mods.compose import ScoreChange, chain
from quire.plans import compute as compute_request
from quire.request import Request
from quire.results import Result


def compute(request: Request, prob_mod: Mod) -> Result:
    """Compute a request whose probabilities `prob_mod` changes, before dropout.

    Results besides the output are those of the softmax.
    """
    softmax = request._replace(aux=request.aux._replace(lse=True), dropout_p=0.0)
    result = compute_request(softmax)
    out = compute_request(second_pass(request, result.lse, prob_mod)).out
    return result._replace(out=out)


def check_softmax(request: Request) -> None:
    """Raise if the weights of a request are not those of a softmax."""
    if request.weighting != "softmax":
        raise ArgumentError(
            "prob_mod must follow a softmax, but weight= gives other weights. Put what it does "
            "into the weight function."
        )


def second_pass(request: Request, lse: Tensor | None, prob_mod: Mod) -> Request:
    """Return the request of the second pass, with `lse` in the layout of the query."""
    assert lse is not None, "the first pass was asked for it"
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
