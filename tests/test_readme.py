"""What README and docs say is true: their programs run, their counts and links hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from typer.main import get_command

from quire.cli import app

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "quire"
README = (ROOT / "README.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
PROGRAMS = [page for page in PAGES if "```python" in page.read_text()]
FIRST_SCREEN = 45
EAGER = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.name)
def test_the_programs_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch_flex, EAGER, getattr(torch_flex, EAGER))  # a page may set it
    torch.set_num_threads(1)  # the fastest on a busy machine
    for name in re.findall(r'^name = "(.+)"$', page.read_text(), re.MULTILINE):
        save_small_model(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    run_programs(page)


def save_small_model(folder: Path) -> None:
    """Random weights in a folder, which transformers prefers to a model of that name elsewhere."""
    from tiny_models import decoder

    decoder("llama").eager.save_pretrained(folder)


def run_programs(page: Path) -> dict[str, Any]:
    """The names that a page's programs leave behind."""
    text, names = page.read_text(), dict[str, Any](__name__=page.stem)
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        above = text.count("\n", 0, block.start(1))  # so that a traceback names the page's line
        exec(compile("\n" * above + block[1], str(page), "exec"), names)
    return names


def test_the_page_on_masks_shows_what_its_programs_print(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = ROOT / "docs" / "masks.md"
    shown = re.findall(r"^```text\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    names = run_programs(page)
    assert (page.parent / "packed.svg").read_text() == names["picture"].svg()
    assert capsys.readouterr().out == "".join(shown) != ""


def test_the_page_on_the_cache_shows_what_its_programs_draw(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("safetensors")
    page = ROOT / "docs" / "kv.md"
    (shown,) = re.findall(r"^```text\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    names = run_programs(page)
    assert (page.parent / "pages.svg").read_text() == names["picture"].svg()
    assert capsys.readouterr().out.endswith(shown)


def test_readme_has_a_program() -> None:
    assert ROOT / "README.md" in PROGRAMS


def test_the_first_screen_is_one() -> None:
    first, fold, _ = README.partition("\n## ")
    assert fold and len(first.splitlines()) <= FIRST_SCREEN
    assert 'from_pretrained(name, attn_implementation="quire")\n' in first


def stated_counts() -> dict[str, int]:
    """Path below src/quire -> the number of lines that README gives, as in `[eager/](...) 690`."""
    found = re.findall(r"\[`([\w/.]+)`\]\(src/quire/[\w/.]+\)\s+([\d,]+)", README)
    return {path: int(count.replace(",", "")) for path, count in found}


def num_lines(path: Path) -> int:
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    return sum(len(file.read_text().splitlines()) for file in files)


def test_the_line_counts_are_true_within_a_tenth() -> None:
    stated = stated_counts()
    assert len(stated) >= 5
    real = {path: num_lines(SOURCE / path) for path in stated}
    wrong = {path: n for path, n in real.items() if abs(stated[path] - n) > max(10, n / 10)}
    assert not wrong, f"README says {stated}, but there are {wrong}"


def links(page: Path) -> list[str]:
    """The files of this repository that a page links to, and the headings on the same page."""
    return re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    missing = [link for link in links(page) if not (page.parent / link).exists()]
    assert not missing


def test_the_make_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"\bmake ([a-z]+)\b`", page.read_text())}
    assert {"demo", "test"} <= named <= targets


def test_the_quire_commands_exist() -> None:
    pages = "\n".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"(?:^|`)quire ([a-z]+)[^`\n]*[`#]", pages, re.MULTILINE))
    assert (
        {"demo", "doctor", "show", "draw", "why", "cache"}
        <= named
        <= get_command(app).commands.keys()
    )
