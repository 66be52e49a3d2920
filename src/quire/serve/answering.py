"""From the engine to a client: an answer as a whole, or a stream of its tokens.

Whatever ends a request (its last token, its client, its time) leaves nothing running: `Reply` is a
context that cancels what is unfinished.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
import traceback
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType

from quire.engine import Answer, Completion, Engine, Generation, Token
from quire.engine.answers import arrivals
from quire.engine.speculation import PromptLookup
from quire.errors import QuireError
from quire.serve import problems
from quire.serve.asking import Asked
from quire.serve.metrics import Metrics
from quire.serve.shapes import AnswerShape, compact, usage
from quire.serve.tools import Json

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
        self._opened = f"data: {compact(self._chunk)}".removesuffix("]}")

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
        async for _ in self._arrivals():
            pass
        completions = list(map(_completed, self.answers))
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
        """Return the events of a stream, those that come together as one part.

        Nothing is said before the first token: until then, an error has a status of its own.
        """
        part = self._openings()
        places = {answer: place for place, answer in enumerate(self.answers)}
        async for answer, tokens in self._arrivals():
            part += self._said(places[answer], answer, tokens)
            if part:
                yield part.encode()
            part = ""
        completions = list(map(_completed, self.answers))
        self._count(completions)
        if with_usage:
            content = self._chunk | {"usage": usage(completions, self._asked.n)}
            yield b"data: %b\n\n" % compact(content).encode()
        yield DONE

    def _openings(self) -> str:
        """Return what a stream begins with."""
        openings = ((place, shape.opening()) for place, shape in enumerate(self._shapes))
        return "".join(self._event(place, each) for place, each in openings if each is not None)

    def _said(self, place: int, answer: Answer, tokens: list[Token]) -> str:
        """Return the events of tokens that have come. If none has, the answer is complete."""
        shape = self._shapes[place]
        pieces = [shape.piece(token) for token in tokens] or shape.closing(_completed(answer))
        return "".join(self._event(place, each) for each in pieces if each is not None)

    async def _arrivals(self) -> AsyncGenerator[tuple[Answer, list[Token]]]:
        """Return tokens of all answers as they come. Tell the time of the first of each."""
        begun: set[Answer] = set()
        try:
            async for answer, tokens in arrivals(self.answers):
                if not tokens:
                    answer.result()  # raises what has ended it
                elif answer not in begun:
                    begun.add(answer)
                    self._metrics.first_token.observe(time.perf_counter() - self._began)
                yield answer, tokens
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

    def _event(self, place: int, piece: str) -> str:
        return f'{self._opened}{{"index":{place},{piece}}}]}}\n\n'

    def _count(self, completions: Sequence[Completion]) -> None:
        self._metrics.duration.observe(time.perf_counter() - self._began)
        for completion in completions:
            self._metrics.answers.labels(completion.finish_reason).inc()


def _completed(answer: Answer) -> Completion:
    completion = answer.result()
    if completion.finish_reason == "cancelled":
        raise problems.shutdown()
    return completion
