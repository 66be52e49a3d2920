"""Vector mathematics. (exp2, log2 so far)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.codegen.builder import Function, Value
from quire.codegen.types import F32, F64, I32, I64, Type


@dataclass(frozen=True)
class _Format:
    """The layout of a float type, and the coefficients fitted for it."""

    integer: Type
    mantissa: int
    bias: int
    exp2: Sequence[float]


_F32 = _Format(I32, 23, 127, (
    0.69314720280904383744,
    0.24022647890467471143,
    0.055503325473115012415,
    0.0096184399951035234858,
    0.0013398849140121003511,
    0.00015352675003435350728,
))
_F64 = _Format(I64, 52, 1023, (
    0.69314718055994532578,
    0.24022650695910131266,
    0.055504108664820085748,
    0.0096181291075941188297,
    0.0013333558146773740471,
    0.00015403530457112127149,
    0.000015252733494126384269,
    1.3215435282710823044e-6,
    1.0178199119590618499e-7,
    7.0737831410097770897e-9,
    4.4348424945227005164e-10,
))
LOG2_F32 = (  # largest error 4.08e-9
    1.4426950408267857902,
    -0.72134735151969842224,
    0.48089824215964640866,
    -0.3606966482341940462,
    0.28856734781567131594,
    -0.23961738344165948023,
    0.20460169812961688966,
    -0.19106397835256873117,
    0.18616888461228925972,
    -0.109939359835119349,
)


def _format(x: Value) -> _Format:
    return {F32: _F32, F64: _F64}[x.type.scalar]


def _horner(f: Function, x: Value, coefficients: Sequence[float]) -> Value:
    total = f.value(coefficients[-1], x.type)
    for coefficient in reversed(coefficients[:-1]):
        total = f.fma(total, x, coefficient)
    return total


def exp2_nonpositive(f: Function, x: Value) -> Value:
    """2**x for x <= 0."""
    form = _format(x)
    x = f.maximum(f.value(-float(form.bias), x.type), x)
    magic = 1.5 * 2**form.mantissa + form.bias
    shifted = x + magic
    fraction = x - (shifted - magic)
    power = f.bitcast(f.bitcast(shifted, form.integer) << form.mantissa, x.type)
    return _horner(f, fraction, (1.0, *form.exp2)) * power


def exp2(f: Function, x: Value) -> Value:
    """2**x."""
    form = _format(x)
    x = f.minimum(f.value(form.bias + 2.0, x.type), x)
    x = f.maximum(f.value(-float(form.bias + form.mantissa + 2), x.type), x)
    magic = 1.5 * 2**form.mantissa
    shifted = x + magic
    fraction = x - (shifted - magic)
    magic_bits = f.bitcast(f.value(magic, x.type), form.integer)
    exponent = f.bitcast(shifted, form.integer) - magic_bits
    half = exponent >> 1
    result = _horner(f, fraction, (1.0, *form.exp2))
    for part in (half, exponent - half):
        result = result * f.bitcast((part + form.bias) << form.mantissa, x.type)
    return result


def log2(f: Function, x: Value) -> Value:
    """log2 placeholder."""
    form = _format(x)
    bits = f.bitcast(x, form.integer)
    one = {F32: 0x3F800000, F64: 0x3FF0000000000000}[x.type.scalar]
    half = {F32: 0x3F3504F3, F64: 0x3FE6A09E667F3BCD}[x.type.scalar]
    e = (bits - half) >> form.mantissa
    m = f.bitcast(bits - (e << form.mantissa), x.type)
    fr = m - 1.0
    r = f.fma(_horner(f, fr, LOG2_F32), fr, f.convert(e, x.type.scalar))
    r = f.select(x.equals(0.0), float("-inf"), r)
    r = f.select(x.equals(float("inf")), float("inf"), r)
    return f.select(f.is_nan(x), x, r)
