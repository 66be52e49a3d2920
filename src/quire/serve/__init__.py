"""The server: OpenAI's interface over HTTP for one engine, and a page that shows its pages.

    quire serve                              # SmolLM2 at 127.0.0.1:8000

    app = Service(engine, Settings(model="mine")).app()    # the same, for a server of yours

A request goes through these files:

    guard.py        refuses what is too large, too slow, from elsewhere, or without a key
    app.py          the routes
    bodies.py       the JSON of requests, as types
    asking.py       from a body to prompts and sampling
    answering.py    from tokens to the JSON of answers, whole or as a stream
    streams.py      a response in parts
    process.py      the process: sockets, signals, a graceful end

With `--replicas`, several processes do this behind one front:

    front.py        passes requests on, and tries again those whose replica died
    prefixes.py     which replica has the beginning of a prompt
    routing.py      the same as a request router of Ray Serve
    replicas.py     the deployment, for this machine or a cluster
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.serve.command import serve
from quire.serve.options import Options
from quire.serve.settings import Settings

if TYPE_CHECKING:
    from quire.serve.app import Service as Service

__all__ = ["Options", "Service", "Settings", "serve"]


def __getattr__(name: str) -> object:
    """Return `Service`, whose module needs the packages of a server."""
    if name != "Service":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from quire.serve.app import Service

    return Service
