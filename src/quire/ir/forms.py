"""Every way to write an operation in a mod, spelled in the ops of the table.

`FORMS` maps a name to a function of symbols, numbers and tensors. The names are those of PyTorch's
functions and methods and of Python's operators without their underscores, so `torch.add(x, 1)`,
`x.add(1)` and `x + 1` are one row.
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
from quire.ir.ops import FLOAT, INTEGERS, OPS
from quire.ir.symbol import (
    FORMS,
    WORKING,
    Recorded,
    Symbol,
    apply,
    converted,
    find_recorder,
    promote,
    unsupported,
)

Form: TypeAlias = Callable[..., Any]


def _op(name: str) -> Form:
    """The op itself, with exactly its operands."""
    if OPS[name].arity == 1:
        return lambda x: apply(name, x)
    return lambda a, b: apply(name, a, b)


def _swapped(form: Form) -> Form:
    return lambda a, b: form(b, a)


def _composed(form: Form) -> Form:
    """A form of several ops, in which a narrow float is widened first and rounded last."""

    @functools.wraps(form)
    def widened(x: Symbol, *args: Any, **kwargs: Any) -> Any:
        if x.dtype not in WORKING:
            return form(x, *args, **kwargs)
        return converted(form(converted(x, WORKING[x.dtype]), *args, **kwargs), x.dtype)

    return widened


def _activation(form: Form) -> Form:
    """A composed form that is for floats alone."""

    @functools.wraps(form)
    def checked(x: Symbol, *args: Any, **kwargs: Any) -> Any:
        if not x.dtype.is_floating_point:
            raise unsupported(f"an activation function of {x.dtype}")
        return _composed(form)(x, *args, **kwargs)

    return checked


def _promoted(*operands: object) -> list[Any]:
    """The operands as symbols of their common dtype."""
    recorder = find_recorder(operands)
    assert recorder is not None, "a form without a symbol"
    values = [recorder.lift(value) for value in operands]
    dtype = promote(values)
    return [Symbol(recorder.node(value, dtype), recorder) for value in values]


# --- arithmetic ----------------------------------------------------------------------------------


def _sum(op: str) -> Form:
    """add and sub, which can multiply their second operand."""

    def form(a: Any, b: Any, *, alpha: Number = 1) -> Symbol:
        if alpha == 1:
            return apply(op, a, b)
        a, b = _promoted(a, b)
        if isinstance(alpha, float) and not b.dtype.is_floating_point:
            raise unsupported(f"alpha={alpha!r} in {b.dtype}")
        return apply(op, a, converted(b * alpha, b.dtype))

    return form


def _divide(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    match rounding_mode:
        case None:
            return apply("div", a, b)
        case "floor":
            return apply("floordiv", a, b)
        case "trunc":
            return _truncated_division(a, b)
    raise unsupported(f"rounding_mode={rounding_mode!r}")


def _truncated_division(a: Any, b: Any) -> Any:
    a, b = _promoted(a, b)
    if a.dtype.is_floating_point:
        return _composed(lambda a, b: apply("trunc", a / b))(a, b)
    magnitude = abs(a) // abs(b)
    return apply("where", (a < 0) ^ (b < 0), -magnitude, magnitude)


def _fmod(a: Any, b: Any) -> Symbol:
    a, b = _promoted(a, b)
    magnitude = abs(a) % abs(b)
    return apply("where", a < 0, -magnitude, magnitude)


_POWERS: dict[float, Form] = {
    2: lambda x: x * x,
    3: lambda x: x * x * x,
    0.5: lambda x: x.sqrt(),
    -0.5: lambda x: 1 / x.sqrt(),
    -1: lambda x: 1 / x,
    -2: lambda x: 1 / (x * x),
}
"""The exponents that PyTorch treats specially as well."""


def _power(base: Any, exponent: Any) -> Any:
    exponent = exponent.item() if isinstance(exponent, np.generic) else exponent
    if isinstance(base, Symbol) and isinstance(exponent, int | float):
        dtype = promote([base, exponent])
        if exponent < 0 and not dtype.is_floating_point:
            raise unsupported(f"the negative power {exponent} of {base.dtype}")
        if exponent in _POWERS and dtype is not torch.bool:
            return _composed(_POWERS[exponent])(converted(base, dtype))
    return apply("pow", base, exponent)


def _choice(op: str) -> Form:
    """torch.max and torch.min: of two tensors. A number there would be a dimension."""

    def form(a: Any, b: Symbol | Tensor) -> Symbol:
        if not isinstance(b, Symbol | Tensor):
            raise unsupported(f"torch.{op} over a dimension")
        return apply(op, a, b)

    return form


def _bounded(x: Any, bound: Any, op: str) -> Symbol:
    x, bound = _promoted(x, bound)
    if not x.dtype.is_floating_point:
        return apply(op, x, bound)
    # At the bound itself the whole derivative is x's, and not half of it as that of max and min.
    return apply("where", x < bound if op == "max" else bound < x, bound, x)


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    if min is None and max is None:
        raise unsupported("clamp without a bound")
    low = x if min is None else _bounded(x, min, "max")
    return low if max is None else _bounded(low, max, "min")


def _rounding(op: str) -> Form:
    def form(x: Symbol) -> Symbol:
        return x if x.dtype in INTEGERS else apply(op, x)

    return form


# --- logic ---------------------------------------------------------------------------------------


def _logical(op: str) -> Form:
    def truth(value: Any) -> Any:
        return value.bool() if isinstance(value, Symbol | Tensor) else bool(value)

    return lambda *operands: apply(op, *map(truth, operands))


def _ne(a: Any, b: Any) -> Symbol:
    return apply("not", apply("eq", a, b))


def _where(condition: Any, a: Any, b: Any) -> Symbol:
    return apply("where", condition, a, b)


def _masked_fill(x: Symbol, mask: Any, value: Any) -> Symbol:
    return apply("where", mask, _filled(x, value, None), x)


def _isnan(x: Any) -> Any:
    return _ne(x, x)


def _isinf(x: Any) -> Any:
    return _is(x, math.inf) | _is(x, -math.inf)


def _is(x: Any, value: float) -> Any:
    """x == value, which no integer is."""
    return apply("eq", x, value) if x.dtype.is_floating_point else _filled(x, False, torch.bool)


def _nan_to_num(
    x: Symbol, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> Symbol:
    if not x.dtype.is_floating_point:
        return x
    limits = torch.finfo(x.dtype)
    number = apply("where", _isnan(x), nan, x)
    below = apply("where", _is(x, math.inf), limits.max if posinf is None else posinf, number)
    return apply("where", _is(x, -math.inf), limits.min if neginf is None else neginf, below)


# --- functions of one number ---------------------------------------------------------------------


def _relu(x: Any, inplace: bool = False) -> Symbol:
    if not x.dtype.is_floating_point:
        return apply("max", x, 0)
    return apply("where", x <= 0, 0, x)  # the derivative at 0 is 0


def _gelu(x: Any, approximate: str = "none") -> Any:
    match approximate:
        case "none":
            return x * 0.5 * (1 + (x * math.sqrt(0.5)).erf())
        case "tanh":
            return x * 0.5 * (1 + ((x + x**3 * 0.044715) * math.sqrt(2 / math.pi)).tanh())
    raise unsupported(f"gelu with approximate={approximate!r}")


def _log1p(x: Any) -> Any:
    """log(w) * x / (w - 1) for w = 1 + x as it was rounded: the two errors cancel."""
    rounded = x + 1.0
    step = rounded - 1.0
    exact = (step == 0) | (step == math.inf)  # then log1p(x) is x
    log = rounded.log() * (x / apply("where", exact, 1.0, step))
    return apply("where", exact, x, log)


def _expm1(x: Any) -> Any:
    return (x * 0.5).tanh() * (x.exp() + 1.0)


def _softplus(x: Any, beta: float = 1, threshold: float = 20) -> Any:
    scaled = x * beta
    smooth = (_log1p((-abs(scaled)).exp()) + apply("max", scaled, 0.0)) / beta
    return apply("where", scaled > threshold, x, smooth)


# --- dtypes and new scalars ----------------------------------------------------------------------


def _to(x: Symbol, *args: Any, **kwargs: Any) -> Symbol:
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


def _as(dtype: torch.dtype) -> Form:
    return lambda x: converted(x, dtype)


def _type(x: Symbol, dtype: torch.dtype) -> Symbol:
    if not isinstance(dtype, torch.dtype):
        raise unsupported(f"type({dtype!r})")
    return converted(x, dtype)


def _filled(x: Symbol, value: Any, dtype: torch.dtype | None) -> Symbol:
    """A scalar of another value, by default of the same dtype."""
    dtype = x.dtype if dtype is None else dtype
    lifted = x.recorder.lift(value)
    if isinstance(lifted, float) and not math.isfinite(lifted) and not dtype.is_floating_point:
        raise unsupported(f"the value {lifted} of {dtype}")
    return converted(Symbol(x.recorder.node(lifted, dtype), x.recorder), dtype)


def _like(value: Number) -> Form:
    return lambda x, *, dtype=None, **unused: _filled(x, value, dtype)


def _full_like(x: Symbol, fill_value: Any, *, dtype: Any = None, **unused: Any) -> Symbol:
    return _filled(x, fill_value, dtype)


def _new(value: Number) -> Form:
    return lambda x, size, **kwargs: _new_full(x, size, value, **kwargs)


def _new_full(x: Symbol, size: Any, fill_value: Any, *, dtype: Any = None, **unused: Any) -> Symbol:
    if size not in ((), [], torch.Size([])):
        raise unsupported("a new tensor that is no scalar")
    return _filled(x, fill_value, dtype)


def _same(x: Symbol, *unused: Any, **also_unused: Any) -> Symbol:
    return x


# --- the table -----------------------------------------------------------------------------------

_OPERATORS: dict[str, Form] = {
    "add": _sum("add"),
    "sub": _sum("sub"),
    "mul": _op("mul"),
    "truediv": _divide,
    "floordiv": _op("floordiv"),
    "mod": _op("mod"),
    "pow": _power,
    "and": _op("and"),
    "or": _op("or"),
    "xor": _op("xor"),
    "lshift": _op("shl"),
    "rshift": _op("shr"),
}
_REFLECTED = {f"r{name}": _swapped(form) for name, form in _OPERATORS.items()}
_COMPARISONS: dict[str, Form] = {
    "lt": _op("lt"),
    "le": _op("le"),
    "gt": _swapped(_op("lt")),
    "ge": _swapped(_op("le")),
    "eq": _op("eq"),
    "ne": _ne,
}
_UNARY_OPERATORS: dict[str, Form] = {
    "neg": _op("neg"),
    "abs": _op("abs"),
    "invert": _op("not"),
    "pos": _same,
}
_FUNCTIONS: dict[str, Form] = {
    **{op.name: _op(op.name) for op in OPS.values() if op.typing is FLOAT},
    "div": _divide,
    "fmod": _fmod,
    "minimum": _op("min"),
    "maximum": _op("max"),
    "min": _choice("min"),
    "max": _choice("max"),
    "clamp": _clamp,
    "clamp_min": lambda x, min: _clamp(x, min=min),
    "clamp_max": lambda x, max: _clamp(x, max=max),
    "sign": _op("sign"),
    "floor": _rounding("floor"),
    "ceil": _rounding("ceil"),
    "round": _rounding("round"),
    "trunc": _rounding("trunc"),
    "logical_and": _logical("and"),
    "logical_or": _logical("or"),
    "logical_xor": _logical("xor"),
    "logical_not": _logical("not"),
    "where": _where,
    "masked_fill": _masked_fill,
    "isnan": _isnan,
    "isinf": _isinf,
    "isfinite": lambda x: ~(_isnan(x) | _isinf(x)),
    "isposinf": lambda x: _is(x, math.inf),
    "isneginf": lambda x: _is(x, -math.inf),
    "nan_to_num": _nan_to_num,
    "square": lambda x: _power(x, 2),
    "reciprocal": _composed(_POWERS[-1]),
    "rsqrt": _composed(_POWERS[-0.5]),
    "tan": _composed(lambda x: x.sin() / x.cos()),
    "log10": _composed(lambda x: x.log2() * math.log10(2.0)),
    "log1p": _composed(_log1p),
    "expm1": _composed(_expm1),
    "relu": _relu,
    "silu": _activation(lambda x, inplace=False: x * x.sigmoid()),
    "gelu": _activation(_gelu),
    "softplus": _activation(_softplus),
    "log_sigmoid": _activation(lambda x: -_softplus(-x)),
}
_CONVERSIONS: dict[str, Form] = {
    "to": _to,
    "type": _type,
    "type_as": _to,
    "float": _as(torch.float32),
    "double": _as(torch.float64),
    "half": _as(torch.float16),
    "bfloat16": _as(torch.bfloat16),
    "int": _as(torch.int32),
    "long": _as(torch.int64),
    "short": _as(torch.int16),
    "char": _as(torch.int8),
    "byte": _as(torch.uint8),
    "bool": _as(torch.bool),
    "clone": _same,
    "contiguous": _same,
    "squeeze": _same,
    "cpu": lambda x: _to(x, "cpu"),
    "new_zeros": _new(0),
    "new_ones": _new(1),
    "new_full": _new_full,
    "new_tensor": _full_like,
    "zeros_like": _like(0),
    "ones_like": _like(1),
    "full_like": _full_like,
}
_ALIASES = {
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "floor_divide": "floordiv",
    "remainder": "mod",
    "negative": "neg",
    "positive": "pos",
    "absolute": "abs",
    "sgn": "sign",
    "fix": "trunc",
    "clip": "clamp",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "not_equal": "ne",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "bitwise_not": "invert",
    "bitwise_left_shift": "lshift",
    "bitwise_right_shift": "rshift",
    "expit": "sigmoid",
}

FORMS.update(_OPERATORS | _REFLECTED | _COMPARISONS | _UNARY_OPERATORS | _FUNCTIONS | _CONVERSIONS)
FORMS.update({alias: FORMS[name] for alias, name in _ALIASES.items()})


def _install_operators() -> None:
    """Give symbols Python's operators, from the same table as everything else."""

    def binary(form: Form) -> Form:
        def operator(self: Recorded, other: object) -> Any:
            return NotImplemented if isinstance(other, _NEVER_OPERANDS) else form(self, other)

        return operator

    def unary(form: Form) -> Form:
        return lambda self: form(self)

    for name, form in (_OPERATORS | _REFLECTED | _COMPARISONS).items():
        setattr(Recorded, f"__{name}__", binary(form))
    for name, form in _UNARY_OPERATORS.items():
        setattr(Recorded, f"__{name}__", unary(form))


_NEVER_OPERANDS = (tuple, list, str, type(None))

_install_operators()
