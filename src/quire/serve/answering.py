"""From the engine to a client: an answer as a whole, or a stream of its tokens.

Whatever ends a request (its last token, its client, its time) leaves nothing running: `Reply` is a
context that cancels what is unfinished.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any

from quire.engine import Answer, Completion, Engine, Generation, Token
from quire.engine.speculation import PromptLookup
from quire.errors import ApiError, QuireError
from quire.serve import problems
from quire.serve.asking import Asked
from quire.serve.metrics import Metrics
from quire.serve.shapes import AnswerShape, Json, usage

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
        self._began = time.perf_counter()
        self._head = {
            "id": f"{shapes[0].prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    async def start(self, engine: Engine, salt: bytes, *, lookup: bool = False) -> None:
        """Give the prompts to the engine. Raise an ApiError if it refuses one.

        With `lookup`, the next tokens are guessed from the text. Samples of one prompt differ, so
        that guesses would be of little use to them.
        """
        for prompt in self._asked.prompts:
            try:
                generation = await asyncio.to_thread(
                    engine.submit,
                    prompt,
                    self._asked.sampling,
                    n=self._asked.n,
                    priority=self._asked.priority,
                    salt=salt,
                    drafter=PromptLookup() if lookup and self._asked.n == 1 else None,
                )
            except QuireError as error:
                raise problems.of_request(error) from None
            self._generations.append(generation)

    async def __aenter__(self) -> Reply:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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

    async def events(self, *, with_usage: bool) -> AsyncIterator[bytes]:
        """Return the events of a stream, each with its end of line."""
        completions: dict[int, Completion] = {}
        for place, shape in enumerate(self._shapes):
            if (opening := shape.opening()) is not None:
                yield self._event(place, opening)
        async for place, found in self._merged():
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
            yield _line(
                self._head | {"object": self._shapes[0].chunk, "choices": [], "usage": counted}
            )
        yield DONE

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
        except QuireError as error:  # of its grammar, or its logits: nobody else's
            raise problems.of_request(error) from None

    def _event(self, place: int, piece: Json) -> bytes:
        choice = {"index": place, "finish_reason": None, **piece}
        return _line(self._head | {"object": self._shapes[0].chunk, "choices": [choice]})

    def _count(self, completions: Sequence[Completion]) -> None:
        self._metrics.duration.observe(time.perf_counter() - self._began)
        for completion in completions:
            self._metrics.answers.labels(completion.finish_reason).inc()


def _completed(answer: Answer) -> Completion:
    completion = answer.result()
    if completion.finish_reason == "cancelled":
        raise ApiError("the server ends, and the answer with it.", status=503, code="shutdown")
    return completion


def _line(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"
