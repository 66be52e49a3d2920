"""The text of an answer while it grows, and the strings that end it.

    stop strings ["END"], the answer so far          Once upon a time E
    `text`, which is final and may be shown          Once upon a time
    held back, since it may become "END"                              E

Bytes that are not a whole character yet are held back, too.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Sequence


class Transcript:
    """The text of one answer. It grows by the bytes of tokens, and is cut at a stop string."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.text = ""
        self.stopped = False
        self._held = ""
        self._stops = tuple(stops)
        self._open = b""  # the beginning of a character

    def add(self, content: bytes, *, final: bool = False) -> None:
        """Add the bytes of a token."""
        content = self._open + content
        new, used = codecs.utf_8_decode(content, "replace", final)
        self._open = content[used:]
        if self.stopped or not new:
            return
        if not self._stops:
            self.text += new
            return
        # What was shown cannot be part of a stop string, so what is held is all there is to search.
        open_end = self._held + new
        places = [place for stop in self._stops if (place := open_end.find(stop)) >= 0]
        if places:
            self.stopped, kept, self._held = True, open_end[: min(places)], ""
        else:
            begun = max((_begun(open_end, stop) for stop in self._stops), default=0)
            kept, self._held = open_end[: len(open_end) - begun], open_end[len(open_end) - begun :]
        self.text += kept

    def close(self) -> None:
        """The answer is complete: nothing is held back any more."""
        self.add(b"", final=True)
        if not self.stopped:
            self.text, self._held = self.text + self._held, ""

    def fork(self) -> Transcript:
        """Return a copy that grows by itself."""
        return copy.copy(self)


def _begun(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` are the beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
