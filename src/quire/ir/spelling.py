"""Operations that have no op of their own, written in the ops of the table.

Each function takes symbols, numbers and tensors and returns a symbol. They are written like mods,
with operators and methods of symbols; `composed` ones are computed in float32 or wider.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from quire.ir.graph import Number
from quire.ir.ops import INTEGERS, OPS
from quire.ir.promote import WORKING, apply, converted, promote
from quire.ir.symbol import Symbol, find_recorder, random_numbers, unsupported

Form: TypeAlias = Callable[..., Any]


def plain(name: str) -> Form:
    """The op itself, with exactly its operands."""
    if OPS[name].arity == 1:
        return lambda x: apply(name, x)
    return lambda a, b: apply(name, a, b)


def swapped(form: Form) -> Form:
    """The form with its two operands exchanged."""
    return lambda a, b: form(b, a)


def composed(form: Form) -> Form:
    """A form of several ops that converts a narrow float first, and rounds once at the end."""

    @functools.wraps(form)
    def widened(x: Symbol, *args: Any, **kwargs: Any) -> Any:
        if x.dtype not in WORKING:
            return form(x, *args, **kwargs)
        return converted(form(converted(x, WORKING[x.dtype]), *args, **kwargs), x.dtype)

    return widened


def activation(form: Form) -> Form:
    """A composed form that takes only floats."""

    @functools.wraps(form)
    def checked(x: Symbol, *args: Any, **kwargs: Any) -> Any:
        if not x.dtype.is_floating_point:
            raise unsupported(f"an activation function of {x.dtype}")
        return composed(form)(x, *args, **kwargs)

    return checked


def _promoted(*operands: object) -> list[Any]:
    """The operands as symbols of their common dtype."""
    recorder = find_recorder(operands)
    assert recorder is not None, "a form without a symbol"
    values = [recorder.lift(value) for value in operands]
    dtype = promote(values)
    return [Symbol(recorder.node(value, dtype), recorder) for value in values]


# --- arithmetic ----------------------------------------------------------------------------------


def scaled(op: str) -> Form:
    """add and sub, which can multiply their second operand."""

    def form(a: Any, b: Any, *, alpha: Number = 1) -> Symbol:
        if alpha == 1:
            return apply(op, a, b)
        a, b = _promoted(a, b)
        if isinstance(alpha, float) and not b.dtype.is_floating_point:
            raise unsupported(f"alpha={alpha!r} in {b.dtype}")
        return apply(op, a, converted(b * filled(b, alpha, None), b.dtype))

    return form


def divide(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    """a / b, also rounded down or towards zero."""
    match rounding_mode:
        case None:
            return apply("div", a, b)
        case "floor":
            return apply("floordiv", a, b)
        case "trunc":
            return _truncated_division(a, b)
    raise unsupported(f"rounding_mode={rounding_mode!r}")


def _truncated_division(a: Any, b: Any) -> Any:
    first, second = _promoted(a, b)
    if first.dtype.is_floating_point:
        return composed(lambda first: apply("trunc", first / b))(first)
    quotient = first // second
    return apply("where", _of_other_sign(first, second), quotient + 1, quotient)


def fmod(a: Any, b: Any) -> Symbol:
    """The remainder that has the sign of `a`."""
    a, b = _promoted(a, b)
    if a.dtype.is_floating_point:
        magnitude = abs(a) % abs(b)
        return apply("where", a < 0, -magnitude, magnitude)
    return apply("where", _of_other_sign(a, b), a % b - b, a % b)


def _of_other_sign(a: Any, b: Any) -> Any:
    """Whether a % b is not 0 and has another sign than `a`.

    abs() cannot be used: it overflows for the lowest integer.
    """
    return ((a < 0) ^ (b < 0)) & (a % b != 0)


POWERS: dict[float, Form] = {
    2: lambda x: x * x,
    3: lambda x: x * x * x,
    0.5: lambda x: x.sqrt(),
    -0.5: lambda x: 1 / x.sqrt(),
    -1: lambda x: 1 / x,
    -2: lambda x: 1 / (x * x),
}
"""Exponents that PyTorch treats specially, too."""


def power(base: Any, exponent: Any) -> Any:
    """base ** exponent; for exponents in POWERS by multiplication."""
    exponent = exponent.item() if isinstance(exponent, np.generic) else exponent
    if isinstance(base, Symbol) and isinstance(exponent, int | float):
        dtype = promote([base, exponent])
        if exponent < 0 and not dtype.is_floating_point:
            raise unsupported(f"the negative power {exponent} of {base.dtype}")
        if exponent in POWERS and dtype is not torch.bool:
            return composed(POWERS[exponent])(converted(base, dtype))
    return apply("pow", base, exponent)


def of_two(op: str) -> Form:
    """torch.max and torch.min of two tensors; a number would be a dimension."""

    def form(a: Any, b: Symbol | Tensor) -> Symbol:
        if not isinstance(b, Symbol | Tensor):
            raise unsupported(f"torch.{op} over a dimension")
        return apply(op, a, b)

    return form


def _bounded(x: Any, bound: Any, op: str) -> Symbol:
    x, bound = _promoted(x, bound)
    if not x.dtype.is_floating_point:
        return apply(op, x, bound)
    # At the bound itself the whole derivative is x's, as it is in torch 2.13 (but not since), and
    # not half of it as that of max and min.
    return apply("where", x < bound if op == "max" else bound < x, bound, x)


def clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    """x, but at least `min` and at most `max`."""
    if min is None and max is None:
        raise unsupported("clamp without a bound")
    low = x if min is None else _bounded(x, min, "max")
    return low if max is None else _bounded(low, max, "min")


def rounding(op: str) -> Form:
    """A rounding function; integers stay as they are."""

    def form(x: Symbol) -> Symbol:
        return x if x.dtype in INTEGERS else apply(op, x)

    return form


# --- logic ---------------------------------------------------------------------------------------


def logical(op: str) -> Form:
    """A bitwise op on the truth of its operands."""

    def truth(value: Any) -> Any:
        return value.bool() if isinstance(value, Symbol | Tensor) else bool(value)

    return lambda *operands: apply(op, *map(truth, operands))


def ne(a: Any, b: Any) -> Symbol:
    """not (a == b)."""
    return apply("not", apply("eq", a, b))


def where(condition: Any, a: Any, b: Any) -> Symbol:
    """where(condition, a, b), by position only."""
    return apply("where", condition, a, b)


def masked_fill(x: Symbol, mask: Any, value: Any) -> Symbol:
    """`value` in the dtype of x where the mask holds."""
    return apply("where", mask, filled(x, value, None), x)


def isnan(x: Any) -> Any:
    """x != x, which holds for NaN alone."""
    return ne(x, x)


def isinf(x: Any) -> Any:
    """Whether x is inf or -inf."""
    return equals(x, math.inf) | equals(x, -math.inf)


def equals(x: Any, value: float) -> Any:
    """x == value for a value that is not finite: False for integers."""
    return apply("eq", x, value) if x.dtype.is_floating_point else filled(x, False, torch.bool)


def nan_to_num(
    x: Symbol, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> Symbol:
    """x with NaN and the infinities replaced by numbers."""
    if not x.dtype.is_floating_point:
        return x
    limits = torch.finfo(x.dtype)
    number = apply("where", isnan(x), nan, x)
    below = apply("where", equals(x, math.inf), limits.max if posinf is None else posinf, number)
    return apply("where", equals(x, -math.inf), limits.min if neginf is None else neginf, below)


# --- functions of one number ---------------------------------------------------------------------


def relu(x: Any, inplace: bool = False) -> Symbol:
    """max(x, 0), with derivative 0 at 0."""
    if not x.dtype.is_floating_point:
        return apply("max", x, 0)
    return apply("where", x <= 0, 0, x)  # the derivative at 0 is 0


def gelu(x: Any, approximate: str = "none") -> Any:
    """x times the normal distribution function, or PyTorch's approximation by tanh."""
    match approximate:
        case "none":
            return x * 0.5 * (1 + (x * math.sqrt(0.5)).erf())
        case "tanh":
            return x * 0.5 * (1 + ((x + x**3 * 0.044715) * math.sqrt(2 / math.pi)).tanh())
    raise unsupported(f"gelu with approximate={approximate!r}")


def log1p(x: Any) -> Any:
    """log(w) * x / (w - 1) with w = 1 + x rounded: the errors of both factors cancel."""
    rounded = x + 1.0
    step = rounded - 1.0
    exact = (step == 0) | (step == math.inf)  # then log1p(x) is x
    log = rounded.log() * (x / apply("where", exact, 1.0, step))
    return apply("where", exact, x, log)


def expm1(x: Any) -> Any:
    """exp(x) - 1 = tanh(x / 2) (exp(x) + 1), which keeps its precision for small x."""
    return (x * 0.5).tanh() * (x.exp() + 1.0)


def softplus(x: Any, beta: float = 1, threshold: float = 20) -> Any:
    """log(1 + exp(x)), which does not overflow."""
    scaled = x * beta
    smooth = (log1p((-abs(scaled)).exp()) + apply("max", scaled, 0.0)) / beta
    return apply("where", scaled > threshold, x, smooth)


# --- dtypes and new scalars ----------------------------------------------------------------------


def to(x: Symbol, *args: Any, **kwargs: Any) -> Symbol:
    """x.to(dtype), x.to(device, dtype), x.to(other)."""
    dtype = x.dtype
    for value in (*args, *kwargs.values()):
        match value:
            case torch.dtype():
                dtype = value
            case Symbol() | Tensor():
                dtype = value.dtype
            case str() | torch.device() if torch.device(value) != x.device:
                raise unsupported(f"a copy to {value}")
    return converted(x, dtype)


def as_dtype(dtype: torch.dtype) -> Form:
    """A conversion named after a dtype, such as x.long()."""
    return lambda x: converted(x, dtype)


def as_type(x: Symbol, dtype: torch.dtype) -> Symbol:
    """x.type(dtype)."""
    if not isinstance(dtype, torch.dtype):
        raise unsupported(f"type({dtype!r})")
    return converted(x, dtype)


def filled(x: Symbol, value: Any, dtype: torch.dtype | None) -> Symbol:
    """A scalar with another value, by default with the dtype of x."""
    dtype = x.dtype if dtype is None else dtype
    lifted = x.recorder.lift(value)
    if isinstance(lifted, float) and not math.isfinite(lifted) and not dtype.is_floating_point:
        raise unsupported(f"the value {lifted} of {dtype}")
    return converted(Symbol(x.recorder.node(lifted, dtype), x.recorder), dtype)


def like(value: Number) -> Form:
    """zeros_like, ones_like."""
    return lambda x, *, dtype=None, **unused: filled(x, value, dtype)


def full_like(x: Symbol, fill_value: Any, *, dtype: Any = None, **unused: Any) -> Symbol:
    """A scalar with another value."""
    return filled(x, fill_value, dtype)


def new(value: Number) -> Form:
    """new_zeros, new_ones."""
    return lambda x, size, **kwargs: new_full(x, size, value, **kwargs)


def new_full(x: Symbol, size: Any, fill_value: Any, *, dtype: Any = None, **unused: Any) -> Symbol:
    """A scalar with another value; only an empty size gives a scalar."""
    if size not in ((), [], torch.Size([])):
        raise unsupported("a new tensor that is no scalar")
    return filled(x, fill_value, dtype)


def dropout(x: Symbol, p: float = 0.5, training: bool = True, inplace: bool = False) -> Symbol:
    """x itself, as in evaluation; raises in training, since dropout is random."""
    if training and p > 0:
        raise random_numbers("dropout")
    return x


def same(x: Symbol, *unused: Any, **also_unused: Any) -> Symbol:
    """x itself."""
    return x
