"""The probabilities of chosen rows, tile by tile; no other row is computed."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from quire.backends.eager.per_sequence import in_rows
from quire.backends.eager.tile import scored_tiles, subtrahend
from quire.backends.eager.tiling import stripes
from quire.memory import Placed, longest
from quire.request import Problem
from quire.results import divisor_of


@torch.no_grad()
def weights(problem: Problem, placed: Placed, sink: Tensor | None, chosen: Tensor) -> Tensor:
    """Return the probabilities, before dropout, of the rows `chosen` of query [B, Hq, L, D].

    The result is [B, Hq, chosen, S]. If there are several sequences, S is the length of the
    longest, and column i is position i of the row's own sequence.
    """
    rows, order = torch.unique(chosen, return_inverse=True)
    width = placed.key.shape[2]
    if not placed.is_dense:
        width = max(placed.positions, longest(placed.sequences.kv_end))
    shape = (*placed.query.shape[:2], len(rows), width)
    scores = placed.query.new_full(shape, -math.inf, dtype=placed.dtype)
    for dense, queries, _ in in_rows(placed).each():
        inside = (rows >= queries.start) & (rows < queries.stop)
        at = slice(int((rows < queries.start).sum()), int((rows < queries.stop).sum()))
        begin = 0 if placed.is_dense else dense.one.kv_begin
        part = scores[:, :, at, begin : begin + dense.key.shape[2]]
        _fill(part, problem, dense, (rows[inside] - queries.start).tolist())
    if problem.weighting == "softmax":
        return _softmax(scores, sink)[:, :, order]
    given = torch.where(scores == -math.inf, 0.0, scores)
    return (given / divisor_of(problem.weighting, given.sum(-1, keepdim=True)))[:, :, order]


def _fill(scores: Tensor, problem: Problem, placed: Placed, rows: list[int]) -> None:
    """Write the scores of some rows of dense memory, after all mods."""
    for stripe in stripes(problem, placed):
        for first, run in _runs(rows, stripe.queries):
            some = stripe._replace(queries=run)
            here = scores[stripe.batch, stripe.heads, first : first + run.stop - run.start]
            for tile, found in scored_tiles(problem, placed, some):
                here[..., tile.key_range.positions] = found


def _runs(rows: list[int], within: slice) -> Iterator[tuple[int, slice]]:
    """Yield runs of neighbours in sorted `rows`, within a range; each with its place in `rows`."""
    first = 0
    for place, row in enumerate(rows):
        if place + 1 < len(rows) and rows[place + 1] == row + 1 != within.stop:
            continue
        begin, end = max(rows[first], within.start), min(row + 1, within.stop)
        if begin < end:
            yield first + begin - rows[first], slice(begin, end)
        first = place + 1


def _softmax(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Return the probabilities of whole rows; 0 where the score is -inf."""
    if scores.shape[-1] == 0:
        return scores
    top = scores.amax(-1, keepdim=True)
    if sink is not None:
        top = torch.maximum(top, sink.to(scores.dtype).view(1, -1, 1, 1))
    below = torch.exp(scores - subtrahend(top))
    total = below.sum(-1, keepdim=True)
    if sink is not None:
        total += torch.exp(sink.to(scores.dtype).view(1, -1, 1, 1) - subtrahend(top))
    return torch.where(scores == -math.inf, 0.0, below / total)
