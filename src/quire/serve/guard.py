"""What every request passes first: names, keys, sizes and times.

    names    a server on the loopback is called by its own name, so that a website cannot reach it
             by a name that points there
    keys     a bearer token for all but the page itself and /health
    JSON     a body must say that it is JSON: browsers ask first before they send that elsewhere
    sizes    of headers and body; uvicorn limits connections
    times    until a body has arrived, and until a client has read what it was sent

The body is read here, whole, and is in `scope["state"]` with the tenant. No answer says anything
of this machine: what fails without a reason of the client's is reported on standard error alone.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
import types
from collections.abc import Generator, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.errors import ApiError
from quire.serve import problems
from quire.serve.bodies import check_amount
from quire.serve.metrics import Metrics
from quire.serve.settings import Settings

OPEN = ("/", "/health", "/page/")
"""Paths that need no key. One that ends with a slash stands for all below it, but / itself."""

ENDLESS = "/live"
"""The path whose streams never end by themselves."""

HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"content-security-policy", b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'"),
]


class Edge:
    """An ASGI application around another one: it counts, and errors become responses."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics
        self._under_way: dict[asyncio.Task[Any], str] = {}  # with the path of each
        self._ended: set[asyncio.Task[Any]] = set()
        self._ending = False

    def end(self, *, answers: bool = False) -> None:
        """End what never ends by itself, since the server does. With `answers`, end all else, too.

        A stream then ends with an error as its last event.
        """
        self._ending = True
        for task, path in self._under_way.items():
            if answers or path == ENDLESS:
                self._ended.add(task)
                task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, and pass it on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._guarded(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # with it, Starlette raises what it does not find
        sender = _Sender(send, self._settings.write_limit)
        task = asyncio.current_task()
        assert task is not None
        self._under_way[task] = scope["path"]
        try:
            if self._ending and scope["path"] == ENDLESS:
                raise problems.shutdown()
            await self._check(scope, receive)
            await self._app(scope, receive, sender.send)
        except ApiError as refusal:
            await sender.problem(refusal, scope, receive)
        except HTTPException as error:  # Starlette's own: no such path, or not with this method
            problem = ApiError(f"{error.detail}.", status=error.status_code)
            allowed = {"allow": "GET, HEAD"} if error.status_code == 405 else {}  # files do not say
            await sender.problem(problem, scope, receive, error.headers or allowed)
        except ClientDisconnect:
            self._metrics.disconnected.inc()
            sender.status = sender.status or 499
        except asyncio.CancelledError:
            if task not in self._ended:
                raise
            task.uncancel()
            await sender.problem(problems.shutdown(), scope, receive)
        except Exception:
            traceback.print_exc(file=sys.stderr)
            failure = ApiError("the server has failed.", status=500, code="internal_error")
            await sender.problem(failure, scope, receive)
        finally:
            del self._under_way[task]
            self._ended.discard(task)
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(route, str(sender.status or 499)).inc()

    async def _check(self, scope: Scope, receive: Receive) -> None:
        """Raise an ApiError if a request is not to be passed on."""


class Guard(Edge):
    """An edge that checks requests first."""

    async def _check(self, scope: Scope, receive: Receive) -> None:
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in scope["headers"])
        most = self._settings.max_header
        if size > most:
            raise ApiError(
                f"the headers must have at most {most} bytes, but have {size}.", status=431
            )
        headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
        self._check_host(headers.get("host", b"").decode("latin-1"))
        state = scope.setdefault("state", {})
        state["tenant"] = self._tenant(scope["path"], headers.get("authorization"))
        state["body"] = b""
        if scope["method"] in ("POST", "PUT", "PATCH"):
            kind = headers.get("content-type", b"").decode("latin-1").partition(";")[0]
            if kind.strip().lower() != "application/json":
                raise ApiError(
                    f"the content type must be application/json, but is {kind[:80]!r}.", status=415
                )
            state["body"] = await self._body(headers.get("content-length"), receive)
            check_amount(state["body"])

    def _check_host(self, host: str) -> None:
        allowed = self._settings.hosts
        name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
        if allowed is not None and name.strip("[]").lower() not in allowed:
            raise ApiError(
                "the server must be called by its own name. Use --allow-host to add a name.",
                status=421,
                code="unknown_host",
            )

    def _tenant(self, path: str, authorization: bytes | None) -> bytes:
        if path in OPEN or any(path.startswith(each) for each in OPEN[1:] if each.endswith("/")):
            return b""
        given = None if authorization is None else authorization.decode("latin-1")
        tenant = self._settings.tenant(given)
        if tenant is None:
            raise ApiError(
                "the API key must be one that the server knows. Send it as "
                "'Authorization: Bearer KEY'.",
                status=401,
                code="invalid_api_key",
            )
        return tenant

    async def _body(self, length: bytes | None, receive: Receive) -> bytes:
        most = self._settings.max_body
        too_large = ApiError(
            f"the body must have at most {most} bytes, but has more.", status=413, code="too_large"
        )
        if length is not None and (not length.isdigit() or int(length[:20]) > most):
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._settings.read_limit):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > most:
                        raise too_large
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(
                f"the body must arrive within {self._settings.read_limit:g} s.", status=408
            ) from None


class _Sender:
    """Sends a response, and gives up a client that does not read."""

    def __init__(self, send: Send, limit: float) -> None:
        self._send, self._limit = send, limit
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        """Send a part of a response."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message["headers"], *HEADERS]}
        try:
            sending = self._send(message).__await__()
            try:
                waits = next(sending)
            except StopIteration:
                return  # there was room for it, as almost always: no timer is needed
            async with asyncio.timeout(self._limit):
                await _rest(waits, sending)
        except (TimeoutError, OSError):
            raise ClientDisconnect from None

    async def problem(
        self,
        problem: ApiError,
        scope: Scope,
        receive: Receive,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send an error. If the response has begun, end it."""
        if self.status is not None:
            await self.send({"type": "http.response.body", "body": problems.event(problem)})
            return
        answer: Any = problems.response(problem)
        answer.headers.update(headers or {})
        await answer(scope, receive, self.send)


@types.coroutine
def _rest(waits: Any, sending: Generator[Any, Any, None]) -> Generator[Any, Any, None]:
    """Go on with what has been begun, and waits for something."""
    try:
        while True:
            try:
                yield waits
                break
            except BaseException as error:  # the timeout, or a cancellation
                waits = sending.throw(error)
    except StopIteration:
        return
    yield from sending
