"""How the numbers of the user's tensors are read and written: one `Storage` for each dtype.

    name              in memory                         a number is read as
    float32, float64  float, double                     it is
    float16           half                              it is
    bfloat16          the upper half of a float         a float
    float8_e5m2       the upper half of a half          a half
    float8_e4m3fn     sign, then 4 + 3 bits             a half with a wider exponent: number / 256
    int8              a signed byte                     an integer

Every number is read exactly: subnormal numbers, infinities and NaN, too. It is rounded to nearest
even when it is written, as torch does. Rows of 8 bits have a scale each, which may be 1; `unit` is
what scales are multiplied by, so that numbers need not be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from quire.codegen.llvm.builder import Function, Value
from quire.codegen.llvm.types import F16, F32, F64, I8, I16, I32, Type
from quire.codegen.phases.transpose import side_by_side
from quire.errors import CodegenError


class Minifloat(NamedTuple):
    """A format of eight bits: a sign, an exponent and a mantissa."""

    mantissa: int  # its bits
    bias: int  # of the exponent
    most: int  # the code that larger numbers become: the largest number, or infinity

    def as_half(self, upper: Value) -> Value:
        """The bits of a half, given i16 with a number in the upper byte; the lower is ignored."""
        shift = self.mantissa - 2  # of the 10 bits that a half has, two are in the upper byte
        if not shift:
            return upper & ~0xFF
        bits = (upper >> shift) & ~0x407F  # the sign was copied to the first bit of the exponent
        return bits | ((bits + 0x80) & 0x4000)  # that bit is 1 for NaN alone, the largest code

    def code(self, f: Function, x: Value) -> Value:
        """A float as a byte, in the low bits of an i32."""
        dropped, magnitude = 23 - self.mantissa, f.bitcast(x, I32) & 0x7FFF_FFFF
        odd = magnitude.logical_shift(dropped) & 1
        rounded = (magnitude + odd + ((1 << (dropped - 1)) - 1)).logical_shift(dropped)
        normal = rounded - ((127 - self.bias) << self.mantissa)
        # Added to a large number, a small one is rounded to a multiple of the smallest.
        exponent = 1 - self.bias - self.mantissa + 23
        whole = f.bitcast(magnitude, F32) + 2.0**exponent
        subnormal = f.bitcast(whole, I32) - ((exponent + 127) << 23)
        is_small = magnitude < (128 - self.bias) << 23
        code = f.minimum(f.select(is_small, subnormal, normal), self.most)
        sign = f.bitcast(x, I32).logical_shift(24) & 0x80
        return f.select(f.is_nan(x), 0x7F, code) | sign


MINIFLOATS = {
    "float8_e4m3fn": Minifloat(mantissa=3, bias=7, most=0x7E),
    "float8_e5m2": Minifloat(mantissa=2, bias=15, most=0x7C),
}
_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


class Storage(NamedTuple):
    """A dtype of the user's tensors: its type in memory, and how it is read and written."""

    name: str
    memory: Type

    @property
    def has_scales(self) -> bool:
        """Whether every row has a scale, as rows of 8 bits have."""
        return self.memory == I8

    @property
    def is_narrow(self) -> bool:
        """Whether a number has less than 32 bits, so that loading it is quick."""
        return self.memory.size < F32.size

    @property
    def unit(self) -> float:
        """What a number is multiplied by after it was read, or the scale of its row."""
        return 256.0 if self.name == "float8_e4m3fn" else 1.0

    @property
    def largest(self) -> float:
        """The magnitude that the largest number of a row becomes, if rows have scales."""
        return _LARGEST[self.name]

    def read(self, f: Function, raw: Value, element: Type) -> Value:
        """A number that was loaded, converted to `element`."""
        if self.name == "bfloat16":
            return f.convert(f.bitcast(f.zero_extend(raw, I32) << 16, F32), element)
        if self.name in MINIFLOATS:
            bits = MINIFLOATS[self.name].as_half(f.zero_extend(raw, I16) << 8)
            return f.convert(f.bitcast(bits, F16), element)
        return f.convert(raw, element)

    def _halves(self, f: Function, bytes: Value) -> list[Value]:
        """The even and the odd ones of float8, as bits of halves; `bytes` may be any integers."""
        pairs = f.reinterpret(bytes, I16.vector(bytes.type.lanes * bytes.type.size // I16.size))
        format = MINIFLOATS[self.name]
        return [format.as_half(upper) for upper in (pairs << 8, pairs)]

    def read_words(self, f: Function, words: Value, element: Type) -> Iterator[Value]:
        """All numbers of words of 32 bits: the first of each word, then the second, and so on."""
        if self.name == "bfloat16":
            yield f.bitcast(words << 16, F32)
            yield f.bitcast(words & ~0xFFFF, F32)
        elif self.name == "int8":
            for low in range(0, 32, 8):
                up = 24 - low
                yield f.convert((words << up if up else words) >> 24, element)
        else:
            is_float8, words_of = self.name in MINIFLOATS, words.type
            halves = self._halves(f, words) if is_float8 else [words]
            both = [f.reinterpret(each, words_of) for each in halves]
            for low in (0, 16):
                for each in both:
                    bits = f.convert(each.logical_shift(low) if low else each, I16)
                    yield f.convert(f.bitcast(bits, F16), element)

    def folds(self, element: Type) -> bool:
        """Whether `read_pairs` gives even columns and odd columns.

        That is so for bfloat16 and float8, as float32.
        """
        return element == F32 and (self.name == "bfloat16" or self.name in MINIFLOATS)

    def read_pairs(
        self, f: Function, rows: Sequence[Value], d: Value | int, vector: Type
    ) -> list[list[Value]]:
        """Two vectors of columns of each row, from d on.

        If they are folded, the first has the even columns and the second the odd ones: a shift and
        a mask separate both from one load. Those of two rows of float8 are separated at once.
        """
        lanes = vector.lanes
        if not self.folds(vector.scalar):
            places = (d, d + lanes)
            return [[self.read_columns(f, row, at, vector) for at in places] for row in rows]
        loads = [f.load(self.memory.vector(2 * lanes), row, d) for row in rows]
        if self.name == "bfloat16":
            words = (f.join_lanes(load, I32) for load in loads)
            return [list(self.read_words(f, both, vector.scalar)) for both in words]
        result = []
        for first in range(0, len(loads), 2):
            several = loads[first : first + 2]
            halves = self._halves(f, side_by_side(f, several))
            for start in range(0, len(several) * lanes, lanes):
                mine = (f.shuffle(x, x, range(start, start + lanes)) for x in halves)
                result.append([f.convert(f.bitcast(x, F16), vector.scalar) for x in mine])
        return result

    def read_columns(self, f: Function, row: Value, d: Value | int, vector: Type) -> Value:
        """A vector of columns of a row, from d on."""
        return self.read(f, f.load(self.memory.like(vector), row, d), vector.scalar)

    def write(self, f: Function, x: Value) -> Value:
        """A number converted to this dtype, rounded to nearest even."""
        if self.name == "int8":
            return f.convert(f.convert(f.intrinsic("rint", x), I32), I8)
        if self.name in MINIFLOATS:
            return f.convert(MINIFLOATS[self.name].code(f, f.convert(x, F32)), I8)
        if self.name != "bfloat16":
            return f.convert(x, self.memory)
        bits = f.bitcast(f.convert(x, F32), I32)
        odd = bits.logical_shift(16) & 1
        rounded = (bits + odd + 0x7FFF).logical_shift(16)
        return f.convert(f.select(f.is_nan(x), 0x7FC0, rounded), I16)


_MEMORY = {"float32": F32, "float64": F64, "float16": F16, "bfloat16": I16, "int8": I8}
_MEMORY |= dict.fromkeys(MINIFLOATS, I8)
STORAGES = {name: Storage(name, memory) for name, memory in _MEMORY.items()}


def storage(name: str) -> Storage:
    """The storage of a dtype, by torch's name of it."""
    if name not in STORAGES:
        raise CodegenError(f"expected a dtype out of {sorted(STORAGES)}, got {name!r}")
    return STORAGES[name]
