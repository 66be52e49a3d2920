"""A table of all rows of some parts of a benchmark, as a mark in a page asks for it.

    <!-- figures: serve http prefix start -->
    <!-- figures: linear layers across 2 with each -->

The first word is the script, and the next are its parts. Each row of their files is a line, and
each processor a column. `across 2` makes columns of the second piece of each case ("int8, 4 rows"
has two), and `with` adds columns of what a row says besides its figure. A part that has no file yet
is a line of empty cells. If no part has one, there is no table, and the page keeps what it has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from builder.results import Part, named, number, parts

PIECES = re.compile(r", (?![^\[(]*[\])])")
"""A comma between pieces of a case, and none within brackets."""

LIMITS = "In brackets is the limit that a figure should keep. Bold figures miss theirs."
NO_FILE = "No file of these figures is kept."
"""What a page says of a table that was not made from a file."""


class Wish(NamedTuple):
    """What a mark asks for."""

    script: str
    parts: tuple[str, ...]
    across: int  # the piece of a case that columns are made of, from 1 or from -1; 0: none
    details: tuple[str, ...]


class Line(NamedTuple):
    """What a line of a table is about: a case, perhaps without a piece, and the unit."""

    case: str
    unit: str


class Column(NamedTuple):
    """A column of figures: the processor, and the piece of the case."""

    label: str
    piece: str


Cells = dict[tuple[Line, Column], dict[str, Any]]
"""The rows of files by their place in a table."""


def wish(mark: str) -> Wish:
    """Read a mark, without its `figures:`."""
    rest, _, details = mark.partition(" with ")
    rest, _, across = rest.partition(" across ")
    script, *parts = rest.split()
    return Wish(script, tuple(parts), int(across or 0), tuple(details.split()))


def table(asked: Wish) -> str | None:
    """Return the table that a mark asks for, with its conditions; None if no part has a file."""
    measured = [part for name in asked.parts for part in own(asked.script, name)]
    if not measured:
        return None
    cells = {place: row for part in measured for place, row in placed(part, asked.across)}
    labels = list(dict.fromkeys(part.label for part in parts()))
    lines = list(dict.fromkeys(line for line, _ in cells))
    columns = sorted(
        dict.fromkeys(column for _, column in cells), key=lambda each: labels.index(each.label)
    )
    head, *texts = _texts(cells, lines, columns, asked)
    missing = [name for name in asked.parts if not own(asked.script, name)]
    texts += [[f"`--only {name}`", *[""] * (len(head) - 1)] for name in missing]
    limits = [LIMITS] if any(row["wanted"] for row in cells.values()) else []
    return f"{markdown(head, texts)}\n\n{' '.join([*limits, where(measured)])}\n"


def _texts(
    cells: Cells, lines: list[Line], columns: list[Column], asked: Wish
) -> Iterator[list[str]]:
    """Yield the head of a table and its lines. Units have a column, if there are any."""
    several = len({column.label for column in columns}) > 1
    units = any(line.unit for line in lines)
    heads = chain.from_iterable(_heads(each, asked, several=several) for each in columns)
    yield ["case", *heads, *["unit"] * units]
    for line in lines:
        found = chain.from_iterable(_cell(cells.get((line, each)), asked) for each in columns)
        yield [line.case, *found, *[line.unit] * units]


def own(script: str, name: str) -> list[Part]:
    """Return a part on each processor that ran code for itself."""
    return [part for part in named(script, name) if part.machine == part.target]


def placed(part: Part, across: int) -> list[tuple[tuple[Line, Column], dict[str, Any]]]:
    """Return the rows of a part, each with its line and its column."""
    found = []
    for row in part.rows:
        pieces = PIECES.split(one(row["case"]))
        piece = pieces.pop(across - (across > 0)) if across else ""
        found.append(((Line(", ".join(pieces), row["unit"]), Column(part.label, piece)), row))
    return found


def _heads(column: Column, asked: Wish, *, several: bool) -> list[str]:
    """Return the heads of a column and of its details. One processor is named below the table."""
    names = [column.label] if several or not column.piece else []
    name = ": ".join(filter(None, [*names, column.piece]))
    details = (each.replace("_", " ") for each in asked.details)
    return [name, *(f"{name}: {each}" if several or column.piece else each for each in details)]


def _cell(row: dict[str, Any] | None, asked: Wish) -> list[str]:
    if row is None:
        return [""] * (1 + len(asked.details))
    limit = f" ({row['wanted']})" if row["wanted"] else ""
    return [f"{number(row)}{limit}", *(str(row.get(each, "")) for each in asked.details)]


def markdown(head: list[str], texts: Iterable[list[str]]) -> str:
    """Return a table."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(text)} |" for text in texts)])


def where(measured: list[Part]) -> str:
    """Return the sentence below a table: when and with what its rows were measured."""
    runs = "; ".join(dict.fromkeys(part.conditions() for part in measured))
    script = measured[0].script
    return f"Measured on {runs}. The rows are in `benchmarks/results/*/{script}.json`."


# Cases in words

LETTERS = {
    "B": "batch of {}",
    "D": "heads of {}",
    "H": "{} heads",
    "Hkv": "{} key heads",
    "Hq": "{} query heads",
    "N": "{} tokens",
    "threads": "{} threads",
}
"""What the letters of cases stand for."""


def words(case: str) -> str:
    """Return a case in words: `causal, 8,192 tokens, heads of 64` for `causal N 8192 D 64`."""

    def said(found: re.Match[str]) -> str:
        letter, digits = found.groups()
        count = f"{int(digits.replace(',', '')):,}"
        text = LETTERS[letter].format(count)
        if count == "1" and letter in ("H", "threads"):
            text = text.removesuffix("s")
        follows = case[: found.start()].endswith((",", " at"))
        return f" {text}" if follows else f", {text}"

    return one(re.sub(rf" ({'|'.join(LETTERS)}) (\d[\d,]*\d|\d)", said, case))


def one(case: str) -> str:
    """Return a case in which one of something has no plural."""
    return re.sub(r"\b1 (thread|row)s\b", r"1 \1", case)
