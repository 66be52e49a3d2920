"""What attention computes: the results and gradients that every backend returns."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Result(NamedTuple):
    """out [B, Hq, L, Dv], key_mass [B, Hq, S], all others [B, Hq, L]; None if not requested."""

    out: Tensor
    lse: Tensor | None = None
    max_scores: Tensor | None = None
    argmax: Tensor | None = None
    entropy: Tensor | None = None
    key_mass: Tensor | None = None

    @property
    def by_query(self) -> dict[str, Tensor]:
        """Return the results that have a row for each query and are not None, by name."""
        named = zip(self._fields[:-1], self[:-1], strict=True)
        return {name: rows for name, rows in named if rows is not None}


def nowhere(weighting: str) -> dict[str, float]:
    """Return the results of a query that reads no key; `lse` is a sum unless of a softmax."""
    lse = -math.inf if weighting == "softmax" else 0.0
    return {"out": 0.0, "lse": lse, "max_scores": -math.inf, "argmax": -1, "entropy": 0.0}


class Wanted(NamedTuple):
    """Which gradients to compute: query, key, value, and each capture that requires grad."""

    query: bool
    key: bool
    value: bool
    captures: tuple[Tensor, ...]
    learned: tuple[int, ...]  # the indices of the captures that require grad

    @staticmethod
    def of(query: bool, key: bool, value: bool, captures: tuple[Tensor, ...] = ()) -> Wanted:
        """Return what to compute, with the captures that require grad as `learned`."""
        learned = tuple(n for n, tensor in enumerate(captures) if tensor.requires_grad)
        return Wanted(query, key, value, captures, learned)

    @property
    def scores(self) -> bool:
        """Return whether one of them needs the gradient of the scores."""
        return self.query or self.key or bool(self.learned)


class Above(NamedTuple):
    """The inputs of a backward pass: results of the forward pass, and their gradients.

    `out` [B, Hq, L, Dv] and `lse` [B, Hq, L] have the working dtype. `grad_out` and `grad_lse` have
    the same shapes; None stands for zeros. `whole` says that `lse` covers exactly the keys of this
    pass and the sink; it is False if `lse` also covers keys that are elsewhere.
    """

    out: Tensor
    lse: Tensor
    grad_out: Tensor | None
    grad_lse: Tensor | None
    sink: Tensor | None = None
    whole: bool = True

    def of_weights(self, weighting: str) -> Above:
        """Return the inputs with the share of each weight as lse.

        With P = weight * share, the gradient of a weight is share * (dP - delta) for every
        weighting, with delta = sum(grad_out * out) - grad_lse. If nothing is divided, the first
        term is missing, as if out were 0. The inputs of a softmax stay as they are.
        """
        if weighting == "softmax":
            return self
        out, lse, _, grad_lse = self[:4]
        if weighting == "sums":
            out = out.new_zeros(()).expand(out.shape)
        elif grad_lse is not None:
            grad_lse = grad_lse * lse
        return self._replace(out=out, lse=1.0 / divisor_of(weighting, lse), grad_lse=grad_lse)

    def at(self, rows: slice) -> Above:
        """Return the inputs for a slice of the queries."""
        grads = [None if x is None else x[:, :, rows] for x in (self.grad_out, self.grad_lse)]
        out, lse = (x[:, :, rows] for x in (self.out, self.lse))
        return self._replace(out=out, lse=lse, grad_out=grads[0], grad_lse=grads[1])


def divisor_of(weighting: str, total: Tensor) -> Tensor:
    """Return what weights are divided by, from their sums. 1 / divisor may overflow."""
    if weighting == "sums":
        return torch.ones_like(total)
    return torch.where(total == 0.0, math.inf, total)


class Tangents(NamedTuple):
    """The direction of a derivative: a tangent like each operand and capture; None stands for 0."""

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    sink: Tensor | None = None
    captures: tuple[Tensor | None, ...] = ()


class Moved(NamedTuple):
    """The results of a call, and the tangents of out and lse; None if one is not finite."""

    results: Result
    tangents: Result | None


class Gradients(NamedTuple):
    """The gradients of a call, or what one tile adds to them; None if not wanted.

    Those of a call have `delta` and `lse` [B, Hq, L] too: the gradient of the sink needs them.
    """

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    captures: tuple[Tensor | None, ...]
    delta: Tensor | None = None
    lse: Tensor | None = None

    def plus(self, other: Gradients) -> Gradients:
        """Return the sums with the gradients of other queries of the same call."""
        both = ((self.query, other.query), (self.key, other.key), (self.value, other.value))
        query, key, value = (None if x is None or y is None else x + y for x, y in both)
        return self._replace(query=query, key=key, value=value)

    def of_scaled(self, key_scale: Tensor | None, value_scale: Tensor | None) -> Gradients:
        """Return the gradients of stored numbers, which are multiplied by scales [P, Hkv, page]."""
        key, value = self.key, self.value
        if key is not None and key_scale is not None:
            key = key * key_scale.unsqueeze(-1)
        if value is not None and value_scale is not None:
            value = value * value_scale.unsqueeze(-1)
        return self._replace(key=key, value=value)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores, sums, lse, max_scores and entropy, for queries of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def folded(parts: Tensor) -> Tensor:
    """Return `parts` [N, ...] summed over N, in an order that does not depend on threads.

    The sum overwrites `parts`, unless autograd records.
    """
    if torch.is_grad_enabled():
        return parts.sum(0)
    count = parts.shape[0]
    while count > 1:
        half = count // 2
        parts[:half] += parts[count - half : count]
        count -= half
    return parts[0] if count else parts.sum(0)


def far_from_zero(eps: float) -> float:
    """Return the smallest |lse| at which rounding lse by `eps` may change weights by 2**-10.

    exp(score - lse) has the absolute error of lse, which grows with |lse|.
    """
    return 2.0**-9 / eps


def is_far(lse: Tensor) -> Tensor:
    """Return where `lse` [B, Hq, L] is finite, but too far from 0 to be precise."""
    size = lse.abs()
    return (size >= far_from_zero(torch.finfo(lse.dtype).eps)) & (size < math.inf)
