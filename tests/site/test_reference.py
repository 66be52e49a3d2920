"""Every public name has a page and an example that runs; pages say what the code says."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch
from builder import gallery, reference, results, source, stage, structure, tables
from builder.examples import examples
from builder.symbols import TORCH, public_modules, symbols

import quire


@pytest.mark.parametrize("name", examples())
def test_examples_run(name: str) -> None:
    torch.set_num_threads(1)
    exec(compile(examples()[name], f"example of {name}", "exec"), {"__name__": "example"})


def test_every_public_name_has_an_example() -> None:
    missing = [name for name, symbol in symbols().items() if not symbol.example]
    assert not missing, f"write an example into docs/examples for {missing}"
    unknown = examples().keys() - symbols().keys()
    assert not unknown, f"docs/examples has examples of names that are not public: {unknown}"


def test_every_public_name_has_a_page(site: Path) -> None:
    for symbol in symbols().values():
        assert (site / "reference" / f"{symbol.page}.html").exists(), symbol.name
    for name in source.modules():
        assert (site / "reference" / "modules" / f"{name}.html").exists(), name


def test_every_page_has_its_parts() -> None:
    pages = reference.pages()
    for symbol in symbols().values():
        page = pages[f"reference/{symbol.page}"]
        for part in ("# ", "## Example", "## Design"):
            assert part in page, (symbol.name, part)
        assert "## Safety" in page or "## The tree of errors" in page, symbol.name
        assert symbol.doc.split("\n")[0][:40] in page, f"{symbol.name} has no text"
    attention = pages["reference/quire.attention"]
    assert "query: Tensor,  # [B, Hq, L, D]" in attention
    assert "| `HeadsError` |" in attention and "## Performance" in attention
    assert "scaled_dot_product_attention`" in attention


def test_pages_do_not_clash_where_case_does_not_count() -> None:
    pages = [name.lower() for name in reference.pages()]
    assert len(pages) == len(set(pages))


def test_the_public_modules_are_all_there() -> None:
    named = {f"quire.{name}" for name in quire.__all__ if hasattr(getattr(quire, name), "__path__")}
    assert named - {"quire.draw"} <= public_modules().keys()


@pytest.mark.parametrize("name", sorted(TORCH.values()))
def test_the_names_of_torch_exist(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert getattr(importlib.import_module(module), attribute) is not None


def test_docstrings_become_markdown() -> None:
    doc = "Do it.\n\n    x = 1\n\n    1 0\n    1 1\n\nSee `x`.\n\n>>> f()\n3\n"
    shown = reference.markdown(doc)
    assert shown.startswith("Do it.\n\n```python\nx = 1\n")
    assert "```pycon\n>>> f()\n3\n```" in shown and "See `x`." in shown


def test_short_signatures_are_one_line() -> None:
    def short(x: int, *, y: str = "a") -> bool: ...

    assert reference.signature("short", short) == "short(x: int, *, y: str = 'a') -> bool"
    assert reference.signature("short", short, "`x` [B, H]").count("\n") == 4


def test_shapes_are_found() -> None:
    doc = "`out` and `grad` [B, H] are so; `key` [P, Hkv] in pages. `q_start` may be a tensor [B]."
    assert reference.shapes(doc)["key"] == "[P, Hkv]"
    assert reference.shapes(doc)["out"] == reference.shapes(doc)["grad"] == "[B, H]"


def test_errors_are_followed_through_calls() -> None:
    found = {each.name for each in source.raises("quire.mods.masks", "sliding_window")}
    assert "ArgumentError" in found
    assert "OutOfPages" not in found
    assert {"OutOfPages", "SequenceError"} <= {
        each.name for each in source.raises("quire.kv.cache", "PagedKVCache")
    }
    assert not source.raises("quire.linear.epilogues", "add")


# Figures


def test_figures_were_measured_with_all_that_is_said_of_them() -> None:
    assert len(results.parts()) > 5
    for part in results.parts():
        assert part.processor and part.rows, part
        assert {"python", "torch", "quire"} <= part.kept["versions"].keys()
        assert re.fullmatch(r"[0-9a-f]{9}(-dirty)?", part.kept["commit"])
        script = (results.BENCHMARKS / f"{part.script}.py").read_text()
        assert (
            f"def {part.name}(" in script or f"import {part.name}" in script or "_chosen" in script
        )


@pytest.mark.parametrize("path", tables.pages(), ids=lambda path: path.name)
def test_tables_of_pages_are_those_of_the_results(path: Path) -> None:
    text = path.read_text()
    assert tables.filled(text) == text, "run: python docs/builder --tables"


def test_plots_show_all_of_their_lines() -> None:
    plots = pytest.importorskip("builder.plots", reason="matplotlib is not installed")
    figure = plots.Figure()
    plots.speed_by_length(figure, [plots.named("forward", "sdpa")])
    drawn = [line.get_ydata() for panel in figure.axes for line in panel.get_lines()]
    low, high = figure.axes[0].get_ylim()
    assert len(figure.axes) == 2 and low == 0
    assert high > max(max(values) for values in drawn)


def test_benchmarks_are_known_to_touch_names() -> None:
    assert ("quire.api.flex", "flex_attention") in results.touched("forward", "sdpa")
    rows = results.rows_about("quire.mods.masks", "sliding_window")
    assert [row["case"] for _, row in rows] == ["sliding_window"]


def test_the_gallery_shows_every_mod() -> None:
    assert not gallery.missing()


# Structure


def test_every_page_of_docs_has_its_place() -> None:
    listed = {name for names in structure.toctrees().values() for name in names}
    pages = {
        path.relative_to(structure.DOCS).with_suffix("").as_posix()
        for path in structure.DOCS.rglob("*.md")
    }
    assert pages - {"index"} <= listed


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("[a](../kv.md#x)", "[a](../kv.md#x)"),
        ("[a](../../examples/train_gpt.py)", "[a](../source/examples/train_gpt.md)"),
        ("[a](../../src/quire/ir/ops.py)", "[a](../reference/modules/quire.ir.ops.md)"),
        ("[`a`](../../tests/test_house.py)", "`a`"),
        ("[a](https://a.b/c.md)", "[a](https://a.b/c.md)"),
        ('<img src="../pages.svg" width="9">', '<img src="../pages.svg" width="9">'),
    ],
)
def test_links_lead_to_the_same_things_on_the_site(written: str, shown: str) -> None:
    path, place = structure.DOCS / "learn" / "page.md", stage.PurePosixPath("learn/page.md")
    assert stage.rewritten(written, path, place, stage.placed()) == shown


def test_search_is_offline(site: Path) -> None:
    page = (site / "search.html").read_text()
    assert "searchindex.js" in page
    remote = re.findall(r'<(?:script|link)[^>]+(?:src|href)="(https?://[^"]+)"', page)
    assert not remote


def test_pages_lead_nowhere_that_does_not_exist(site: Path) -> None:
    missing = []
    for path in site.rglob("*.html"):
        for link in set(re.findall(r'(?:href|src)="([^"#?:]+)[#?"]', path.read_text())):
            if not (path.parent / link).exists():
                missing.append((path.name, link))
    assert not missing[:10]
