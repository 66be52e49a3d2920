"""A narrow float and a Python number: in a mod they make what torch makes of ordinary tensors.

Torch multiplies and divides by the number as it is, in float32, and rounds the result. Elsewhere
it rounds the number to the dtype of the tensor first. `torch.vmap` does so everywhere.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_version import TORCH

from quire import AuxRequest, Dense, attention, reference
from quire.config import Backend
from quire.ir.trace import Mod, trace
from quire.ir.vectorise import evaluate

Form = Callable[[Any, Any], Any]

NUMBERS = (0.1, 3, -0.7, 1 / 3, 257, 1.5, 1e5)
COUNT = 96
PLACES = tuple(map(torch.arange, (1, 1, COUNT, 1)))
ZEROS = torch.zeros(1, 1, COUNT, 1)
EVERYWHERE = torch.ones_like(ZEROS, dtype=torch.bool)
QUERY, KEY = torch.zeros(1, 1, COUNT, 8), torch.zeros(1, 1, 1, 8)  # a row for each number

KEPT: dict[str, Form] = {
    "x * n": operator.mul,
    "n * x": lambda x, n: n * x,
    "x.mul(other=n)": lambda x, n: x.mul(other=n),
    "torch.multiply": torch.multiply,
    "x / n": operator.truediv,
    "torch.true_divide": torch.true_divide,
    "x // n": operator.floordiv,
    "floor_divide": torch.floor_divide,
    "div, rounded down": lambda x, n: torch.div(x, n, rounding_mode="floor"),
    "div, rounded to zero": lambda x, n: torch.div(x, n, rounding_mode="trunc"),
}
"""What keeps the number."""

ROUNDED: dict[str, Form] = {
    "x + n": operator.add,
    "n + x": lambda x, n: n + x,
    "x - n": operator.sub,
    "n - x": lambda x, n: n - x,
    "x < n": operator.lt,
    "x <= n": operator.le,
    "x > n": operator.gt,
    "x >= n": operator.ge,
    "x == n": operator.eq,
    "x != n": operator.ne,
    "clamp(min)": lambda x, n: x.clamp(min=n),
    "clamp(max)": lambda x, n: x.clamp(max=n),
    "clamp_min": torch.clamp_min,
    "where(n, x)": lambda x, n: torch.where(x > 0, n, x),
    "where(x, n)": lambda x, n: torch.where(x > 0, x, n),
    "masked_fill": lambda x, n: x.masked_fill(x > 0, n),
    "maximum": lambda x, n: torch.maximum(x, torch.full_like(x, n)),
    "minimum": lambda x, n: torch.minimum(x, torch.full_like(x, n)),
    "x % n": operator.mod,
    "n % x": lambda x, n: n % x,
    "fmod": torch.fmod,
    "x ** n": lambda x, n: x.abs() ** n,
    "n ** x": lambda x, n: abs(n) ** x,
    "n / x": lambda x, n: n / x,  # by way of 1 / x, which torch rounds: we need not
}
"""What rounds it, or something else."""

NEAR = ("x ** n", "n ** x", "n / x")
"""Where torch rounds on the way, or functions have their own last bits."""

NOT_DIFFERENTIATED = ("x // n", "floor_divide", "n % x", "x ** n", "n ** x")
"""Where torch refuses to, or where it rounds an exponent that the mod does not have, n - 1."""

FORMS = KEPT | ROUNDED


def table(dtype: torch.dtype, number: float) -> Tensor:
    """Numbers of both signs, none of them 0, and the number itself as it is rounded."""
    values = 3 * torch.randn(COUNT, generator=torch.Generator().manual_seed(2))
    values[:2] = torch.tensor([number, -number])
    return values.to(dtype)


def cases(form: Form, dtype: torch.dtype) -> Iterator[tuple[float, Tensor, Tensor]]:
    """Numbers, what they meet, and what torch makes of it, except where it refuses the number."""
    for number in NUMBERS:
        x = table(dtype, number).requires_grad_()
        try:
            found = form(x, number)
        except RuntimeError as error:
            if "cannot be converted" not in str(error):
                raise
        else:
            yield number, x, found


def scored(form: Form, x: Tensor, number: float) -> Mod:
    """The form as a score_mod."""
    return lambda score, b, h, q_idx, kv_idx: form(x[q_idx], number)


def found_within(form: Form, x: Tensor, number: float, low: Tensor, high: Tensor) -> Mod:
    """Whether the form gives a number between two others, or NaN with them, as a mask."""

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        found = form(x[q_idx], number).float()
        within = (low[q_idx] <= found) & (found <= high[q_idx])
        return within | (found.isnan() & low[q_idx].isnan())

    return mask


def same(ours: Tensor, theirs: Tensor, name: str) -> None:
    """The same bits, NaN included; two roundings apart where one cannot ask for more."""
    eps = torch.finfo(theirs.dtype).eps if name in NEAR else 0
    torch.testing.assert_close(ours, theirs, rtol=2 * eps, atol=0, equal_nan=True)


each_form = pytest.mark.parametrize("name", FORMS)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
each_backend = pytest.mark.parametrize("backend", ["jit", "eager"])


@each_form
@each_dtype
def test_a_mod_means_what_torch_means(name: str, dtype: torch.dtype) -> None:
    for number, x, expected in cases(FORMS[name], dtype):
        mod = scored(FORMS[name], x, number)
        by_reference = reference.evaluate(mod, EVERYWHERE, (0, 0, 0, 0), ZEROS, fill=0.0)
        by_vmap = evaluate(mod, "score", *PLACES, score=ZEROS)
        by_trace = evaluate(trace(mod, "score"), "score", *PLACES, score=ZEROS)
        assert by_vmap.dtype == expected.dtype
        for found in (by_reference, by_vmap, by_trace):
            same(found.expand_as(ZEROS).flatten().to(expected.dtype), expected, name)


@each_form
@each_dtype
@each_backend
def test_attention_computes_these_numbers(name: str, dtype: torch.dtype, backend: Backend) -> None:
    """A row attends to its only key where its mask found the number that torch found."""
    eps = 2 * torch.finfo(dtype).eps if name in NEAR else 0
    memory = Dense(KEY, torch.ones_like(KEY))
    for number, x, expected in cases(FORMS[name], dtype):
        ends = [expected.detach().float() * (1 + sign * eps) for sign in (-1, 1)]
        low, high = torch.minimum(*ends), torch.maximum(*ends)
        mask = found_within(FORMS[name], x.detach(), number, low, high)
        assert attention(QUERY, memory, mask=mask, q_start=0, backend=backend).eq(1).all()


@pytest.mark.parametrize("name", [name for name in FORMS if name not in NOT_DIFFERENTIATED])
@each_dtype
@each_backend
def test_gradients_are_torch_s(name: str, dtype: torch.dtype, backend: Backend) -> None:
    for number, x, expected in cases(FORMS[name], dtype):
        if not expected.requires_grad or not expected.isfinite().all():
            continue
        mod = scored(FORMS[name], x, number)
        _, aux = attention(
            *(QUERY, Dense(KEY, KEY)),
            score_mod=mod,
            q_start=0,
            backend=backend,
            return_aux=AuxRequest(lse=True),
        )
        assert aux.lse is not None
        (theirs,) = torch.autograd.grad(expected.float().sum(), x)
        ours = as_in_torch_2_13(name, theirs, x.detach(), number)
        same(*torch.autograd.grad(aux.lse.sum(), x), ours, name)
        for found in (  # by torch's own derivatives
            evaluate(mod, "score", *PLACES, score=ZEROS),
            reference.evaluate(mod, EVERYWHERE, (0, 0, 0, 0), ZEROS, fill=0.0),
        ):
            same(*torch.autograd.grad(found.float().sum(), x), theirs, name)


def as_in_torch_2_13(name: str, theirs: Tensor, x: Tensor, number: float) -> Tensor:
    """Torch's derivatives, but 1 at the bound of a clamp, where it is 0 since 2.14."""
    if TORCH < (2, 14) or not name.startswith("clamp"):
        return theirs
    bound = x == torch.tensor(number).to(x.dtype)
    assert bound.any() and not theirs[bound].any()
    return theirs.masked_fill(bound, 1.0)


def test_the_number_matters() -> None:
    """A rounded number gives another result, so that the tests above can fail."""
    for dtype in (torch.bfloat16, torch.float16):
        x, rounded = table(dtype, 0.1), torch.tensor(0.1, dtype=dtype).item()
        for name, form in KEPT.items():
            assert not torch.equal(form(x, 0.1), form(x, rounded)), name
