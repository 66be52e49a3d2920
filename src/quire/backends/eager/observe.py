"""What a row has seen so far of the scores themselves: where the largest is, and the entropy."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Observed(NamedTuple):
    """The place of the largest score, and `surprise`, the sum of weight * (score - largest).

    Weights are exp(score - largest), as in the running softmax. Both are columns [b, h, rows, 1].
    """

    place: Tensor
    surprise: Tensor

    @staticmethod
    def nothing(peak: Tensor) -> Observed:
        """Before the first tile."""
        return Observed(torch.full_like(peak, -1, dtype=torch.int64), torch.zeros_like(peak))

    def after(
        self,
        scores: Tensor,
        kv_idx: Tensor,
        weights: Tensor,
        peak: Tensor,
        total: Tensor,
        shift: Tensor,
    ) -> Observed:
        """With one more tile, whose weights are relative to exp(shift).

        `peak` and `total` are the maximum and the sum of weights before it.
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
        """That of the probabilities, where all has been read.

        `total` is the sum of weights, `whole` that with a sink, relative to a maximum which is
        higher by -`below`.
        """
        rescale = torch.exp(below)
        terms = self.surprise + total * (below - torch.log(whole))
        share = torch.where(whole == 0, 0.0, rescale / whole)
        return (0.0 - share * torch.where(rescale == 0, 0.0, terms)).clamp(min=0.0)
