"""What an operator decides: who may ask, and how much."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""The names of a server that only this machine can reach."""


@dataclass(frozen=True)
class Settings:
    """The settings of a server. Sizes are in bytes, times in seconds.

    `hosts` are the names that a request may use for the server, or None for all. A server on the
    loopback accepts its own names alone, so that no website can reach it through a name that it
    points there.
    """

    model: str
    api_keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = LOOPBACK
    lookup: bool = False  # whether answers are guessed from the text before them
    max_body: int = 4 << 20
    max_header: int = 16 << 10
    max_ongoing: int = 256  # answers that run or wait
    max_answers: int = 16  # of one request
    max_prompts: int = 64  # of one request
    max_texts: int = 256  # of one request for embeddings
    max_connections: int = 512
    time_limit: float = 600.0  # of a request
    read_limit: float = 30.0  # until a request has arrived
    write_limit: float = 60.0  # until a client has read a part of an answer

    def tenant(self, authorization: str | None) -> bytes | None:
        """Return the salt of whoever sent this header, or None if the key is not known.

        All keys are compared, each in constant time, so that the time says nothing of them.
        """
        if not self.api_keys:
            return b""
        scheme, _, given = (authorization or "").partition(" ")
        digest = hashlib.sha256(given.strip().encode()).digest()
        found = None
        for key in self.api_keys:
            known = hashlib.sha256(key.encode()).digest()
            if hmac.compare_digest(digest, known):
                found = known
        return found if scheme.lower() == "bearer" else None
