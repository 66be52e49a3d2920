"""Who holds what, as text and as a picture."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from quire.draw.pages import COLOURS, NUM_COLOURS, draw_pages
from quire.errors import ArgumentError
from quire.kv import Group, PagedKVCache, PageMap
from quire.kv.page_map import FREE, KEPT, OWNED, SHARED


def append(cache: PagedKVCache, sequence: object, count: int) -> None:
    rows = torch.zeros(cache.num_layers, count, 1, 1)
    cache.append([sequence], rows, rows)  # type: ignore[list-item]


def filled() -> PagedKVCache:
    cache = PagedKVCache(1, heads=1, head_dim=1, page_size=4, n_pages=10, prefix=True)
    a, b, c = (cache.sequence() for _ in range(3))
    append(cache, c, 4)
    cache.keep(c, range(4))
    cache.free(c)  # page 0 is kept
    append(cache, a, 6)
    append(cache, b, 9)
    child = cache.fork(a)
    append(cache, child, 1)
    return cache


def test_a_map_names_the_holder_of_each_page() -> None:
    text = str(filled().page_map())
    assert text.splitlines() == [
        "10 pages of 4 tokens: 5 held by one sequence, 1 shared, 1 kept, 3 free",
        "0 +#abbbd...",
    ]


def test_long_maps_have_lines() -> None:
    owners = np.full(130, FREE)
    owners[100] = OWNED + 27
    lines = str(PageMap(owners, 16)).splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["0", "64", "128"]
    assert lines[1].index("b") == 4 + 36  # letters begin again


def test_each_group_has_its_own() -> None:
    cache = PagedKVCache(
        groups=[Group([0]), Group([1], window=2)], heads=1, head_dim=1, page_size=2, n_pages=8
    )
    sequence = cache.sequence()
    for _ in range(7):
        append(cache, sequence, 1)
    assert cache.page_map(0).count(OWNED) == 4
    assert cache.page_map(1).count(OWNED) == 2


def test_a_picture_has_a_colour_for_each_kind() -> None:
    first = PageMap(np.array([FREE, KEPT]), 4)
    second = PageMap(np.array([OWNED, OWNED + 1 + NUM_COLOURS, SHARED]), 4)
    drawing = draw_pages([first, second])
    assert drawing.kinds().tolist() == [[FREE, OWNED], [KEPT, OWNED + 1], [FREE, SHARED]]
    assert str(drawing) == repr(drawing) == str(second)
    pytest.importorskip("matplotlib")
    svg = drawing.svg()
    words = [
        text.text for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert words == [
        *("0", "2", "steps", "pages"),
        *("sequences, in turn", "shared", "kept", "free", "pages over time"),
        f"2 steps; at the end {second.facts}",
    ]
    counts = {kind: svg.count(f"fill: {colour}") for kind, colour in COLOURS.items()}
    del counts[SHARED]  # words have its colour, too
    assert list(counts.values()) == [2, 2, 2, 2, 1, 1]  # among the cells, and explained


def test_long_runs_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = pytest.importorskip("quire.draw.picture")
    painted = []
    monkeypatch.setattr(picture, "paint", lambda _, kinds, step, __: painted.append((kinds, step)))
    maps = [PageMap(np.full(3_000, OWNED + step), 4) for step in range(2_500)]
    drawing = draw_pages(maps)
    assert drawing.kinds().shape == (3_000, 2_500)
    figure = drawing._figure()
    ((kinds, step),) = painted
    assert (kinds.shape, step) == ((1_000, 834), (3, 3))
    assert max(figure.get_size_inches()) * 96 < 1_000


def test_pictures_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    maps = [filled().page_map()]
    draw_pages(maps, path=tmp_path / "a.svg")
    draw_pages(maps, path=tmp_path / "a.png")
    assert (tmp_path / "a.svg").read_text() == draw_pages(maps).svg()
    assert (
        (tmp_path / "a.png").read_bytes() == draw_pages(maps).png() == draw_pages(maps)._repr_png_()
    )
    with pytest.raises(ArgumentError, match=r"Name the file a\.png or a\.svg"):
        draw_pages(maps, path=tmp_path / "a.gif")
    with pytest.raises(ArgumentError, match="page_map"):
        draw_pages([])
