"""Pictures: files that others can read, in which cells have the colours that they should."""

from __future__ import annotations

import re
import struct
import tracemalloc
import xml.etree.ElementTree as ElementTree
import zlib
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import quire
from quire import mods
from quire.block_mask.lists import EMPTY, FULL, PARTIAL
from quire.draw import Drawing, strokes
from quire.draw.sheet import COLOURS, INK, LEFT, PAPER, RESOLUTION, SIDE, TOP, Sheet
from quire.draw.svg import rectangles

SVG = "{http://www.w3.org/2000/svg}"
DRAWINGS = {
    "elements": (mods.sliding_window(9), (64, 64), 16),
    "blocks": (mods.prefix_lm(700), (1000, 3000), 128),
    "many blocks": (
        mods.and_masks(mods.causal, mods.document(lengths=[60_000] * 5)),
        (300_000,),
        128,
    ),
    "flat": (mods.sliding_window(100_000), (1000, 1 << 20), 128),
    "tiny": (mods.causal, (1, 1), 128),
}


def drawn(name: str) -> Drawing:
    mask, lengths, block_size = DRAWINGS[name]
    return quire.draw(mask, *lengths, block_size=block_size)


def decoded(png: bytes) -> NDArray[np.uint8]:
    """The dots [height, width, 3] of a PNG without filters."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, at = {}, 8
    while at < len(png):
        length, name = struct.unpack(">I4s", png[at : at + 8])
        chunks[name] = png[at + 8 : at + 8 + length]
        (check,) = struct.unpack(">I", png[at + 8 + length : at + 12 + length])
        assert check == zlib.crc32(name + chunks[name])
        at += 12 + length
    assert list(chunks) == [b"IHDR", b"pHYs", b"IDAT", b"IEND"]
    width, height, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert rest == [8, 2, 0, 0, 0]  # 8 bits of red, green and blue
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, -1)
    assert (rows[:, 0] == 0).all()
    return rows[:, 1:].reshape(height, width, 3)


@pytest.mark.parametrize("name", DRAWINGS)
def test_the_cells_of_a_png_have_their_colours(name: str) -> None:
    drawing = drawn(name)
    sheet, dots = Sheet(drawing.subject), decoded(drawing.png())
    assert dots.shape == (sheet.height * RESOLUTION, sheet.width * RESOLUTION, 3)
    kinds = sheet.cells.kinds
    rows = TOP * RESOLUTION + np.arange(len(kinds)) * sheet.q.dots
    columns = LEFT * RESOLUTION + np.arange(kinds.shape[1]) * sheet.kv.dots
    palette = np.array([COLOURS[EMPTY], COLOURS[PARTIAL], COLOURS[FULL]])
    assert (dots[np.ix_(rows, columns)] == palette[kinds]).all()
    assert (dots[[0, -1]] == PAPER).all() and (dots[:, [0, -1]] == PAPER).all(), "no margin"
    assert (dots[: 48 * RESOLUTION] == INK).all(-1).sum() > 20, "no title"


@pytest.mark.parametrize("name", DRAWINGS)
def test_an_svg_has_the_same_cells(name: str) -> None:
    drawing = drawn(name)
    sheet, root = Sheet(drawing.subject), ElementTree.fromstring(drawing.svg())
    assert (root.get("width"), root.get("height")) == (str(sheet.width), str(sheet.height))
    side = {
        axis: np.arange(count) * each.dots / RESOLUTION
        for axis, each, count in (
            ("y", sheet.q, len(sheet.cells.kinds)),
            ("x", sheet.kv, sheet.cells.kinds.shape[1]),
        )
    }
    kinds = {"#" + bytes(colour).hex(): kind for kind, colour in COLOURS.items()}
    found = np.full(sheet.cells.kinds.shape, -1)
    for path in root.iter(f"{SVG}path"):
        assert path.get("transform") == f"translate({LEFT} {TOP})"
        kind = kinds[path.get("fill")]
        for box in re.findall(r"M([\d.]+) ([\d.]+)H([\d.]+)V([\d.]+)H\1Z", path.get("d") or ""):
            left, top, right, bottom = map(float, box)
            y, x = (
                (side["y"] >= top) & (side["y"] < bottom),
                (side["x"] >= left) & (side["x"] < right),
            )
            assert (found[np.ix_(y, x)] == -1).all(), "drawn twice"
            found[np.ix_(y, x)] = kind
    assert (found == sheet.cells.kinds).all()


def test_words() -> None:
    texts = [text.text for text in ElementTree.fromstring(drawn("flat").svg()).iter(f"{SVG}text")]
    assert texts == [
        "sliding_window_100000",
        "1,000 queries x 1,048,576 keys in blocks of 128, sparsity 99.9 %",
        *("keys", "queries", "0", "256k", "512k", "768k", "1M", "1k"),
        *("full", "partial", "empty", "a cell is 128 x 2,048 tokens"),
    ]
    texts = [
        text.text for text in ElementTree.fromstring(drawn("elements").svg()).iter(f"{SVG}text")
    ]
    assert texts[-2:] == ["seen", "hidden"]


def test_names_are_escaped_and_cut() -> None:
    svg = quire.draw(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, 8).svg()
    root = ElementTree.fromstring(svg)
    assert next(text.text for text in root.iter(f"{SVG}text")) == "<lambda>"
    long = mods.and_masks(*[mods.causal] * 99)
    title = Sheet(quire.draw(long, 8).subject).title
    assert title.startswith("and_masks(causal, ") and title.endswith("…")
    assert decoded(quire.draw(long, 8).png()).size


def test_the_blocks_of_elements_are_outlined() -> None:
    lines = {16: 6, 64: 0}  # three across, three down; none within a single block
    for block_size, expected in lines.items():
        sheet = Sheet(quire.draw(mods.causal, 64, block_size=block_size).subject)
        sides = (sheet.kv.side, sheet.q.side)
        dark = [b for b in sheet._lines() if b.colour != PAPER and max(b.width, b.height) in sides]
        assert len(dark) == expected


def test_no_picture_is_too_large() -> None:
    tracemalloc.start()
    quire.draw(mods.causal, 1_000_000).png()
    quire.draw(mods.causal, 1_000_000).svg()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6
    for name in DRAWINGS:
        sheet = Sheet(drawn(name).subject)
        assert max(sheet.q.side, sheet.kv.side) <= SIDE


def test_rectangles_are_few() -> None:
    kinds = np.kron(np.eye(8, dtype=np.uint8), np.full((50, 50), FULL, np.uint8))
    assert sorted(rectangles(kinds, FULL)) == [
        (50 * i, 50 * i + 50, 50 * i, 50 * i + 50) for i in range(8)
    ]


@pytest.mark.parametrize("suffix", [".png", ".svg", ".PNG"])
def test_saved_where_asked(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"mask{suffix}"
    drawing = quire.draw(mods.causal, 64, path=path)
    content = path.read_bytes()
    assert content == (drawing.svg().encode() if suffix == ".svg" else drawing.png())
    assert drawing._repr_png_() == drawing.png()


# letters


def test_every_sign_has_strokes_of_its_own() -> None:
    signs = [chr(code) for code in range(33, 127) if chr(code) not in "@$`"] + ["…"]
    assert strokes._STROKES.keys() == set(signs)
    pictures = {strokes.letters(sign, 40).tobytes() for sign in signs if sign not in "lI"}
    assert len(pictures) == len(signs) - 2


def test_a_sign_without_strokes_is_a_box() -> None:
    assert (strokes.letters("é", 24) == strokes.letters("ß", 24)).all()


def test_letters_stand_on_the_line_within_their_width() -> None:
    ink = strokes.letters("Hxn", 40)
    assert ink.shape[1] == round(strokes.text_width("Hxn", 40)) + 4
    dark = np.flatnonzero((ink > 0.5).any(1))
    baseline = len(ink) - strokes.descent(40)
    assert baseline - 28 <= dark[0] + 2 <= baseline - 26  # capitals are 0.7 of the size
    assert baseline <= dark[-1] + 1 <= baseline + 2
    assert strokes.letters("p", 40)[baseline + 4 :].max() > 0.9
