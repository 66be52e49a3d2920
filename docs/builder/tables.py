"""Tables of figures in README and pages, made from committed results.

    <!-- figures: million -->
    | ... |
    <!-- end -->

`python docs/builder --tables` writes them anew; a test fails if a page has other figures.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from builder.results import Part, part
from builder.source import ROOT

MARKED = re.compile(r"(<!-- figures: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def million() -> str:
    """Return what create_block_mask costs at a million tokens."""
    measured = part("masks", "million")
    cases = [row["case"] for row in measured.rows if row["case"].startswith("create_block_mask")]
    names = dict.fromkeys(re.split(r",", case)[0] for case in cases)
    lines = [
        f"| {name.removeprefix('create_block_mask ')} | "
        f"{measured.figure(f'{name}, 1M x 1M') * 1e3:.0f} ms | "
        f"{measured.figure(f'{name}, memory'):.0f} MB |"
        for name in names
    ]
    return (
        "| mask | time | memory |\n|---|---|---|\n" + "\n".join(lines) + f"\n\n{where(measured)}\n"
    )


def where(measured: Part) -> str:
    """Return the sentence below a table."""
    path = f"benchmarks/results/{measured.target}/{measured.script}.json"
    return f"Measured on {measured.conditions()}; the rows are in `{path}`."


def against_torch() -> str:
    """Return the table of README: some figures of each kind, also those that are low."""
    rows = []
    for label, script, name, cases in SHOWN:
        measured = part(script, name)
        found = [row["figure"] for row in measured.rows if re.fullmatch(cases, row["case"])]
        assert found, f"{measured.command} has no row {cases}"
        low, high = f"{min(found):.2g}", f"{max(found):.2g}"
        figure = low if low == high else f"{low} to {high}"
        command = measured.command.removeprefix("python benchmarks/")
        rows.append(f"| {label} | {figure} | `{command}` |")
    kept = part("forward", "sdpa")
    conditions = kept.conditions().rpartition(", commit")[0]
    head = "| case | times as fast | `python benchmarks/...` |\n|---|---|---|"
    return f"{head}\n" + "\n".join(rows) + f"\n\nMeasured on {conditions}.\n"


SHOWN = (
    ("dense, 512 to 8,192 tokens, against SDPA", "forward", "sdpa", r"dense N \d+ D \d+ threads 2"),
    ("causal, against SDPA", "forward", "sdpa", r"causal N \d+ D \d+ threads 2"),
    (
        "causal, forward and backward, against SDPA",
        "backward",
        "masked",
        r"causal N \d+ D \d+ threads 2",
    ),
    ("the masks of the gallery, against SDPA with a dense mask", "gallery", "masks", r".*"),
    ("a bias read from a tensor [L, S], against SDPA with it", "gallery", "scores", "table_bias"),
    (
        "64 sequences of 16 to 2,048 tokens, packed, against SDPA in a loop",
        "ragged",
        "forward",
        r".*loop",
    ),
    ("nested tensors, against PyTorch's", "ragged", "nested", r".*"),
)
"""What README shows: a label, script and part, and the cases whose range of figures is shown."""

TABLES: dict[str, Callable[[], str]] = {"million": million, "torch": against_torch}


def filled(text: str) -> str:
    """Return a page with the tables that its marks name."""
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[4]}", text)


def pages() -> list[Path]:
    """Return the pages that have such tables."""
    every = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in every if MARKED.search(path.read_text())]


def write() -> None:
    """Write the tables of all pages anew."""
    for path in pages():
        path.write_text(filled(path.read_text()))
