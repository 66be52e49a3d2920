"""Commands of a shell: they are read and checked, not run.

`quire` and scripts take the options, `make` has the targets, pip finds extras and packages that are
known, and curl asks for what the server has.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

from typer.main import get_command

from quire.cli import app

ROOT = Path(__file__).parent.parent
PROGRAMS = ("quire", "python", "make", "pip", "curl")
VARIABLE = re.compile(r"[A-Z_]+=\S+")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()


def split(shell: str) -> Iterator[list[str]]:
    """Yield the words of each command of a block."""
    read = ""
    for line in shell.splitlines():
        read += line.removesuffix("\\") + "\n"
        try:
            words = shlex.split(read, comments=True)
        except ValueError:  # a quotation goes on
            continue
        if line.endswith("\\"):
            continue
        read = ""
        while "&&" in words:
            place = words.index("&&")
            yield words[:place]
            words = words[place + 1 :]
        if words:
            yield words
    assert not read, f"this does not end: {read}"


def check(words: list[str]) -> None:
    """Raise if a command is not one that there is."""
    while VARIABLE.fullmatch(words[0]):
        name = words.pop(0).partition("=")[0]
        assert name in VARIABLES, f"nothing reads {name}"
    match words:
        case ["quire", name]:  # names a command, and leaves its arguments out
            assert name in get_command(app).commands, f"no command {name}"
        case ["quire", *_]:
            parse(words)
        case ["python", script, *options]:
            check_script(script, options)
        case ["pip", "install", *what]:
            check_install(what)
        case ["make", target, *variables]:
            assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), f"no target {target}"
            assert all(VARIABLE.match(each) for each in variables)
        case ["curl", address, *options]:
            assert address.split("8000")[1] in ROUTES, f"the server has no {address}"
            given = dict(zip(options[::2], options[1::2], strict=True))
            assert given.keys() <= {"-H", "-d"} and json.loads(given.get("-d", "{}"))
        case _:
            raise AssertionError(f"write <!-- not run: why --> above: {' '.join(words)}")


def parse(words: list[str]) -> None:
    """Parse a command of quire as the command line does; raise what it raises."""
    given = get_command(app)
    context = given.make_context(words[0], words[1:])
    while hasattr(given, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        name, given, rest = given.resolve_command(context, rest)
        context = given.make_context(name, rest, parent=context)


def check_script(script: str, options: list[str]) -> None:
    """Raise if there is no such script, or if it does not name an option."""
    path = ROOT / script
    if path.is_dir():
        path /= "__main__.py"
    assert path.exists(), f"there is no {script}"
    given = {each.partition("=")[0] for each in options if each.startswith("--")}
    assert given <= options_of(path), f"{script} has no {sorted(given - options_of(path))}"


@functools.cache
def options_of(path: Path) -> frozenset[str]:
    """Return the options that a script, or what it shares with others, adds to its parser."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(ast.Attribute(attr="add_argument"), [ast.Constant(str(name)), *_]):
                found.add(name)
            case ast.ImportFrom(module=str(module)) if module.startswith("_"):
                shared = path.parent / f"{module}.py"
                found |= options_of(shared) if shared.exists() else set()
    return frozenset(found)


PACKAGE = re.compile(r"([\w-]+|\.)(?:\[([\w,]+)\])?(?:==[\d.]+)?")


def check_install(what: list[str]) -> None:
    """Raise if pip is told to install a package or an extra that quire does not know."""
    for each in what:
        if each == "--no-deps":
            continue
        found = PACKAGE.fullmatch(each)
        assert found, each
        package, extras = found.groups()
        known = package in (".", "quire") or re.search(rf"^WEIGHTS.*\b{package}\b", MAKEFILE, re.M)
        assert known, f"nothing of quire needs {package}"
        unknown = set((extras or "").split(",")) - {""} - PROJECT["optional-dependencies"].keys()
        assert not unknown, f"no extra {unknown}"


def read(path: str) -> str:
    """Return the text of a file of the repository."""
    return (ROOT / path).read_text()


ROUTES = set(re.findall(r'Route\("([^"]+)"', read("src/quire/serve/app.py")))
VARIABLES = {"ARGS", "PYTHON"} | set(
    re.findall(
        r'"([A-Z]{2,}_[A-Z_]+)"', read("src/quire/config.py") + read("benchmarks/_results.py")
    )
)
"""Environment variables that something reads."""
