"""Locks that hold across a fork.

A child process has one thread, the one that forked. A lock that another thread held at that moment
would be held for ever in the child, and what it guards would be half done. So a fork waits for all
of these locks, takes them, and lets go of them on both sides.
"""

from __future__ import annotations

import os
import threading
import weakref

_locks: weakref.WeakKeyDictionary[threading.RLock, None] = weakref.WeakKeyDictionary()
_held: list[threading.RLock] = []


def lock() -> threading.RLock:
    """A lock that its thread may take again: the collector may run anything in our midst."""
    made = threading.RLock()
    _locks[made] = None
    return made


def _take_all() -> None:
    taken = list(_locks)
    for each in taken:
        each.acquire()
    _held.extend(taken)


def _release_all() -> None:
    taken = _held.copy()
    _held.clear()  # while nobody else can be here: another thread may be about to fork
    for each in reversed(taken):
        each.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_take_all, after_in_parent=_release_all, after_in_child=_release_all)
