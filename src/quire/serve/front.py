"""The front of several replicas: it checks requests as one process does, and passes them on.

    client -> Guard -> Front -> PrefixRouter -> Replica: the routes of app.py over its own engine

A request whose replica or engine dies before a byte of the answer was sent is tried again. If a
stream has begun, it ends with an error, since what the client has read cannot be taken back. A
client that leaves cancels its request in the replica.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from ray.exceptions import RayActorError, RayError, TaskCancelledError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route, Router
from starlette.staticfiles import StaticFiles

from quire.errors import ApiError
from quire.serve import problems
from quire.serve.app import PAGE, too_late
from quire.serve.gate import Gate
from quire.serve.guard import Guard
from quire.serve.metrics import Metrics, written
from quire.serve.prefixes import demand_of
from quire.serve.routing import Forwarded
from quire.serve.settings import Settings
from quire.serve.streams import Stream, unless_left

TRIES = 3
PATIENCE = 9.0
"""How many seconds replicas have to say how they are, or to begin what never ends. Who asks may
wait for ten."""

PASSED_ON = {"content-type", "cache-control", "x-accel-buffering", "retry-after"}


class Front:
    """The routes of a server with `replicas` replicas behind `handle`."""

    def __init__(self, handle: DeploymentHandle, settings: Settings, replicas: int) -> None:
        self._handle = handle.options(stream=True, method_name="answer")
        self._settings, self._replicas = settings, replicas
        self._metrics = Metrics()
        # As many answers wait as one replica writes: Ray would also count those on their way.
        self._gate = Gate(settings.max_ongoing * (replicas + 1), self._metrics)

    async def forward(self, request: Request) -> Response:
        """Pass a request to the replica that has its beginning, and its answer back."""
        body, tenant = request.state.body, request.state.tenant
        path = request.url.path
        start, answers = demand_of(path, body, tenant)
        answers = min(answers, self._settings.max_ongoing)  # a replica refuses more
        call = Forwarded(request.method, path, body, tenant, start, answers=answers)
        async with contextlib.AsyncExitStack() as stack:
            if request.method == "POST":
                stack.enter_context(self._gate.admit(answers))
            response = await unless_left(request.receive, self._tried(call))
            if isinstance(response, Stream):
                response.held.push_async_exit(stack.pop_all())
            return response

    async def _tried(self, call: Forwarded) -> Response:
        """Return the answer of a replica. If it fails before a byte of it, ask the next."""
        brief = call.method == "GET"
        limit = PATIENCE if brief else self._settings.time_limit + PATIENCE
        until = asyncio.get_running_loop().time() + limit
        lost = _lost()
        try:
            for _ in range(TRIES):
                try:
                    return await self._answered(call, until)
                except _Failed as failure:
                    lost = failure.problem
                    call = call._replace(failed=call.failed | failure.names)
        except TimeoutError:
            if not brief:
                raise too_late(self._settings.time_limit) from None
        raise lost

    async def _answered(self, call: Forwarded, until: float) -> Response:
        """Return the answer of a replica: all of it, or the beginning of a stream."""
        async with contextlib.AsyncExitStack() as stack:
            parts = self._call(call, stack)
            with _watched():
                async with asyncio.timeout_at(until):
                    status, headers = await anext(parts)
                    kept = _kept(headers)
                    if not kept.get("content-type", "").startswith("text/event-stream"):
                        content = b"".join([part async for part in parts])
                        if problems.code_of(content) == problems.ENGINE_FAILED:
                            raise _Failed(problems.engine_failed(), headers["x-replica"])
                        return Response(content, status, kept)
                    first = await anext(parts, b"")
            # Time in the queue does not count, as it does not there: a replica ends it before that.
            limit = self._settings.time_limit + PATIENCE
            return Stream(
                _rest(parts),
                stack.pop_all(),
                status,
                kept,
                first=first,
                until=asyncio.get_running_loop().time() + limit,
                late=_lost(),
            )

    def _call(self, call: Forwarded, stack: contextlib.AsyncExitStack) -> Any:
        """Call a replica, and return the parts of its answer. `stack` ends the call."""
        parts = self._handle.remote(call)
        stack.callback(_end, parts)
        return parts

    # --- of one replica or of all

    async def watch(self, request: Request) -> Response:
        """Return the live map of the pages of a replica: /live?replica=1."""
        given = request.query_params.get("replica", "0")
        place = int(given) if given.isdecimal() and len(given) < 5 else self._replicas
        if place >= self._replicas:
            raise ApiError(
                f"replica must be from 0 to {self._replicas - 1}, but is {given[:20]!r}.",
                param="replica",
            )
        async with contextlib.AsyncExitStack() as stack:
            parts = self._call(Forwarded("GET", "/live", place=place), stack)
            try:
                async with asyncio.timeout(PATIENCE):
                    with _watched():
                        status, headers = await anext(parts)
            except (_Failed, TimeoutError):
                raise _lost() from None
            kept = _kept(headers) | {"x-replicas": str(self._replicas)}
            return Stream(_rest(parts), stack.pop_all(), status, kept)

    async def numbers(self, _: Request) -> Response:
        """Return the numbers of all replicas for Prometheus, each with the name of its replica."""
        families: dict[str, list[Any]] = {}  # one that answers twice counts once
        for place in range(self._replicas):  # Ray confuses calls of one request at the same time
            families |= await self._numbers(place)
        front = list(text_string_to_metric_families(self._metrics.text().decode()))
        text = written([("front", front), *families.items()])
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _numbers(self, place: int) -> dict[str, list[Any]]:
        """Return the numbers of a replica by its name, or none if it is being started."""
        async with contextlib.AsyncExitStack() as stack:
            parts = self._call(Forwarded("GET", "/metrics", place=place), stack)
            try:
                async with asyncio.timeout((PATIENCE - 1) / self._replicas):
                    with _watched():
                        _, headers = await anext(parts)
                        text = b"".join([part async for part in parts]).decode()
            except (_Failed, TimeoutError):
                return {}
        return {headers["x-replica"]: list(text_string_to_metric_families(text))}

    async def page(self, _: Request) -> Response:
        """Return the page."""
        return FileResponse(PAGE / "index.html")

    def app(self) -> Guard:
        """Return the application."""
        routes = [
            Route("/v1/completions", self.forward, methods=["POST"]),
            Route("/v1/chat/completions", self.forward, methods=["POST"]),
            Route("/v1/embeddings", self.forward, methods=["POST"]),
            Route("/v1/models", self.forward),
            Route("/v1/models/{name:path}", self.forward),
            Route("/health", self.forward),
            Route("/metrics", self.numbers),
            Route("/live", self.watch),
            Route("/", self.page),
            Mount("/page", StaticFiles(directory=PAGE)),
        ]
        return Guard(Router(routes), self._settings, self._metrics)


class _Failed(Exception):
    """A replica, maybe the one of this name, writes the answer no further."""

    def __init__(self, problem: ApiError, name: str | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.names = frozenset(() if name is None else (name,))


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    """Raise one error for all ways in which a call of a replica can fail."""
    try:
        yield
    except (RayActorError, RayServeException, TaskCancelledError):
        raise _Failed(_lost()) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():  # it was this side
            raise
        raise _Failed(_lost()) from None


async def _rest(parts: Any) -> AsyncGenerator[bytes]:
    """Return the rest of a stream. If its replica fails, its last event is an error."""
    try:
        with _watched():
            async for part in parts:
                yield part
    except _Failed as failure:
        raise failure.problem from None


def _kept(headers: dict[str, str]) -> dict[str, str]:
    """Return the headers of a replica that a client gets."""
    return {name: value for name, value in headers.items() if name in PASSED_ON}


def _end(parts: Any) -> None:
    """Cancel a call if it is not finished. One that never began raises what has kept it."""
    with contextlib.suppress(RayError, RayServeException):
        parts.cancel()


def _lost() -> ApiError:
    return ApiError(
        "the replica that wrote the answer has failed. Ask again.", status=503, code="replica_lost"
    )
