"""Packed weights of a linear layer: how they lie in memory, and how they become floats.

Weights [N, K] are packed in panels of 16 columns of the result, and a panel in blocks of 64 steps
of k. So a tile reads a panel from its first byte to its last:

    panel 0                      panel 1
    | block 0 | block 1 | ...    | block 0 | ...        a block: 64 k of 16 columns

    float32    64 x 16 floats
    float16    64 x 16 halves
    bfloat16   32 words x 16: the word of a column holds k in its low half, k + 1 in its high half
    int8       2 x 16 scales, then 16 words x 16 of four numbers: w = (number - 128) * scale
    int4       2 x 16 scales and 16 offsets, then 8 words x 16 of eight numbers:
               w = number * scale + offset, rounded once

A scale belongs to 32 k of a column; scales and offsets are float16. Byte b of a word of int8 is
k + b. A word of int4 has k + b in the low half of byte b, and k + 4 + b in the high half, so that
each half is a word of four bytes. int8 is what GGUF calls Q8_0, int4 is Q4_1; Q4_0 is int4 with the
offset -8 * scale.

A format gives the very bits of a layer of float32 whose weights are the decoded ones.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.codegen.llvm.builder import Function, Value
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import F16, F32, I8, I32

PANEL = 16  # columns
BLOCK = 64  # steps of k
GROUP = 32  # steps of k that share a scale
GROUPS = BLOCK // GROUP
GROUP_BYTES = GROUP * PANEL * F32.size  # of floats
MANTISSA, EXPONENT_BIAS = 23, 127  # of float32
BYTE = 8  # bits


class WeightFormat(NamedTuple):
    """How weights are stored: bits of a number, steps of k in a load, and parts of a header.

    The header of a group has no parts, scales, or scales and offsets.
    """

    name: str
    bits: int
    step: int
    header: int = 0

    @property
    def scaled(self) -> bool:
        """Whether numbers are integers with a scale."""
        return self.header > 0

    @property
    def shifted(self) -> bool:
        """Whether numbers have an offset."""
        return self.header > 1

    @property
    def header_bytes(self) -> int:
        """The bytes of the scales and offsets of a block."""
        return GROUPS * self.header * PANEL * F16.size

    @property
    def block_bytes(self) -> int:
        """The bytes of a block, which are whole cache lines."""
        return self.header_bytes + BLOCK * PANEL * self.bits // 8

    @property
    def step_bytes(self) -> int:
        """The bytes that `load` reads from a panel."""
        return PANEL * self.bits * self.step // 8

    @property
    def zero(self) -> int:
        """The integer that stands for 0, if there is no offset."""
        return 0 if self.shifted else 1 << (self.bits - 1)

    def panel_bytes(self, depth: int) -> int:
        """The bytes of a panel whose columns have `depth` weights."""
        return -(-depth // BLOCK) * self.block_bytes


FORMATS = {
    each.name: each
    for each in (
        WeightFormat("float32", 32, 1),
        WeightFormat("float16", 16, 1),
        WeightFormat("bfloat16", 16, 2),
        WeightFormat("int8", 8, 4, header=1),
        WeightFormat("int4", 4, 8, header=2),
    )
}
FLOAT32 = FORMATS["float32"]


class Scale(NamedTuple):
    """What makes a weight of an integer: number * factor + offset, for each lane."""

    factor: Value
    offset: Value


def _shifted(word: Value, right: int) -> Value:
    return word.logical_shift(right) if right > 0 else word << -right if right else word


class Loader:
    """Writes the code that loads and decodes weights of one format."""

    def __init__(self, f: Function, target: Target, format: WeightFormat) -> None:
        self.f, self.target, self.format = f, target, format
        self.lanes = min(PANEL, target.lanes(F32))
        self.looks_up = format.bits == 4 and self.lanes == 16 and "+avx512f" in target.features
        self.parts = range(0, PANEL, self.lanes)  # the first column of each vector of a panel

    def scales(self, block: Value, group: Value) -> list[Scale]:
        """The scales and offsets of a group of a block, as floats, for each vector of a panel."""
        at = self.f.offset(block, group * (self.format.header * PANEL), F16)
        scales = []
        for part in self.parts:
            factor = self._halves(at, part)
            scales.append(Scale(factor, self._offset(at, part, factor)))
        return scales

    def _offset(self, place: Value, part: int, factor: Value) -> Value:
        """What is added to number * factor: it is stored, or it takes `zero` off."""
        if self.format.shifted:
            return self._halves(place, PANEL + part)
        return factor * -float((1 << MANTISSA - BYTE) + self.format.zero)

    def _halves(self, place: Value, first: int) -> Value:
        return self.f.convert(self.f.load(F16.vector(self.lanes), place, first), F32)

    def words(self, place: Value) -> list[Value]:
        """What lies at `place` for `format.step` steps of k, for each vector of a panel."""
        f = self.f
        type = {"float32": F32, "float16": F16}.get(self.format.name, I32)
        return [f.load(type.vector(self.lanes), place, part) for part in self.parts]

    def decode(self, word: Value, j: int, scale: Scale | None) -> Value:
        """The j-th step of k of what was loaded, as floats."""
        f = self.f
        match self.format.name:
            case "float32":
                return word
            case "float16":
                return f.convert(word, F32)
            case "bfloat16":
                return f.bitcast(word & -65536 if j else word << 16, F32)
        assert scale is not None, "integers have scales"
        number = self._byte(word, j) if self.format.bits == 8 else self._half(word, j)
        return f.fma(number, scale.factor, scale.offset)

    def decode_group(self, block: Value, group: Value, out: Value) -> None:
        """Write a group of a block to `out` as floats, [k][16]."""
        f, format = self.f, self.format
        scales = self.scales(block, group) if format.scaled else [None] * len(self.parts)
        turns = GROUP // format.step
        with f.range(0, turns) as turn:
            at = (group * turns + turn) * format.step_bytes + format.header_bytes
            words = self.words(f.offset(block, at, I8))
            row = f.offset(out, turn * (format.step * PANEL), F32)
            for j in range(format.step):
                for part, word, scale in zip(self.parts, words, scales, strict=True):
                    f.store(self.decode(word, j, scale), row, j * PANEL + part)

    # An integer becomes a float when its bits become bits of the mantissa of a power of two. No
    # conversion does that in fewer instructions, and the multipliers stay free for the products.

    def _byte(self, word: Value, j: int) -> Value:
        """2**15 + the j-th byte. Its product with a scale is exact, and so is taking zero off."""
        return self._in_mantissa(_shifted(word, BYTE * (j - 1)), BYTE)

    def _half(self, word: Value, j: int) -> Value:
        """The j-th number of four bits."""
        first = BYTE * (j % 4) + 4 * (j // 4)
        if self.looks_up:
            return self._looked_up(_shifted(word, first))
        place = MANTISSA - self.format.bits
        return self._in_mantissa(_shifted(word, first - place), place) - float(1 << 4)

    def _looked_up(self, word: Value) -> Value:
        """The number in the lowest four bits: a permutation of a vector reads no others."""
        type = F32.vector(self.lanes)
        numbers = self.f.lanes(type, [float(number) for number in range(self.lanes)])
        return self.f.instruction("x86.avx512.permvar.sf.512", type, numbers, word)

    def _in_mantissa(self, word: Value, first: int) -> Value:
        """2**(23 - first) + the number of `format.bits` bits that begins at bit `first`."""
        mask = (1 << self.format.bits) - 1 << first
        exponent = MANTISSA - first + EXPONENT_BIAS << MANTISSA
        return self.f.bitcast(word & mask | exponent, F32)

    def bytes_of(self, word: Value) -> list[Value]:
        """Words of four numbers without a sign, in the order of k."""
        if self.format.bits == 8:
            return [word]
        return [word & 0x0F0F0F0F, word.logical_shift(4) & 0x0F0F0F0F]

    def place(self, panel: Value, block: Value) -> Value:
        """The address of a block of a panel."""
        return self.f.offset(panel, block * self.format.block_bytes, I8)
