"""QUIRE_CHECK=1: what a kernel computed, computed again in float64 for some rows of it."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

from quire.aux_outputs import AuxRequest
from quire.backends.eager.forward import forward_stripe
from quire.backends.eager.per_sequence import in_rows
from quire.backends.eager.tiling import Stripe, stripes
from quire.config import config
from quire.errors import KernelMismatchError
from quire.memory import Placed
from quire.request import Call, Problem
from quire.results import Result

ROUNDINGS = 256
"""How many roundings of the largest value a result may be off by."""


def recheck(call: Call, result: Result) -> None:
    """Compare rows, chosen at random, with float64; raise where they differ."""
    sink = call.request.sink
    for alone, rows, _ in in_rows(call.placed).each():
        mine = {name: x[:, :, rows] for name, x in result.by_query.items()}
        _recheck_one(call.problem, alone, sink, Result(**mine))


def _recheck_one(problem: Problem, placed: Placed, sink: Tensor | None, result: Result) -> None:
    """Stripes of rows of one sequence.

    As many as have `config().check_rows` rows together; of a small result that is all of it.
    """
    every = list(stripes(problem, placed))
    exact = placed.on(*(tensor.double() for tensor in placed.operands))
    looked_at = 0
    for stripe in random.sample(every, len(every)):
        if looked_at >= config().check_rows:
            break
        looked_at += math.prod(part.stop - part.start for part in stripe.rows)
        wanted = AuxRequest(entropy=result.entropy is not None)
        expected = forward_stripe(problem, exact, stripe, sink, wanted)
        size = _largest(expected.by_query["lse"])
        for name, ours in result.by_query.items():
            if name != "argmax":  # of two scores that are all but equal, either may be the larger
                theirs = expected.by_query[name]
                _compare(name, ours[stripe.rows], theirs, size, stripe, placed.query.dtype)


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
