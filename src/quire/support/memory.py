"""Memory that was freed, and that the C library keeps."""

from __future__ import annotations

import ctypes
from contextlib import suppress


def give_back() -> None:
    """Return freed memory to the system, where the C library keeps it for later (the GNU one)."""
    with suppress(OSError, AttributeError, TypeError):  # another library; the last on Windows
        ctypes.CDLL(None).malloc_trim(0)
