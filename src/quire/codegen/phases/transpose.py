"""Squares of vectors, transposed in registers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.codegen.llvm.builder import Function, Value


def transpose(f: Function, rows: Sequence[Value]) -> list[Value]:
    """The transpose of a square of vectors, in shuffles that are one instruction each.

    Every step exchanges one bit of the number of a row with one bit of the number of a lane.
    """
    vectors, lanes = list(rows), rows[0].type.lanes
    within = min(lanes, 128 // rows[0].type.scalar.bits)  # lanes that one instruction interleaves
    bit_of_column: list[int] = []  # by the bit of a row that was exchanged for it
    unit, bit = 1, 1
    while bit < lanes:
        inside = unit < within
        low, high = _interleaved(lanes, within, unit) if inside else _halved(lanes, unit)
        for r in range(lanes):
            if not r & bit:
                a, b = vectors[r], vectors[r | bit]
                vectors[r], vectors[r | bit] = f.shuffle(a, b, low), f.shuffle(a, b, high)
        bit_of_column.append(within // 2 // unit if inside else bit)
        unit, bit = (unit * 2 if inside else unit), bit * 2
    return [vectors[_row_of(column, bit_of_column)] for column in range(lanes)]


def _row_of(column: int, bit_of_column: Sequence[int]) -> int:
    return sum(1 << k for k, bit in enumerate(bit_of_column) if column & bit)


def _interleaved(lanes: int, within: int, unit: int) -> Iterator[list[int]]:
    """Units of two vectors in turns: of the lower halves of each 128 bits, then of the upper."""
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
