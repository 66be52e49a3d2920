"""The letters of a PNG, which has to bring its own: strokes of a round pen.

A stroke is a row of points; a point is two digits to the base of 36, x and y, of a twentieth of the
text's size. Descenders end at 0, letters stand on 4, small ones reach 14 (e), capitals 18 (i). A ~
before a stroke makes it a curve through its points, an @ a closed one.

    "a": "@4e094489 8e84"        a ring through (4, 14), (0, 9), (4, 4), (8, 9), and a stem
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
from numpy.typing import NDArray

UNITS = 20  # of a text's size
BASELINE, SPACING, BLANK = 4, 4, 2
PEN, BOLD_PEN = 1.75, 2.6
ROUND = 0.83  # makes a closed curve through the four ends of a cross an ellipse
PIECES = 8  # straight pieces of a curve between two points

_STROKES = {
    "a": "@4e094489 8e84",
    "b": "0i04 @4e094489",
    "c": "~8c4e094486",
    "d": "8i84 @4e094489",
    "e": "0989 ~894e094486",
    "f": "343f ~3f4i6i 0e6e",
    "g": "8e83 ~834001 @4e094489",
    "h": "0i04 ~0a4e8a 8a84",
    "i": "0e04 0h0i",
    "j": "3e32 ~321000 3h3i",
    "k": "0i04 7e08 3a84",
    "l": "0i04",
    "m": "0e04 ~0a3e6a 6a64 ~6a9eca cac4",
    "n": "0e04 ~0a4e8a 8a84",
    "o": "@4e094489",
    "p": "0e00 @4e094489",
    "q": "8e80 @4e094489",
    "r": "0e04 ~0a2d5e",
    "s": "~7d4e0c49864405",
    "t": "3h37 ~374464 0e6e",
    "u": "0e08 ~084488 8e84",
    "v": "0e448e",
    "w": "0e346e94ce",
    "x": "0e84 8e04",
    "y": "0e44 8e4420",
    "z": "0e8e0484",
    "A": "045ia4 2989",
    "B": "040i 0i5i ~5i8f5b 5b0b ~5b9854 5404",
    "C": "~9f5i0b5497",
    "D": "040i4i ~4i9b44 4404",
    "E": "8i0i0484 0b7b",
    "F": "8i0i04 0b7b",
    "G": "~9f5i0b5497 979b6b",
    "H": "0i04 9i94 0b9b",
    "I": "0i04",
    "J": "6i68 ~683406",
    "K": "0i04 8i09 3c94",
    "L": "0i0474",
    "M": "040i5aaia4",
    "N": "040i949i",
    "O": "@5i0b54ab",
    "P": "040i5i ~5i9e5a 5a0a",
    "Q": "@5i0b54ab 68b3",
    "R": "040i5i ~5i9e5a 5a0a 5a94",
    "S": "~9f5i0f5b975406",
    "T": "0iai 5i54",
    "U": "0i09 ~0954a9 a9ai",
    "V": "0i54ai",
    "W": "0i447ia4ei",
    "X": "0i94 9i04",
    "Y": "0i5bai 5b54",
    "Z": "0i9i0494",
    "0": "@4i0b448b",
    "1": "0f4i44",
    "2": "~0e4i8e6a 6a0484",
    "3": "~0g4i7f3b ~3b884406",
    "4": "646i0888",
    "5": "7i1i0b ~0b4d884406",
    "6": "~6i1d08 @4d084488",
    "7": "0i8i34",
    "8": "@4i1f4b7f @4b084488",
    "9": "@4i0e498e ~8e7924",
    ".": "0405",
    ",": "1502",
    ":": "0405 0c0d",
    ";": "1502 1c1d",
    "'": "0i0f",
    '"': "0i0f 3i3f",
    "!": "0i08 0504",
    "?": "~0f4i8f4b 4b48 4544",
    "_": "0292",
    "-": "0959",
    "+": "0888 4c44",
    "*": "3i3c 0h6d 6h0d",
    "/": "036j",
    "\\": "0j63",
    "|": "0j02",
    "=": "0787 0b8b",
    "<": "7d0975",
    ">": "0d7905",
    "%": "@2i0g2e4g @a886a4c6 8i44",
    "&": "~4b2f4i6f4b07448a 4b94",
    "#": "3i14 8i64 0d9d 0898",
    "(": "~3j0b33",
    ")": "~0j3b03",
    "[": "3j0j0333",
    "]": "0j3j3303",
    "{": "4j2i2c0b2a2343",
    "}": "0j2i2c4b2a2303",
    "~": "~0a2b4a69",
    "^": "0e3i6e",
    "…": "0405 4445 8485",
}
_UNKNOWN = "0i8i84040i"


def text_width(text: str, size: float) -> float:
    """How wide a line is."""
    units = sum(BLANK if sign == " " else _extent(sign) for sign in text)
    return (units + SPACING * (len(text) - 1)) * size / UNITS


def letters(text: str, size: float, bold: bool = False) -> NDArray[np.float64]:
    """A line as the share of each dot that is ink; the baseline is `descent(size)` from below."""
    unit = size / UNITS
    width, height = round(text_width(text, size)) + 2 * _PAD, descent(size) + round(16 * unit)
    ink = np.zeros((height, width))
    x = float(_PAD)
    for sign in text:
        if sign != " ":
            at = round(x * 4) / 4  # so that few pictures of a letter are made
            drawn = _letter(sign, size, bold, at % 1)
            part = ink[:, int(at) - _PAD : int(at) - _PAD + drawn.shape[1]]
            np.maximum(part, drawn[:, : part.shape[1]], out=part)
        x += ((BLANK if sign == " " else _extent(sign)) + SPACING) * unit
    return ink


def descent(size: float) -> int:
    """How far the dots of a line reach below the baseline."""
    return round(BASELINE * size / UNITS) + _PAD


_PAD = 2  # dots around a line, for the width of the pen


@functools.lru_cache(maxsize=1024)
def _letter(sign: str, size: float, bold: bool, shift: float) -> NDArray[np.float64]:
    """One letter on as many rows as its line, moved to the right by less than a dot."""
    unit = size / UNITS
    rows = descent(size) + round(16 * unit)
    columns = int(_extent(sign) * unit + shift) + 2 * _PAD + 1
    y = rows - descent(size) - 0.5 - np.arange(rows)[:, None]
    x = np.arange(columns)[None, :] + 0.5 - _PAD
    distance = np.full((rows, columns), np.inf)
    for stroke in _curves(sign):
        ends = stroke * unit + (shift, -BASELINE * unit)
        for start, stop in itertools.pairwise(ends):
            along = stop - start
            reach = float(along @ along) or 1.0
            part = ((x - start[0]) * along[0] + (y - start[1]) * along[1]) / reach
            part = np.clip(part, 0, 1)
            gap = np.hypot(x - start[0] - part * along[0], y - start[1] - part * along[1])
            distance = np.minimum(distance, gap)
    return np.clip(0.5 + (BOLD_PEN if bold else PEN) * unit / 2 - distance, 0, 1)


@functools.lru_cache(maxsize=256)
def _curves(sign: str) -> list[NDArray[np.float64]]:
    """The strokes of a letter as rows of points [n, 2]."""
    return [_curve(stroke) for stroke in _STROKES.get(sign, _UNKNOWN).split()]


def _curve(stroke: str) -> NDArray[np.float64]:
    kind, digits = (stroke[0], stroke[1:]) if stroke[0] in "~@" else ("", stroke)
    numbers = np.array([int(digit, 36) for digit in digits], float).reshape(-1, 2)
    if not kind:
        return numbers
    points = np.vstack([numbers, numbers[:1]]) if kind == "@" else numbers
    before, after = np.roll(points, 1, axis=0), np.roll(points, -1, axis=0)
    if kind == "@":
        before[0], after[-1] = points[-2], points[1]
    speed = ROUND * (after - before)
    if kind == "~":
        speed[0] = 2 * (points[1] - points[0]) - speed[1]
        speed[-1] = 2 * (points[-1] - points[-2]) - speed[-2]
    at = np.linspace(0, 1, PIECES, endpoint=False)[:, None]
    pieces = [
        _between(points[i], points[i + 1], speed[i], speed[i + 1], at)
        for i in range(len(points) - 1)
    ]
    return np.vstack([*pieces, points[-1:]])


def _between(
    start: NDArray[np.float64],
    stop: NDArray[np.float64],
    leaving: NDArray[np.float64],
    arriving: NDArray[np.float64],
    at: NDArray[np.float64],
) -> NDArray[np.float64]:
    """The cubic between two points that has these speeds there."""
    rest = 1 - at
    return (
        start * (1 + 2 * at) * rest**2
        + leaving * at * rest**2
        + stop * (3 - 2 * at) * at**2
        - arriving * rest * at**2
    )


@functools.lru_cache(maxsize=256)
def _extent(sign: str) -> float:
    return float(max(points[:, 0].max() for points in _curves(sign)))
