"""The live map of pages, as a stream of events for the page.

A frame has every page of the cache: free, kept, shared, or the answer that holds it. Frames are
made between two steps of the engine, at most ten in a second, and only while somebody looks.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

from quire.engine import Engine, Event
from quire.errors import ApiError

PERIOD = 0.1
MOST_WATCHERS = 16

Preempted = deque[int]
"""Answers that were preempted since the last frame."""


class Live:
    """Tells watchers what the engine does."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._watchers: tuple[Preempted, ...] = ()  # what each has not been shown yet
        engine.listen(self._note)

    def _note(self, event: Event) -> None:
        """Keep what a frame does not show: the engine's thread calls this."""
        if event.kind == "preempt":
            for preempted in self._watchers:
                preempted.append(event.answer)

    @contextmanager
    def watching(self) -> Iterator[Preempted]:
        """Return what a watcher reads of preemptions. Raise an ApiError if there are too many."""
        if len(self._watchers) >= MOST_WATCHERS:
            raise ApiError("too many pages look at the map.", status=429, retry_after=10)
        mine = Preempted(maxlen=64)
        self._watchers = (*self._watchers, mine)
        try:
            yield mine
        finally:
            self._watchers = tuple(each for each in self._watchers if each is not mine)

    async def frames(self, preempted: Preempted) -> AsyncGenerator[bytes]:
        """Return frames as events for a watcher, without an end."""
        last, silent = b"", 0.0
        while True:
            frame = await asyncio.to_thread(self._frame, preempted)
            if frame != last or silent >= 10:
                yield b"data: " + frame + b"\n\n"
                last, silent = frame, 0.0
            silent += PERIOD
            await asyncio.sleep(PERIOD)

    def _frame(self, preempted: Preempted) -> bytes:
        seen = self._engine.look()
        now: dict[str, Any] = {
            "page_size": seen.page_size,
            "owners": seen.owners,
            "answers": [each._asdict() for each in seen.answers],
            "preempted": [preempted.popleft() for _ in range(len(preempted))],
            "counts": {
                "output_tokens": seen.counts.output_tokens,
                "prompt_tokens": seen.counts.prompt_tokens,
                "cached_tokens": seen.counts.cached_tokens,
                "preempted": seen.counts.preempted,
                "steps": seen.counts.steps,
            },
        }
        return json.dumps(now, separators=(",", ":")).encode()
