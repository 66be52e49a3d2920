"""Every public name has a page and an example that runs; pages say what the code says."""

from __future__ import annotations

import importlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from builder import raising, reference, results, source, stage, structure, tables
from builder.examples import examples
from builder.symbols import TORCH, public_modules, symbols

import quire


@pytest.mark.parametrize("name", examples())
def test_examples_run(name: str) -> None:
    torch.set_num_threads(1)
    code = compile(examples()[name], f"example of {name}", "exec")
    with ThreadPoolExecutor(1) as another:  # a browser's driver keeps an event loop in this thread
        another.submit(exec, code, {"__name__": "example"}).result()


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
        for part in ("# ", "## Example", "## Design", "## Performance", "## Related"):
            assert part in page, (symbol.name, part)
        assert "## Safety" in page or "## The tree of errors" in page, symbol.name
        assert symbol.doc.split("\n")[0][:40] in page, f"{symbol.name} has no text"
    assert "[`quire.serve.Service`]" in pages["reference/modules/quire.serve"]
    attention = pages["reference/quire.attention"]
    assert "query: Tensor,  # [B, Hq, L, D]" in attention
    assert (
        "| [`HeadsError`](quire.errors.md#headserror) |" in attention
        and reference.UNMEASURED not in attention
    )
    assert "[`quire.Dense`]" in attention and "| Zen 5, AVX-512 |" in attention
    assert "scaled_dot_product_attention`" in attention


def test_the_page_of_errors_has_each_of_them(site: Path) -> None:
    page = (site / "reference" / "quire.errors.html").read_text()
    text = reference.pages()["reference/quire.errors"]
    for name in source.drawn_errors():
        assert f'id="{name.lower()}"' in page and f'id="quire.errors.{name}"' in page
        assert f"## {name}\n" in text
    assert "Names that can raise it: " in text and "[`quire.attention`](quire.attention.md)" in text
    index = (site / "genindex.html").read_text()
    assert "quire.errors.html#quire.errors.TracedBranchError" in index


def test_pages_of_names_lead_to_all_rows_of_their_figures(site: Path) -> None:
    figures = (site / "figures.html").read_text()
    places = set(re.findall(r'\bid="([^"]+)"', figures))
    assert {part.anchor for part in results.parts()} <= places
    page = reference.pages()["reference/quire.attention"]
    assert "The rest of the rows: [" in page and "](../figures.md#" in page


WITHOUT_SHAPES = {
    "AttentionGradients": "those of the operands",
    "weights": "a list of rows",
    "BlockMask": "the text gives a shape to fields that begin alike",
    "block_table": "it must be None",
    "paths": "lists of nodes",
    "given": "what an epilogue reads: it says the shapes",
    **dict.fromkeys(("score", "b", "h", "q_idx", "kv_idx"), "numbers: parameters of mods"),
    **dict.fromkeys(("batch", "head", "token_q", "token_kv"), "numbers: PyTorch's names of these"),
}
"""Names and parameters of which no shape is stated, and why."""


def test_signatures_say_the_shapes_of_tensors() -> None:
    """Those of functions, of classes and of their methods."""
    missing = []
    for symbol in symbols().values():
        heads = re.findall(r"```\n\n```python\n(.*?)```", reference.symbol_page(symbol), re.DOTALL)
        lines = [line for head in heads for line in head.splitlines() if "#" not in line]
        tensors = [
            name
            for line in lines
            for name in re.findall(r"(\w+): [^#,()]*\bTensor\b", line.partition("->")[0])
        ]
        if symbol.short not in WITHOUT_SHAPES:
            missing += [f"{symbol.name}: {x}" for x in tensors if x not in WITHOUT_SHAPES]
    assert not missing, f"say the shape in the docstring, as in `query` [B, Hq, L, D]: {missing}"


def test_pages_do_not_clash_where_case_does_not_count() -> None:
    pages = [name.lower() for name in reference.pages()]
    assert len(pages) == len(set(pages))


IMPORT = re.compile(
    r"(?m)^\s*(?:\"\s*)?from (quire[\w.]*) import ([\w, ]+)|^\s*import (quire[\w.]*)"
)
LISTED = {"quire.errors", "quire.integrations", "quire.integrations.smollm2", "quire.draw.picture"}
"""Modules of which a page lists all names: errors by their tree, and helpers of the project."""


def test_what_pages_and_examples_import_is_public() -> None:
    files = [*structure.DOCS.rglob("*.md"), *structure.DOCS.glob("examples/*.py")]
    files += [source.ROOT / "README.md", *structure.DOCS.glob("notebooks/*.ipynb")]
    public, unknown = public_modules(), set()
    for file in files:
        for module, names, alone in IMPORT.findall(file.read_text()):
            if alone or module in LISTED:
                unknown |= {alone} - public.keys() - {""}
                continue
            named = {f"{module}.{name.strip()}" for name in names.split(",")}
            unknown |= {name for name in named if not {name, module} & public.keys()}
            unknown |= named - symbols().keys() - public.keys()
    assert not unknown


def test_the_public_modules_are_all_there() -> None:
    named = {f"quire.{name}" for name in quire.__all__ if hasattr(getattr(quire, name), "__path__")}
    assert named - {"quire.draw"} <= public_modules().keys()
    folders = {name for name in source.modules() if name.count(".") == 1 and is_public(name)}
    assert folders - INSIDE <= public_modules().keys()


INSIDE = {"quire.draw", "quire.block_mask", "quire.memory"}
"""Packages whose names users get from `quire`."""


def is_public(name: str) -> bool:
    """Whether a package says which of its names are public."""
    module = source.modules()[name]
    return module.path.name == "__init__.py" and "\n__all__" in module.path.read_text()


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
    found = {each.name for each in raising.raises("quire.mods.masks", "sliding_window")}
    assert "ArgumentError" in found
    assert "OutOfPages" not in found
    assert {"OutOfPages", "SequenceError"} <= {
        each.name for each in raising.raises("quire.kv.cache", "PagedKVCache")
    }
    assert not raising.raises("quire.linear.epilogues", "add")


def test_naming_a_class_does_not_call_its_methods() -> None:
    found = {each.name for each in raising.raises("quire.api.attention", "attention")}
    assert not found & {"MaskFileError", "MaskPickleError", "MissingFileError", "BlockIndexError"}
    assert {"RankError", "HeadsError", "TracedBranchError", "RandomModError"} <= found
    of_masks = {each.name for each in raising.raises("quire.block_mask.mask", "BlockMask")}
    assert {"MaskFileError", "MaskPickleError", "SlicedMaskError"} <= of_masks


# Figures


def test_figures_were_measured_with_all_that_is_said_of_them() -> None:
    assert len(results.parts()) > 5
    for part in results.parts():
        assert part.processor and part.rows, part
        assert {"python", "torch", "quire"} <= part.kept["versions"].keys()
        assert re.fullmatch(r"[0-9a-f]{9}(-dirty)?|unknown", part.kept["commit"])
        script = (results.BENCHMARKS / f"{part.script}.py").read_text()
        assert (
            f"def {part.name}(" in script or f"import {part.name}" in script or "_chosen" in script
        )


@pytest.mark.parametrize("path", tables.pages(), ids=lambda path: path.name)
def test_tables_of_pages_are_those_of_the_results(path: Path) -> None:
    text = path.read_text()
    assert tables.filled(text) == text, "run: python docs/builder --tables"


def test_earlier_runs_are_older_than_the_last() -> None:
    seen = 0
    for part in results.parts():
        runs = part.runs()
        commits = [commit for commit, _ in runs if commit != results.UNKNOWN]
        assert len(set(commits)) == len(commits), part
        for _, figures in runs[:-1]:
            seen += 1
            assert figures, part
    assert seen > 3


def test_benchmarks_are_known_to_touch_names() -> None:
    assert ("quire.api.flex", "flex_attention") in results.touched("forward", "sdpa")
    rows = results.rows_about("quire.mods.masks", "sliding_window")
    assert {row["case"] for _, row in rows} == {"sliding_window"}
    assert len({part.place for part, _ in rows}) == len(rows) > 1  # once for each processor


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


def test_remarks_about_files_are_not_on_the_site(site: Path) -> None:
    for name in ("explorer", "gallery"):
        written = (structure.DOCS / f"{name}.md").read_text()
        shown = (site / f"{name}.html").read_text()
        assert "in this file" in written and "in this file" not in shown


def test_pages_of_a_build_before_are_gone(site: Path) -> None:
    assert not (site / "page-of-before.html").exists()


def test_search_is_offline(site: Path) -> None:
    page = (site / "search.html").read_text()
    assert "searchindex.js" in page
    remote = re.findall(r'<(?:script|link)[^>]+(?:src|href)="(https?://[^"]+)"', page)
    assert not remote


def test_pages_lead_nowhere_that_does_not_exist(site: Path) -> None:
    """Every link leads to a file of the site, and to a place in it."""
    texts = {path: path.read_text() for path in site.rglob("*.html")}
    places = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in texts.items()}
    missing = []
    for path, text in texts.items():
        for link, _, place in {
            link.partition("#") for link in re.findall(r'(?:href|src)="([^":?]+)[?"]', text)
        }:
            target = Path(os.path.normpath(path.parent / link)) if link else path
            known = target in places and (not place or place in places[target])
            if not known and (place or not target.exists()):
                missing.append((path.relative_to(site).as_posix(), f"{link}#{place}"))
    assert not missing, missing[:10]
