"""The routes of the server.

POST /v1/completions  /v1/chat/completions  /v1/embeddings
GET  /v1/models  /health  /metrics  /live  /  /page/...
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route, Router
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from quire.engine import Engine
from quire.errors import ApiError, QuireError
from quire.serve import asking, embedding, problems
from quire.serve.answering import Reply
from quire.serve.asking import Asked
from quire.serve.bodies import AnyBody, ChatBody, CompletionBody, EmbeddingBody, TextBody, parsed
from quire.serve.embedding import Embedder
from quire.serve.gate import Gate
from quire.serve.guard import Edge, Guard
from quire.serve.live import Live
from quire.serve.metrics import Metrics
from quire.serve.settings import Settings
from quire.serve.shapes import AnswerShape, ChatShape, TextShape
from quire.serve.streams import Stream, unless_left

PAGE = Path(__file__).parent / "page"
AnyText = TypeVar("AnyText", bound=TextBody)


class Service:
    """OpenAI's interface for one engine. `app` returns it for any server that speaks ASGI."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.metrics = Metrics(engine)
        self.gate = Gate(settings.max_ongoing, self.metrics)
        self.live = Live(engine)
        self.embedder = Embedder()
        self.created = int(time.time())

    # --- text

    async def completions(self, request: Request) -> Response:
        """Continue texts."""
        body = self._body(request, CompletionBody)
        asked = await self._asked(asking.completion, body)
        echoed = [""] * len(asked.prompts)
        if body.echo:
            decode = self.engine.vocabulary.tokenizer.decode
            echoed = [decode(prompt, skip_special_tokens=True) for prompt in asked.prompts]
        vocabulary = self.engine.vocabulary
        shapes = [TextShape(vocabulary, text) for text in echoed for _ in range(asked.n)]
        return await self._reply(request, body, asked, shapes)

    async def chat(self, request: Request) -> Response:
        """Answer in a chat."""
        body = self._body(request, ChatBody)
        asked = await self._asked(asking.chat, body)
        shapes = [ChatShape(self.engine.vocabulary, asked.toolbox) for _ in range(asked.n)]
        return await self._reply(request, body, asked, shapes)

    def _body(self, request: Request, kind: type[AnyBody]) -> AnyBody:
        return parsed(kind, request.state.body)

    async def _asked(
        self, read: Callable[[AnyText, Engine, Settings], Asked], body: AnyText
    ) -> Asked:
        if body.model != self.settings.model:
            raise _no_model(body.model, self.settings.model)
        try:
            return await asyncio.to_thread(read, body, self.engine, self.settings)
        except ApiError:
            raise
        except QuireError as error:
            raise problems.of_request(error) from None

    async def _reply(
        self, request: Request, body: TextBody, asked: Asked, shapes: Sequence[AnswerShape]
    ) -> Response:
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self.gate.admit(len(shapes)))
            limit = self.settings.time_limit
            until, late = asyncio.get_running_loop().time() + limit, too_late(limit)
            reply = Reply(asked, shapes, self.settings.model, self.metrics)
            await stack.enter_async_context(reply)
            await reply.start(self.engine, request.state.tenant, lookup=self.settings.lookup)
            options = body.stream_options
            events = reply.events(with_usage=options is not None and options.include_usage)
            try:
                async with asyncio.timeout_at(until):
                    if not body.stream:
                        return JSONResponse(await unless_left(request.receive, reply.whole()))
                    first = await unless_left(request.receive, _next(events))
            except TimeoutError:
                raise late from None
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
            return Stream(
                events, stack.pop_all(), headers=headers, first=first, until=until, late=late
            )

    # --- the rest of OpenAI's interface

    async def models(self, request: Request) -> Response:
        """Return the names of models, or one of them."""
        names = [self.settings.model]
        if not self.embedder.missing:
            names.append(embedding.NAME)
        cards = [
            {"id": name, "object": "model", "created": self.created, "owned_by": "quire"}
            for name in names
        ]
        wanted = request.path_params.get("name")
        if wanted is None:
            return JSONResponse({"object": "list", "data": cards})
        for card in cards:
            if card["id"] == wanted:
                return JSONResponse(card)
        raise _no_model(wanted, ", ".join(names))

    async def embeddings(self, request: Request) -> Response:
        """Return vectors of texts."""
        body = self._body(request, EmbeddingBody)
        if body.model != embedding.NAME:
            raise _no_model(body.model, embedding.NAME)
        if absent := self.embedder.missing:
            raise ApiError(
                f"the server has no embeddings: {', '.join(absent)} must be installed.", status=404
            )
        given = body.input
        texts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        most = self.settings.max_texts
        if len(texts) > most:
            raise ApiError(
                f"input must be at most {most} texts, but is {len(texts)}.", param="input"
            )
        with self.gate.admit(1):
            try:
                async with asyncio.timeout(self.settings.time_limit):
                    answer = self.embedder.answer(texts)  # type: ignore[arg-type]
                    vectors, tokens = await unless_left(request.receive, answer)
            except TimeoutError:
                raise too_late(self.settings.time_limit) from None
        if body.dimensions not in (None, vectors.shape[1]):
            raise ApiError(
                f"dimensions must be {vectors.shape[1]}, but is {body.dimensions}.",
                param="dimensions",
            )
        rows: list[object] = vectors.tolist()
        if body.encoding_format == "base64":
            rows = [base64.b64encode(vector.numpy().tobytes()).decode() for vector in vectors]
        data = [
            {"object": "embedding", "index": place, "embedding": row}
            for place, row in enumerate(rows)
        ]
        counted = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse(
            {"object": "list", "data": data, "model": embedding.NAME, "usage": counted}
        )

    # --- for whoever runs the server

    async def health(self, _: Request) -> Response:
        """Say whether the engine works."""
        return JSONResponse(
            {"status": "ok"} if self.engine.is_alive else {"status": "failed"},
            200 if self.engine.is_alive else 503,
        )

    async def numbers(self, _: Request) -> Response:
        """Return the numbers for Prometheus."""
        text = await asyncio.to_thread(self.metrics.text)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def watch(self, _: Request) -> Response:
        """Return the live map of pages."""
        async with contextlib.AsyncExitStack() as stack:
            preempted = stack.enter_context(self.live.watching())
            frames = self.live.frames(preempted)
            return Stream(frames, stack.pop_all(), headers={"cache-control": "no-cache"})

    async def page(self, _: Request) -> Response:
        """Return the page."""
        return FileResponse(PAGE / "index.html")

    def app(self) -> Guard:
        """Return the application."""
        return Guard(self._router(), self.settings, self.metrics)

    def inner(self) -> ASGIApp:
        """Return the application for requests that a front has checked."""
        return Edge(self._router(), self.settings, self.metrics)

    def _router(self) -> Router:
        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.models),
            Route("/health", self.health),
            Route("/metrics", self.numbers),
            Route("/live", self.watch),
            Route("/", self.page),
            Mount("/page", StaticFiles(directory=PAGE)),
        ]
        return Router(routes)


async def _next(events: AsyncGenerator[bytes]) -> bytes:
    return await anext(events)


def too_late(limit: float) -> ApiError:
    """Return the error of a request that takes too long."""
    return ApiError(
        f"an answer must be complete within {limit:g} s, but is not.", status=504, code="timeout"
    )


def _no_model(name: str, known: str) -> ApiError:
    return ApiError(
        f"model must be {known}, but is {name[:80]!r}.",
        status=404,
        code="model_not_found",
        param="model",
    )
