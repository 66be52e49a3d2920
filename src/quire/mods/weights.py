"""Weights that are not a softmax: from a score to how much of a value a query gets.

    attention(query, memory, weight=sigmoid(-math.log(2048)), normalise=False)
    attention(query, memory, weight=squared_relu)

A weight is a function of (score, b, h, q_idx, kv_idx), written like a score_mod, and comes after
the score_mod. The output is the sum of weight times value. With `normalise`, which is the default,
it is divided by the sum of the weights. A weight of -inf means that the key is not read.
"""

from __future__ import annotations

from numbers import Real
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.checks.arguments import tensor_of
from quire.mods.compose import ScoreChange

__all__ = ["exp", "relu", "sigmoid", "softmax", "softmax_one", "softplus", "squared_relu"]

Weighting: TypeAlias = Literal["softmax", "shares", "sums"]
"""What becomes of a score: an exponent of the softmax; a weight, divided by the sum of weights; or
a weight as it is."""


@ScoreChange
def exp(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Weigh a key by exp(score). It overflows where `softmax`, which is the same, does not."""
    return torch.exp(score)


@ScoreChange
def softmax(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Weigh a key by exp(score - largest score), the default."""
    return torch.exp(score)


@ScoreChange
def softmax_one(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Weigh a key by exp(score) / (1 + sum of exp(score)): a query may attend to little.

    This is a softmax with one more score of 0 that has no value, as `sink=torch.zeros(heads)`.
    """
    return torch.exp(score)


@ScoreChange
def relu(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Weigh a key by its score, and by 0 if that is negative."""
    return torch.relu(score)


@ScoreChange
def squared_relu(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Weigh a key by the square of its score, and by 0 if that is negative (Primer)."""
    return torch.relu(score) ** 2


@ScoreChange
def softplus(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Weigh a key by log(1 + exp(score))."""
    return F.softplus(score)


def sigmoid(bias: float | Tensor = 0.0) -> ScoreChange:
    """Weigh a key by sigmoid(score + bias).

    `bias` is a number or a float tensor [] or [Hq], which may be learned. Sigmoid attention is used
    with `normalise=False` and a bias of -log(number of keys), so that weights add up to about 1.
    """
    if isinstance(bias, bool) or not isinstance(bias, Real | torch.SymFloat | torch.SymInt):
        advice = "Give one number, or one for each query head."
        bias = tensor_of("floats", "bias", bias, ranks=(0, 1), advice=advice)
    return ScoreChange(_sigmoid, "sigmoid", bias=bias)


def _sigmoid(
    score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, bias: float | Tensor
) -> Tensor:
    by_head = isinstance(bias, Tensor) and bias.ndim == 1
    return torch.sigmoid(score + (bias[h] if by_head else bias))  # type: ignore[index]
