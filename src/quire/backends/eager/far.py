"""Rows whose log-sum-exp is so far from 0 that its rounding spoils the softmax.

    scores -1e9, -1e9, -1e9      log-sum-exp -1e9 + log 3, in float32 -1e9

Then exp(score - lse) is 1 for each of the three keys, not 1/3. For such rows, the backward pass
computes the largest score and the sum of exp(score - largest) again, and uses them instead of lse.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from quire.backends.eager.tile import scored_tiles, subtrahend
from quire.backends.eager.tiling import Stripe, stripes
from quire.block_mask.blocks import BlockRows
from quire.memory import Placed
from quire.request import Problem
from quire.results import is_far


class Normaliser(NamedTuple):
    """Numbers of each row [B, Hq, L], with probability = exp(score - shift) * share."""

    shift: Tensor
    share: Tensor


def normaliser(
    problem: Problem, placed: Placed, blocks: BlockRows | None, lse: Tensor, sink: Tensor | None
) -> Normaliser | None:
    """Return shift and share of all rows: lse and 1, except in rows far from 0. None if none is.

    `lse` is [B, Hq, L], `sink` [Hq]. Autograd differentiates the shift as if it were lse.
    """
    far = is_far(lse)
    if problem.weighting != "softmax" or not bool(far.any()):
        return None
    shift, share = lse.detach().clone(), torch.ones_like(lse)
    with torch.no_grad():
        for stripe in stripes(problem, placed, blocks):
            here = far[stripe.rows]
            if bool(here.any()):
                peak, total = _largest_and_sum(problem, placed, stripe, sink)
                shift[stripe.rows] = torch.where(here, peak, shift[stripe.rows])
                share[stripe.rows] = torch.where(here, 1.0 / total, 1.0)
    return Normaliser(torch.where(far, lse + (shift - lse).detach(), lse), share)


def _largest_and_sum(
    problem: Problem, placed: Placed, stripe: Stripe, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the largest score and the sum of exp(score - largest) of each row of a stripe."""
    rows = placed.query[stripe.rows]
    peak = rows.new_full((*rows.shape[:-1], 1), -math.inf, dtype=placed.dtype)
    if sink is not None:
        peak = peak.maximum(sink[stripe.heads].to(peak.dtype).view(1, -1, 1, 1))
    total = torch.exp(peak - subtrahend(peak))
    for _, scores in scored_tiles(problem, placed, stripe):
        higher = torch.maximum(peak, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - subtrahend(higher))
        total = total * torch.exp(peak - subtrahend(higher)) + weights.sum(-1, keepdim=True)
        peak = higher
    return peak.squeeze(-1), total.squeeze(-1)
