"""A conversation with a language model, on a paged cache."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from quire.kv.page_map import OWNED
from quire.tools.demo.page import say
from quire.tools.demo.talker import talker
from quire.tools.demo.tour_screen import introduce, stream


def run(console: Console, new: int) -> None:
    """Answer each line that is typed with at most `new` tokens, until the input ends."""
    with console.status("loading a language model"):
        speaker = talker()
    introduce(console, speaker)
    say(console, Text("Type, and press Enter. Ctrl-C ends an answer, Ctrl-D ends this.", "dim"))
    turns: list[dict[str, str]] = []
    while (line := _next_line(console)) is not None:
        if not line:
            continue
        turns.append({"role": "user", "content": line})
        try:
            found = stream(console, [speaker.name], speaker, [turns], new)
        except KeyboardInterrupt:
            turns.pop()
            console.print()
            continue
        turns.append({"role": "assistant", "content": found.answers[0]})
        read, pages = speaker.batch([turns[:-1]])["input_ids"].numel(), found.maps[-1]
        say(
            console,
            Text(
                f"{read} tokens read in {found.first:.2f} s, then {found.rate:.0f} a second; "
                f"{pages.count(OWNED)} pages",
                "dim",
            ),
        )


def _next_line(console: Console) -> str | None:
    """Return the line that is typed. None at the end of the input, and for Ctrl-C."""
    try:
        return console.input("\n[bold]you[/bold]  " if console.is_terminal else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
