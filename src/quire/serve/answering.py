"""From the engine to a client: an answer as a whole, or a stream of its tokens.

Whatever ends a request (its last token, its client, its time) leaves nothing running: `Reply` is a
context that cancels what is unfinished.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from types import TracebackType

from quire.engine import Answer, Completion, Engine, Generation, Token
from quire.engine.speculation import PromptLookup
from quire.errors import QuireError
from quire.serve import problems
from quire.serve.asking import Asked
from quire.serve.metrics import Metrics
from quire.serve.shapes import AnswerShape, usage
from quire.serve.tools import Json

_compact = json.JSONEncoder(separators=(",", ":")).encode

DONE = b"data: [DONE]\n\n"


class Reply:
    """The answers to one request while they are written."""

    def __init__(
        self, asked: Asked, shapes: Sequence[AnswerShape], model: str, metrics: Metrics
    ) -> None:
        self._asked = asked
        self._shapes = shapes  # one for each answer
        self._metrics = metrics
        self._generations: list[Generation] = []
        self._engine: Engine | None = None
        self._left = False
        self._began = time.perf_counter()
        self._head = {
            "id": f"{shapes[0].prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        self._chunk = self._head | {"object": shapes[0].chunk, "choices": []}
        # All that the events of a stream have in common, up to the choice of each.
        self._opened = b"data: %b" % _compact(self._chunk).encode().removesuffix(b"]}")

    async def start(self, engine: Engine, salt: bytes, *, lookup: bool = False) -> None:
        """Give the prompts to the engine. Raise an ApiError if it refuses one.

        With `lookup`, the next tokens are guessed from the text. Samples of one prompt differ, so
        that guesses would be of little use to them.
        """

        self._engine = engine

        def give(prompt: list[int]) -> None:
            generation = engine.submit(
                prompt,
                self._asked.sampling,
                n=self._asked.n,
                priority=self._asked.priority,
                salt=salt,
                drafter=PromptLookup() if lookup and self._asked.n == 1 else None,
            )
            self._generations.append(generation)
            if self._left:  # while this thread was at it
                generation.cancel()

        for prompt in self._asked.prompts:
            try:
                await asyncio.to_thread(give, prompt)
            except QuireError as error:
                raise self._problem(error) from None

    async def __aenter__(self) -> Reply:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._left = True
        for generation in self._generations:
            generation.cancel()  # does nothing if it is finished

    @property
    def answers(self) -> list[Answer]:
        """All answers, by the prompt that they belong to."""
        return [answer for generation in self._generations for answer in generation.answers]

    async def whole(self) -> Json:
        """Wait for all answers, and return the body of the response."""
        completions = list(await asyncio.gather(*map(self._read, self.answers)))
        choices = [
            {"index": place, **shape.choice(completion)}
            for place, (shape, completion) in enumerate(zip(self._shapes, completions, strict=True))
        ]
        self._count(completions)
        return {
            **self._head,
            "object": self._shapes[0].whole,
            "choices": choices,
            "usage": usage(completions, self._asked.n),
        }

    async def events(self, *, with_usage: bool) -> AsyncGenerator[bytes]:
        """Return the events of a stream, each with its end of line.

        Nothing is said before the first token: until then, an error has a status of its own.
        """
        completions: dict[int, Completion] = {}
        opened = False
        async for place, found in self._merged():
            if not opened:
                opened = True
                for event in self._openings():
                    yield event
            if isinstance(found, Completion):
                completions[place] = found
                for piece in self._shapes[place].closing(found):
                    yield self._event(place, piece)
            elif (said := self._shapes[place].piece(found)) is not None:
                yield self._event(place, said)
        finished = [completions[place] for place in sorted(completions)]
        self._count(finished)
        if with_usage:
            counted = usage(finished, self._asked.n)
            content = self._chunk | {"usage": counted}
            yield b"data: %b\n\n" % _compact(content).encode()
        yield DONE

    def _openings(self) -> Iterator[bytes]:
        for place, shape in enumerate(self._shapes):
            if (opening := shape.opening()) is not None:
                yield self._event(place, opening)

    async def _merged(self) -> AsyncIterator[tuple[int, Token | Completion]]:
        """Return tokens of all answers as they come, and each answer when it is complete."""
        if len(self.answers) == 1:
            async for token in self._tokens(self.answers[0]):
                yield 0, token
            yield 0, _completed(self.answers[0])
            return
        queue: asyncio.Queue[tuple[int, Token | Completion | Exception]] = asyncio.Queue()

        async def pump(place: int, answer: Answer) -> None:
            try:
                async for token in self._tokens(answer):
                    queue.put_nowait((place, token))
                queue.put_nowait((place, _completed(answer)))
            except Exception as error:
                queue.put_nowait((place, error))

        tasks = [asyncio.create_task(pump(*each)) for each in enumerate(self.answers)]
        try:
            left = len(tasks)
            while left:
                place, found = await queue.get()
                if isinstance(found, Exception):
                    raise found
                left -= isinstance(found, Completion)
                yield place, found
        finally:
            for task in tasks:
                task.cancel()

    async def _read(self, answer: Answer) -> Completion:
        async for _ in self._tokens(answer):
            pass
        return _completed(answer)

    async def _tokens(self, answer: Answer) -> AsyncIterator[Token]:
        """Return the tokens of an answer as they come. Tell the time of the first."""
        first = True
        try:
            async for token in answer:
                if first:
                    self._metrics.first_token.observe(time.perf_counter() - self._began)
                    first = False
                yield token
        except Exception as error:
            raise self._problem(error) from None

    def _problem(self, error: Exception) -> Exception:
        """Return what a client is told if the engine, or an answer of it, raises an error."""
        if self._engine is not None and not self._engine.is_alive:
            traceback.print_exception(error, file=sys.stderr)
            return problems.engine_failed()
        if isinstance(error, QuireError):  # of its grammar, or its logits: nobody else's
            return problems.of_request(error)
        return error

    def _event(self, place: int, piece: Json) -> bytes:
        choice = {"index": place, "finish_reason": None, **piece}
        return b"%b%b]}\n\n" % (self._opened, _compact(choice).encode())

    def _count(self, completions: Sequence[Completion]) -> None:
        self._metrics.duration.observe(time.perf_counter() - self._began)
        for completion in completions:
            self._metrics.answers.labels(completion.finish_reason).inc()


def _completed(answer: Answer) -> Completion:
    completion = answer.result()
    if completion.finish_reason == "cancelled":
        raise problems.shutdown()
    return completion
