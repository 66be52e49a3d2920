"""The command `quire show FILE.py:NAME`: print a mod and the code that quire makes of it.

    quire show mods.py:near --target aarch64 --stage asm

A single stage is printed without a title, so that another program can read it. The file is run to
get the mod, and what it prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import runpy
import sys
import textwrap
import tokenize
import traceback
from collections.abc import Collection, Iterator
from operator import attrgetter
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace

from rich.console import Console
from rich.text import Text

from quire.api.stages import NAMES, Kernel, kernel
from quire.checks import DTYPES
from quire.checks.arguments import dtype_name
from quire.errors import ArgumentError
from quire.ir.source import describe
from quire.ir.trace import Mod, mod_kind
from quire.mods.objects import Bound
from quire.runtime.mods import COLUMN
from quire.tools.colour import coloured

_DTYPES = {dtype_name(dtype): dtype for dtype in DTYPES}


def run(
    console: Console, place: str, kind: str | None, dtype: str, target: str, stage: str
) -> None:
    """Print the mod that `place` names, and its stages."""
    _check("--kind", kind or "mask", ("score", "mask"))
    _check("--dtype", dtype, _DTYPES)
    _check("--stage", stage, (*NAMES, "all"))
    with contextlib.redirect_stdout(sys.stderr):  # the user's code runs here, and only here
        mod = load(place)
        is_mask = (kind or mod_kind(mod)) == "mask"
        made = kernel(
            None if is_mask else mod,
            mod if is_mask else None,
            dtype=_DTYPES[dtype],
            target=None if target == "host" else target,
        )
    if stage != "all":
        console.print(coloured(made.stages[stage], COLUMN.get(stage, stage)), soft_wrap=True)
        return
    for name, text in _all(mod, made):
        console.print(Text(f"\n{name}\n", style="bold"))
        console.print(coloured(text, COLUMN.get(name, name)), soft_wrap=True)


def _check(option: str, word: str, choices: Collection[str]) -> None:
    if word not in choices:
        raise ArgumentError(
            f"{option} must be one of {', '.join(choices)}, but is {word!r}. Leave it out for the "
            f"default."
        )


def _all(mod: Mod, made: Kernel) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the user's source, if it is known, and of every stage."""
    source = source_of(mod)
    if source is not None:
        yield "python", source
    yield from made.stages.items()


def source_of(mod: Mod) -> str | None:
    """Return the source of a mod, or None if it is not known."""
    while isinstance(mod, functools.partial | Bound):
        mod = mod.func if isinstance(mod, functools.partial) else mod.function
    try:
        return textwrap.dedent(inspect.getsource(mod))
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        return None


# Finding the user's function


def load(place: str) -> Mod:
    """Return the mod at a place: "mods.py:near", "mods.py:Masks.near" or "quire.mods:causal"."""
    file, _, name = place.rpartition(":")
    if not (file and name):
        raise ArgumentError(
            f"the mod must be FILE.py:NAME or MODULE:NAME, as in mods.py:near or "
            f"quire.mods:causal, but is {place!r}. Name a score_mod or mask_mod, and its file or "
            f"module."
        )
    path = Path(file).absolute()
    is_module = not path.is_file() and all(part.isidentifier() for part in file.split("."))
    content = _import_module(file) if is_module and not file.endswith(".py") else _run_file(path)
    try:
        mod: Mod = attrgetter(name)(content)
    except AttributeError:
        names = getattr(content, "__all__", ()) or (
            key for key, value in vars(content).items() if _is_from(path, value)
        )
        own = ", ".join(names)
        raise ArgumentError(
            f"{file} must have a function {name!r}, but has none. Choose one of its own: "
            f"{own or 'there is none'}."
        ) from None
    return mod


def _is_from(path: Path, value: object) -> bool:
    value = value.function if isinstance(value, Bound) else value
    return isinstance(value, FunctionType) and value.__code__.co_filename == str(path)


def _import_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ArgumentError(
            f"{name!r} must be a module that can be imported, or a file that ends in .py, but "
            f"importing it raises: {error}. Check the part before the colon."
        ) from error


def _run_file(path: Path) -> SimpleNamespace:
    """Run a file as if it were imported, and return its global names."""
    if not path.is_file():
        raise ArgumentError(
            f"{str(path)!r} must be a Python file, but there is no such file. Check the part "
            f"before the colon."
        )
    sys.path.insert(0, str(path.parent))  # stays, since a mod may import when it is traced
    try:
        return SimpleNamespace(**runpy.run_path(str(path), run_name="__shown__"))
    except (Exception, SystemExit) as error:
        frames = traceback.walk_tb(error.__traceback__)
        lines = [line for frame, line in frames if frame.f_code.co_filename == str(path)]
        where = describe((str(path), lines[-1])) if lines else ""
        reason = str(error).partition("\n")[0]
        raise ArgumentError(
            f"{path} must run before a mod of it can be shown, but it ended with "
            f"{type(error).__name__}: {reason}{where}. Put what the mod does not need under "
            f'`if __name__ == "__main__":`.'
        ) from error
