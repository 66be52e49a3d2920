"""What README and docs say is true: their programs run, their counts and links hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import FENCED, PAGES, Block, blocks
from torch.nn.attention import flex_attention as torch_flex

from quire import Dense, attention
from quire.config import config
from quire.ir.ops import OPS
from quire.tools.walk import Walk, walk

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "quire"
README = (ROOT / "README.md").read_text()
PROGRAMS = [page for page in PAGES if any(block.runs for block in blocks(page))]
PICTURES = {"masks.md": "packed.svg", "kv.md": "pages.svg"}
"""Pages whose last `picture` is a file beside them."""

FIRST_SCREEN = 36
EAGER = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"


@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.name)
def test_the_programs_run_and_print_what_is_shown(
    page: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch_flex, EAGER, getattr(torch_flex, EAGER))  # a page may set it
    torch.set_num_threads(1)  # the fastest on a busy machine
    for name in re.findall(r'^name = "(.+)"$', page.read_text(), re.MULTILINE):
        save_small_model(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    names = run_programs(page)
    printed = capsys.readouterr().out
    for block in blocks(page):
        if block.language == "text" and not block.reason:
            printed = block.after(printed)
    if page.name in PICTURES:
        kept = page.parent / PICTURES[page.name]
        assert kept.read_text() == names["picture"].svg()


def save_small_model(folder: Path) -> None:
    """Random weights in a folder, which transformers prefers to a model of that name elsewhere."""
    from tiny_models import decoder

    decoder("llama").eager.save_pretrained(folder)


def run_programs(page: Path) -> dict[str, Any]:
    """The names that a page's programs leave behind."""
    names = dict[str, Any](__name__=page.stem)
    for block in blocks(page):
        if block.runs:
            above = "\n" * block.line  # so that a traceback names the page's line
            exec(compile(above + block.text, str(page), "exec"), names)
    return names


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "docs" / "index.md"], ids=lambda page: page.name
)
def test_the_first_program_gives_the_gradients_that_it_names(page: Path) -> None:
    (program, *_) = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    (said,) = re.findall(r"# gradients of (.+)$", program, re.MULTILINE)
    names = dict[str, Any]()
    exec(program, names)
    wanted = re.split(r", | and ", said)
    assert len(wanted) == 4 and all(names[name].grad is not None for name in wanted)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_tested_or_says_why_not(page: Path) -> None:
    """Python runs, text is what it prints, and `tests/test_commands.py` looks at commands."""
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        assert block.language, f"{where} has no language: python, bash or text"
        tested = block.language in ("python", "bash", "text")
        assert tested or block.reason, f"{where}: write <!-- not run: why --> above the block"
        if block.language == "text" and not block.reason:
            assert page in PROGRAMS, f"{where}: no program of this page can print it"
        for path in re.findall(r"tests/[\w/.]+", block.reason):
            assert exists(path), f"{where} names {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_is_fenced(page: Path) -> None:
    text = FENCED.sub("", page.read_text())
    assert not re.findall(r"\n\n(?: {4}.*\n)+", text), "write code between ```, with its language"


def test_what_is_printed_is_compared() -> None:
    block = Block("text", "a\n  b\n", 1, "", lines=False)
    assert block.after("x\na\n  b\ny\n") == "y\n"
    with pytest.raises(AssertionError, match="is not printed"):
        block.after("a\nb\n")
    some = Block("text", "a\nc\n", 1, "", lines=True)
    assert some.after("  a\n b\n  c\nd\n") == "d"
    with pytest.raises(AssertionError, match="is not printed"):
        some.after("c\na\n")


def test_readme_has_a_program() -> None:
    assert ROOT / "README.md" in PROGRAMS


def test_the_first_screen_is_one() -> None:
    first, fold, _ = README.partition("\n## ")
    assert fold and len(first.splitlines()) <= FIRST_SCREEN
    (program,) = re.findall(r"^```python\n(.*?)^```", first, re.MULTILINE | re.DOTALL)
    assert len([line for line in program.splitlines() if line]) <= 14
    assert first.count("<img ") == 1 and "pip install" in first
    assert 'from_pretrained(name, attn_implementation="quire")\n' in README


def stated_counts() -> dict[str, int]:
    """Path below src/quire -> the lines that README states, as in `| [ir/ops.py](...) | 100 |`."""
    found = re.findall(r"\[`([\w/.]+)`\]\(src/quire/([\w/.]+)\) \| ([\d,]+) \|", README)
    assert all(name == link for name, link, _ in found)
    return {path: int(count.replace(",", "")) for path, _, count in found}


def num_lines(path: Path) -> int:
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    return sum(len(file.read_text().splitlines()) for file in files)


def test_the_line_counts_are_true_within_a_tenth() -> None:
    stated = stated_counts()
    assert len(stated) >= 10
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


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them: `## And, or, not` is `and-or-not`."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_headings_lead_to_one(page: Path) -> None:
    found = re.findall(r"\]\((?!https?://)([^)#]*)#([^)]+)\)", page.read_text())
    missing = [
        (file, heading)
        for file, heading in found
        if heading not in anchors(page.parent / file if file else page)
    ]
    assert not missing


# What pages say about the source

ROOTS = (ROOT, SOURCE, *(ROOT / name for name in ("benchmarks", "docs", "tests")))


def named_paths(page: Path) -> list[str]:
    """The paths that stand in backticks, perhaps with a test: `tests/x.py::test_y`."""
    return [
        path for path in re.findall(r"`([\w./-]+(?:::\w+)?)`", page.read_text()) if is_path(path)
    ]


def is_path(text: str) -> bool:
    """`ir/ops.py`, `codegen/` and `LICENSE.md` are; `torch.vmap` and `/` are not."""
    return bool(re.fullmatch(r"(?!\.)[\w.-]+(/[\w.-]+)*(/|\.(py|md)(::\w+)?)", text))


def exists(path: str) -> bool:
    file, _, test = path.partition("::")
    found = [root / file for root in ROOTS if (root / file).exists()]
    if not test:
        return bool(found)
    return any(f"\ndef {test}(" in each.read_text() for each in found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_paths_that_are_named_exist(page: Path) -> None:
    missing = [path for path in named_paths(page) if not exists(path)]
    assert not missing, f"{page.name} names {missing}"


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def test_the_drawings_of_the_architecture_name_what_exists() -> None:
    drawn = re.findall(r"^```text\n(.*?)^```", ARCHITECTURE, re.MULTILINE | re.DOTALL)
    words = [word.strip("(),") for text in drawn for word in text.split()]
    paths = [word for word in words if is_path(word)]
    assert len(paths) > 30
    missing = [path for path in paths if not exists(path)]
    assert not missing


def test_the_tree_of_folders_is_whole() -> None:
    tree = re.findall(r"^```text\n(request\.py.*?)^```", ARCHITECTURE, re.MULTILINE | re.DOTALL)
    (drawn,) = ({line.split()[0] for line in text.splitlines()} for text in tree)
    real = {f"{path.name}/" if path.is_dir() else path.name for path in SOURCE.iterdir()}
    assert real - {"__init__.py", "__pycache__/", "py.typed"} == {
        path for path in drawn if "/" not in path[:-1]
    }


def test_the_number_of_ops_is_true() -> None:
    assert f"nodes of {len(OPS)} ops" in ARCHITECTURE


def steps_of(heading: str) -> list[str]:
    """The files in the table below a heading, step by step."""
    section = ARCHITECTURE.partition(f"### {heading}\n")[2].partition("\n#")[0]
    return re.findall(r"^\| \d+ \| `([^`]+)` \|", section, re.MULTILINE)


def in_order(files: list[str], way: Walk) -> bool:
    """Whether a call enters these files one after the other, whatever else it enters between."""
    entered = iter(stop.file for stop in way.stops)
    return all(file in entered for file in files)


def test_the_architecture_follows_a_call_as_it_goes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))  # nothing is compiled yet
    config.cache_clear()
    slopes, operands = torch.rand(4), torch.randn(3, 1, 4, 200, 16)
    query, key, value = operands.unbind(0)

    def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx

    def call() -> None:
        attention(query, Dense(key, value), score_mod=unlike_others, mask=causal)

    def unlike_others(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score.tanh() * slopes[h].cos() - ((q_idx - kv_idx) % 7) / (h + 3) ** 2

    first, later = walk(call), walk(call)
    assert len(steps_of("The first call")) == 17
    assert in_order(steps_of("The first call"), first)
    named = steps_of("A later call like it")
    assert in_order(named, later)
    own = {file for file in named if not file.startswith(("ir/", "codegen/"))}
    assert own | {"support/torch_private/__init__.py"} == set(later.files)
    assert f"these are {len(later.files)} files" in ARCHITECTURE
