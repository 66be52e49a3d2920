"""The blocks of code in pages, and what stands above them.

<!-- not run: it needs a server -->           a test does nothing with the block
<!-- some lines of what is printed -->        text that leaves lines out
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
CHANGES = ROOT / "changes" / "README.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), CHANGES])

FENCED = re.compile(r"((?:^<!--[^\n]*-->\n)?)^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
REASON = re.compile(r"<!-- not run: (.+) -->")
LINES = "<!-- some lines of what is printed -->"


class Block(NamedTuple):
    """A block: its language, its text, the lines before it, and why no test runs it."""

    language: str
    text: str
    line: int
    reason: str
    lines: bool

    @property
    def runs(self) -> bool:
        """Whether it is a program that a test runs."""
        return self.language == "python" and not self.reason

    def after(self, printed: str) -> str:
        """Return what was printed after this text; fail if it was not."""
        if not self.lines:
            _, found, rest = printed.partition(self.text)
            assert found, f"this is not printed:\n{self.text}"
            return rest
        rest = [line.strip() for line in printed.splitlines()]
        for line in map(str.strip, self.text.splitlines()):
            assert line in rest, f"this is not printed, or not in this order: {line}"
            rest = rest[rest.index(line) + 1 :]
        return "\n".join(rest)


@functools.cache
def blocks(page: Path) -> tuple[Block, ...]:
    """Return the blocks of a page."""
    text, found = page.read_text(), []
    for each in FENCED.finditer(text):
        above, language, content = each.groups()
        reason = REASON.match(above)
        line = text.count("\n", 0, each.start(3))
        found.append(Block(language, content, line, reason[1] if reason else "", LINES in above))
    return tuple(found)
