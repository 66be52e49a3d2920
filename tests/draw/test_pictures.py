"""Pictures: files that others can read, in which cells have the colours that they should."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import textwrap
import threading
import tracemalloc
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import quire
from quire import errors, mods
from quire.block_mask.blocks import EMPTY, FULL, PARTIAL
from quire.draw.drawing import MaskDrawing

matplotlib = pytest.importorskip("matplotlib")
picture = pytest.importorskip("quire.draw.picture")

SVG = "{http://www.w3.org/2000/svg}"
DRAWINGS: dict[str, tuple[Any, tuple[int, ...], int]] = {
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
TO_POINTS = 0.75


def drawn(name: str) -> MaskDrawing:
    mask, lengths, block_size = DRAWINGS[name]
    drawing = quire.draw(mask, *lengths, block_size=block_size)
    assert isinstance(drawing, MaskDrawing)
    return drawing


def cells_and_pixels(drawing: MaskDrawing) -> tuple[NDArray[np.uint8], tuple[int, ...], Any]:
    """The kinds of its cells, the tokens in one, and the sides of all in pixels."""
    room = picture.most_pixels(drawing.subject.lengths)
    cells = drawing.subject.cells(room)
    return cells.kinds, cells.step, picture.whole_dots(drawing.subject.lengths, cells.step, room)


def decoded(png: bytes) -> NDArray[np.uint8]:
    """The dots [height, width, 3] of a PNG."""
    from matplotlib.image import imread

    dots = np.round(imread(io.BytesIO(png)) * 255).astype(np.uint8)
    assert (dots[..., 3] == 255).all(), "nothing shines through"
    return dots[..., :3]


def middles(side: float, length: int, step: int, count: int) -> NDArray[np.int64]:
    """A dot of each cell along a side, away from lines at its ends."""
    wide = picture.RESOLUTION * side * step / length
    assert wide >= 1, "no cell is lost"
    return np.minimum(np.arange(count) * wide + wide // 2, 2 * side - 1).astype(np.int64)


def rgb(colour: str) -> list[int]:
    return list(bytes.fromhex(colour[1:]))


def texts(svg: str) -> list[str | None]:
    return [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("name", DRAWINGS)
def test_the_cells_of_a_png_have_their_colours(name: str) -> None:
    drawing = drawn(name)
    dots = decoded(drawing.png())
    kinds, step, pixels = cells_and_pixels(drawing)
    rows, columns = (
        start * picture.RESOLUTION + middles(side, length, each, count)
        for start, side, length, each, count in zip(
            *((picture.TOP, picture.LEFT), pixels, drawing.subject.lengths, step, kinds.shape),
            strict=True,
        )
    )
    palette = np.array([rgb(picture.COLOURS[kind]) for kind in (EMPTY, PARTIAL, FULL)])
    same = (dots[np.ix_(rows, columns)] == palette[kinds]).all(-1)
    edge = (0, -1) if min(kinds.shape) > 20 else ()  # where the frame takes half of a small cell
    for axis in range(2):
        same = np.delete(same, edge, axis)
    assert same.size and same.all()
    assert (dots[[0, -1]] == 255).all() and (dots[:, [0, -1]] == 255).all(), "no margin"
    dark = (dots[: 48 * picture.RESOLUTION] == rgb(picture.INK)).all(-1)
    assert dark.sum() > 20, "no title"


@pytest.mark.parametrize("name", DRAWINGS)
def test_an_svg_has_the_same_cells(name: str) -> None:
    drawing = drawn(name)
    kinds, step, pixels = cells_and_pixels(drawing)
    middles = [
        (TO_POINTS * start, TO_POINTS * side / length * each * (np.arange(count) + 0.25))
        for start, side, length, each, count in zip(
            *((picture.TOP, picture.LEFT), pixels, drawing.subject.lengths, step, kinds.shape),
            strict=True,
        )
    ]
    y, x = (start + places for start, places in middles)
    layers = {colour: kind for kind, colour in picture.COLOURS.items()}
    found = np.full(kinds.shape, -1)
    for path in ElementTree.fromstring(drawing.svg()).iter(f"{SVG}path"):
        fill = re.search(r"fill: (#\w+)", path.get("style") or "")
        if fill is None or fill[1] not in layers or "clip-path" not in path.attrib:
            continue  # no cells: a line, or a colour that is explained
        corners = r"M ([\d.]+) ([\d.]+) +L ([\d.]+) \2 +L \3 ([\d.]+) "
        for left, top, right, bottom in re.findall(corners, path.get("d") or ""):
            rows = (y >= float(top)) & (y < float(bottom))
            columns = (x >= float(left)) & (x < float(right))
            found[np.ix_(rows, columns)] = layers[fill[1]]
    assert (found == kinds).all()


def test_words() -> None:
    assert texts(drawn("flat").svg()) == [
        *("0", "256k", "512k", "768k", "1M", "keys", "queries", "1k"),
        *("full", "partial", "empty", "a cell is 128 x 2,048 tokens"),
        "sliding_window_100000",
        "1,000 queries x 1,048,576 keys in blocks of 128, sparsity 99.9 %",
    ]
    assert texts(drawn("elements").svg())[-4:-2] == ["seen", "hidden"]
    title = ElementTree.fromstring(drawn("tiny").svg()).find(f"{SVG}title")
    assert title is not None and title.text == "causal: 1 query x 1 key, sparsity 0.0 %"


def test_names_are_escaped_and_cut_and_no_formulas() -> None:
    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx

    for name in ("<lambda>", "$x^2$", "$&"):
        mask.__name__ = name
        assert texts(quire.draw(mask, 8).svg())[-2] == name
    long = mods.and_masks(*[mods.causal] * 99)
    title = texts(quire.draw(long, 8).svg())[-2]
    assert title and title.startswith("and_masks(causal, ") and title.endswith("…")
    assert decoded(quire.draw(long, 8).png()).shape[1] < 2 * 800


def test_the_blocks_of_elements_are_outlined() -> None:
    lines = {16: 6, 64: 0}  # three across, three down; none within a single block
    for block_size, expected in lines.items():
        svg = quire.draw(mods.causal, 64, block_size=block_size).svg()
        collections = re.findall(r'<g id="LineCollection_\d+">(.*?)</g>', svg, re.DOTALL)
        dark = [each for each in collections if f"stroke: {picture.QUIET}" in each]
        assert sum(each.count("<path") for each in dark) == expected


def test_no_picture_is_too_large() -> None:
    quire.draw(mods.causal, 8).png()  # matplotlib finds its fonts
    tracemalloc.start()
    quire.draw(mods.causal, 1_000_000).png()
    quire.draw(mods.causal, 1_000_000).svg()
    quire.draw(mods.alibi(8), 1_000_000).png()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6
    for name in DRAWINGS:
        assert max(cells_and_pixels(drawn(name))[2]) <= picture.SIDE


def test_rectangles_are_few() -> None:
    marked = np.kron(np.eye(8, dtype=bool), np.ones((50, 50), bool))
    assert sorted(picture.rectangles(marked)) == [
        (50 * i, 50 * i + 50, 50 * i, 50 * i + 50) for i in range(8)
    ]


@pytest.mark.parametrize("suffix", [".png", ".svg", ".PNG"])
def test_saved_where_asked(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"mask{suffix}"
    drawing = quire.draw(mods.causal, 64, path=path)
    content = path.read_bytes()
    assert content == (drawing.svg().encode() if suffix == ".svg" else drawing.png())
    assert drawing._repr_png_() == drawing.png()


# matplotlib


def test_a_users_settings_are_left_alone_and_change_nothing() -> None:
    drawing = quire.draw(mods.alibi(4), 100)
    before = drawing.svg(), drawing.png()
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.fonttype": "path"}):
        mine = dict(matplotlib.rcParams)
        assert (drawing.svg(), drawing.png()) == before
        assert dict(matplotlib.rcParams) == mine


def test_a_picture_says_neither_when_nor_by_what_it_was_made() -> None:
    drawing = quire.draw(mods.causal, 100)
    assert not re.search(r"Matplotlib|20\d\d-\d\d", drawing.svg())
    assert b"Software" not in drawing.png()


def in_new_process(program: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout


def test_matplotlib_is_imported_for_pictures_alone_and_pyplot_never() -> None:
    said = in_new_process(
        """
        import sys
        import quire
        from quire.draw import pages
        drawing = quire.draw(quire.mods.causal, 4)
        print(drawing, "matplotlib" in sys.modules)
        print(len(drawing.svg()) > 1000, "matplotlib" in sys.modules)
        print(len(drawing.png()) > 1000, "matplotlib.pyplot" in sys.modules)
        """
    )
    assert said.splitlines()[-3:] == ["██ seen  · hidden False", "True True", "True False"]


def test_without_matplotlib_there_is_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "quire.draw.picture")
    monkeypatch.delattr(sys.modules["quire.draw"], "picture")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    drawing = quire.draw(mods.causal, 4)
    assert str(drawing).endswith("hidden")
    assert drawing._repr_png_() is None
    for ask in (drawing.svg, drawing.png, lambda: drawing.save(tmp_path / "mask.png")):
        with pytest.raises(errors.MissingPackageError, match=r"pip install 'quire\[draw\]'\."):
            ask()
    assert not list(tmp_path.iterdir())


def test_threads_draw_the_same() -> None:
    expected = quire.draw(mods.causal, 64).svg()
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(quire.draw(mods.causal, 64).svg()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4
