"""A dictionary that forgets the oldest of too many entries."""

from __future__ import annotations

from typing import TypeVar

from quire.support.locks import lock

Key = TypeVar("Key")
Value = TypeVar("Value")


_lock = lock()


class BoundedDict(dict[Key, Value]):
    """At most `most` entries. Reading takes no lock, so a thread may miss what another one adds."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def keep(self, key: Key, value: Value) -> Value:
        """Add an entry, in the place of the oldest if there are too many."""
        with _lock:
            while len(self) >= self._most:
                del self[next(iter(self))]
            self[key] = value
        return value
