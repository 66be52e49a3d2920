"""A dictionary of limited size."""

from __future__ import annotations

from typing import TypeVar

from quire.support.locks import lock

Key = TypeVar("Key")
Value = TypeVar("Value")

_lock = lock()


class BoundedDict(dict[Key, Value]):
    """Holds at most `most` entries. Reads take no lock, so a thread may miss a new entry."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def keep(self, key: Key, value: Value) -> Value:
        """Add an entry and return its value. If the dictionary is full, drop the oldest entry."""
        with _lock:
            while len(self) >= self._most:
                del self[next(iter(self))]
            self[key] = value
        return value
