"""Every way to write an operation in a mod, and the ops that it becomes.

`FORMS` maps a name to a function of symbols, numbers and tensors. Names are those of PyTorch's
functions and methods, and of Python's operators without underscores: `torch.add(x, 1)`, `x.add(1)`
and `x + 1` are one row.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from quire.ir import reductions, spelling
from quire.ir.elementwise import elementwise, of_elements
from quire.ir.ops import FLOAT, OPS
from quire.ir.spelling import Form
from quire.ir.symbol import FORMS, Recorded

_OPERATORS: dict[str, Form] = {
    "add": spelling.scaled("add"),
    "sub": spelling.scaled("sub"),
    "mul": spelling.plain("mul"),
    "truediv": spelling.divide,
    "floordiv": spelling.plain("floordiv"),
    "mod": spelling.plain("mod"),
    "pow": spelling.power,
    "and": spelling.plain("and"),
    "or": spelling.plain("or"),
    "xor": spelling.plain("xor"),
    "lshift": spelling.plain("shl"),
    "rshift": spelling.plain("shr"),
}
_REFLECTED = {f"r{name}": spelling.swapped(form) for name, form in _OPERATORS.items()}
_COMPARISONS: dict[str, Form] = {
    "lt": spelling.plain("lt"),
    "le": spelling.plain("le"),
    "gt": spelling.swapped(spelling.plain("lt")),
    "ge": spelling.swapped(spelling.plain("le")),
    "eq": spelling.plain("eq"),
    "ne": spelling.ne,
}
_UNARY_OPERATORS: dict[str, Form] = {
    "neg": spelling.plain("neg"),
    "abs": spelling.plain("abs"),
    "invert": spelling.plain("not"),
    "pos": spelling.same,
}
_FUNCTIONS: dict[str, Form] = {
    **{op.name: spelling.plain(op.name) for op in OPS.values() if op.typing is FLOAT},
    "div": spelling.divide,
    "fmod": spelling.fmod,
    "minimum": spelling.plain("min"),
    "maximum": spelling.plain("max"),
    "clamp": spelling.clamp,
    "clamp_min": lambda x, min: spelling.clamp(x, min=min),
    "clamp_max": lambda x, max: spelling.clamp(x, max=max),
    "sign": spelling.plain("sign"),
    "floor": spelling.rounding("floor"),
    "ceil": spelling.rounding("ceil"),
    "round": spelling.rounding("round"),
    "trunc": spelling.rounding("trunc"),
    "logical_and": spelling.logical("and"),
    "logical_or": spelling.logical("or"),
    "logical_xor": spelling.logical("xor"),
    "logical_not": spelling.logical("not"),
    "where": spelling.where,
    "masked_fill": spelling.masked_fill,
    "isnan": spelling.isnan,
    "isinf": spelling.isinf,
    "isfinite": lambda x: ~(spelling.isnan(x) | spelling.isinf(x)),
    "isposinf": lambda x: spelling.equals(x, math.inf),
    "isneginf": lambda x: spelling.equals(x, -math.inf),
    "nan_to_num": spelling.nan_to_num,
    "square": lambda x: spelling.power(x, 2),
    "reciprocal": spelling.composed(spelling.POWERS[-1]),
    "rsqrt": spelling.composed(spelling.POWERS[-0.5]),
    "tan": spelling.composed(lambda x: x.sin() / x.cos()),
    "log10": spelling.composed(lambda x: x.log2() * math.log10(2.0)),
    "log1p": spelling.composed(spelling.log1p),
    "expm1": spelling.composed(spelling.expm1),
    "relu": spelling.relu,
    "silu": spelling.activation(lambda x, inplace=False: x * x.sigmoid()),
    "gelu": spelling.activation(spelling.gelu),
    "softplus": spelling.activation(spelling.softplus),
    "log_sigmoid": spelling.activation(lambda x: -spelling.softplus(-x)),
}
_CONVERSIONS: dict[str, Form] = {
    "to": spelling.to,
    "type": spelling.as_type,
    "type_as": spelling.to,
    "float": spelling.as_dtype(torch.float32),
    "double": spelling.as_dtype(torch.float64),
    "half": spelling.as_dtype(torch.float16),
    "bfloat16": spelling.as_dtype(torch.bfloat16),
    "int": spelling.as_dtype(torch.int32),
    "long": spelling.as_dtype(torch.int64),
    "short": spelling.as_dtype(torch.int16),
    "char": spelling.as_dtype(torch.int8),
    "byte": spelling.as_dtype(torch.uint8),
    "bool": spelling.as_dtype(torch.bool),
    "clone": spelling.same,
    "contiguous": spelling.same,
    "dropout": spelling.dropout,
    "cpu": lambda x: spelling.to(x, "cpu"),
    "new_zeros": spelling.new(0),
    "new_ones": spelling.new(1),
    "new_full": spelling.new_full,
    "new_tensor": spelling.full_like,
    "zeros_like": spelling.like(0),
    "ones_like": spelling.like(1),
    "full_like": spelling.full_like,
}
_ALIASES = """
    subtract=sub multiply=mul divide=div true_divide=div floor_divide=floordiv remainder=mod
    negative=neg positive=pos absolute=abs sgn=sign fix=trunc clip=clamp less=lt less_equal=le
    greater=gt greater_equal=ge not_equal=ne bitwise_and=and bitwise_or=or bitwise_xor=xor
    bitwise_not=invert bitwise_left_shift=lshift bitwise_right_shift=rshift expit=sigmoid
    concat=cat concatenate=cat inner=dot vdot=dot vecdot=dot
"""

_EXTREMES = {name: reductions.largest_or_smallest(name) for name in ("min", "max")}
_NUMBERS = _OPERATORS | _REFLECTED | _COMPARISONS | _UNARY_OPERATORS | _FUNCTIONS
FORMS.update({name: elementwise(form) for name, form in _NUMBERS.items()})
FORMS.update({name: of_elements(form) for name, form in _CONVERSIONS.items()})
FORMS.update(reductions.REDUCTIONS | _EXTREMES)
_PAIRS = (pair.split("=") for pair in _ALIASES.split())
FORMS.update({alias: FORMS[name] for alias, name in _PAIRS})


def _install_operators() -> None:
    """Give symbols and vectors Python's operators, from the same table."""

    def binary(form: Form) -> Form:
        def operator(self: Recorded, other: object) -> Any:
            return NotImplemented if isinstance(other, _NEVER_OPERANDS) else form(self, other)

        return operator

    def unary(form: Form) -> Form:
        return lambda self: form(self)

    for name in (*_OPERATORS, *_REFLECTED, *_COMPARISONS, "matmul", "rmatmul"):
        setattr(Recorded, f"__{name}__", binary(FORMS[name]))
    for name in _UNARY_OPERATORS:
        setattr(Recorded, f"__{name}__", unary(FORMS[name]))


_NEVER_OPERANDS = (tuple, list, str, type(None))

_install_operators()
