"""The process of a server: a socket, uvicorn, signals, and a graceful end.

On SIGTERM or Ctrl-C the server accepts nothing more, and finishes what is being written. Answers
that take longer than a minute end with an error. Then the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import socket
from typing import Any

import h11
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from quire.errors import ApiError, ArgumentError
from quire.serve import problems
from quire.serve.guard import Guard
from quire.serve.settings import Settings

GRACE = 60
LAST = 5
"""How many seconds before the end of this grace answers are ended, so that clients are told."""


class _Connection(h11.Connection):
    """h11's connection, which writes the parts of a stream without h11's events and checks.

    Those take longer than everything else that is done for a token.
    """

    _in_chunks = False

    def send(self, event: Any) -> bytes | None:  # type: ignore[override]
        """Return the bytes of an event."""
        if type(event) is h11.Data and self._in_chunks:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""
        sent: bytes | None = super().send(event)
        if type(event) is h11.Response:
            self._in_chunks = b"\r\ntransfer-encoding: chunked\r\n" in (sent or b"").lower()
        return sent


class _Protocol(H11Protocol):
    """HTTP, whose requests must begin in time: uvicorn would wait for headers for ever.

    What it refuses has OpenAI's shape.
    """

    patience = 30.0
    most = 512

    def __init__(self, config: uvicorn.Config, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self.conn = _Connection(h11.SERVER, config.h11_max_incomplete_event_size or 1 << 14)

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Close the connection if no request has come after a while."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            self.app = _full
        self._watch(begun=True)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, or has headers that are too long."""
        refusal = ApiError("a request must be HTTP with headers that are short enough, but is not.")
        problem = problems.response(refusal)
        headers = [*problem.raw_headers, (b"connection", b"close")]
        body = bytes(problem.body)
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def _watch(self, *, begun: bool) -> None:
        self.loop.call_later(self.patience, self._close_if_slow, self.cycle, begun)

    def _close_if_slow(self, cycle: object, begun: bool) -> None:
        """Close the connection if a request has begun a while ago, and has no headers yet.

        The first counts from the connection, whether a byte came or not.
        """
        if self.transport.is_closing():
            return
        idle = self.cycle is None or self.cycle.response_complete
        part = idle and (self.cycle is None or bool(self.conn.trailing_data[0]))
        if part and begun and self.cycle is cycle:
            self.transport.close()
        else:
            self._watch(begun=part)


async def _full(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a request on a connection that is one too many."""
    problem = ApiError(
        "the server has as many connections as it takes. Try again later.",
        status=503,
        code="too_many_connections",
        retry_after=10,
    )
    response = problems.response(problem)
    response.headers["connection"] = "close"
    await response(scope, receive, send)


class _Server(uvicorn.Server):
    """uvicorn, which tells streams that they must end."""

    def __init__(self, config: uvicorn.Config, app: Guard) -> None:
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams that never end by themselves, then wait for the others for a while."""
        self._app.end()
        loop = asyncio.get_running_loop()
        timer = loop.call_later(GRACE - LAST, functools.partial(self._app.end, answers=True))
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that is bound. Port 0 is any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, reuse_port=False, backlog=1024)
    except OSError as error:
        raise ArgumentError(
            f"the server must have {_at(host, port)} for itself, but: {error.strerror}. Give "
            f"another --port."
        ) from None


def announce(settings: Settings, bound: socket.socket) -> None:
    """Say where the server is."""
    at = _at(*bound.getsockname()[:2])
    print(f"{settings.model} at http://{at} (OpenAI's interface: /v1). Ctrl-C ends.", flush=True)


def _at(host: str, port: int) -> str:
    """Return an address as it stands in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def run(app: Guard, settings: Settings, bound: socket.socket) -> None:
    """Serve until a signal comes, then end gracefully."""
    protocol = type(
        "Protocol",
        (_Protocol,),
        {"patience": settings.read_limit, "most": settings.max_connections},
    )
    options: dict[str, Any] = {
        "http": protocol,
        "ws": "none",
        "lifespan": "off",
        "log_level": "warning",
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "h11_max_incomplete_event_size": settings.max_header,
        "timeout_keep_alive": 30,
        "timeout_graceful_shutdown": GRACE,
    }
    config = uvicorn.Config(app, **options)
    server = _Server(config, app)
    # uvicorn raises the signals that it has caught once more, when it has ended gracefully.
    signal.signal(signal.SIGTERM, lambda *_: None)
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[bound])
