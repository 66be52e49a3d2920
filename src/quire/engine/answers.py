"""What a user holds of a request: its answers, as they are written.

    for token in request: ...                 async for token in request: ...
    request.result()                          request.cancel()

A request has one answer, or several if it asked for n samples. An answer can be read by any number
of threads and event loops, from its first token on, at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, NamedTuple

from quire.errors import EngineClosed

FinishReason = Literal["stop", "length", "cancelled", "error"]


def expect_process(process: int) -> None:
    """Raise in a process that was forked: it has neither the engine's thread, nor its locks."""
    if os.getpid() != process:
        raise EngineClosed(
            "the engine must be used in the process that made it, but this one was forked. Make an "
            "engine here."
        )


class Token(NamedTuple):
    """A token of an answer, and the text that can be shown since it came."""

    token: int
    text: str = ""
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Completion:
    """A finished answer. `logprobs` has a number for each token if they were asked for."""

    tokens: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: list[float] | None = None
    top_logprobs: list[tuple[tuple[int, float], ...]] | None = None
    num_prompt: int = 0
    num_cached: int = 0  # tokens of the prompt whose pages were found


class Bells:
    """Wakes event loops after a step, each once for all answers that it waits for.

    Waking a loop wakes its thread, which takes time from the engine. Only the engine's thread rings
    and sounds, or whoever closes the engine after it.
    """

    def __init__(self) -> None:
        self._rung: dict[asyncio.AbstractEventLoop, dict[asyncio.Event, None]] = {}

    def ring(self, loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
        """Set an event of a loop when the bells sound."""
        self._rung.setdefault(loop, {})[event] = None

    def sound(self) -> None:
        """Wake the loops."""
        rung, self._rung = self._rung, {}
        for loop, events in rung.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits there
                loop.call_soon_threadsafe(_set_all, events)


def _set_all(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        event.set()


class Answer:
    """One answer. `drive` computes a step if nobody else does, and is None if a thread does.

    `expect` raises where nobody can wait for the answer. `bells` wake the loops that wait for it.
    """

    def __init__(
        self,
        number: int,
        drive: Callable[[], object] | None,
        expect: Callable[[], None],
        bells: Bells,
    ) -> None:
        self.number = number
        self.is_cancelled = False
        self.is_scored = False  # whether its log-probabilities are asked for
        self.num_prompt = self.num_cached = 0
        self._drive, self._expect, self._bells = drive, expect, bells
        self._tokens: list[Token] = []
        self._end: FinishReason | None = None
        self._text = ""
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None  # of the error, before anybody has raised it
        # Who waits for the end is not woken by each token: waking takes time from the engine.
        self._changed = threading.Condition()
        self._readers = 0  # how many threads wait for a token
        self._ended = threading.Condition()
        self._loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    # --- the engine writes

    def add(self, token: Token) -> None:
        """Add a token.

        Whoever waits for one counts as a reader before it looks whether the token is there.
        """
        self._tokens.append(token)
        if self._readers or self._loops:
            with self._changed:
                self._tell()

    def finish(self, reason: FinishReason, text: str, error: BaseException | None = None) -> None:
        """End the answer."""
        with self._changed, self._ended:
            self._end, self._text, self._error = reason, text, error
            self._traceback = None if error is None else error.__traceback__
            self._tell()
            self._ended.notify_all()

    def _tell(self) -> None:
        if self._readers:
            self._changed.notify_all()
        for loop, event in self._loops:
            self._bells.ring(loop, event)

    # --- the user reads

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer ended. None while it is written."""
        return self._end

    def cancel(self) -> None:
        """Ask the engine to end the answer. It ends before the next step."""
        self.is_cancelled = True

    def __iter__(self) -> Iterator[Token]:
        place = 0
        while (token := self._wait(place)) is not None:
            yield token
            place += 1
        self._raise()

    async def __aiter__(self) -> AsyncIterator[Token]:
        async with contextlib.aclosing(arrivals([self])) as arriving:
            async for _, tokens in arriving:
                for token in tokens:
                    yield token
        self._raise()

    def result(self, timeout: float | None = None) -> Completion:
        """Wait until the answer is finished, and return it. Raise what ended it, if that is so."""
        began = time.monotonic()
        while self._end is None:
            self._expect()
            left = None if timeout is None else began + timeout - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"the answer must end in {timeout} s, but is still written")
            if self._drive is not None:
                self._drive()
                continue
            with self._ended:
                self._ended.wait_for(lambda: self._end is not None, left)
        self._raise()
        return Completion(
            tokens=[each.token for each in self._tokens],
            text=self._text,
            finish_reason=self._end,
            logprobs=[each.logprob or 0.0 for each in self._tokens] if self.is_scored else None,
            top_logprobs=[each.top_logprobs for each in self._tokens] if self.is_scored else None,
            num_prompt=self.num_prompt,
            num_cached=self.num_cached,
        )

    def _wait(self, place: int) -> Token | None:
        """Return the token at a place, or None if the answer ends before it."""
        while len(self._tokens) <= place and self._end is None:
            self._expect()
            if self._drive is not None:
                self._drive()
                continue
            with self._changed:
                self._readers += 1
                try:
                    self._changed.wait_for(
                        lambda: len(self._tokens) > place or self._end is not None
                    )
                finally:
                    self._readers -= 1
        return self._tokens[place] if place < len(self._tokens) else None

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(self._traceback)


async def arrivals(answers: Sequence[Answer]) -> AsyncGenerator[tuple[Answer, list[Token]]]:
    """Return the tokens that have come to each answer since the last time, until all have ended.

    The last list of an answer is empty. `result` then says at once how it has ended.
    """
    event = asyncio.Event()
    mine = asyncio.get_running_loop(), event
    drive = answers[0]._drive
    for answer in answers:
        answer._expect()
        with answer._changed:
            answer._loops.append(mine)
    read = dict.fromkeys(answers, 0)  # how many tokens of those that are written
    try:
        while True:
            event.clear()
            for answer, place in list(read.items()):
                ended = answer._end is not None  # asked first: no token comes after the end
                if tokens := answer._tokens[place:]:
                    read[answer] += len(tokens)
                    yield answer, tokens
                if ended:
                    del read[answer]
                    yield answer, []
            if not read:
                return
            if drive is not None:
                await asyncio.to_thread(drive)
            else:
                await event.wait()
    finally:
        for answer in answers:
            with answer._changed:
                answer._loops.remove(mine)


class Generation:
    """A request, with its `answers`. Reading it reads the first of them."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.answers = list(answers)

    @property
    def number(self) -> int:
        """The number of the request, which events name."""
        return self.answers[0].number

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first answer ended. None while it is written."""
        return self.answers[0].finish_reason

    def __iter__(self) -> Iterator[Token]:
        return iter(self.answers[0])

    def __aiter__(self) -> AsyncIterator[Token]:
        return self.answers[0].__aiter__()

    def cancel(self) -> None:
        """Ask the engine to end all answers."""
        for answer in self.answers:
            answer.cancel()

    def result(self, timeout: float | None = None) -> Completion:
        """Wait for the first answer, and return it."""
        return self.answers[0].result(timeout)

    def results(self, timeout: float | None = None) -> list[Completion]:
        """Wait for all answers, and return them."""
        return [answer.result(timeout) for answer in self.answers]
