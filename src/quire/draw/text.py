"""A mask as text: one or two characters for each cell, numbers above and beside them.

causal: 1,024 queries x 1,024 keys in blocks of 128, sparsity 43.8 %
     0       512
   0 ▒▒· · · · · · ·
     ██▒▒· · · · · ·
...
"""

from __future__ import annotations

from quire.block_mask.lists import EMPTY, FULL, PARTIAL
from quire.draw.scale import scale
from quire.draw.subject import Cells, Pair, Subject

SIGNS = {EMPTY: "· ", PARTIAL: "▒▒", FULL: "██"}
LEAST_WIDTH = 24


def write_text(subject: Subject, width: int) -> str:
    """The drawing in at most `width` columns; only the first line may be longer."""
    margin = len(f"{subject.lengths[0]}") + 1
    most = _most_cells(subject, width - margin)
    cells = subject.cells(most)
    signs = {kind: sign[: min(2, (width - margin) // most[1])] for kind, sign in SIGNS.items()}
    drawn = ["".join(signs[kind] for kind in row) for row in cells.kinds.tolist()]
    beside = _row_numbers(subject.lengths[0], cells.step[0], len(drawn))
    margin = max(map(len, beside)) + 1
    above = _column_numbers(subject.lengths[1], cells.step[1], len(signs[FULL]), len(drawn[0]))
    rows = [f"{number:>{margin - 1}} {row}" for number, row in zip(beside, drawn, strict=True)]
    lines = [f"{subject.name}: {facts(subject, cells)}", " " * margin + above, *rows]
    return "\n".join(line.rstrip() for line in [*lines, _legend(subject, cells)])


def facts(subject: Subject, cells: Cells) -> str:
    """What stands in the title beside the name."""
    q_len, kv_len = subject.lengths
    blocks = "" if subject.elementwise else f" in blocks of {_size(subject.block)}"
    # Samples mistake partial for empty, never the other way round.
    sparsity = (
        _percent(cells.empty) if cells.proven else f"at most {_percent(cells.empty)}, sampled"
    )
    return (
        f"{q_len:,} {_plural('query', 'queries', q_len)} x {kv_len:,} "
        f"{_plural('key', 'keys', kv_len)}{blocks}, sparsity {sparsity}"
    )


def words(subject: Subject, cells: Cells) -> dict[int, str]:
    """What each kind of cell that can occur is called."""
    if subject.elementwise and cells.step == (1, 1):
        return {FULL: "seen", EMPTY: "hidden"}
    return {FULL: "full", PARTIAL: "partial", EMPTY: "empty"}


def cell_size(subject: Subject, cells: Cells) -> str:
    """How large a cell is, where it is no block."""
    if cells.step == subject.block:
        return ""
    return f"a cell is {cells.step[0]:,} x {cells.step[1]:,} tokens"


def _most_cells(subject: Subject, room: int) -> Pair:
    """As many as fit, two columns each; elements may take one each."""
    columns = room // 2
    if subject.elementwise and columns < subject.lengths[1] <= room:
        columns = room
    longest = max(subject.lengths)
    if subject.elementwise and longest <= room:
        return longest, columns
    q_len, kv_len = (max(1, columns * length // longest) for length in subject.lengths)
    return q_len, kv_len


def _row_numbers(length: int, step: int, count: int) -> list[str]:
    """What stands beside each row: the number that it holds, if any."""
    numbers = [""] * count
    for at, label in reversed(scale(length, _at_most(count, 1)).labels):
        if at < length:
            numbers[at // step] = label
    return numbers


def _column_numbers(length: int, step: int, width: int, room: int) -> str:
    """What stands above the columns, where there is room for it."""
    line = ""
    for at, label in scale(length, _at_most(room, min(len(str(length)), 4) + 2)).labels:
        place = at // step * width
        if place >= len(line) + bool(line) and place + len(label) <= room:
            line = f"{line:{place}}{label}"
    return line


def _at_most(room: int, each: int) -> int:
    return max(1, min(5, room // each))


def _legend(subject: Subject, cells: Cells) -> str:
    parts = [f"{SIGNS[kind].strip()} {word}" for kind, word in words(subject, cells).items()]
    size = cell_size(subject, cells)
    return "  ".join(parts + [f"({size})"] * bool(size))


def _size(block: Pair) -> str:
    return f"{block[0]:,}" if block[0] == block[1] else f"{block[0]:,} x {block[1]:,}"


def _plural(one: str, many: str, count: int) -> str:
    return one if count == 1 else many


def _percent(share: float) -> str:
    """One digit after the point; 0 and 100 only for nothing and all."""
    shown = f"{100 * share:.1f}"
    if shown == "0.0" and share > 0:
        return "less than 0.1 %"
    if shown == "100.0" and share < 1:
        return "more than 99.9 %"
    return f"{shown} %"
