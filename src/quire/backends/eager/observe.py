"""The argmax and the entropy of each row, updated tile by tile."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Observed(NamedTuple):
    """`place`, the position of the largest score, and `surprise` = sum(weight * (score - largest)).

    Weights are exp(score - largest), as in the running softmax. Both tensors are [b, h, rows, 1].
    """

    place: Tensor
    surprise: Tensor

    @staticmethod
    def before(peak: Tensor) -> Observed:
        """Return the state before the first tile."""
        return Observed(torch.full_like(peak, -1, dtype=torch.int64), torch.zeros_like(peak))

    def after(
        self,
        scores: Tensor,
        kv_idx: Tensor,
        weights: Tensor,
        *,
        peak: Tensor,
        total: Tensor,
        shift: Tensor,
    ) -> Observed:
        """Return the state after one more tile, whose weights are exp(score - shift).

        `peak` and `total` are the maximum and the sum of weights before this tile.
        """
        best, at = scores.max(-1, keepdim=True)
        higher = (best > peak) | (best.isnan() & ~peak.isnan())
        rescale = torch.exp(peak - shift)
        moved = rescale * (self.surprise + total * (peak - shift))
        terms = torch.where(weights == 0, 0.0, weights * (scores - shift))
        return Observed(
            torch.where(higher, kv_idx[at], self.place),
            torch.where(rescale == 0, 0.0, moved) + terms.sum(-1, keepdim=True),
        )

    def entropy(self, total: Tensor, whole: Tensor, below: Tensor) -> Tensor:
        """Return the entropy of the probabilities, after the last tile.

        `total` is the sum of exp(score - m) over keys, with m the largest score of a key. `whole`
        is the sum of exp(score - n) over keys and sink, with n the larger of m and the sink.
        `below` is m - n.
        """
        rescale = torch.exp(below)
        terms = self.surprise + total * (below - torch.log(whole))
        share = torch.where(whole == 0, 0.0, rescale / whole)
        return (0.0 - share * torch.where(rescale == 0, 0.0, terms)).clamp(min=0.0)
