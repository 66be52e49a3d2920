"""Squares of vectors, transposed in registers by shuffles that are one instruction each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from quire.codegen.llvm.builder import Function, Value


def transpose(f: Function, rows: Sequence[Value]) -> list[Value]:
    """The transpose of a square of vectors."""
    vectors, lanes = list(rows), rows[0].type.lanes
    unit = min(lanes, 128 // rows[0].type.scalar.bits)
    for first in range(0, lanes, unit):
        vectors[first : first + unit] = transpose_units(f, vectors[first : first + unit])
    # Now every step exchanges one bit of the number of a row with one bit of the number of a unit.
    bit, (low, high) = unit, _halved(lanes, unit)
    while bit < lanes:
        for r in range(lanes):
            if not r & bit:
                a, b = vectors[r], vectors[r | bit]
                vectors[r], vectors[r | bit] = f.shuffle(a, b, low), f.shuffle(a, b, high)
        bit *= 2
    return vectors


def transpose_parts(
    f: Function, read: Callable[[int], Value], lanes: int, part: int, unit: int
) -> list[Value]:
    """Columns of as many rows as there are `lanes`, of which `read` gives `part` numbers each.

    Rows are put side by side until vectors are full. A part has one or two units of 128 bits, or is
    a whole vector. Rows are chosen so that they are in order in the end.
    """
    if part == lanes:
        return transpose(f, [read(row) for row in range(lanes)])
    if part == unit:
        rows = [side_by_side(f, [read(t) for t in range(r, lanes, unit)]) for r in range(unit)]
        return transpose_units(f, rows)
    first, second = (
        transpose_units(
            f, [side_by_side(f, [read(r), read(r + unit)]) for r in range(begin, begin + unit)]
        )
        for begin in (0, 2 * unit)
    )
    halves = [
        [f.shuffle(a, b, picks) for a, b in zip(first, second, strict=True)]
        for picks in _halved(lanes, unit)
    ]
    return halves[0] + halves[1]


def transpose_units(f: Function, rows: Sequence[Value]) -> list[Value]:
    """The transpose of small squares that lie side by side, each in 128 bits of the vectors."""
    vectors, lanes, size = list(rows), rows[0].type.lanes, len(rows)
    bit = 1
    while bit < size:
        low, high = _interleaved(lanes, size, bit)
        for r in range(size):
            if not r & bit:
                a, b = vectors[r], vectors[r | bit]
                vectors[r], vectors[r | bit] = f.shuffle(a, b, low), f.shuffle(a, b, high)
        bit *= 2
    # The upper halves of a pair come second, so columns are in the order of reversed bits.
    bits = size.bit_length() - 1
    return [vectors[int(f"{column:0{bits}b}"[::-1] or "0", 2)] for column in range(size)]


def side_by_side(f: Function, parts: Sequence[Value]) -> Value:
    """One vector of the lanes of several, whose number is a power of two."""
    vectors = list(parts)
    while len(vectors) > 1:
        lanes = range(2 * vectors[0].type.lanes)
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [f.shuffle(a, b, lanes) for a, b in pairs]
    return vectors[0]


def _interleaved(lanes: int, within: int, unit: int) -> Iterator[list[int]]:
    """Units of two vectors in turns: of the lower half of every `within` lanes, then the upper."""
    for half in (0, within // 2):
        yield [
            side + block + half + at + lane
            for block in range(0, lanes, within)
            for at in range(0, within // 2, unit)
            for side in (0, lanes)
            for lane in range(unit)
        ]


def _halved(lanes: int, unit: int) -> Iterator[list[int]]:
    """Every second unit of the first vector, then of the second vector."""
    for start in (0, unit):
        yield [
            side + at + lane
            for side in (0, lanes)
            for at in range(start, lanes, 2 * unit)
            for lane in range(unit)
        ]
