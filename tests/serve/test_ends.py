"""How answers end when something else does: the engine, the server, a client, a connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
from starlette.requests import ClientDisconnect

from quire.engine import Engine, Event
from quire.engine.events import Counts
from quire.serve import Service, Settings
from quire.serve.guard import _Sender
from quire.serve.live import MOST_WATCHERS, Live

BODY = {"model": "tiny", "prompt": "the fox", "max_tokens": 4}


@contextlib.contextmanager
def service(model: Path) -> Iterator[Service]:
    with Engine.from_pretrained(str(model), max_bytes=1 << 22) as engine:
        yield Service(engine, Settings(model="tiny"))


def with_client(app: Any, ask: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    """Run `ask` with a client of an application in this process."""

    async def run() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await ask(client)

    asyncio.run(run())


# The engine


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_is_not_the_fault_of_a_request(
    model: Path,
    stream: bool,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither of the one that it fails at, nor of later ones: another engine may answer them."""

    def fail() -> None:
        raise RuntimeError("a mistake of ours")

    with service(model) as served:

        async def ask(client: httpx.AsyncClient) -> None:
            assert (await client.get("/health")).json() == {"status": "ok"}
            monkeypatch.setattr(served.engine._core, "schedule", fail)
            for _ in range(2):
                answer = await client.post("/v1/completions", json=BODY | {"stream": stream})
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "engine_failed"
            health = await client.get("/health")
            assert health.status_code == 503 and health.json() == {"status": "failed"}

        with_client(served.app(), ask)
        assert served.gate.inside == 0
    assert "a mistake of ours" in capfd.readouterr().err


# The map


def test_one_watcher_too_many_is_refused_before_its_stream(model: Path) -> None:
    with service(model) as served, contextlib.ExitStack() as stack:
        for _ in range(MOST_WATCHERS):
            stack.enter_context(served.live.watching())

        async def ask(client: httpx.AsyncClient) -> None:
            answer = await client.get("/live")
            assert answer.status_code == 429 and answer.headers["retry-after"] == "10"
            assert "too many pages" in answer.json()["error"]["message"]

        with_client(served.app(), ask)


def test_who_asks_for_the_headers_alone_does_not_watch(model: Path) -> None:
    with service(model) as served:

        async def ask(client: httpx.AsyncClient) -> None:
            answer = await asyncio.wait_for(client.head("/live"), 20)
            assert answer.status_code == 200 and answer.content == b""
            assert answer.headers["content-type"].startswith("text/event-stream")

        with_client(served.app(), ask)
        assert not served.live._watchers


class Looked:
    """An engine of which one looks at one answer."""

    def listen(self, listener: Callable[[Event], None]) -> None:
        self.tell = listener

    def look(self) -> Any:
        return SimpleNamespace(page_size=16, owners=[], answers=[], counts=Counts())


def test_every_watcher_is_shown_every_preemption() -> None:
    engine = Looked()
    live = Live(engine)  # type: ignore[arg-type]

    async def shown(preempted: deque[int]) -> list[int]:
        frames = live.frames(preempted)
        frame = json.loads((await anext(frames))[6:])
        await frames.aclose()
        found: list[int] = frame["preempted"]
        return found

    engine.tell(Event("preempt", 1, 5))  # nobody looks
    with live.watching() as first, live.watching() as second:
        engine.tell(Event("preempt", 2, 7))
        engine.tell(Event("finish", 2, 8))
        assert asyncio.run(shown(first)) == [7]
        with live.watching() as third:
            engine.tell(Event("preempt", 3, 9))
            assert asyncio.run(shown(third)) == [9]
        assert asyncio.run(shown(second)) == [7, 9]
        assert asyncio.run(shown(first)) == [9]


# Clients


def test_who_leaves_gets_no_vectors(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = asyncio.Event()

    class Slow:
        missing: tuple[str, ...] = ()

        async def answer(self, _: Any) -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()

    body = json.dumps({"model": "all-MiniLM-L6-v2", "input": "x"}).encode()
    messages = iter([{"type": "http.request", "body": body}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(messages)

    async def send(_: Any) -> None:
        raise AssertionError("nobody is there")

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/embeddings",
        "raw_path": b"/v1/embeddings",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }
    with service(model) as served:
        monkeypatch.setattr(served, "embedder", Slow())

        async def leave() -> None:
            await served.app()(scope, receive, send)
            await asyncio.wait_for(ended.wait(), 20)

        asyncio.run(leave())
        assert served.gate.inside == 0
        assert "quire_disconnected_total 1.0" in served.metrics.text().decode()


# Parts


def test_events_are_compact_json_whose_beginning_is_the_same(model: Path) -> None:
    with service(model) as served:

        async def ask(client: httpx.AsyncClient) -> None:
            body = BODY | {"stream": True, "n": 2, "stream_options": {"include_usage": True}}
            text = (await client.post("/v1/completions", json=body)).text
            *lines, usage, done, end = text.split("\n\n")
            assert (done, end) == ("data: [DONE]", "") and len(lines) > 2
            for line in (*lines, usage):
                event = json.loads(line.removeprefix("data: "))
                assert line == "data: " + json.dumps(event, separators=(",", ":"))
                assert list(event)[:5] == ["id", "created", "model", "object", "choices"]
                head = {name: event[name] for name in ("id", "created", "model", "object")}
                assert head == {"object": "text_completion"} | head and event["model"] == "tiny"
            assert json.loads(usage.removeprefix("data: "))["choices"] == []

        with_client(served.app(), ask)


def test_a_part_may_wait_for_room_but_not_for_ever() -> None:
    sent, given_up = [], []

    async def send(message: Any) -> None:
        try:
            for _ in range(message["waits"]):
                await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            given_up.append(message["waits"])
            await asyncio.sleep(0)  # it may have to wait as it ends
            raise
        sent.append(message["waits"])

    async def run() -> None:
        sender = _Sender(send, 1.0)
        for waits in (0, 1, 3):
            await sender.send({"type": "http.response.body", "waits": waits})
        with pytest.raises(ClientDisconnect):
            await sender.send({"type": "http.response.body", "waits": 1000})
        last = asyncio.create_task(
            sender.send({"type": "http.response.body", "waits": 2000})  # type: ignore[arg-type]
        )
        await asyncio.sleep(0.1)
        last.cancel()
        with pytest.raises(asyncio.CancelledError):
            await last

    asyncio.run(run())
    assert sent == [0, 1, 3] and given_up == [1000, 2000]


# The server

SCRIPT = """
import asyncio, sys
from quire.serve import process
from quire.serve.guard import Guard
from quire.serve.metrics import Metrics
from quire.serve.settings import Settings

process.GRACE, process.LAST = 3, 2
settings = Settings(model="x", max_connections=3, write_limit=1.0)

async def app(scope, receive, send):
    print("begun", scope["path"], flush=True)
    part = {"type": "http.response.body", "more_body": True, "body": b"x"}
    if scope["path"] == "/large":
        part["body"] *= 1 << 20
    if scope["path"] != "/whole":
        await send({"type": "http.response.start", "status": 200, "headers": []})
    try:
        while True:
            if scope["path"] != "/whole":
                await send(part)
            await asyncio.sleep(0.01)
    finally:
        print("ended", scope["path"], flush=True)

bound = process.listen("127.0.0.1", 0)
process.announce(settings, bound)
process.run(Guard(app, settings, Metrics()), settings, bound)
"""


class Endless:
    """A server whose answers never end, with 3 connections and little time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.connections = contextlib.ExitStack()
        line = self.said()
        self.port = int(line.partition("127.0.0.1:")[2].partition(" ")[0])

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def ask(self, path: str) -> socket.socket:
        return self.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())

    def send(self, data: bytes) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        self.connections.enter_context(connection)
        connection.sendall(data)
        return connection


@pytest.fixture
def endless() -> Iterator[Endless]:
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            server = Endless(process)
            with server.connections:
                yield server
        finally:
            process.kill()


def rest(connection: socket.socket) -> bytes:
    """Return all that comes until the server closes."""
    received = b""
    while part := connection.recv(65536):
        received += part
    return received


def test_answers_that_outlast_the_server_end_with_an_error(endless: Endless) -> None:
    paths = ("/stream", "/live", "/whole")
    asked = {}
    for path in paths:
        asked[path] = endless.ask(path)
        assert endless.said() == f"begun {path}\n"
    endless.process.terminate()
    assert b'"code": "shutdown"' in rest(asked["/live"])
    assert endless.said() == "ended /live\n", (
        "the map holds the end"
    )  # it is not the first that began
    for path in ("/stream", "/whole"):
        ended = rest(asked[path]).replace(b'": "', b'":"')
        assert b'"code":"shutdown"' in ended
        assert ended.endswith(b"0\r\n\r\n") or path == "/whole"
    assert endless.process.wait(60) == 0


def test_connections_have_a_limit(endless: Endless) -> None:
    kept = [endless.ask("/stream") for _ in range(3)]
    for each in kept:
        assert each.recv(10).startswith(b"HTTP/1.1 2")
    refused = rest(endless.ask("/stream"))
    assert refused.startswith(b"HTTP/1.1 503") and b"retry-after: 10" in refused
    error = json.loads(refused.partition(b"\r\n\r\n")[2])["error"]
    assert error["code"] == "too_many_connections"
    assert error["type"] == "service_unavailable_error"
    kept.pop().close()
    end = time.monotonic() + 60
    while not endless.ask("/stream").recv(10).startswith(b"HTTP/1.1 2"):
        assert time.monotonic() < end, "a connection that was closed still counts"


def test_who_does_not_read_is_given_up(endless: Endless) -> None:
    endless.ask("/large")
    assert endless.said() == "begun /large\n"
    assert endless.said() == "ended /large\n"


def test_what_is_not_http_is_refused_in_the_same_shape(endless: Endless) -> None:
    head, _, body = rest(endless.send(b"hello\r\n\r\n")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and b"application/json" in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
