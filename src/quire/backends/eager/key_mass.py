"""How much attention each key received: the probabilities summed over queries.

Probabilities need the log-sum-exp of the whole row, so this is a second pass over all tiles, which
computes their scores again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.backends.eager.far import normaliser
from quire.backends.eager.tile import probabilities, scored_tiles
from quire.backends.eager.tiling import stripes
from quire.memory import Placed
from quire.request import Problem


def key_mass(problem: Problem, placed: Placed, lse: Tensor, sink: Tensor | None) -> Tensor:
    """Return the probabilities before dropout, summed over the queries of each head: [B, Hq, S].

    `lse` [B, Hq, L] is a result of the forward pass, `sink` is [Hq].
    """
    query, key, _ = placed.operands
    mass = lse.new_zeros((*query.shape[:2], key.shape[2]))
    found = normaliser(problem, placed, None, lse, sink)
    shift, share = found or (lse, torch.ones_like(lse))
    with torch.no_grad():
        for stripe in stripes(problem, placed):
            below, part = (x[stripe.rows].unsqueeze(-1) for x in (shift, share))
            for tile, scores in scored_tiles(problem, placed, stripe):
                here = mass[stripe.batch, stripe.heads, tile.key_range.positions]
                here += (probabilities(scores, below) * part).sum(-2)
    return mass
