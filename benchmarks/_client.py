"""A client of streams that costs little, since it runs on the cores that it measures.

It sends requests on connections that it keeps, and reads every event of their answers.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import time
from typing import Any
from urllib.parse import urlsplit

import httptools
import uvloop


class Client:
    """A client of servers that take turns, with connections that it keeps."""

    def __init__(self, *urls: str) -> None:
        self._addresses = itertools.cycle([urlsplit(url) for url in urls])
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._connections: list[_Connection] = []

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()

    def ask(self, bodies: list[dict[str, Any]]) -> list[float]:
        """Send all requests at once, and read their streams. Return the times of first tokens."""
        return self._runner.run(self._ask(bodies))

    async def _ask(self, bodies: list[dict[str, Any]]) -> list[float]:
        loop = asyncio.get_running_loop()
        while len(self._connections) < len(bodies):
            to = next(self._addresses)
            made = functools.partial(_Connection, to.netloc)
            _, connection = await loop.create_connection(made, to.hostname or "", to.port or 80)
            self._connections.append(connection)
        pairs = zip(self._connections, bodies, strict=False)
        return await asyncio.gather(*(each.ask(body) for each, body in pairs))


class _Connection(asyncio.Protocol):
    """Asks for one stream after the other."""

    def __init__(self, host: str) -> None:
        self._host = host

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._parser = httptools.HttpResponseParser(self)

    def ask(self, body: dict[str, Any]) -> asyncio.Future[float]:
        """Send a request. The future is the seconds until the first event of its stream."""
        self._done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._first, self._unread = 0.0, b""
        self._began = time.perf_counter()
        content = json.dumps(body).encode()
        lines = [
            "POST /v1/completions HTTP/1.1",
            f"Host: {self._host}",
            "Content-Type: application/json",
            f"Content-Length: {len(content)}",
        ]
        self._transport.write("\r\n".join([*lines, "", ""]).encode() + content)
        return self._done

    def data_received(self, data: bytes) -> None:
        """Read what has come."""
        self._parser.feed_data(data)

    def on_body(self, part: bytes) -> None:
        """Read events, each of which must be a part of an answer."""
        self._first = self._first or time.perf_counter() - self._began
        *events, self._unread = (self._unread + part).split(b"\n\n")
        for event in events:
            if event != b"data: [DONE]" and "error" in json.loads(event.removeprefix(b"data: ")):
                self._fail(event)

    def on_message_complete(self) -> None:
        """End the request."""
        if self._parser.get_status_code() != 200:
            self._fail(self._unread)
        elif not self._done.done():
            self._done.set_result(self._first)

    def connection_lost(self, _: Exception | None) -> None:
        """Say that an answer is lost, if one was asked for."""
        self._fail(b"the connection was closed")

    def _fail(self, said: bytes) -> None:
        if not self._done.done():
            self._done.set_exception(AssertionError(said.decode()))
