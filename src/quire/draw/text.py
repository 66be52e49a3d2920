"""A mask or a score mod as text: one or two characters for each cell, with numbers around.

causal: 1,024 queries x 1,024 keys in blocks of 128, sparsity 43.8 %
     0       512
   0 ▒▒· · · · · · ·
     ██▒▒· · · · · ·
...
"""

from __future__ import annotations

import numpy as np

from quire.block_mask.blocks import EMPTY, FULL, PARTIAL
from quire.draw.scale import scale
from quire.draw.scores import Ends, HeatMap, Values
from quire.draw.subject import Subject
from quire.draw.survey import Cells, Pair

SIGNS = {EMPTY: "· ", PARTIAL: "▒▒", FULL: "██"}
SHADES = "░▒▓█"
SPECIAL = {"-inf": "· ", "inf": "^ ", "nan": "? "}
LEAST_WIDTH = 24


def write_mask(subject: Subject, width: int) -> str:
    """Return the text of a mask in `width` columns. The first and last line may be longer."""
    most, columns = _most_cells(subject.lengths, width, subject.elementwise)
    cells = subject.cells(most)
    signs = [[SIGNS[kind] for kind in row] for row in cells.kinds.tolist()]
    title = f"{subject.name}: {facts(subject, cells)}"
    legend = {SIGNS[kind]: word for kind, word in words(subject, cells).items()}
    rows = grid(signs, subject.lengths, cells.step, columns)
    return "\n".join([title, *rows, written_legend(legend, cell_size(subject, cells))])


def write_scores(scores: HeatMap, width: int) -> str:
    """Return the text of a score mod. A darker sign is a larger value."""
    most, columns = _most_cells(scores.lengths, width, elementwise=True)
    found = scores.cells(most)
    title = f"{scores.name}: {score_facts(scores, found)}"
    legend = _shades(found.ends) | {SPECIAL[name]: name for name in found.special()}
    rows = grid(_signs(found), scores.lengths, found.step, columns)
    return "\n".join([title, *rows, written_legend(legend, sample(scores, found))])


def facts(subject: Subject, cells: Cells) -> str:
    """Return the text that follows the name of a mask in the title."""
    blocks = "" if subject.elementwise else f" in blocks of {_size(subject.block)}"
    # Samples may mistake partial for empty, but never empty for partial.
    sparsity = (
        _percent(cells.empty) if cells.proven else f"at most {_percent(cells.empty)}, sampled"
    )
    return f"{_lengths(subject.lengths)}{blocks}, sparsity {sparsity}"


def score_facts(scores: HeatMap, found: Values) -> str:
    """Return the text that follows the name of a score mod in the title."""
    values = [str(found.ends)] if found.ends else []
    becomes = " or ".join([*values, *found.special()])
    return f"{_lengths(scores.lengths)}, {scores.what} {becomes}"


def words(subject: Subject, cells: Cells) -> dict[int, str]:
    """Return the word for each kind of cell that can occur."""
    if subject.elementwise and cells.step == (1, 1):
        return {FULL: "seen", EMPTY: "hidden"}
    return {FULL: "full", PARTIAL: "partial", EMPTY: "empty"}


def cell_size(subject: Subject, cells: Cells) -> str:
    """Return the size of a cell, or "" if a cell is a block."""
    if cells.step == subject.block:
        return ""
    return f"a cell is {cells.step[0]:,} x {cells.step[1]:,} tokens"


def sample(scores: HeatMap, found: Values) -> str:
    """Return a note on which elements of a heat map are shown, or "" if all are."""
    if found.step == (1, 1):
        return ""
    return f"{scores.shown} of each {found.step[0]:,} x {found.step[1]:,}"


def _shades(ends: Ends | None) -> dict[str, str]:
    """Return each shade with the range of values that it shows."""
    if ends is None:
        return {}
    if ends.low == ends.high:
        return {2 * SHADES[-1]: str(ends)}
    edges = np.linspace(ends.low, ends.high, len(SHADES) + 1).tolist()
    return {2 * s: str(Ends(*edges[at : at + 2])) for at, s in enumerate(SHADES)}


def _signs(found: Values) -> list[list[str]]:
    ends, count = found.ends, len(SHADES)
    signs = np.full(found.values.shape, 2 * SHADES[-1])
    if ends is not None and ends.low < ends.high:
        share = np.nan_to_num((found.values - ends.low) / (ends.high - ends.low)).clip(0, 1)
        level = np.minimum(share * count, count - 1).astype(int)
        signs = np.array([2 * shade for shade in SHADES])[level]
    for name, where in found.special().items():
        signs[where] = SPECIAL[name]
    rows: list[list[str]] = signs.tolist()
    return rows


def _most_cells(lengths: Pair, width: int, elementwise: bool) -> tuple[Pair, int]:
    """Return the largest number of rows and columns of cells, and the characters per cell."""
    room = width - len(f"{lengths[0]}") - 1
    columns = room // 2
    if elementwise and columns < lengths[1] <= room:
        columns = room
    longest = max(lengths)
    most = max(1, columns * lengths[0] // longest), max(1, columns * lengths[1] // longest)
    if elementwise and longest <= room:
        most = longest, columns
    return most, min(2, room // most[1])


def grid(signs: list[list[str]], lengths: Pair, step: Pair, columns: int) -> list[str]:
    """Return rows of signs, with numbers above and beside them."""
    drawn = ["".join(sign[:columns] for sign in row) for row in signs]
    beside = _row_numbers(lengths[0], step[0], len(drawn))
    margin = max(map(len, beside)) + 1
    above = _column_numbers(lengths[1], step[1], columns, len(drawn[0]))
    rows = [f"{number:>{margin - 1}} {row}" for number, row in zip(beside, drawn, strict=True)]
    return [line.rstrip() for line in (" " * margin + above, *rows)]


def _row_numbers(length: int, step: int, count: int) -> list[str]:
    """Return the text beside each row: a number of the scale, or ""."""
    numbers = [""] * count
    for at, label in reversed(scale(length, _at_most(count, 1))):
        if at < length:
            numbers[at // step] = label
    return numbers


def _column_numbers(length: int, step: int, width: int, room: int) -> str:
    """Return the line above the columns: the numbers of the scale for which there is space."""
    line = ""
    for at, label in scale(length, _at_most(room, min(len(str(length)), 4) + 2)):
        place = at // step * width
        if place >= len(line) + bool(line) and place + len(label) <= room:
            line = f"{line:{place}}{label}"
    return line


def _at_most(room: int, each: int) -> int:
    return max(1, min(5, room // each))


def written_legend(meanings: dict[str, str], note: str) -> str:
    """Return the line below a drawing: each sign with its meaning, and a note."""
    parts = [f"{sign.strip()} {meaning}" for sign, meaning in meanings.items()]
    return "  ".join(parts + [f"({note})"] * bool(note))


def _lengths(lengths: Pair) -> str:
    q_len, kv_len = lengths
    queries = "query" if q_len == 1 else "queries"
    keys = "key" if kv_len == 1 else "keys"
    return f"{q_len:,} {queries} x {kv_len:,} {keys}"


def _size(block: Pair) -> str:
    return f"{block[0]:,}" if block[0] == block[1] else f"{block[0]:,} x {block[1]:,}"


def _percent(share: float) -> str:
    """Return a percentage with one digit. Only exact 0 and 1 are shown as 0.0 % and 100.0 %."""
    shown = f"{100 * share:.1f}"
    if shown == "0.0" and share > 0:
        return "less than 0.1 %"
    if shown == "100.0" and share < 1:
        return "more than 99.9 %"
    return f"{shown} %"
