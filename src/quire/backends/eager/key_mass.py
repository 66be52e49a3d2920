"""How much attention each key received: the probabilities summed over queries.

Probabilities need the log-sum-exp of the whole row, so this is a second pass over all tiles, which
computes their scores again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.backends.eager.far import normaliser
from quire.backends.eager.tile import Tile, probabilities
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
            rows = query[stripe.rows].to(placed.dtype)
            below, part = (x[stripe.rows].unsqueeze(-1) for x in (shift, share))
            for keys in stripe.tiles:
                tile = Tile(problem, placed, stripe, keys)
                if tile.is_empty:
                    continue
                scores = tile.masked(tile.modified(tile.raw_scores(rows)))
                here = mass[stripe.batch, stripe.heads, keys.positions]
                here += (probabilities(scores, below) * part).sum(-2)
    return mass
