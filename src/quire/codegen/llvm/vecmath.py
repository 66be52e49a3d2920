"""Mathematical functions of scalars and vectors, written in basic arithmetic.

Every function takes a float or double, or a vector of them. It is defined for all values: NaN gives
NaN, infinities and zeros give what C gives. Errors are in units of the last place of the result
(ulp), the largest that tests find: over all values of float32, over many of float64. Coefficients
are our own, see `coefficients.py`.

Generated code calls no library, and the same input gives the same bits in every lane.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from quire.codegen.llvm import angles
from quire.codegen.llvm import coefficients as fitted
from quire.codegen.llvm.builder import Function, Operand, Value
from quire.codegen.llvm.types import F32, F64, I32, I64, Type
from quire.errors import CodegenError

# Constants that float64 cannot hold are split into parts that add up.
LOG2_E = (1.4426950408889634, 2.0355273740931033e-17)
LN_2_HIGH_F32, LN_2_LOW_F32 = 0.693145751953125, 1.4286068203094173e-06
LN_2_HIGH_F64, LN_2_LOW_F64 = 0.6931471804855391, 7.440617110012397e-11
HALF_PI = (1.5707963267948966, 6.123233995736766e-17, -1.4973849048591698e-33)


class _Format(NamedTuple):
    """The layout of a float type, and constants for it."""

    integer: Type
    mantissa: int
    bias: int
    exp2: Sequence[float]
    log2_e: tuple[float, float]

    @property
    def round_shift(self) -> float:
        """Adding this rounds to an integer, which is then in the low bits of the sum."""
        return 1.5 * 2.0**self.mantissa


_LOG2_E_F32 = (1.4426950216293335, 1.9259629911266175e-08)
_FORMATS = {
    F32: _Format(I32, 23, 127, fitted.EXP2_F32, _LOG2_E_F32),
    F64: _Format(I64, 52, 1023, fitted.EXP2_F64, LOG2_E),
}


def _format(x: Value) -> _Format:
    if x.type.scalar not in _FORMATS:
        raise CodegenError(f"expected float or double, got {x!r}; convert it first")
    return _FORMATS[x.type.scalar]


def _polynomial(f: Function, x: Value, terms: Sequence[float]) -> Value:
    """terms[0] + terms[1] x + ..., by Horner's rule."""
    total = f.value(terms[-1], x.type)
    for term in reversed(terms[:-1]):
        total = f.fma(total, x, term)
    return total


def _clamp(f: Function, x: Value, low: float, high: float) -> Value:
    """x within [low, high]; NaN stays NaN."""
    bounded = f.minimum(f.value(high, x.type), x)
    return f.maximum(f.value(low, x.type), bounded)


def _scaled(f: Function, x: Value, exponent: Value) -> Value:
    """x * 2**exponent, in two steps: 2**exponent itself may overflow or underflow."""
    form = _format(x)
    half = exponent >> 1
    for part in (half, exponent - half):
        x = x * f.bitcast((part + form.bias) << form.mantissa, x.type)
    return x


def _rounded(f: Function, shifted: Value) -> Value:
    """The integer in the low bits of a number to which `round_shift` was added."""
    form = _format(shifted)
    shift = f.bitcast(f.value(form.round_shift, shifted.type), form.integer)
    return f.bitcast(shifted, form.integer) - shift


# --- remainders


def fmod(f: Function, a: Value, b: Value) -> Value:
    """The remainder of a / b that has the sign of a: exact, as in C."""
    x, y = f.intrinsic("fabs", a), f.intrinsic("fabs", b)
    ratio, near = _remainder(f, x, y)
    far = ~(ratio < 2.0 ** _format(a).mantissa) & (x < math.inf) & (y > 0.0)
    (left,) = f.choose(
        f.any_lane(far),
        lambda: [f.select(far, _far_remainder(f, x, y), near)],
        lambda: [near],
    )
    left = f.select(y.equals(math.inf) & (x < math.inf), x, left)
    return f.intrinsic("copysign", left, a)


def _remainder(f: Function, x: Value, y: Value) -> tuple[Value, Value]:
    """x / y and the remainder, for positive numbers; exact if the quotient fits the mantissa.

    The quotient may have been rounded up to a whole number: then the remainder is below 0 at first.
    """
    ratio = x / y
    left = f.fma(-f.intrinsic("trunc", ratio), y, x)
    return ratio, f.select(left < 0.0, left + y, left)


def _far_remainder(f: Function, x: Value, y: Value) -> Value:
    """The remainder for any quotient, by long division: a few bits of the quotient at a time."""
    form = _format(x)
    (large, above), (small, below) = _split(f, x), _split(f, y)

    def divide(carried: list[Value]) -> list[Value]:
        left, digits = carried
        now = f.maximum(f.minimum(digits, form.mantissa - 1), 0)
        shifted = left * f.bitcast((now + form.bias) << form.mantissa, x.type)
        return [_remainder(f, shifted, small)[1], digits - now]

    _, first = _remainder(f, large, small)
    left, _ = f.repeat(lambda carried: f.any_lane(carried[1] > 0), divide, [first, above - below])
    return _scaled(f, left, below)


def _split(f: Function, x: Value) -> tuple[Value, Value]:
    """m from 1 to 2 and an integer e with x = m * 2**e, for positive finite x."""
    form = _format(x)
    tiny = x < 2.0 ** (1 - form.bias)
    bits = f.bitcast(f.select(tiny, x * 2.0**form.mantissa, x), form.integer)
    stored = bits >> form.mantissa
    mantissa = f.bitcast(bits - ((stored - form.bias) << form.mantissa), x.type)
    shift = f.select(tiny, f.value(form.bias + form.mantissa, bits.type), form.bias)
    return mantissa, stored - shift


# --- exponentials and logarithms


def exp4_nonpositive(f: Function, x: Value) -> Value:
    """4**x for x <= 0, in as few instructions as possible: 1 ulp.

    exp4(0) is exactly 1 and exp4(-inf) exactly 0. Results below the smallest normal number may
    be 0.
    """
    form = _format(x)
    x = f.maximum(f.value(-form.bias / 2, x.type), x)
    # The bias is added with the shift, so the low bits are an exponent as it is stored; for the
    # smallest x that is 0, which makes the power 0. Doubling x costs nothing here.
    shift = form.round_shift + form.bias
    shifted = f.fma(x, 2.0, shift)
    fraction = f.fma(x, 2.0, -(shifted - shift))
    power = f.bitcast(f.bitcast(shifted, form.integer) << form.mantissa, x.type)
    return _polynomial(f, fraction, (1.0, *form.exp2)) * power


def exp4(f: Function, x: Value) -> Value:
    """4**x: 1 ulp."""
    return exp2(f, x + x)


def exp2(f: Function, x: Value) -> Value:
    """2**x: 1 ulp; exact at integers."""
    form = _format(x)
    x = _clamp(f, x, -(form.bias + form.mantissa + 2), form.bias + 2)
    shifted = x + form.round_shift
    fraction = x - (shifted - form.round_shift)
    return _scaled(f, _polynomial(f, fraction, (1.0, *form.exp2)), _rounded(f, shifted))


def exp(f: Function, x: Value) -> Value:
    """e**x: 1.5 ulp."""
    form = _format(x)
    high, low = form.log2_e
    limit = (form.bias + form.mantissa + 2) * math.log(2)
    x = _clamp(f, x, -limit, limit)
    shifted = f.fma(x, high, form.round_shift)
    whole = shifted - form.round_shift
    fraction = f.fma(x, low, f.fma(x, high, -whole))
    return _scaled(f, _polynomial(f, fraction, (1.0, *form.exp2)), _rounded(f, shifted))


def _mantissa_and_exponent(f: Function, x: Value) -> tuple[Value, Value]:
    """m - 1 and e with x = m * 2**e, m from sqrt(1/2) to sqrt(2), for positive finite x."""
    form = _format(x)
    tiny = x < 2.0 ** (1 - form.bias)
    bits = f.bitcast(f.select(tiny, x * 2.0**form.mantissa, x), form.integer)
    root = f.bitcast(f.value(math.sqrt(0.5), x.type), form.integer)
    exponent = (bits - root) >> form.mantissa
    mantissa = f.bitcast(bits - (exponent << form.mantissa), x.type)
    shifted = f.select(tiny, exponent - form.mantissa, exponent)
    return mantissa - 1.0, f.convert(shifted, x.type)


def _log_where_positive(f: Function, x: Value, result: Value) -> Value:
    """`result` for positive finite x, else the logarithm of 0, infinity, NaN or a negative x."""
    negative = f.select(x.equals(0.0), f.value(-math.inf, x.type), math.nan)
    return f.select(x.equals(math.inf), x, f.select(x > 0.0, result, negative))


def _log1p(f: Function, x: Value) -> Value:
    """log(1 + x) for 1 + x from sqrt(1/2) to sqrt(2)."""
    if x.type.scalar == F32:
        return f.fma(x * x, _polynomial(f, x, fitted.LOG_F32), x)
    # With s = x / (2 + x), log(1 + x) is 2 s + s z P(z); 2 s = x - s x keeps all bits of x.
    s = x / (x + 2.0)
    z = s * s
    half_square = x * x * 0.5
    rest = z * _polynomial(f, z, fitted.LOG_F64)
    return x - (half_square - s * (half_square + rest))


def log2(f: Function, x: Value) -> Value:
    """Logarithm to base 2: 2 ulp; exact at powers of two."""
    m, e = _mantissa_and_exponent(f, x)
    if x.type.scalar == F32:
        result = f.fma(m, _polynomial(f, m, fitted.LOG2_F32), e)
    else:
        natural = _log1p(f, m)
        result = f.fma(natural, LOG2_E[0], f.fma(natural, LOG2_E[1], e))
    return _log_where_positive(f, x, result)


def log(f: Function, x: Value) -> Value:
    """Natural logarithm: 1.5 ulp."""
    m, e = _mantissa_and_exponent(f, x)
    single = x.type.scalar == F32
    high, low = (LN_2_HIGH_F32, LN_2_LOW_F32) if single else (LN_2_HIGH_F64, LN_2_LOW_F64)
    result = f.fma(e, high, f.fma(e, low, _log1p(f, m)))
    return _log_where_positive(f, x, result)


def pow(f: Function, x: Value, y: Operand) -> Value:
    """x**y with C's special cases: 1 ulp in float32; in float64 4 + 2 |y log2(x)| ulp."""
    y = f.value(y, x.type)
    size = f.intrinsic("fabs", x)
    if x.type.scalar == F32:
        power = exp2(f, f.convert(y, F64) * log2(f, f.convert(size, F64)))
        result = f.convert(power, F32)
    else:
        result = exp2(f, y * log2(f, size))
    half = y * 0.5
    whole = y.equals(f.intrinsic("floor", y))
    odd = whole & half.differs(f.intrinsic("floor", half))
    result = f.select((x < 0.0) & (size < math.inf) & ~whole, math.nan, result)
    result = f.select(size.equals(1.0) & whole | y.equals(0.0) | x.equals(1.0), 1.0, result)
    negative = f.bitcast(x, _format(x).integer) < 0
    result = f.select(odd & negative, -result, result)
    return f.select(y.equals(1.0), x, result)  # also where the largest number would overflow


# --- sigmoids


def _odd_rational(f: Function, x: Value, top: Sequence[float], bottom: Sequence[float]) -> Value:
    """x P(x**2) / Q(x**2)."""
    z = x * x
    return x * _polynomial(f, z, top) / _polynomial(f, z, bottom)


def _saturating(
    f: Function, x: Value, top: Sequence[float], bottom: Sequence[float], limit: float
) -> Value:
    """A rational function up to `limit`, where it just exceeds 1, and 1 beyond."""
    ratio = _odd_rational(f, _clamp(f, x, -limit, limit), top, bottom)
    return _clamp(f, ratio, -1.0, 1.0)


def sigmoid(f: Function, x: Value) -> Value:
    """1 / (1 + e**-x): 3 ulp.

    Both sides of the fraction are divided by 2**spare, so that e**-x does not overflow where the
    result is below the smallest normal number. The low bits of `shifted` are an exponent as it is
    stored.
    """
    form = _format(x)
    high, low = form.log2_e
    spare = form.mantissa + 8  # e**-x is too small to count below 2**-spare
    x = _clamp(f, x, -(form.bias + form.mantissa + 2) * math.log(2), spare * math.log(2))
    shift = form.round_shift + form.bias - spare
    shifted = f.fma(x, -high, shift)
    fraction = f.fma(x, -low, f.fma(x, -high, -(shifted - shift)))
    power = f.bitcast(f.bitcast(shifted, form.integer) << form.mantissa, x.type)
    one = f.value(2.0**-spare, x.type)
    return one / f.fma(_polynomial(f, fraction, (1.0, *form.exp2)), power, one)


def tanh(f: Function, x: Value) -> Value:
    """Hyperbolic tangent: 7 ulp in float32, 3 in float64."""
    if x.type.scalar == F32:
        return _saturating(f, x, fitted.TANH_F32_TOP, fitted.TANH_F32_BOTTOM, 9.084)
    size = f.intrinsic("fabs", x)
    near = _odd_rational(f, x, fitted.TANH_F64_TOP, fitted.TANH_F64_BOTTOM)
    far = 1.0 - f.value(2.0, x.type) / (exp(f, size + size) + 1.0)
    return f.select(size < 0.625, near, f.intrinsic("copysign", far, x))


def erf(f: Function, x: Value) -> Value:
    """The error function: 7 ulp in float32, 3 in float64."""
    if x.type.scalar == F32:
        return _saturating(f, x, fitted.ERF_F32_TOP, fitted.ERF_F32_BOTTOM, 3.948)
    size = f.minimum(f.value(6.0, x.type), f.intrinsic("fabs", x))
    near = _odd_rational(f, x, fitted.ERF_F64_TOP, fitted.ERF_F64_BOTTOM)
    tail = _polynomial(f, (size - 2.0) / (size + 2.0), fitted.ERFC_F64)
    far = 1.0 - tail * exp(f, -(size * size))
    return f.select(size < 1.0, near, f.intrinsic("copysign", far, x))


# --- circular functions


def sin(f: Function, x: Value) -> Value:
    """Sine: 2 ulp.

    In float64 a result below 1/4 has the absolute error of a result of 1/4.
    """
    return _circular(f, x, quarter_turns=0)


def cos(f: Function, x: Value) -> Value:
    """Cosine, with the errors of sine."""
    return _circular(f, x, quarter_turns=1)


def _circular(f: Function, x: Value, quarter_turns: int) -> Value:
    rest, quarters = _quarter_turns(f, x)
    quarters = quarters + quarter_turns
    single = x.type.scalar == F32
    z = rest * rest
    sine = f.fma(rest * z, _polynomial(f, z, fitted.SIN_F32 if single else fitted.SIN_F64), rest)
    cosine = _polynomial(f, z, (1.0, -0.5, *(fitted.COS_F32 if single else fitted.COS_F64)))
    result = f.select((quarters & 1).differs(0), cosine, sine)
    return f.select((quarters & 2).differs(0), -result, result)


def _quarter_turns(f: Function, x: Value) -> tuple[Value, Value]:
    """x less a whole number of quarter turns, and that number."""
    form = _format(x)
    size, limit = f.intrinsic("fabs", x), 2.0**40 if x.type.scalar == F32 else 2.0**30
    far = (size > limit) & (size < math.inf)
    near = _few_quarter_turns(f, x)

    def many() -> list[Value]:
        rest, quarters = angles.quarter_turns(f, x, form.mantissa, form.bias)
        reduced = f.convert(rest, x.type), f.convert(quarters, form.integer)
        return [f.select(far, a, b) for a, b in zip(reduced, near, strict=True)]

    rest, quarters = f.choose(f.any_lane(far), many, lambda: near)
    return rest, quarters


def _few_quarter_turns(f: Function, x: Value) -> tuple[Value, Value]:
    """The same for angles up to the limit, computed in float64."""
    wide = f.convert(x, F64)
    shift = _FORMATS[F64].round_shift
    shifted = f.fma(wide, 2.0 / math.pi, shift)
    whole = shifted - shift
    rest = wide
    for part in HALF_PI:
        rest = f.fma(whole, -part, rest)
    return f.convert(rest, x.type), f.convert(_rounded(f, shifted), _format(x).integer)
