"""The site in a real browser: the explorer, the search, and what a newcomer looks for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from builder.explorer import LONGEST, Shown, movable, shown
from builder.structure import DOCS, toctrees

import quire
from quire.block_mask.classify import UNSURE, Rectangles
from quire.ir.trace import trace
from quire.mods import Mask


def facts(page: Any) -> dict[str, str]:
    lines = page.locator("[data-facts] div")
    texts = [lines.nth(n).inner_text() for n in range(lines.count())]
    return dict(text.split(": ", 1) for text in texts)


def move(page: Any, name: str, value: int) -> None:
    """Drag a slider to a value, as an input event tells it."""
    page.locator(f"input[name='{name}']").evaluate(
        "(input, value) => { input.value = value; input.dispatchEvent(new Event('input')); }", value
    )


def num_decided(one: Shown, numbers: dict[str, int], length: int, block: int) -> int:
    """The number of blocks that quire's bounds decide, if numbers are captured tensors."""
    mask = one.mod
    if numbers:
        assert isinstance(mask, Mask)
        mask, captured = movable(mask, one.sliders)
        for name, value in numbers.items():
            captured[name].fill_(value)
    ends = {"b": (0, 0), "h": (0, 7), "q_idx": (0, LONGEST - 1), "kv_idx": (0, LONGEST - 1)}
    first = torch.arange(0, length, block)
    zero = torch.zeros(1, 1, dtype=torch.int64)
    box = {
        "b": zero,
        "h": zero,
        "q_low": first[:, None],
        "q_high": first[:, None] + block - 1,
        "kv_low": first[None],
        "kv_high": first[None] + block - 1,
    }
    kinds = Rectangles(trace(mask, "mask"), ends).kinds(box).expand(len(first), len(first))
    return int((kinds != UNSURE).sum())


def test_the_explorer_classifies_as_quire_does(site: Path, page: Any) -> None:
    page.goto((site / "explorer.html").as_uri())
    for place, one in enumerate(shown()):
        page.select_option("[data-masks]", str(place))
        assert page.locator("[data-code]").inner_text()
        numbers = {name: (slider.start + slider.most) // 2 for name, slider in one.sliders.items()}
        for name, value in numbers.items():
            move(page, name, value)
        move(page, "tokens", 448)
        move(page, "block size", 64)
        mask = one.mod
        if numbers:
            assert isinstance(mask, Mask)
            mask = Mask(mask.function, mask.__name__, **{**mask.fields, **numbers})
        blocks = quire.create_block_mask(mask, None, None, 448, 448, BLOCK_SIZE=64)
        full = int(blocks.full_kv_num_blocks.sum())
        partial = int(blocks.kv_num_blocks.sum())
        found = facts(page)
        wanted = f"{full} full, {partial} partial, {49 - full - partial} empty"
        assert found["blocks"] == wanted, one.title
        assert found["sparsity"].startswith(f"{blocks.sparsity():.1f} %")
        decided = int(re.findall(r"decide (\d+) of 49", found["bounds"])[0])
        assert decided == num_decided(one, numbers, 448, 64), one.title


def test_the_explorer_answers_about_one_point(site: Path, page: Any) -> None:
    page.goto((site / "explorer.html").as_uri())
    page.select_option("[data-masks]", "0")  # causal
    box = page.locator("[data-canvas]").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.1, box["y"] + box["height"] * 0.9)
    said = page.locator("[data-point]").inner_text()
    assert "seen" in said and "full" in said
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + box["height"] * 0.1)
    assert "hidden" in page.locator("[data-point]").inner_text()
    page.locator("[data-canvas]").dispatch_event(  # a tap
        "pointerdown", {"clientX": box["x"] + 0.1, "clientY": box["y"] + 0.1}
    )
    assert page.locator("[data-point]").inner_text().startswith("query 0, key 0: seen")


def test_numbers_that_move_are_captured() -> None:
    one = next(each for each in shown() if each.sliders)
    assert isinstance(one.mod, Mask)
    mask, numbers = movable(one.mod, one.sliders)
    assert numbers and all(value.ndim == 0 for value in numbers.values())
    assert quire.create_mask(mask, None, None, LONGEST, LONGEST).any()


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("page table", "quire.Paged"),
        ("reserve", "quire.PagedAttention"),
        ("fork", "quire.kv.PagedKVCache.fork"),
        ("ragged offsets", "quire.Ragged"),
        ("lse", "quire.AuxRequest"),
        ("merge_pieces", "quire.merge_pieces"),
    ],
)
def test_the_search_finds_names_by_their_words(
    site: Path, page: Any, words: str, wanted: str
) -> None:
    page.goto(f"{(site / 'search.html').as_uri()}?q={words.replace(' ', '+')}")
    page.wait_for_function(
        "() => /found|did not match/i.test(document.querySelector('#search-results').innerText)"
    )
    titles = page.locator("#search-results ul.search li > a").all_inner_texts()
    assert wanted in titles[:10], titles[:20]


QUESTIONS = {
    "how to write a mask": (
        ["invent a mask"],
        "learn/invent_a_mask",
        ("def recent_turns(b, h, q_idx, kv_idx):", "What may stand in a mask"),
    ),
    "what create_block_mask costs at a million tokens": (
        ["a million tokens"],
        "why/bounds",
        ("What it costs at a million queries and a million keys", "prefix + window"),
    ),
    "what happens to a NaN": (
        ["what happens to a NaN"],
        "why/same_bits",
        ("A NaN or an infinity in a key or a value reaches exactly the queries that read it",),
    ),
    "how to serve a model": (
        ["serve"],
        "learn/serve",
        ("quire serve --weights int8", "puts an engine behind OpenAI's interface over HTTP"),
    ),
}
"""What is asked: the links to click, the page with the answer, and words that only it has."""


def words(text: str) -> str:
    """The words of a text, as a page shows them: without marks, in one line."""
    return " ".join(re.sub("[`*]", "", text).replace("’", "'").split())


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_newcomer_finds_it_within_three_clicks(site: Path, page: Any, question: str) -> None:
    clicks, name, wanted = QUESTIONS[question]
    page.goto((site / "index.html").as_uri())
    for text in clicks:
        page.locator("article").get_by_role("link", name=text, exact=True).last.click()
    assert len(clicks) <= 3 and page.url.partition("#")[0].endswith(f"{name}.html")
    shown = words(page.locator("article").inner_text())
    assert all(each in shown for each in wanted), wanted


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_answer_is_on_one_page_alone(question: str) -> None:
    _, name, wanted = QUESTIONS[question]
    texts = {
        path.relative_to(DOCS).with_suffix("").as_posix(): words(path.read_text())
        for path in DOCS.rglob("*.md")
    }
    for each in wanted:
        assert [page for page, text in texts.items() if each in text] == [name]


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["index", "explorer", "gallery", "reference/quire.attention"])
def test_pages_fit_the_screen(site: Path, page: Any, name: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    page.goto((site / f"{name}.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width


# Light and dark

TOP = [name for name, below in toctrees().items() for name in (name, *below)]
"""The start pages of all parts, and the pages below them."""

CONTRASTS = """() => {
    const channel = x => (x /= 255) <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
    const numbers = text => text.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
    const behind = node => {
        for (; node; node = node.parentElement) {
            const colour = numbers(getComputedStyle(node).backgroundColor);
            if (colour.length < 4 || colour[3] > 0.9) return colour;
        }
        return [255, 255, 255];
    };
    const found = [];
    for (const node of document.querySelectorAll("article p, article li, article td, article h1")) {
        if (!node.innerText.trim() || !node.offsetParent) continue;
        const pair = [numbers(getComputedStyle(node).color), behind(node)].map(light);
        const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
        found.push([ratio, node.innerText.slice(0, 60)]);
    }
    return found;
}"""
"""Reads the contrast of each text of a page, as WCAG defines it, and the beginning of the text."""


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_can_be_read(site: Path, browser: Any, scheme: str, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    faint, wide, seen, shades = [], [], 0, set()
    for name in dict.fromkeys(TOP):
        page.goto((site / f"{name}.html").as_uri())
        found = page.evaluate(CONTRASTS)
        seen += len(found)
        faint += [(name, round(ratio, 2), text) for ratio, text in found if ratio < 4.5]
        shades.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        over = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        wide += [(name, over)] if over > 1 else []
    page.close()
    assert seen > 500 and not faint, faint[:10]
    assert not wide, f"pages that are wider than the window: {wide}"
    (shade,) = shades
    brightness = sum(map(int, re.findall(r"\d+", shade)[:3])) / 3
    assert (brightness > 200) == (scheme == "light") and (brightness < 60) == (scheme == "dark")
