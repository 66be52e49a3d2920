"""Rows of x, staged for a linear layer: one pointer serves all rows of a tile.

    floats     [group of 32 k][k][row]
    integers   [group of 32 k] of: scales [row] (float32), totals [row] (int32), then the integers,
               [word][row]

Integers are x / scale, rounded half to even, where scale is the largest magnitude of the group
/ 127. A group with inf or NaN gets the scale NaN. Packed weights are numbers without a sign, which
are too large by `zero` or too small by an offset; the total of a group's integers makes up for it.
The sum of a group is exact, whatever the instructions are that compute it:

    DOT_BYTES    a word has four bytes              VNNI: four products and three sums at once
    DOT_PAIRS    two words, of k, k + 2 and of k + 1, k + 3, in 16 bits      AVX2
    DOT_SINGLE   four words, of one number each     any processor
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from quire.codegen.llvm.builder import Function, Value
from quire.codegen.llvm.jit import llvm_version
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import F32, I8, I16, I32, Type
from quire.codegen.phases.tiles import across
from quire.codegen.phases.weights import GROUP

DOT_BYTES, DOT_PAIRS, DOT_SINGLE = 1, 2, 4  # words for four numbers
LARGEST = 127.0
_WIDE = 16  # lanes of sums over a row, the same on every processor
HEAD = 2  # words of a row and group before its integers: scale and total


class Activations(NamedTuple):
    """How rows are staged: as floats (`words` is 0), or as integers of `words` words for four."""

    words: int = 0

    @property
    def group_words(self) -> int:
        """The words of one row in one group."""
        return HEAD + GROUP // 4 * self.words if self.words else GROUP

    @staticmethod
    def integers(target: Target) -> Activations:
        """Return how a processor gets integers."""
        has = set(target.features.split(","))
        lanes = target.lanes(F32)
        vnni = {"+avx512vnni"} if lanes == 16 else {"+avx512vnni", "+avx512vl"}
        if lanes in (8, 16) and vnni <= has:
            return Activations(DOT_BYTES)
        x86 = target.triple.startswith("x86_64")
        return Activations(DOT_PAIRS if x86 and lanes == 8 else DOT_SINGLE)

    def scale(self, f: Function, group: Value, row: int) -> Value:
        """The scale of a row in a group of integers."""
        return f.load(F32, group, row)

    def total(self, f: Function, group: Value, rows: int, row: int) -> Value:
        """The sum of the integers of a row in a group."""
        return f.load(I32, group, rows + row)

    def dot(self, f: Function, words: Callable[[int], Value], four: Value, total: Value) -> Value:
        """`total` and the products of four numbers of x with `four` bytes of weights, per lane.

        `words(i)` is the i-th word of x in every lane.
        """
        type, lanes = total.type, total.type.lanes
        if self.words == DOT_BYTES:
            return _dot_bytes(f, total, four, words(0))
        if self.words == DOT_PAIRS:
            pairs = I16.vector(2 * lanes)
            for i in range(2):
                halves = (four.logical_shift(8) if i else four) & 0x00FF00FF
                operands = [f.reinterpret(value, pairs) for value in (halves, words(i))]
                total = total + f.instruction("x86.avx2.pmadd.wd", type, *operands)
            return total
        for i in range(4):
            number = four.logical_shift(8 * i) if i else four
            total = total + (number & 0xFF if i < 3 else number) * words(i)
        return total


def _dot_bytes(f: Function, total: Value, four: Value, word: Value) -> Value:
    type, bits = total.type, 32 * total.type.lanes
    if int(llvm_version().split(".")[0]) >= 22:  # older versions pass the bytes as words
        four, word = (f.reinterpret(value, I8.vector(bits // 8)) for value in (four, word))
    return f.instruction(f"x86.avx512.vpdpbusd.{bits}", type, total, four, word)


class Stager:
    """Writes the code that stages rows which lie as floats in working memory."""

    def __init__(self, f: Function, staged: Activations) -> None:
        self.f, self.staged = f, staged

    def scatter(self, line: Value, depth: Value, out: Value, rows: Value) -> None:
        """Copy `depth` floats, whole blocks, to `out`, one row of it."""
        f = self.f
        if self.staged.words:
            with f.range(0, depth, GROUP) as k:
                group = k.udiv(GROUP) * rows * self.staged.group_words
                self._quantise(f.offset(line, k, F32), f.offset(out, group, F32), rows)
            return
        with f.range(0, depth, 8) as k:
            for u in range(8):
                f.store(f.load(F32, line, k + u), out, (k + u) * rows)

    def _quantise(self, numbers: Value, group: Value, rows: Value) -> None:
        """Write a group of one row as integers."""
        f, type = self.f, F32.vector(_WIDE)
        parts = [f.load(type, numbers, part) for part in range(0, GROUP, _WIDE)]
        bits = [f.bitcast(part, I32) & 0x7FFF_FFFF for part in parts]
        most = f.bitcast(f.reduce("smax", f.maximum(*bits)), F32)
        finite = most < float("inf")
        scale = f.select(finite, most / LARGEST, float("nan"))
        inverse = f.select(finite & (most > 0.0), LARGEST / most, 0.0)
        # The inverse of a tiny number is infinite; such a group counts as 0.
        inverse = f.splat(f.select(inverse < float("inf"), inverse, 0.0), type)
        whole = [self._rounded(part * inverse, finite) for part in parts]
        f.store(scale, group)
        total = f.extract(across(f, whole[0] + whole[1], lambda a, b: a + b), 0)
        f.store(total, f.offset(group, rows, F32))
        at = f.offset(group, rows * HEAD, F32)
        for part, number in enumerate(whole):
            for i, word in enumerate(self._words(number)):
                place = part * (_WIDE // 4) * self.staged.words + i
                f.store(word, at, rows * place)

    def _rounded(self, number: Value, finite: Value) -> Value:
        f = self.f
        return f.convert(f.intrinsic("roundeven", f.select(finite, number, 0.0)), I32)

    def _words(self, numbers: Value) -> list[Value]:
        """Integers as words, in the order in which `dot` takes them."""
        f, words = self.f, self.staged.words
        packed: Type = {DOT_BYTES: I8, DOT_PAIRS: I16, DOT_SINGLE: I32}[words]
        order = list(range(_WIDE))
        if words == DOT_PAIRS:
            order = [four + k for four in range(0, _WIDE, 4) for k in (0, 2, 1, 3)]
        narrow = f.convert(f.shuffle(numbers, numbers, order), packed)
        joined = f.reinterpret(narrow, I32.vector(_WIDE // 4 * words))
        return [f.extract(joined, i) for i in range(joined.type.lanes)]
