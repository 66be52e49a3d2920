"""QUIRE_CHECK=1: what a kernel computed, computed again in float64 for some rows of it."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

from quire.aux_outputs import AuxRequest
from quire.config import config
from quire.eager import Operands, Result
from quire.eager.forward import forward_stripe
from quire.eager.tiling import Sizes, Stripe, stripes
from quire.errors import KernelMismatchError
from quire.problem import Problem

ROUNDINGS = 256
"""How many roundings of the largest value a result may be off by."""


def recheck(problem: Problem, operands: Operands, sink: Tensor | None, result: Result) -> None:
    """Compare stripes of rows, chosen at random, with float64; raise where they differ.

    As many as have `config().check_rows` rows together; of a small result that is all of it.
    """
    every = list(stripes(problem, Sizes.of(operands.query, operands.key)))
    exact = Operands(*(tensor.double() for tensor in operands))
    looked_at = 0
    for stripe in random.sample(every, len(every)):
        if looked_at >= config().check_rows:
            break
        looked_at += math.prod(part.stop - part.start for part in stripe.rows)
        wanted = AuxRequest(entropy=result.entropy.dim() > 1)
        expected = forward_stripe(problem, exact, stripe, sink, wanted)
        size = _largest(expected.lse)
        for name, ours, theirs in zip(Result._fields, result, expected, strict=True):
            # Of two scores that are all but equal, either may be the larger one; and the mass of
            # a key is no matter of some rows.
            if name not in ("argmax", "key_mass") and ours.dim() > 1:
                _compare(name, ours[stripe.rows], theirs, size, stripe, operands.query.dtype)


def _compare(
    name: str, actual: Tensor, expected: Tensor, size: float, stripe: Stripe, dtype: torch.dtype
) -> None:
    # An entropy is a small difference of scores, however large they are: their `size` counts.
    largest = max(_largest(expected), size if name == "entropy" else 0.0)
    epsilon = torch.finfo(dtype if name == "out" else actual.dtype).eps
    bound = ROUNDINGS * epsilon * max(1.0, largest)
    error = (actual.double() - expected).abs()
    same = (error <= bound) | (actual == expected) | (actual.isnan() & expected.isnan())
    if not bool(same.all()):
        raise KernelMismatchError(
            f"{name} of batches {_range(stripe.batch)}, heads {_range(stripe.heads)}, queries "
            f"{_range(stripe.queries)} is off by {error.nan_to_num(torch.inf).max():.3g}, and "
            f"{bound:.3g} is what rounding explains. This is a bug of quire's: use "
            f"backend='eager', and report it with quire.kernel(...).stages."
        )


def _largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def _range(part: slice) -> str:
    return f"{part.start} to {part.stop - 1}"
