"""Lines of the user's source, for messages."""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import sys
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TypeAlias

import torch

Location: TypeAlias = tuple[str, int]
"""A line of source: file name and line number."""

_OURS = {str(path) for path in Path(__file__).parent.glob("*.py")} | {functools.__file__}
_TORCH = os.path.dirname(torch.__file__) + os.sep


_given: ContextVar[Location | None] = ContextVar("_given", default=None)


@contextlib.contextmanager
def reading(location: Location | None) -> Iterator[None]:
    """Give this line to all nodes that this thread traces meanwhile: they come from a graph."""
    token = _given.set(location)
    try:
        yield
    finally:
        _given.reset(token)


def user_location() -> Location:
    """The line of the innermost frame outside of this package and PyTorch."""
    given = _given.get()
    if given is not None:
        return given
    frame = sys._getframe(2)
    filename = frame.f_code.co_filename
    while (filename in _OURS or filename.startswith(_TORCH)) and frame.f_back is not None:
        frame = frame.f_back
        filename = frame.f_code.co_filename
    return filename, frame.f_lineno


def raising_location(error: BaseException) -> Location | None:
    """The innermost line of the user's code in an exception's traceback."""
    found = None
    for frame, lineno in traceback.walk_tb(error.__traceback__):
        filename = frame.f_code.co_filename
        if filename not in _OURS and not filename.startswith(_TORCH):
            found = filename, lineno
    return found


def describe(location: Location | None) -> str:
    """' at file.py:3: `the line`', or '' if the line is not known."""
    if location is None:
        return ""
    filename, lineno = location
    line = linecache.getline(filename, lineno).strip()
    return f" at {os.path.basename(filename)}:{lineno}" + (f": `{line}`" if line else "")


def here() -> str:
    """Describes the user's line that is running."""
    return describe(user_location())
