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

from builder.results import Part, part, parts
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
    for label, script, name, cases, unit in SHOWN:
        command = part(script, name).command.removeprefix("python benchmarks/")
        figures = [span(script, name, cases, unit, target) for target in TARGETS]
        rows.append(f"| {label} | {' | '.join(figures)} | `{command}` |")
    conditions = part("forward", "sdpa").conditions().rpartition(", commit")[0]
    head = f"| case | {' | '.join(TARGETS.values())} | `python benchmarks/...` |\n|---|---|---|---|"
    return f"{head}\n" + "\n".join(rows) + f"\n\nMeasured on {conditions}.\n"


def span(script: str, name: str, cases: str, unit: str, target: str) -> str:
    """Return the least and the largest figure of some cases on a processor, if it was measured."""
    measured = [each for each in parts() if (each.script, each.name) == (script, name)]
    rows = [row for each in measured if each.target == target for row in each.rows]
    found = [
        row["figure"]
        for row in rows
        if re.fullmatch(cases, row["case"]) and row["unit"].startswith(unit)
    ]
    assert found or target != "znver5", f"benchmarks/{script}.py --only {name}: no row {cases}"
    if not found:
        return ""
    low, high = f"{min(found):.2g}", f"{max(found):.2g}"
    text = low if low == high else f"{low} to {high}"
    return text if unit == FASTER else f"**{text} {unit}**" if "slower" in unit else f"{text} %"


FASTER = "x as fast"
TARGETS = {"znver5": "AVX-512", "x86-64-v3": "AVX2"}
"""The columns of README's table."""

SHOWN = (
    (
        "dense, 512 to 8,192 tokens, against SDPA",
        "forward",
        "sdpa",
        r"dense N \d+ D \d+ threads 2",
        FASTER,
    ),
    ("causal, against SDPA", "forward", "sdpa", r"causal N \d+ D \d+ threads 2", FASTER),
    (
        "causal, forward and backward, against SDPA",
        "backward",
        "masked",
        r"causal N \d+ D \d+ threads 2",
        FASTER,
    ),
    (
        "the masks of the gallery, against SDPA with a dense mask",
        "gallery",
        "masks",
        r".*",
        FASTER,
    ),
    (
        "a bias read from a tensor [L, S], against SDPA with it",
        "gallery",
        "scores",
        "table_bias",
        FASTER,
    ),
    (
        "64 sequences of 16 to 2,048 tokens, packed, against SDPA in a loop",
        "ragged",
        "forward",
        r".*loop",
        FASTER,
    ),
    ("nested tensors, against PyTorch's", "ragged", "nested", r".*", FASTER),
    (
        "decode of 16 sequences of 4,096, bfloat16, against SDPA",
        "paged",
        "contiguous",
        r".*bfloat16",
        FASTER,
    ),
    (
        "the same, as a share of the speed of only reading the bytes: float32 and bfloat16",
        "paged",
        "contiguous",
        r".*",
        "% of the reading speed",
    ),
    (
        "that decode in float32 from random pages of 16 to 128, against contiguous",
        "paged",
        "paged",
        r".*random pages.*",
        "% slower",
    ),
)
"""What README shows: a label, script and part, and the cases and unit whose range is shown."""

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
