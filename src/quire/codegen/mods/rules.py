"""The vector code of each op, one rule for each, and the LLVM type of each dtype.

A rule gets operands of one shape, all scalars or all vectors, and gives a result of that shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from quire.codegen.llvm import vecmath
from quire.codegen.llvm.builder import Function, Operand, Value
from quire.codegen.llvm.types import F16, F32, F64, I1, I8, I16, I32, I64, Type
from quire.ir.graph import Node

REGISTER: dict[torch.dtype, Type] = {
    torch.bool: I1,
    torch.uint8: I16,
    torch.int8: I8,
    torch.int16: I16,
    torch.int32: I32,
    torch.int64: I64,
    torch.float16: F32,
    torch.bfloat16: F32,
    torch.float32: F32,
    torch.float64: F64,
}
"""The type in which a dtype is computed. float16, bfloat16 and uint8 are rounded after every op."""

MEMORY: dict[torch.dtype, Type] = {
    **REGISTER,
    torch.bool: I8,
    torch.uint8: I8,
    torch.float16: F16,
    torch.bfloat16: I16,
}
"""The type of a dtype in memory."""


Rule: TypeAlias = Callable[..., Value]
"""(function, node, *operands) -> result."""


def _is_bool(value: Value) -> bool:
    return value.type.kind == "i1"


def _add(f: Function, node: Node, a: Value, b: Value) -> Value:
    return a | b if _is_bool(a) else a + b


def _mul(f: Function, node: Node, a: Value, b: Value) -> Value:
    return a & b if _is_bool(a) else a * b


def _min(f: Function, node: Node, a: Value, b: Value) -> Value:
    if _is_bool(a):
        return a & b
    smaller = f.minimum(a, b)
    return f.select(f.is_nan(a), a, smaller) if a.type.is_float else smaller


def _max(f: Function, node: Node, a: Value, b: Value) -> Value:
    if _is_bool(a):
        return a | b
    larger = f.maximum(a, b)
    return f.select(f.is_nan(a), a, larger) if a.type.is_float else larger


def _abs(f: Function, node: Node, a: Value) -> Value:
    return f.intrinsic("fabs", a) if a.type.is_float else f.select(a < 0, -a, a)


def _sign(f: Function, node: Node, a: Value) -> Value:
    if _is_bool(a):
        return a
    return f.select(a > 0, f.value(1, a.type), f.select(a < 0, -1, f.value(0, a.type)))


def _floordiv(f: Function, node: Node, a: Value, b: Value) -> Value:
    return _quotient_and_remainder(f, node, a, b)[0]


def _mod(f: Function, node: Node, a: Value, b: Value) -> Value:
    return _quotient_and_remainder(f, node, a, b)[1]


def _quotient_and_remainder(f: Function, node: Node, a: Value, b: Value) -> tuple[Value, Value]:
    """The quotient rounded down, and the remainder, which has the sign of b."""
    if a.type.is_float:
        return _float_division(f, a, b)
    divisor = _safe_divisor(f, node, a, b)
    if a.type.bits <= 32:
        quotient = _divide_by_doubles(f, a, divisor)
        return quotient, a - quotient * divisor
    quotient = a.sdiv(divisor)
    left = a - quotient * divisor
    below = left.differs(0) & ((left ^ divisor) < 0)
    return f.select(below, quotient - 1, quotient), f.select(below, left + divisor, left)


def _safe_divisor(f: Function, node: Node, a: Value, b: Value) -> Value:
    """The divisor, replaced by 1 where the processor would trap.

    It traps for a divisor of 0, which is noted as a mistake, and for the lowest integer / -1. That
    quotient wraps around to the lowest integer itself, and the remainder is 0, as for 1.
    """
    if node.args[1].op == "const" and node.args[1].payload not in (0, -1):
        return b
    lowest = -(2 ** (a.type.bits - 1))
    return f.select(b.equals(0) | (b.equals(-1) & a.equals(lowest)), 1, b)


def _divide_by_doubles(f: Function, a: Value, b: Value) -> Value:
    """a // b of integers of at most 32 bits, in doubles, exactly.

    (a + 1/2) / b is at least 1 / 2b away from any integer, which is far more than the error of a
    double. So rounding it down gives a // b. For b < 0 it is (a - 1/2) / b, by symmetry.
    """
    numerator, denominator = f.convert(a, F64), f.convert(b, F64)
    half = f.select(b < 0, f.value(-0.5, numerator.type), 0.5)
    return f.convert(f.intrinsic("floor", (numerator + half) / denominator), a.type)


def _float_division(f: Function, a: Value, b: Value) -> tuple[Value, Value]:
    """As PyTorch does it: from the exact remainder that has the sign of a."""
    left = vecmath.fmod(f, a, b)
    other_sign = left.differs(0.0) & ((b < 0.0) ^ (left < 0.0))
    quotient = (a - left) / b
    quotient = f.select(other_sign, quotient - 1.0, quotient)
    below = f.intrinsic("floor", quotient)
    nearest = f.select(quotient - below > 0.5, below + 1.0, below)
    plain = a / b
    zero = f.intrinsic("copysign", f.value(0.0, a.type), plain)
    nearest = f.select(quotient.equals(0.0), zero, nearest)
    return f.select(b.equals(0.0), plain, nearest), f.select(other_sign, left + b, left)


def _power(f: Function, node: Node, a: Value, b: Value) -> Value:
    return vecmath.pow(f, a, b) if a.type.is_float else _integer_power(f, a, b)


SMALL_EXPONENT = 6
"""Exponents of at most 6 bits need no loop."""


def _integer_power(f: Function, a: Value, b: Value) -> Value:
    """By squaring; products wrap around. A negative power is 0, except for base 1 and -1."""

    def step(bit: Operand, carried: list[Value]) -> list[Value]:
        result, base = carried
        odd = ((b >> bit) & 1).differs(0)
        return [f.select(odd, result * base, result), base * base]

    def large(bit: Value, carried: list[Value]) -> list[Value]:
        return step(f.splat(f.convert(bit, b.type.scalar), b.type), carried)

    power = [f.value(1, a.type), a]
    for bit in range(SMALL_EXPONENT):
        power = step(bit, power)
    last = f.select(f.any_lane((b >> SMALL_EXPONENT) > 0), f.value(a.type.bits - 1, I64), 0)
    result = f.loop(SMALL_EXPONENT, last, large, carry=power)[0]
    sign = f.select((b & 1).differs(0), a, f.value(1, a.type))
    unit = a.equals(1) | a.equals(-1)
    return f.select(b < 0, f.select(unit, sign, 0), result)


def _cast(f: Function, node: Node, a: Value) -> Value:
    target = REGISTER[node.dtype]
    if node.dtype == torch.bool:
        return a if _is_bool(a) else a.differs(0)
    if a.type.is_float and target.is_int:
        return _saturated(f, a, target)
    return f.convert(a, target)


def _saturated(f: Function, a: Value, target: Type) -> Value:
    """A float rounded towards zero into what an integer can hold; NaN gives 0."""
    wide = f.convert(a, F64)
    low, high = -(2.0 ** (target.bits - 1)), 2.0 ** (target.bits - 1)
    top = high - 1.0 if target.bits < 64 else 2.0**63 - 1024.0
    bounded = f.minimum(f.maximum(wide, low), top)
    return f.convert(f.select(f.is_nan(wide), 0.0, bounded), target)


def _lt(f: Function, node: Node, a: Value, b: Value) -> Value:
    return ~a & b if _is_bool(a) else a < b


def _le(f: Function, node: Node, a: Value, b: Value) -> Value:
    return ~a | b if _is_bool(a) else a <= b


def _shl(f: Function, node: Node, a: Value, b: Value) -> Value:
    wrong = (b < 0) | (b >= a.type.bits)
    return f.select(wrong, 0, a << f.select(wrong, 0, b))


def _shr(f: Function, node: Node, a: Value, b: Value) -> Value:
    wrong = (b < 0) | (b >= a.type.bits)
    return a >> f.select(wrong, a.type.bits - 1, b)


def _intrinsic(name: str) -> Rule:
    return lambda f, node, a: f.intrinsic(name, a)


def _math(name: str) -> Rule:
    return lambda f, node, a: getattr(vecmath, name)(f, a)


_FUNCTIONS = ("exp", "exp2", "log", "log2", "tanh", "sigmoid", "erf", "sin", "cos")
RULES: dict[str, Rule] = {
    "cast": _cast,
    "add": _add,
    "sub": lambda f, node, a, b: a - b,
    "mul": _mul,
    "div": lambda f, node, a, b: a / b,
    "floordiv": _floordiv,
    "mod": _mod,
    "pow": _power,
    "min": _min,
    "max": _max,
    "neg": lambda f, node, a: -a,
    "abs": _abs,
    "sign": _sign,
    "floor": _intrinsic("floor"),
    "ceil": _intrinsic("ceil"),
    "round": _intrinsic("roundeven"),
    "trunc": _intrinsic("trunc"),
    "lt": _lt,
    "le": _le,
    "eq": lambda f, node, a, b: a.equals(b),
    "and": lambda f, node, a, b: a & b,
    "or": lambda f, node, a, b: a | b,
    "xor": lambda f, node, a, b: a ^ b,
    "not": lambda f, node, a: ~a,
    "shl": _shl,
    "shr": _shr,
    "bits": lambda f, node, a: f.select(a < 1, 0, a.type.bits - f.leading_zeros(a)),
    "where": lambda f, node, condition, a, b: f.select(condition, a, b),
    "sqrt": _intrinsic("sqrt"),
    **{name: _math(name) for name in _FUNCTIONS},
}
"""The code of each op; `Scope` handles `input`, `const` and `load`."""
