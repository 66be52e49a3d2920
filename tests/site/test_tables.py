"""Tables of figures in pages are made from files, and say so where no file is kept."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
from builder import figures, results, rows, tables
from builder.source import ROOT

PAGES = {path.name: path.read_text() for path in tables.pages()}
MARKS = [(name, *found.groups()) for name in PAGES for found in tables.MARKED.finditer(PAGES[name])]
OF_ROWS = [(name, mark, text) for name, _, mark, text, _ in MARKS if mark not in tables.TABLES]

VERSIONS = {"torch": "2.13.0+cpu", "python": "3.12.1", "quire": "0.1.0"}
KEPT = {
    "command": "python benchmarks/a.py",
    "versions": VERSIONS,
    "threads": 2,
    "date": "2026-01-02",
    "commit": "0123456789",
}


def row(case: str, figure: float, wanted: str = "", **more: object) -> dict[str, Any]:
    return {"case": case, "figure": figure, "unit": "x", "wanted": wanted, **more}


def part(name: str, machine: str, *content: dict[str, Any], **kept: Any) -> results.Part:
    return results.Part("a", name, machine, machine, "AMD EPYC", {**KEPT, **kept, "rows": content})


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> list[results.Part]:
    """What is kept, in place of the files; a test adds to it."""
    kept: list[results.Part] = []
    monkeypatch.setattr(rows, "parts", lambda: kept)
    monkeypatch.setattr(rows, "named", lambda _, name: [x for x in kept if x.name == name])
    return kept


def test_a_line_for_each_row_and_a_column_for_each_processor(files: list[results.Part]) -> None:
    files += [part("one", "znver4", row("b", 2.0, "< 2"), row("c", 3))]
    files += [part("one", "znver5", row("b", 1.5, "< 2", MB=7))]
    text, z4, z5 = rows.table(rows.wish("a one two with MB")), "Zen 4, AVX-512", "Zen 5, AVX-512"
    assert text is not None and text.splitlines()[:5] == [
        f"| case | {z4} | {z4}: MB | {z5} | {z5}: MB | unit |",
        "|---|---|---|---|---|---|",
        "| b | **2.00** (< 2) |  | 1.50 (< 2) | 7 | x |",
        "| c | 3 |  |  |  | x |",
        "| `--only two` |  |  |  |  |  |",
    ]
    assert rows.LIMITS in text and "2026-01-02, commit 0123456789" in text


@pytest.mark.parametrize("across", [2, -2])
def test_columns_can_be_pieces_of_cases(files: list[results.Part], across: int) -> None:
    cases = [row("f, 1 rows, at (2, 3)", 1.0), row("f, 4 rows, at (2, 3)", 1234.5)]
    files.append(part("one", "znver5", *cases, row("g, 4 rows, at (2, 3)", 0.5)))
    text = rows.table(rows.wish(f"a one across {across}"))
    assert text is not None and text.splitlines()[:4] == [
        "| case | 1 row | 4 rows | unit |",
        "|---|---|---|---|",
        "| f, at (2, 3) | 1.00 | 1,234 | x |",
        "| g, at (2, 3) |  | 0.500 | x |",
    ]
    assert rows.LIMITS not in text


def test_all_rows_are_folded_and_columns_without_content_are_left_out() -> None:
    some = part("one", "znver5", row("dense N 8192 D 64 threads 1", 0.5, ">= 1"), row("b", 2))
    text = figures.table(some)
    assert "<summary>2 rows, of which 1 misses a limit</summary>" in text
    assert "| dense, 8,192 tokens, heads of 64, 1 thread | **0.500** x | >= 1, missed |" in text
    plain = figures.table(part("one", "znver5", row("extra memory at N 2,048, H 1, causal", 2)))
    assert "limit" not in plain and "| extra memory at 2,048 tokens, 1 head, causal |" in plain
    assert "<summary>1 row</summary>" in plain


def test_without_a_file_a_page_keeps_what_it_has(files: list[results.Part]) -> None:
    page = "<!-- figures: a one -->\nold\n<!-- end -->\n"
    assert tables.filled(page) == page
    files.append(part("one", "znver5", row("b", 1.5)))
    assert "old" not in tables.filled(page) and "| b | 1.50 | x |" in tables.filled(page)


@pytest.mark.parametrize(("name", "mark", "text"), OF_ROWS)
def test_what_is_no_table_of_a_file_says_so(name: str, mark: str, text: str) -> None:
    asked = rows.wish(mark)
    made = any(rows.own(asked.script, each) for each in asked.parts)
    assert made != (rows.NO_FILE in text)


@pytest.mark.parametrize(("name", "mark", "text"), OF_ROWS)
def test_marks_name_parts_that_exist(name: str, mark: str, text: str) -> None:
    asked = rows.wish(mark)
    content = (results.BENCHMARKS / f"{asked.script}.py").read_text()
    for shared in re.findall(r"^import (_\w+)$", content, re.MULTILINE):
        content += (results.BENCHMARKS / f"{shared}.py").read_text()
    for each in asked.parts:
        assert f"def {each}(table" in content
    assert all(re.search(rf"\b{each}\b", content) for each in asked.details)
    assert asked.parts


def test_what_misses_its_limit_is_bold() -> None:
    found = [
        (wanted, results.misses(row("a", 5.0, wanted))) for wanted in ("> 5", ">= 5", "< 5", "<= 5")
    ]
    assert found == [("> 5", True), (">= 5", False), ("< 5", True), ("<= 5", False)]
    assert figures.verdict(row("a", 5.0, "> 5")) == "> 5, missed"
    cases = [row("a", 1.5, ">= 1.2"), row("b", 1.1, ">= 1.2"), row("c", 0.9)]
    of_rows = part("one", "znver5", *({**each, "unit": tables.FASTER} for each in cases))
    spans = [tables.span(of_rows, case, tables.FASTER) for case in "abc"]
    assert spans == ["1.5", "**1.1** (misses >= 1.2)", "**0.9** (slower)"]
    named = part("one", "znver5", {**row("c", 0.9), "unit": "x as fast as SDPA"})
    assert tables.span(named, "c", "x as fast as SDPA") == "**0.9** (slower)"
    mixed = tables.span(of_rows, "[ab]", tables.FASTER)
    assert mixed == "**1.1 to 1.5** (1 of 2 misses >= 1.2)"
    slower = part("one", "znver5", {**row("a", 3.0, "<= 5"), "unit": tables.SLOWER})
    assert tables.span(slower, "a", tables.SLOWER) == "3 % slower"


# Commits


def test_pages_name_no_commit_that_was_not_kept() -> None:
    lost = part("one", "znver5", commit=results.UNKNOWN).conditions()
    assert lost.endswith("2026-01-02, the commit was not kept")
    changed = part("one", "znver5", commit="abcdef123-dirty").conditions()
    assert changed.endswith("commit abcdef123 with changes")


def git(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)


def test_workflows_that_run_tests_have_the_whole_history() -> None:
    texts = {path.name: path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml")}
    testing = {
        name for name, text in texts.items() if re.search(r"make test|pytest|\.ci/run", text)
    }
    assert testing == {"ci.yml", "docs.yml", "matrix.yml"}
    assert all("fetch-depth: 0" in texts[name] for name in testing)


def test_commits_of_files_are_in_the_history() -> None:
    try:
        whole = git("rev-parse", "--is-shallow-repository").stdout.strip() == "false"
    except OSError:
        whole = False
    if not whole:
        pytest.skip("this is no checkout with its whole history")
    named = {commit.partition("-")[0] for each in results.parts() for commit, _ in each.runs()}
    missing = [x for x in sorted(named - {results.UNKNOWN}) if git("cat-file", "-e", x).returncode]
    assert not missing, f'write "{results.UNKNOWN}" in place of {missing}'
