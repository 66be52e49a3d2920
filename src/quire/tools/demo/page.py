"""How the commands print: titles, and paragraphs that are indented by two columns."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

WIDTH = 76


def title(console: Console, words: str) -> None:
    """Print the title of a section."""
    console.print(Text(f"\n{words}\n", style="bold"))


def say(console: Console, content: RenderableType) -> None:
    """Print a paragraph, a table or code, at most `WIDTH` columns wide."""
    console.print(Padding(content, (0, 0, 0, 2), expand=False), width=WIDTH + 2)
