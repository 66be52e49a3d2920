"""QUIRE_CHECK=1: compare some rows of a kernel's results with float64."""

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
"""The largest accepted error, as a multiple of the rounding error of the largest value."""


def recheck(call: Call, result: Result) -> None:
    """Compare random rows of `result` with float64, and raise if they differ."""
    sink = call.request.sink
    for dense, rows, _ in in_rows(call.placed).each():
        part = {name: x[:, :, rows] for name, x in result.by_query.items()}
        _recheck_one(call.problem, dense, sink, Result(**part))


def _recheck_one(problem: Problem, placed: Placed, sink: Tensor | None, result: Result) -> None:
    """Compare random stripes of one sequence, until `config().check_rows` rows were compared."""
    all_stripes = list(stripes(problem, placed))
    exact = placed.on(*(tensor.double() for tensor in placed.operands))
    num_compared = 0
    for stripe in random.sample(all_stripes, len(all_stripes)):
        if num_compared >= config().check_rows:
            break
        num_compared += math.prod(part.stop - part.start for part in stripe.rows)
        wanted = AuxRequest(entropy=result.entropy is not None)
        expected = forward_stripe(problem, exact, stripe, sink, wanted).by_query
        for name, actual in result.by_query.items():
            if name != "argmax":  # if two scores are nearly equal, either may be the larger
                bound = _bound(name, expected, actual.dtype, placed.query.dtype)
                _compare(name, actual[stripe.rows], expected[name], bound, stripe)


def _bound(
    name: str, expected: dict[str, Tensor], dtype: torch.dtype, query_dtype: torch.dtype
) -> float:
    """Return how far a result may be from its expected value."""
    largest = _largest(expected[name])
    if name == "entropy":  # it is computed as a difference of scores, which may be large
        largest = max(largest, _largest(expected["lse"]))
    epsilon = torch.finfo(query_dtype if name == "out" else dtype).eps
    return ROUNDINGS * epsilon * max(1.0, largest)


def _compare(name: str, actual: Tensor, expected: Tensor, bound: float, stripe: Stripe) -> None:
    error = (actual.double() - expected).abs()
    same = (error <= bound) | (actual == expected) | (actual.isnan() & expected.isnan())
    if not bool(same.all()):
        raise KernelMismatchError(
            f"{name} of batches {_range(stripe.batch)}, heads {_range(stripe.heads)}, queries "
            f"{_range(stripe.queries)} must be within {bound:.3g} of float64, but is off by "
            f"{error.nan_to_num(torch.inf).max():.3g}. This is a bug of quire: use "
            f"backend='eager', and report it with quire.kernel(...).stages."
        )


def _largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def _range(part: slice) -> str:
    return f"{part.start} to {part.stop - 1}"
