"""The scores of one tile [b, h, rows, keys] in the working dtype, and sums over its keys.

No tensor here is larger than a tile. Every step can be differentiated; autograd records it if the
caller has gradients enabled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from quire.backends.eager.tiling import Keys, Stripe
from quire.ir.graph import Node
from quire.ir.interpret import interpret
from quire.ir.trace import MASK_INPUTS
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
        """Return the keys of the tile: [b or 1, kvh, keys, D]."""
        key = self.placed.key
        return key[self.stripe.rows_of(self.key_range, key)].to(self.placed.dtype)

    @cached_property
    def values(self) -> Tensor:
        """Return the values of the tile: [b or 1, kvh, keys, Dv]."""
        value = self.placed.value
        return value[self.stripe.rows_of(self.key_range, value)].to(self.placed.dtype)

    @cached_property
    def indices(self) -> Indices:
        """Return the absolute b, h, q_idx and kv_idx of the tile, each a 1-D tensor."""
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
        """Return where all masks are true, broadcastable to the scores; None for everywhere."""
        mask = None
        for mod in self.key_range.masks:
            allowed = evaluate(mod, "mask", *self.indices)
            mask = allowed if mask is None else mask & allowed
        return mask

    @property
    def is_empty(self) -> bool:
        """Return whether no query of the tile reads a key."""
        return self.mask is not None and not bool(self.mask.any())

    def raw_scores(self, rows: Tensor) -> Tensor:
        """Return the scaled scores of query rows [b, h, rows, D], before any mod."""
        products = by_group(rows, self.keys) @ self.keys.transpose(-2, -1)
        return products.view(*rows.shape[:-1], -1) * self.problem.scale

    def modified(self, raw: Tensor, *, only: Tensor | None = None) -> Tensor:
        """Return the scores after the score_mod. With `only`, call it just where this is true."""
        mod = self.problem.score_mod
        if mod is None:
            return raw
        if only is not None:
            return evaluate_live(mod, "score", self.indices, raw, only)
        scores = evaluate(mod, "score", *self.indices, score=raw, live=self.mask)
        return scores.to(raw.dtype).broadcast_to(raw.shape)

    def of_graph(self, graph: Node, captures: Sequence[Tensor], given: dict[str, Tensor]) -> Tensor:
        """Return the value of a graph of positions and other inputs, which are like the scores."""
        shapes = ((-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1))
        positions = (x.view(shape) for x, shape in zip(self.indices, shapes, strict=True))
        env = dict(zip(MASK_INPUTS, positions, strict=True)) | given
        return interpret(graph, env, captures, live=self.mask)

    def masked(self, scores: Tensor) -> Tensor:
        """Return the scores with -inf where the mask is false."""
        return scores if self.mask is None else torch.where(self.mask, scores, -math.inf)

    def reweighed(self, weights: Tensor, along: Tensor | None = None) -> Tensor:
        """Return the weights after prob_mod and dropout, which both multiply. 0 stays 0.

        With `along`, return that times their factors, where weights are not 0.
        """
        mod, changed = self.problem.prob_mod, weights if along is None else along
        if mod is not None:
            live = weights != 0
            found = evaluate(mod, "score", *self.indices, score=changed, live=live)
            changed = torch.where(live, found.to(weights.dtype), 0.0)
        return self.dropped(changed)

    def dropped(self, weights: Tensor) -> Tensor:
        """Return the weights after dropout."""
        dropout = self.problem.dropout
        if dropout is None:
            return weights
        return torch.where(self._kept, weights * dropout.factor, 0.0)

    @cached_property
    def _kept(self) -> Tensor:
        assert self.problem.dropout is not None
        return evaluate(self.problem.dropout.keep, "mask", *self.indices)


def scored_tiles(problem: Problem, placed: Placed, stripe: Stripe) -> Iterator[tuple[Tile, Tensor]]:
    """Yield the tiles of a stripe that are not empty, with their scores [b, h, rows, keys].

    Scores are those after the score_mod, and -inf where the mask is false.
    """
    rows = placed.query[stripe.rows].to(placed.dtype)
    for keys in stripe.tiles:
        tile = Tile(problem, placed, stripe, keys)
        if not tile.is_empty:
            yield tile, tile.masked(tile.modified(tile.raw_scores(rows)))


def probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """Return exp(scores - lse), the softmax of rows with log-sum-exp `lse`; 0 for a score of -inf.

    An lse of -inf is that of a row that reads no key; a row with an lse of inf becomes NaN.
    """
    shift = torch.where(lse.isinf(), math.nan, lse)
    return torch.exp(torch.where(scores != -math.inf, scores - shift, -math.inf))


class Weighed(NamedTuple):
    """The probabilities of a tile, and the factor from their gradients to those of scores."""

    probabilities: Tensor
    slope: Tensor


def weigh(problem: Problem, scores: Tensor, divisor: Tensor) -> Weighed:
    """Return what scores [b, h, rows, keys] become, with a number of each row [b, h, rows, 1].

    `divisor` is the log-sum-exp of a softmax, or else the `divisor_of` the sum of weights.
    """
    if problem.weighting == "softmax":
        found = probabilities(scores, divisor)
        return Weighed(found, found)
    return Weighed(torch.where(scores != -math.inf, scores, 0.0) / divisor, 1.0 / divisor)


def subtrahend(peak: Tensor) -> Tensor:
    """Return `peak`, or 0 if it is -inf: scores of -inf minus this are -inf, not NaN."""
    return torch.where(peak == -math.inf, 0.0, peak)


def by_group(rows: Tensor, keys: Tensor) -> Tensor:
    """Return rows [b, h, r, n] as [b, kvh, h / kvh * r, n], for keys [b or 1, kvh, ...].

    The query heads of a group become rows of their key head, so that keys need not be repeated.
    """
    return rows.reshape(rows.shape[0], keys.shape[1], -1, rows.shape[-1])


def weighted_sum(weights: Tensor, rows: Tensor, read: Tensor) -> Tensor:
    """Return weights [b, h, m, n] @ rows [b or 1, h, n, d], where only `read` [b, h, m, n] counts.

    The other weights are 0, but 0 times inf or NaN is NaN. So rows that are not finite are added
    one by one, only where they are read.
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
