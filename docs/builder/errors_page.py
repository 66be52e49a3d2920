"""The page of all errors: what each means, what else it is, and which public names raise it."""

from __future__ import annotations

import functools
import inspect
import textwrap

from builder import raising, source
from builder.source import Drawn
from builder.symbols import Symbol, same_thing, symbols
from quire import errors

NAME = "quire.errors"
MOST = 12
"""How many names are listed that raise an error."""


def link(name: str) -> str:
    """Return a link to an error, from a page of a name."""
    return f"[`{name}`]({NAME}.md#{name.lower()})"


def tree() -> str:
    """Return the drawing of all errors."""
    return f"```text\n{textwrap.dedent(source.modules()[NAME].doc.split(chr(10) * 2)[1])}\n```"


@functools.cache
def raised_by(symbol: Symbol) -> tuple[Drawn, ...]:
    """Return the errors that a public name can raise, also one that is another name of a thing."""
    here = source.modules()[symbol.home].definitions if symbol.home else {}
    names = [each.short for each in (symbol, *same_thing(symbol)) if each.short in here]
    if not symbol.home or symbol.home == NAME:
        return ()
    return tuple(raising.raises(symbol.home, (names or [symbol.short])[0]))


def page() -> str:
    """Return the page."""
    raisers: dict[str, list[Symbol]] = {}
    for symbol in symbols().values():
        for each in raised_by(symbol):
            raisers.setdefault(each.name, []).append(symbol)
    entries = [entry(name, raisers.get(name, [])) for name in source.drawn_errors()]
    intro = "Each is a `QuireError`. A refused call changes nothing."
    return "\n\n".join([f"# {NAME}", tree(), intro, *entries]) + "\n"


def entry(name: str, raisers: list[Symbol]) -> str:
    """Return what is said of one error."""
    kind = getattr(errors, name)
    bases = ", ".join(f"`{each.__name__}`" for each in kind.__bases__)
    links = [f"[`{each.name}`]({each.page}.md)" for each in raisers[:MOST]]
    more = f" and {len(raisers) - MOST} more" if len(raisers) > MOST else ""
    heard = f"Names that can raise it: {', '.join(links)}{more}." if links else ""
    directive = f"```{{py:exception}} {NAME}.{name}\n:no-typesetting:\n```"
    texts = [
        f"## {name}",
        directive,
        inspect.getdoc(kind) or "",
        f"It derives from {bases}.",
        heard,
    ]
    return "\n\n".join(filter(None, texts))
