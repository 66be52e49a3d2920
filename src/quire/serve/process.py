"""The process of a server: a socket, uvicorn, signals, and a graceful end.

On SIGTERM or Ctrl-C the server accepts nothing more, answers that are being written are finished
(for up to a minute), and the process ends.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from quire.engine import Engine
from quire.errors import ArgumentError
from quire.serve.app import Service
from quire.serve.settings import Settings

GRACE = 60


class _Protocol(H11Protocol):
    """HTTP, whose requests must begin in time: uvicorn would wait for headers for ever."""

    patience = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Close the connection if no request has come after a while."""
        super().connection_made(transport)
        self.loop.call_later(self.patience, self._close_if_silent)

    def _close_if_silent(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()


class _Server(uvicorn.Server):
    """uvicorn, which tells the streams of the page that they must end."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams that never end by themselves, then wait for the others."""
        self._service.live.closing.set()
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that is bound. Port 0 is any free one."""
    try:
        return socket.create_server((host, port), reuse_port=False, backlog=1024)
    except OSError as error:
        raise ArgumentError(
            f"the server must have {host}:{port} for itself, but: {error.strerror}. Give another "
            f"--port."
        ) from None


def run(engine: Engine, settings: Settings, bound: socket.socket) -> None:
    """Serve until a signal comes, then end gracefully."""
    service = Service(engine, settings)
    protocol = type("Protocol", (_Protocol,), {"patience": settings.read_limit})
    options: dict[str, Any] = {
        "http": protocol,
        "ws": "none",
        "lifespan": "off",
        "log_level": "warning",
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "h11_max_incomplete_event_size": settings.max_header,
        "limit_concurrency": settings.max_connections,
        "timeout_keep_alive": 30,
        "timeout_graceful_shutdown": GRACE,
    }
    config = uvicorn.Config(service.app(), **options)
    server = _Server(config, service)
    # uvicorn raises the signals that it has caught once more, when it has ended gracefully.
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        server.run(sockets=[bound])
    except KeyboardInterrupt:
        pass
    finally:
        engine.close()
