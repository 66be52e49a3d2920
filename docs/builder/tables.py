"""Tables of figures in README and pages, made from committed results.

    <!-- figures: million -->
    | ... |
    <!-- end -->

The mark has a name of `TABLES`, or names a script and its parts (`rows.py`).
`python docs/builder --tables` writes them anew; a test fails if a page has other figures.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from builder import rows
from builder.results import Part, misses, named
from builder.source import ROOT

MARKED = re.compile(r"(<!-- figures: ([^>]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def million() -> str:
    """Return what create_block_mask costs at a million tokens."""
    measured = named("masks", "million")
    cases = [row["case"] for row in measured[0].rows if row["case"].startswith("create_block")]
    names = dict.fromkeys(case.partition(",")[0] for case in cases)
    processors = [part.label.partition(",")[0] for part in measured]
    lines = []
    for name in names:
        seconds = [f"{part.figure(f'{name}, 1M x 1M') * 1e3:.0f} ms" for part in measured]
        memory = [f"{part.figure(f'{name}, memory'):.0f} MB" for part in measured]
        cells = [name.removeprefix("create_block_mask "), *seconds, *memory]
        lines.append(f"| {' | '.join(cells)} |")
    heads = [f"{what}, {name}" for what in ("time", "memory") for name in processors]
    head = f"| mask | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}"
    return f"{head}\n" + "\n".join(lines) + f"\n\n{rows.where(measured)}\n"


class Line(NamedTuple):
    """A line of a table: a label, and the cases and the unit whose range is shown."""

    label: str
    script: str
    name: str
    cases: str
    unit: str


def summary(lines: tuple[Line, ...], columns: list[Part]) -> str:
    """Return a table with a line for each kind of figure, and a column for each processor."""
    texts, dates = [], set()
    for label, script, name, cases, unit in lines:
        measured = {part.place: part for part in named(script, name)}
        assert measured, f"benchmarks/{script}.py --only {name} was never kept"
        figures = [span(measured.get(column.place), cases, unit) for column in columns]
        dates |= {part.kept["date"] for part in measured.values()}
        texts.append([label, *figures, f"`{script}.py --only {name}`"])
    head = ["case", *(column.label for column in columns), "`python benchmarks/...`"]
    versions = columns[0].kept["versions"]
    conditions = (
        f"{columns[0].processor} of two generations, {columns[0].kept['threads']} threads, torch "
        f"{versions['torch'].split('+')[0]}, Python {versions['python']}, "
        f"{' to '.join(sorted({min(dates), max(dates)}))}"
    )
    return f"{rows.markdown(head, texts)}\n\nMeasured on {conditions}.\n"


def span(part: Part | None, cases: str, unit: str) -> str:
    """Return the least and the largest figure of some cases on a processor, if it was measured.

    If some of them miss their limits, or are slower than what they are measured against, they are
    bold, and brackets say how many and which limits.
    """
    if part is None:
        return ""
    found = [
        row
        for row in part.rows
        if re.fullmatch(cases, row["case"]) and row["unit"].startswith(unit)
    ]
    assert found, f"benchmarks/{part.script}.py --only {part.name}: no row {cases}"
    figures = [row["figure"] for row in found]
    low, high = f"{min(figures):.2g}", f"{max(figures):.2g}"
    text = low if low == high else f"{low} to {high}"
    ratio = unit.startswith(FASTER)
    text += "" if ratio else {SLOWER: f" {unit}"}.get(unit, " %")
    late = [row for row in found if misses(row)]
    if late:
        said = _count(len(late), len(found), "miss", "misses")
        limits = sorted({row["wanted"] for row in late}, key=lambda limit: float(limit.split()[1]))
        return f"**{text}** ({said} {', '.join(limits)})"
    slow = sum(figure < 1 for figure in figures) if ratio else 0
    said = _count(slow, len(found), "are slower", "is slower" if len(found) > 1 else "slower")
    return f"**{text}** ({said})" if slow else text


def _count(some: int, every: int, several: str, one: str) -> str:
    """Return `2 of 6 miss`, or `misses` of the only one."""
    verb = one if some == 1 else several
    return f"{some} of {every} {verb}" if every > 1 else verb


FASTER = "x as fast"
READING = "% of the reading speed"
SLOWER = "% slower"

AGAINST_TORCH = (
    Line(
        "dense, 512 to 8,192 tokens, against SDPA",
        "forward",
        "sdpa",
        r"dense N \d+ D \d+ threads 2",
        FASTER,
    ),
    Line("causal, against SDPA", "forward", "sdpa", r"causal N \d+ D \d+ threads 2", FASTER),
    Line(
        "causal, forward and backward, against SDPA",
        "backward",
        "masked",
        r"causal N \d+ D \d+ threads 2",
        FASTER,
    ),
    Line(
        "the masks of the gallery, against SDPA with a dense mask",
        "gallery",
        "masks",
        r".*",
        FASTER,
    ),
    Line(
        "the score mods of the gallery, against SDPA with a dense bias",
        "gallery",
        "scores",
        r".*",
        f"{FASTER} as SDPA",
    ),
    Line(
        "64 sequences of 16 to 2,048 tokens, packed, against SDPA in a loop",
        "ragged",
        "forward",
        r".*loop",
        FASTER,
    ),
    Line("nested tensors, against PyTorch's", "ragged", "nested", r".*", FASTER),
    Line(
        "decoding 16 sequences of 4,096 tokens in bfloat16, against SDPA",
        "paged",
        "contiguous",
        r".*bfloat16",
        FASTER,
    ),
    Line(
        "the same in float32 and bfloat16, as a share of the speed at which its bytes can be read",
        "paged",
        "contiguous",
        r".*",
        READING,
    ),
    Line(
        "the same in float32 from random pages of 16 to 128 tokens, against contiguous memory",
        "paged",
        "paged",
        r".*random pages.*",
        SLOWER,
    ),
)
"""What README shows."""

DECODING = (
    Line("float32, contiguous, against SDPA", "paged", "contiguous", r".*float32", FASTER),
    Line("share of the speed of reading", "paged", "contiguous", r".*float32", READING),
    Line("bfloat16, contiguous, against SDPA", "paged", "contiguous", r".*bfloat16", FASTER),
    Line("share of the speed of reading", "paged", "contiguous", r".*bfloat16", READING),
    Line("float32 in random pages of 16, against contiguous", "paged", "paged", r".*16", SLOWER),
    Line("pages of 64", "paged", "paged", r".*64", SLOWER),
    Line("pages of 128", "paged", "paged", r".*128", SLOWER),
    Line("int8 in pages of 64, against bfloat16", "paged", "int8", r".*", FASTER),
)
"""What the page on pages shows."""

TRAINING = tuple(
    Line(
        f"{kind}, heads of {width}, 512 to 4,096 tokens",
        "backward",
        part,
        rf"{kind} N \d+ D {width} threads 2",
        FASTER,
    )
    for kind, part in (("dense", "dense"), ("causal", "masked"))
    for width in (64, 128)
)
"""What the page on training shows."""

DENSE = "dense, heads of {}, 512 to 8,192 tokens, against SDPA"
LONG = "causal, heads of {}, 2,048 and 8,192 tokens, against SDPA"

PROCESSORS = (
    *(
        Line(text.format(width), "forward", "sdpa", rf"{cases} D {width} threads 2", FASTER)
        for text, cases in ((DENSE, r"dense N \d+"), (LONG, "causal N (?:2048|8192)"))
        for width in (64, 128)
    ),
    Line("causal, 512 tokens, against SDPA", "forward", "sdpa", r"causal N 512 D.*2", FASTER),
    *(
        Line(
            f"dense {dtype}, 2,048 tokens, against SDPA",
            "forward",
            "dtypes",
            rf"dense {dtype} .*threads 2",
            FASTER,
        )
        for dtype in ("bfloat16", "float16")
    ),
    *(line._replace(label=f"forward and backward, {line.label}") for line in TRAINING),
    *(line._replace(label=f"decode, {line.label}") for line in DECODING),
    Line("packed sequences, against padded SDPA", "ragged", "forward", r".*padded", FASTER),
    Line("nested tensors, against PyTorch's", "ragged", "nested", r".*", FASTER),
)
"""What the page on processors shows."""

TABLES: dict[str, Callable[[], str]] = {
    "million": million,
    "torch": lambda: summary(AGAINST_TORCH, named("forward", "sdpa")),
    "decoding": lambda: summary(DECODING, named("paged", "contiguous")),
    "processors": lambda: summary(PROCESSORS, named("forward", "sdpa")),
    "training": lambda: summary(TRAINING, named("backward", "dense")),
}


def filled(text: str) -> str:
    """Return a page with the tables that its marks name, where there are files for them."""

    def content(found: re.Match[str]) -> str:
        mark, before = found[2], found[3]
        made = TABLES[mark]() if mark in TABLES else rows.table(rows.wish(mark))
        return f"{found[1]}{before if made is None else made}{found[4]}"

    return MARKED.sub(content, text)


def pages() -> list[Path]:
    """Return the pages that have such tables."""
    every = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in every if MARKED.search(path.read_text())]


def write() -> None:
    """Write the tables of all pages anew."""
    for path in pages():
        path.write_text(filled(path.read_text()))
