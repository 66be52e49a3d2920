"""A response that comes in parts, and gives back what it holds when it ends.

Nothing goes on without its client: see `unless_left` before an answer begins, `Stream` after that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.errors import ApiError

T = TypeVar("T")


async def unless_left(receive: Receive, wanted: Coroutine[Any, Any, T]) -> T:
    """Return what is wanted. If the client goes first, cancel it, and raise ClientDisconnect.

    What is wanted has ended when this returns: what it used can be closed.
    """
    task, gone = asyncio.create_task(wanted), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait([task, gone])


async def _left(receive: Receive) -> None:
    """Wait until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Stream(Response):
    """A stream of events. `held` is closed at its end, also if no part of it was ever sent.

    `first` was made before the others, so that what fails until then has a status of its own. A
    stream that is not complete at the time `until` ends with the error `late`.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        parts: AsyncGenerator[bytes],
        held: contextlib.AsyncExitStack,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        *,
        first: bytes = b"",
        until: float | None = None,
        late: ApiError | None = None,
    ) -> None:
        self.status_code, self.background = status, None
        self.init_headers(headers)
        del self.headers["content-length"]
        self.parts, self.held = parts, held
        self._first, self._until, self._late = first, until, late

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the parts, until the client is gone or the time is over."""
        async with self.held, contextlib.aclosing(self.parts):
            try:
                async with asyncio.timeout_at(self._until):
                    brief = scope.get("method") == "HEAD"
                    await unless_left(receive, self._send(send, brief=brief))
            except TimeoutError:
                raise (self._late or ClientDisconnect()) from None
            except OSError:
                raise ClientDisconnect from None

    async def _send(self, send: Send, *, brief: bool) -> None:
        """Send the parts. If only the headers are asked for, send none."""
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        if not brief:
            if self._first:
                await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for part in self.parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
