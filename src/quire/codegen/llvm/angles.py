"""Reduces large angles: the number of quarter turns, and what is left.

An angle is m * 2**e with a whole number m, and has m * 2**e * 2 / pi quarter turns. Four are a full
turn, so only the part below four is needed, and only the bits of 2 / pi from weight 2 on:

    2 / pi = 0.b1 b2 b3 ...        2**e * 2 / pi  =  ... b(e-1) b(e) . b(e+1) b(e+2) ...
                                                       |<- 96 bits, found by shifting words

64-bit integers hold the product, two bits before the point and 62 behind it. What overflows are
full turns.
"""

from __future__ import annotations

import itertools
import math

from quire.codegen.llvm.builder import Function, Value
from quire.codegen.llvm.types import F64, I64

WORD = 32
_MASK = 2**WORD - 1
_BEHIND_THE_POINT = 62


def _inverse_arctangent(number: int, unit: int) -> int:
    """atan(1 / number), times `unit`."""
    term, total, n = unit // number, 0, 1
    while term:
        total += term // n if n % 4 == 1 else -(term // n)
        term //= number * number
        n += 2
    return total


def _words_of_two_over_pi(count: int) -> list[int]:
    """2 / pi in words of 32 bits: a word of zeros before the point, then its bits."""
    bits = WORD * count
    pi = 16 * _inverse_arctangent(5, 1 << bits) - 4 * _inverse_arctangent(239, 1 << bits)
    fixed = (2 << 2 * bits) // pi >> WORD
    return [fixed >> WORD * (count - 1 - place) & _MASK for place in range(count)]


_LEVELS = {23: (4, 2, 1), 52: (16, 8, 4, 2, 1)}
"""For float32 and float64, by mantissa bits: powers of two that add up to any shift in words."""


def quarter_turns(f: Function, x: Value, mantissa: int, bias: int) -> tuple[Value, Value]:
    """The rest of a large angle, as a double, and its number of quarter turns, modulo 4."""
    bits = f.bitcast(f.intrinsic("fabs", x), x.type.as_int)
    exponent = f.convert(bits >> mantissa, I64) - (bias + mantissa)
    whole = (f.convert(bits, I64) & (2**mantissa - 1)) + 2**mantissa
    first = exponent + (WORD - 2)  # the bit of weight 2, counted from the front
    words = _shifted(f, first >> 5, _LEVELS[mantissa])
    shift = first & (WORD - 1)
    turns = _product(whole & _MASK, words[:4], shift)
    if mantissa >= WORD:
        turns = turns + _product(whole >> WORD, words[1:], shift)
    half = 2 ** (_BEHIND_THE_POINT - 1)
    quarters = (turns + half) >> _BEHIND_THE_POINT
    rest = f.convert(turns - (quarters << _BEHIND_THE_POINT), F64)
    rest = rest * (math.pi / 2 / 2.0**_BEHIND_THE_POINT)
    negative = x < 0.0
    return f.select(negative, -rest, rest), f.select(negative, -quarters, quarters)


def _shifted(f: Function, place: Value, levels: tuple[int, ...]) -> list[Value]:
    """Five words of 2 / pi from `place` on; each lane has its own place."""
    constants = _words_of_two_over_pi(sum(levels) + 5)
    words = [f.value(word, place.type) for word in constants]
    for level in levels:
        far = (place & level).differs(0)
        words = [f.select(far, b, a) for a, b in zip(words, words[level:], strict=False)]
    return words


def _product(number: Value, words: list[Value], shift: Value) -> Value:
    """A whole number of at most 32 bits times the 96 bits from `shift` in the first word on."""
    windows: list[Value] = [
        ((a << WORD | b) >> (WORD - shift)) & _MASK for a, b in itertools.pairwise(words)
    ]
    high, middle, low = windows
    total: Value = (number * high << WORD) + number * middle
    return total + (number * (low >> 1) >> (WORD - 1))
