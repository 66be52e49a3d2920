"""Every environment variable that quire reads, parsed once.

    QUIRE_BACKEND     auto | eager | inductor | jit   the backend that `backend="auto"` chooses
    QUIRE_CACHE_DIR   a directory                     where compiled kernels are stored
    QUIRE_CHECK       1 | 0 | a number of rows        compare rows of every result with float64
    QUIRE_TARGET      x86-64-v3 | x86-64-v4 | aarch64 the processor that kernels are generated for,
                                                      with a vector width in bits if you like, as
                                                      in x86-64-v3:512; unset: this one
    QUIRE_THREADS     1, 2, 3, ...                    threads of a kernel; unset: as many as torch

An empty variable counts as unset. A wrong value raises an ArgumentError when it is first read. The
environment is read at the first call of `config()`; `config.cache_clear()` makes the next call read
it again.

By default, kernels are stored where the system keeps caches: in XDG_CACHE_HOME or ~/.cache, on
macOS in ~/Library/Caches, on Windows in LOCALAPPDATA.
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
_ROWS_CHECKED = 4096  # with QUIRE_CHECK=1

T = TypeVar("T")


@dataclass(frozen=True)
class Config:
    """The settings of a process.

    >>> Config.read({"QUIRE_THREADS": "4"}).threads
    4
    """

    backend: Backend
    cache_dir: Path
    check_rows: int  # how many rows of each result are compared with float64, at least
    target: str | None
    threads: int | None

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Config:
        """Return the settings in these environment variables."""

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
    """Return the settings of this process. Its environment is read once."""
    return Config.read(os.environ)


def _backend(name: str, text: str) -> Backend:
    for backend in BACKENDS:
        if text.lower() == backend:
            return backend
    raise ArgumentError(
        f"{name} must be one of {', '.join(BACKENDS)}, but is {text!r}. Unset it to let quire "
        f"choose."
    )


def _rows(name: str, text: str) -> int:
    """Return the number of rows; 1 stands for `_ROWS_CHECKED`."""
    if text.lower() in _TRUE + _FALSE:
        return _ROWS_CHECKED if text.lower() in _TRUE else 0
    if not (text.isascii() and text.isdigit()):
        raise ArgumentError(
            f"{name} must be 1 or 0 (or true/false, yes/no, on/off), or a number of rows, but is "
            f"{text!r}. Unset it for the default, 0."
        )
    return int(text)


def _count(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ArgumentError(
            f"{name} must be a whole number of at least 1, but is {text!r}. Unset it to use as "
            f"many threads as torch does."
        )
    return int(text)


def _directory(name: str, text: str) -> Path:
    expanded = os.path.expanduser(text)
    if expanded == text and text.startswith("~"):
        raise ArgumentError(
            f"{name} must be a directory, but is {text!r}, and the home directory in it is "
            f"unknown. Write the path in full."
        )
    path = Path(os.path.abspath(expanded))
    if os.path.exists(path) and not os.path.isdir(path):
        raise ArgumentError(
            f"{name} must be a directory, or a path where one can be made, but is the file "
            f"{str(path)!r}. Name another path, or unset it to use the default."
        )
    return path


def _default_cache_dir(environ: Mapping[str, str]) -> Path:
    """Return the system's directory for caches; a relative path if the user has no home."""
    variable, default = _CACHES.get(sys.platform, ("XDG_CACHE_HOME", "~/.cache"))
    base = environ.get(variable, "")
    # The XDG specification says that a relative path must be ignored.
    root = base if os.path.isabs(base) else os.path.expanduser(default)
    return Path(root) / "quire"


_CACHES = {"darwin": ("", "~/Library/Caches"), "win32": ("LOCALAPPDATA", "~/AppData/Local")}
"""By platform: the variable that names the directory for caches, and its default."""
