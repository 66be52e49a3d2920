"""Every environment variable that quire reads, parsed once.

    QUIRE_BACKEND     auto | eager | inductor | jit   what `backend="auto"` stands for
    QUIRE_CACHE_DIR   a directory                     where compiled kernels are kept
    QUIRE_CHECK       1 | 0 | a number of rows        compute rows of every result again
    QUIRE_TARGET      x86-64-v3 | x86-64-v4 | aarch64 the processor that kernels are generated for,
                                                      perhaps with a width of vectors in bits, as
                                                      in x86-64-v3:512; unset: this one
    QUIRE_THREADS     1, 2, 3, ...                    threads of a kernel; unset: as many as torch

An empty variable counts as unset. A value that means nothing is an ArgumentError when it is first
read, never a silent default. The process's environment is read at the first call of `config()`;
`config.cache_clear()` makes the next call read it again.

Where nothing is said, kernels are kept where the system keeps caches: in XDG_CACHE_HOME or
~/.cache, on macOS in ~/Library/Caches, on Windows in LOCALAPPDATA.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, get_args

from quire.errors import ArgumentError

Backend = Literal["auto", "eager", "inductor", "jit"]
"""The values that `backend=` and QUIRE_BACKEND take."""

BACKENDS: tuple[Backend, ...] = get_args(Backend)

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_ROWS_CHECKED = 4096  # where QUIRE_CHECK says yes and no number

T = TypeVar("T")


@dataclass(frozen=True)
class Config:
    """The settings of a process.

    >>> Config.read({"QUIRE_THREADS": "4"}).threads
    4
    """

    backend: Backend
    cache_dir: Path
    check_rows: int  # how many of each result are computed again, at least; 0 for none
    target: str | None
    threads: int | None

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Config:
        """The settings that these environment variables ask for."""

        def parsed(name: str, parse: Callable[[str, str], T], default: T) -> T:
            text = environ.get(name, "").strip()
            return parse(name, text) if text else default

        return cls(
            backend=parsed("QUIRE_BACKEND", _backend, "auto"),
            cache_dir=parsed("QUIRE_CACHE_DIR", _directory, _default_cache_dir(environ)),
            check_rows=parsed("QUIRE_CHECK", _rows, 0),
            target=parsed("QUIRE_TARGET", lambda _, text: text.lower(), None),
            threads=parsed("QUIRE_THREADS", _count, None),
        )


@functools.cache
def config() -> Config:
    """The settings of this process, read from its environment once."""
    return Config.read(os.environ)


def _backend(name: str, text: str) -> Backend:
    for backend in BACKENDS:
        if text.lower() == backend:
            return backend
    raise ArgumentError(
        f"{name}: expected one of {', '.join(BACKENDS)}, got {text!r}. "
        f"Unset it to let quire choose."
    )


def _rows(name: str, text: str) -> int:
    """How many rows, 0 being none; 1 stands for the default number."""
    if text.lower() in _TRUE + _FALSE:
        return _ROWS_CHECKED if text.lower() in _TRUE else 0
    if not (text.isascii() and text.isdigit()):
        raise ArgumentError(
            f"{name}: expected 1 or 0 (or true/false, yes/no, on/off), or a number of rows, got "
            f"{text!r}. Unset it for the default, 0."
        )
    return int(text)


def _count(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ArgumentError(
            f"{name}: expected a whole number of at least 1, got {text!r}. "
            f"Unset it to use as many threads as torch does."
        )
    return int(text)


def _directory(name: str, text: str) -> Path:
    expanded = os.path.expanduser(text)
    if expanded == text and text.startswith("~"):
        raise ArgumentError(
            f"{name}: expected a directory, got {text!r}, and nobody knows the home directory that "
            f"it begins with. Write the path in full."
        )
    path = Path(os.path.abspath(expanded))
    if os.path.exists(path) and not os.path.isdir(path):
        raise ArgumentError(
            f"{name}: expected a directory, or a path where one can be made, got the file "
            f"{str(path)!r}. Name another path, or unset it to use the default."
        )
    return path


def _default_cache_dir(environ: Mapping[str, str]) -> Path:
    """Where this system keeps caches; a path that is not absolute where there is no home."""
    variable, otherwise = _CACHES.get(sys.platform, ("XDG_CACHE_HOME", "~/.cache"))
    base = environ.get(variable, "")
    # The XDG specification tells to ignore a relative path.
    root = base if os.path.isabs(base) else os.path.expanduser(otherwise)
    return Path(root) / "quire"


_CACHES = {"darwin": ("", "~/Library/Caches"), "win32": ("LOCALAPPDATA", "~/AppData/Local")}
"""A variable that names the directory of caches, and where it is without one."""
