"""What attention computes: the values that every backend gives, and that autograd asks for."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Result(NamedTuple):
    """The output, what is known about each query, and what about each key.

    out [B, Hq, L, Dv], key_mass [B, Hq, S], the others [B, Hq, L]. A result that nobody asked for
    is None.
    """

    out: Tensor
    lse: Tensor | None = None
    max_scores: Tensor | None = None
    argmax: Tensor | None = None
    entropy: Tensor | None = None
    key_mass: Tensor | None = None

    @property
    def by_query(self) -> dict[str, Tensor]:
        """The results that exist and have a row for each query, by name."""
        named = zip(self._fields[:-1], self[:-1], strict=True)
        return {name: rows for name, rows in named if rows is not None}


NOWHERE = {"out": 0.0, "lse": -math.inf, "max_scores": -math.inf, "argmax": -1, "entropy": 0.0}
"""What a row holds that may attend nowhere."""


class Wanted(NamedTuple):
    """Whose gradients are wanted. Of the captured tensors: of those that require one."""

    query: bool
    key: bool
    value: bool
    captures: tuple[Tensor, ...]
    learned: tuple[int, ...]  # the places of the captured tensors that require a gradient

    @staticmethod
    def of(query: bool, key: bool, value: bool, captures: tuple[Tensor, ...] = ()) -> Wanted:
        """Those of the operands that are named, and of the captures that require one."""
        learned = tuple(n for n, tensor in enumerate(captures) if tensor.requires_grad)
        return Wanted(query, key, value, captures, learned)

    @property
    def scores(self) -> bool:
        """Whether any of them needs the gradient of the scores."""
        return self.query or self.key or bool(self.learned)


class Above(NamedTuple):
    """What a backward pass starts from.

    `out` [B, Hq, L, Dv] and `lse` [B, Hq, L] are results of the forward pass in the working dtype.
    The gradients have their shapes. One that is None is zero. They are `whole` if `lse` is that of
    the sink, if any, and of all keys that are at hand.
    """

    out: Tensor
    lse: Tensor
    grad_out: Tensor | None
    grad_lse: Tensor | None
    sink: Tensor | None = None
    whole: bool = True

    def at(self, rows: slice) -> Above:
        """That of some queries."""
        grads = [None if x is None else x[:, :, rows] for x in (self.grad_out, self.grad_lse)]
        out, lse = (x[:, :, rows] for x in (self.out, self.lse))
        return self._replace(out=out, lse=lse, grad_out=grads[0], grad_lse=grads[1])


class Gradients(NamedTuple):
    """The gradients that are wanted, of a call or from one tile; None for the others.

    Those of a call come with `delta` and `lse` of all rows [B, Hq, L], from which the gradient of a
    sink follows.
    """

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    captures: tuple[Tensor | None, ...]
    delta: Tensor | None = None
    lse: Tensor | None = None


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, sums, lse, max_scores, entropies and sinks, for queries of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def output_layout(query: Tensor, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The output's shape and strides: dense, its dimensions in the order of the query's.

    As in PyTorch the head dimension is the innermost, whatever the query's is.
    """
    shape = (*query.shape[:-1], head_dim)
    inner_first = sorted(range(4), key=lambda dim: (query.stride(dim), -dim))
    strides = _dense_strides(shape, inner_first)
    if strides[-1] != 1:
        inner_first.remove(3)
        strides = _dense_strides(shape, [3, *inner_first])
    return shape, strides


def _dense_strides(shape: tuple[int, ...], inner_first: list[int]) -> tuple[int, ...]:
    strides, step = [0] * len(shape), 1
    for dim in inner_first:
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def folded(parts: Tensor) -> Tensor:
    """The sum over the first dimension, halves upon halves: in one order whatever the threads.

    It is made in `parts`, unless gradients are recorded.
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
    """The least size of a log-sum-exp whose rounding by `eps` may change weights by 2**-10.

    exp(score - lse) is as wrong as lse is, and more so the farther from 0.
    """
    return 2.0**-9 / eps


def is_far(lse: Tensor) -> Tensor:
    """Where a log-sum-exp is finite, but too far from 0 to be precise."""
    size = lse.abs()
    return (size >= far_from_zero(torch.finfo(lse.dtype).eps)) & (size < math.inf)
