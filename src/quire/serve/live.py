"""The live map of pages, as a stream of events for the page.

A frame has every page of the cache: free, kept, shared, or the answer that holds it. Frames are
made between two steps of the engine, at most ten in a second, and only while somebody looks.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from quire.engine import Engine, Event
from quire.errors import ApiError

PERIOD = 0.1
MOST_WATCHERS = 16


class Live:
    """Tells watchers what the engine does."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._watchers = 0
        self._events: deque[Event] = deque(maxlen=64)
        self.closing = asyncio.Event()
        engine.listen(self._note)

    def _note(self, event: Event) -> None:
        """Keep what a frame does not show: the engine's thread calls this."""
        if self._watchers and event.kind == "preempt":
            self._events.append(event)

    async def frames(self) -> AsyncIterator[bytes]:
        """Return frames as events, until the server ends."""
        if self._watchers >= MOST_WATCHERS:
            raise ApiError("too many pages look at the map.", status=429, retry_after=10)
        self._watchers += 1
        last, silent = b"", 0.0
        try:
            while not self.closing.is_set():
                frame = await asyncio.to_thread(self._frame)
                if frame != last or silent >= 10:
                    yield b"data: " + frame + b"\n\n"
                    last, silent = frame, 0.0
                silent += PERIOD
                try:
                    await asyncio.wait_for(self.closing.wait(), PERIOD)
                except TimeoutError:
                    continue
        finally:
            self._watchers -= 1

    def _frame(self) -> bytes:
        seen = self._engine.look()
        now: dict[str, Any] = {
            "page_size": seen.page_size,
            "owners": seen.owners,
            "answers": [each._asdict() for each in seen.answers],
            "preempted": [event.answer for event in self._recent()],
            "counts": {
                "output_tokens": seen.counts.output_tokens,
                "prompt_tokens": seen.counts.prompt_tokens,
                "cached_tokens": seen.counts.cached_tokens,
                "preempted": seen.counts.preempted,
                "steps": seen.counts.steps,
            },
        }
        return json.dumps(now, separators=(",", ":")).encode()

    def _recent(self) -> list[Event]:
        """Return the preemptions since the last frame."""
        found = []
        while self._events:
            found.append(self._events.popleft())
        return found
