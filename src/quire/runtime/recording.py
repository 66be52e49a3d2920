"""Launches that are prepared and not run: what a program (`program.py`) takes from attention."""

from __future__ import annotations

import ctypes
from contextvars import ContextVar
from typing import NamedTuple


class PreparedLaunch(NamedTuple):
    """A launch that was prepared and not run; a program (`program.py`) will run it."""

    kernel: int
    block: ctypes.Array[ctypes.c_char]
    counters_at: int  # bytes from the start of the block, as flag_at and table_at are
    flag_at: int
    table_at: int
    scratch_bytes: int  # of each thread
    slots: int
    partial_bytes: int  # of each slot
    keeps: object  # what must live until it has run


recording: ContextVar[list[PreparedLaunch] | None] = ContextVar("recording", default=None)
"""Takes the launches of attention in a block of code, instead of running them."""
