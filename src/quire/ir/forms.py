"""Every way to write an operation in a mod, spelled in the ops of the table.

`FORMS` maps a name to a function of symbols, numbers and tensors. The names are those of PyTorch's
functions and methods and of Python's operators without their underscores, so `torch.add(x, 1)`,
`x.add(1)` and `x + 1` are one row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire.ir.graph import Number, cast
from quire.ir.symbol import FORMS, Symbol, apply, unsupported


def _logical(op: str) -> Callable[..., Symbol]:
    def form(*operands: object) -> Symbol:
        return apply(
            op, *(v.bool() if isinstance(v, Symbol | Tensor) else bool(v) for v in operands)
        )

    return form


def _unary(op: str) -> Callable[..., Symbol]:
    return lambda x: apply(op, x)


def _binary(op: str) -> Callable[..., Symbol]:
    return lambda a, b: apply(op, a, b)


def _swapped(op: str) -> Callable[..., Symbol]:
    return lambda a, b: apply(op, b, a)


def _scaled_add(op: str) -> Callable[..., Symbol]:
    return lambda a, b, *, alpha=1: apply(op, a, b if alpha == 1 else FORMS["mul"](b, alpha))


def _rounding(op: str) -> Callable[..., Symbol]:
    def form(x: Symbol) -> Symbol:
        return apply(op, x) if x.dtype.is_floating_point else x

    return form


def _divide(a: Any, b: Any, *, rounding_mode: str | None = None) -> Symbol:
    match rounding_mode:
        case None:
            return apply("div", a, b)
        case "floor":
            return apply("floordiv", a, b)
        case "trunc":
            down = apply("floordiv", apply("abs", a), abs(b))
            same = apply(
                "eq", apply("lt", a, 0), FORMS["lt"](b, 0) if isinstance(b, Symbol) else b < 0
            )
            return apply("where", same, down, apply("neg", down))
    raise unsupported(f"rounding_mode={rounding_mode!r}")


def _power(a: Any, b: Any) -> Symbol:
    match b:
        case bool():
            pass
        case 2:
            return apply("mul", a, a)
        case 3:
            return apply("mul", apply("mul", a, a), a)
        case 0.5:
            return apply("sqrt", a)
        case 1:
            return apply("mul", a, b)
    return apply("pow", a, b)


def _clamp(x: Symbol, min: Any = None, max: Any = None) -> Symbol:
    if min is None and max is None:
        raise unsupported("clamp without a bound")
    low = x if min is None else apply("max", x, min)
    return low if max is None else apply("min", low, max)


def _where(condition: Any, *branches: Any, **named: Any) -> Symbol:
    a, b = (*branches, *(named[name] for name in ("input", "other") if name in named))
    return apply("where", condition, a, b)


def _masked_fill(x: Symbol, mask: Any, value: Any) -> Symbol:
    filled = apply("where", mask, value, x)
    return _to(filled, x.dtype)


def _gelu(x: Symbol, approximate: str = "none") -> Symbol:
    if approximate == "tanh":
        cubic = apply("mul", _power(x, 3), 0.044715)
        inner = apply("mul", apply("add", x, cubic), math.sqrt(2 / math.pi))
        gate = apply("tanh", inner)
    else:
        gate = apply("erf", apply("mul", x, math.sqrt(0.5)))
    return apply("mul", apply("mul", x, 0.5), apply("add", gate, 1.0))


def _softplus(x: Symbol) -> Symbol:
    tail = apply("log", apply("add", apply("exp", apply("neg", apply("abs", x))), 1.0))
    return apply("add", apply("max", x, 0.0), tail)


def _to(x: Symbol, *args: Any, **kwargs: Any) -> Symbol:
    dtype = x.dtype
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, Symbol | Tensor):
            dtype = value.dtype
    return Symbol(cast(x.node, dtype), x.recorder)


def _as(dtype: torch.dtype) -> Callable[..., Symbol]:
    return lambda x: _to(x, dtype)


def _filled(x: Symbol, value: Any, dtype: torch.dtype | None) -> Symbol:
    lifted = x.recorder.lift(value)
    return Symbol(x.recorder.node(lifted, dtype or x.dtype), x.recorder)


def _new(value: Number) -> Callable[..., Symbol]:
    def form(x: Symbol, size: Any = (), *, dtype: Any = None, **unused: Any) -> Symbol:
        if tuple(size if isinstance(size, tuple | list | torch.Size) else (size,)) != ():
            raise unsupported("a new tensor that is no scalar")
        return _filled(x, value, dtype)

    return form


def _like(value: Number) -> Callable[..., Symbol]:
    return lambda x, *, dtype=None, **unused: _filled(x, value, dtype)


def _new_full(x: Symbol, size: Any, value: Any, *, dtype: Any = None, **unused: Any) -> Symbol:
    return _filled(_new(0)(x, size), value, dtype)


def _full_like(x: Symbol, fill_value: Any, *, dtype: Any = None, **unused: Any) -> Symbol:
    return _filled(x, fill_value, dtype)


def _new_tensor(x: Symbol, data: Any, *, dtype: Any = None, **unused: Any) -> Symbol:
    return _filled(x, data, dtype)


def _isnan(x: Symbol) -> Symbol:
    return apply("not", apply("eq", x, x))


def _isinf(x: Symbol) -> Symbol:
    return apply("eq", apply("abs", x), math.inf)


def _same(x: Symbol, *unused: Any, **also_unused: Any) -> Symbol:
    return x


_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": _scaled_add("add"),
    "sub": _scaled_add("sub"),
    "mul": _binary("mul"),
    "truediv": _divide,
    "floordiv": _binary("floordiv"),
    "mod": _binary("mod"),
    "pow": _power,
    "and": _binary("and"),
    "or": _binary("or"),
    "xor": _binary("xor"),
    "lshift": _binary("shl"),
    "rshift": _binary("shr"),
}
_REFLECTED = {
    "radd": _swapped("add"),
    "rsub": _swapped("sub"),
    "rmul": _swapped("mul"),
    "rtruediv": _swapped("div"),
    "rfloordiv": _swapped("floordiv"),
    "rmod": _swapped("mod"),
    "rpow": _swapped("pow"),
    "rand": _swapped("and"),
    "ror": _swapped("or"),
    "rxor": _swapped("xor"),
    "rlshift": _swapped("shl"),
    "rrshift": _swapped("shr"),
}
_COMPARISONS: dict[str, Callable[..., Any]] = {
    "lt": _binary("lt"),
    "le": _binary("le"),
    "gt": _swapped("lt"),
    "ge": _swapped("le"),
    "eq": _binary("eq"),
    "ne": lambda a, b: apply("not", apply("eq", a, b)),
}
_UNARY_OPERATORS = {
    "neg": _unary("neg"),
    "abs": _unary("abs"),
    "invert": _unary("not"),
    "pos": _same,
}

FORMS.update(
    {
        **_OPERATORS,
        **_REFLECTED,
        **_COMPARISONS,
        **_UNARY_OPERATORS,
        "subtract": _scaled_add("sub"),
        "multiply": _binary("mul"),
        "div": _divide,
        "divide": _divide,
        "true_divide": _binary("div"),
        "floor_divide": _binary("floordiv"),
        "remainder": _binary("mod"),
        "square": lambda x: apply("mul", x, x),
        "reciprocal": lambda x: apply("div", 1.0, x),
        "minimum": _binary("min"),
        "min": _binary("min"),
        "maximum": _binary("max"),
        "max": _binary("max"),
        "clamp": _clamp,
        "clip": _clamp,
        "clamp_min": lambda x, min: _clamp(x, min=min),
        "clamp_max": lambda x, max: _clamp(x, max=max),
        "negative": _unary("neg"),
        "absolute": _unary("abs"),
        "sign": _unary("sign"),
        "sgn": _unary("sign"),
        "floor": _rounding("floor"),
        "ceil": _rounding("ceil"),
        "round": _rounding("round"),
        "trunc": _rounding("trunc"),
        "fix": _rounding("trunc"),
        "less": _binary("lt"),
        "less_equal": _binary("le"),
        "greater": _swapped("lt"),
        "greater_equal": _swapped("le"),
        "not_equal": _COMPARISONS["ne"],
        "bitwise_and": _binary("and"),
        "bitwise_or": _binary("or"),
        "bitwise_xor": _binary("xor"),
        "bitwise_not": _unary("not"),
        "bitwise_left_shift": _binary("shl"),
        "bitwise_right_shift": _binary("shr"),
        "logical_and": _logical("and"),
        "logical_or": _logical("or"),
        "logical_xor": _logical("xor"),
        "logical_not": _logical("not"),
        "where": _where,
        "masked_fill": _masked_fill,
        **{
            op: _unary(op)
            for op in ("exp", "exp2", "log", "log2", "sqrt", "tanh", "sigmoid", "erf")
        },
        **{op: _unary(op) for op in ("sin", "cos")},
        "tan": lambda x: apply("div", apply("sin", x), apply("cos", x)),
        "log10": lambda x: apply("mul", apply("log2", x), math.log10(2.0)),
        "rsqrt": lambda x: apply("div", 1.0, apply("sqrt", x)),
        "relu": lambda x, inplace=False: apply("max", x, 0),
        "silu": lambda x, inplace=False: apply("mul", x, apply("sigmoid", x)),
        "gelu": _gelu,
        "softplus": _softplus,
        "isnan": _isnan,
        "isinf": _isinf,
        "isfinite": lambda x: apply("not", apply("or", _isnan(x), _isinf(x))),
        "isposinf": lambda x: apply("eq", x, math.inf),
        "isneginf": lambda x: apply("eq", x, -math.inf),
        "to": _to,
        "type": _to,
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
        "cpu": _same,
        "new_zeros": _new(0),
        "new_ones": _new(1),
        "new_full": _new_full,
        "new_tensor": _new_tensor,
        "zeros_like": _like(0),
        "ones_like": _like(1),
        "full_like": _full_like,
    }
)


def _install_operators() -> None:
    """Give `Symbol` Python's operators, from the same table as everything else."""

    def method(form: Callable[..., Any]) -> Callable[..., Any]:
        def operator(self: Symbol, *other: object) -> Any:
            if any(isinstance(value, tuple | list | str | type(None)) for value in other):
                return NotImplemented
            return form(self, *other)

        return operator

    for table in (_OPERATORS, _REFLECTED, _COMPARISONS, _UNARY_OPERATORS):
        for name, form in table.items():
            setattr(Symbol, f"__{name}__", method(form))


_install_operators()
