"""A dictionary that forgets the oldest of too many."""

from __future__ import annotations

from typing import TypeVar

from quire.locks import lock

Key = TypeVar("Key")
Thing = TypeVar("Thing")


class Known(dict[Key, Thing]):
    """At most `most` things. Reading takes no lock, so a thread may miss what another one adds."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self._lock = lock()

    def keep(self, key: Key, thing: Thing) -> Thing:
        """Add a thing, in the place of the oldest if there are too many."""
        with self._lock:
            while len(self) >= self._most:
                del self[next(iter(self))]
            self[key] = thing
        return thing
