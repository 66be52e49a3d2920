"""A laid-out picture as PNG, with nothing but zlib."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from quire.draw.sheet import LEFT, PAPER, RESOLUTION, TOP, Box, Label, Picture
from quire.draw.strokes import descent, letters, text_width

_SHIFT = {"start": 0.0, "middle": 0.5, "end": 1.0}


def write_png(sheet: Picture) -> bytes:
    """The content of a file."""
    dots = np.empty((sheet.height * RESOLUTION, sheet.width * RESOLUTION, 3), np.uint8)
    dots[:] = PAPER
    _paint_cells(dots, sheet)
    for box in sheet.boxes():
        _paint_box(dots, box)
    for label in sheet.labels():
        _paint_label(dots, label)
    return _encoded(dots)


def _paint_cells(dots: NDArray[np.uint8], sheet: Picture) -> None:
    palette = np.array([sheet.colours[kind] for kind in sorted(sheet.colours)], np.uint8)
    colours = palette[sheet.kinds]
    drawn = colours.repeat(sheet.q.dots, axis=0).repeat(sheet.kv.dots, axis=1)
    height, width = (round(axis.side * RESOLUTION) for axis in (sheet.q, sheet.kv))
    top, left = TOP * RESOLUTION, LEFT * RESOLUTION
    dots[top : top + height, left : left + width] = drawn[:height, :width]


def _paint_box(dots: NDArray[np.uint8], box: Box) -> None:
    left, top, right, bottom = (
        round(end * RESOLUTION) for end in (box.x, box.y, box.x + box.width, box.y + box.height)
    )
    dots[top:bottom, left:right] = box.colour


def _paint_label(dots: NDArray[np.uint8], label: Label) -> None:
    size = label.size * RESOLUTION
    ink = letters(label.text, size, label.bold)[..., None]
    left = round(label.x * RESOLUTION - _SHIFT[label.anchor] * text_width(label.text, size))
    bottom = round(label.y * RESOLUTION) + descent(size)
    left = max(0, left)
    place = dots[max(0, bottom - len(ink)) : bottom, left : left + ink.shape[1]]
    ink = ink[-len(place) :, : place.shape[1]]
    place[:] = np.round(place * (1 - ink) + np.array(label.colour) * ink)


def _encoded(dots: NDArray[np.uint8]) -> bytes:
    height, width, _ = dots.shape
    rows = np.zeros((height, 1 + width * 3), np.uint8)  # each begins with its filter, none
    rows[:, 1:] = dots.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, red green blue
    density = round(96 * RESOLUTION / 0.0254)  # dots per metre
    chunks = [
        (b"IHDR", header),
        (b"pHYs", struct.pack(">IIB", density, density, 1)),
        (b"IDAT", zlib.compress(rows.tobytes(), 9)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
