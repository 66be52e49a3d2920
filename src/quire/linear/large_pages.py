"""Memory for packed weights, in large pages of the system where it has them.

    | layer | layer | layer  | free ...      a room: layers lie side by side, as they are packed

In small pages, reading weights misses the TLB again and again. A layer that had large pages of its
own would leave most of the last one empty. So layers share them, but for the largest.
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

from quire.support.locks import lock

_LARGE_PAGE = 2 << 20
_LINE = 64  # bytes of the cache
_ROOM = 32 << 20

_lock = lock()


class _Room:
    """Memory that is given away part by part. It is freed when all tensors in it are."""

    def __init__(self, size: int) -> None:
        # What a process shares with others gets no large pages, unless a setting says so.
        flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if _is_unix() else {}
        self._memory = mmap.mmap(-1, size + _LARGE_PAGE, **flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # of a kernel without them
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._first = -torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr() % _LARGE_PAGE
        self._last = self._first + size

    def take(self, count: int) -> Tensor | None:
        """Return the next so many bytes as a tensor of its own; None if there are fewer."""
        if count > self._last - self._first:
            return None
        part = torch.frombuffer(self._memory, dtype=torch.uint8, count=count, offset=self._first)
        self._first += -(-count // _LINE) * _LINE
        return part


def _is_unix() -> bool:
    return hasattr(mmap, "MAP_PRIVATE")


_room: _Room | None = None


def empty_panels(panels: int, size: int, *, for_a_while: bool = False) -> Tensor:
    """Return memory for panels, uint8 [panels, size], all of it zeros.

    What is needed for a while only shares its memory with nothing, so that it is freed alone.
    """
    global _room
    count = panels * size
    if not count:
        return torch.empty(panels, size, dtype=torch.uint8, device="cpu")
    with _lock:
        part = None if _room is None or for_a_while else _room.take(count)
        if part is None:
            room = _Room(count if for_a_while else max(_ROOM, count))
            part = room.take(count)
            if count < _ROOM and not for_a_while:
                _room = room
    assert part is not None, "a new room is large enough"
    return part.view(panels, size)
