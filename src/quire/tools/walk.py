"""The command `quire walk`: the files that a call enters, in order.

    quire walk examples/walks.py:paged_decode

A function without parameters makes the call. It runs twice under `sys.setprofile`: the first call
is checked and planned, the second one finds its plan. Files of the compiler, `ir/` and `codegen/`,
are not counted: a walk shows the code between the user and the kernel.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1]
COMPILER = ("ir/", "codegen/")


class Stop(NamedTuple):
    """A file that a call enters, and the functions that it runs there before it moves on."""

    file: str
    functions: tuple[str, ...]


class Walk(NamedTuple):
    """The stops of one call, in order."""

    stops: tuple[Stop, ...]

    @property
    def files(self) -> list[str]:
        """The files outside of the compiler, each once, in the order in which they are entered."""
        entered = dict.fromkeys(stop.file for stop in self.stops)
        return [file for file in entered if not file.startswith(COMPILER)]

    @property
    def moves(self) -> int:
        """How often the call moves from one file to another, the compiler's included."""
        return max(0, len(self.stops) - 1)

    def __str__(self) -> str:
        return "\n".join(f"{stop.file:28} {' '.join(stop.functions)}" for stop in self.stops)


def walk(function: Callable[[], object]) -> Walk:
    """Run a function, and return the files of quire that it enters."""
    entered: list[tuple[str, str]] = []
    prefix = f"{PACKAGE}/"

    def note(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(prefix) and path != __file__:
            entered.append((path.removeprefix(prefix), frame.f_code.co_name))

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    groups = itertools.groupby(entered, key=lambda step: step[0])
    return Walk(
        tuple(Stop(file, tuple(dict.fromkeys(name for _, name in part))) for file, part in groups)
    )


def report(function: Callable[[], object]) -> str:
    """Return what `quire walk` prints: the walk of a later call, and the lengths of both walks."""
    first, later = walk(function), walk(function)
    return (
        f"{later}\n\n"
        f"first call: {len(first.files)} files, {first.moves} moves\n"
        f"later call: {len(later.files)} files, {later.moves} moves"
    )
