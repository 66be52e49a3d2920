"""The scores of one tile, and sums over its keys.

Comes in: a problem, operands in dense memory, a stripe and a tile. Goes out: tensors
[b, h, rows, keys] in the working dtype. Nothing here is larger than a tile. Every step can be
differentiated, and is recorded where the caller has gradients enabled.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from quire.backends.eager.tiling import Keys, Stripe
from quire.ir.vectorise import Indices, evaluate, evaluate_live
from quire.memory import Placed
from quire.request import Problem


class Tile:
    """A stripe of queries against a range of keys."""

    def __init__(self, problem: Problem, placed: Placed, stripe: Stripe, keys: Keys) -> None:
        self.problem = problem
        self.placed = placed
        self.stripe = stripe
        self.key_range = keys

    @cached_property
    def keys(self) -> Tensor:
        """[b or 1, kvh, keys, D]."""
        key = self.placed.key
        return key[self.stripe.rows_of(self.key_range, key)].to(self.placed.dtype)

    @cached_property
    def values(self) -> Tensor:
        """[b or 1, kvh, keys, Dv]."""
        value = self.placed.value
        return value[self.stripe.rows_of(self.key_range, value)].to(self.placed.dtype)

    @cached_property
    def indices(self) -> Indices:
        """The absolute b, h, q_idx and kv_idx of the tile."""
        rows, stripe = self.placed.one, self.stripe
        ranges = (
            (stripe.batch, rows.b),
            (stripe.heads, 0),
            (stripe.queries, rows.q_start),
            (self.key_range.positions, rows.kv_begin),
        )
        device = self.placed.query.device
        b, h, q_idx, kv_idx = (
            torch.arange(part.start + at, part.stop + at, device=device) for part, at in ranges
        )
        return b, h, q_idx, kv_idx

    @cached_property
    def mask(self) -> Tensor | None:
        """Where the masks hold, broadcastable to the scores; None for everywhere."""
        mask = None
        for mod in self.key_range.masks:
            holds = evaluate(mod, "mask", *self.indices)
            mask = holds if mask is None else mask & holds
        return mask

    @property
    def is_empty(self) -> bool:
        """Whether the masks hold nowhere."""
        return self.mask is not None and not bool(self.mask.any())

    def raw_scores(self, rows: Tensor) -> Tensor:
        """The scaled scores of the stripe's `rows` of the query, before any mod."""
        products = by_group(rows, self.keys) @ self.keys.transpose(-2, -1)
        return products.view(*rows.shape[:-1], -1) * self.problem.scale

    def modified(self, raw: Tensor, *, only: Tensor | None = None) -> Tensor:
        """Scores after the score_mod, which may be called `only` where this holds."""
        mod = self.problem.score_mod
        if mod is None:
            return raw
        if only is not None:
            return evaluate_live(mod, "score", self.indices, raw, only)
        scores = evaluate(mod, "score", *self.indices, score=raw, live=self.mask)
        return scores.to(raw.dtype).broadcast_to(raw.shape)

    def masked(self, scores: Tensor) -> Tensor:
        """Scores with -inf where the mask is false."""
        return scores if self.mask is None else torch.where(self.mask, scores, -math.inf)

    def dropped(self, weights: Tensor) -> Tensor:
        """Weights after dropout."""
        dropout = self.problem.dropout
        if dropout is None:
            return weights
        return torch.where(self._kept, weights * dropout.factor, 0.0)

    @cached_property
    def _kept(self) -> Tensor:
        assert self.problem.dropout is not None
        return evaluate(self.problem.dropout.keep, "mask", *self.indices)


def probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """What softmax makes of scores whose row has the log-sum-exp `lse`; 0 where one is -inf.

    An infinite lse is that of a row that reads nothing, or of one that is NaN.
    """
    shift = torch.where(lse.isinf(), math.nan, lse)
    return torch.exp(torch.where(scores != -math.inf, scores - shift, -math.inf))


def subtrahend(peak: Tensor) -> Tensor:
    """A maximum that can be subtracted from scores: 0 where there is none yet."""
    return torch.where(peak == -math.inf, 0.0, peak)


def by_group(rows: Tensor, keys: Tensor) -> Tensor:
    """Rows [b, h, r, n] as [b, kvh, h / kvh * r, n]: the heads of a group read one key head.

    So keys are never repeated. It is a view, or a copy of a tile.
    """
    return rows.reshape(rows.shape[0], keys.shape[1], -1, rows.shape[-1])


def weighted_sum(weights: Tensor, rows: Tensor, read: Tensor) -> Tensor:
    """weights [b, h, m, n] @ rows [b or 1, h, n, d], in which `read` [b, h, m, n] is exact.

    A weight that is not read is 0, but 0 times a row that is not finite is not: such rows are
    added one by one, to what reads them.
    """
    finite = torch.isfinite(rows.detach()).all(-1)
    if bool(finite.all()):
        return weights @ rows
    total = weights @ torch.where(finite.unsqueeze(-1), rows, 0.0)
    for at in (~finite).any(0).any(0).nonzero().flatten().tolist():
        reached = read[..., at] & ~finite[..., at, None]
        row = torch.where(reached.unsqueeze(-1), rows[..., at, None, :], 0.0)
        total = total + weights[..., at, None] * row
    return total
