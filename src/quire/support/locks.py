"""Locks that survive a fork.

A forked child has one thread. If another thread held a lock during the fork, the child could never
take that lock, and the data behind it would be half written. So a fork first takes all of these
locks, and then releases them in parent and child.
"""

from __future__ import annotations

import os
import threading
import weakref

_locks: weakref.WeakKeyDictionary[threading.RLock, None] = weakref.WeakKeyDictionary()
_held: list[threading.RLock] = []


def lock() -> threading.RLock:
    """Return a reentrant lock: the garbage collector may run code that takes it again."""
    new = threading.RLock()
    _locks[new] = None
    return new


def _take_all() -> None:
    taken = list(_locks)
    for each in taken:
        each.acquire()
    _held.extend(taken)


def _release_all() -> None:
    taken = _held.copy()
    _held.clear()  # before the release: then another thread may fork and fill it again
    for each in reversed(taken):
        each.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_take_all, after_in_parent=_release_all, after_in_child=_release_all)
