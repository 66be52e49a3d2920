"""Requests that are too large, too slow, malformed, or from somebody who may not ask."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from serving import KEYS, Served, served
from starlette.requests import ClientDisconnect

from quire.serve.streams import Stream

CLOSE = b"\r\nConnection: close"
BODY = {"model": "tiny", "prompt": "the fox", "max_tokens": 4, "temperature": 0}


def post(server: Served, body: Any = BODY, **options: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | options.pop("headers", {})
    path = options.pop("path", "/v1/completions")
    return httpx.post(
        f"{server.url}{path}", content=content, headers=headers, timeout=60, **options
    )


def raw(server: Served, data: bytes, *, half_close: bool = False, wait: float = 100) -> bytes:
    """Send bytes, and return all that comes until the server closes."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=wait) as connection:
        connection.sendall(data)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        received = b""
        while part := connection.recv(65536):
            received += part
        return received


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    # No path of the machine, and no line of a trace.
    assert not re.search(r"/(home|usr|tmp|root|work)/|Traceback|\.py", error["message"])
    return error


# Keys


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer wrong", f"Basic {KEYS[0]}", KEYS[0]])
def test_a_wrong_key_is_refused(guarded: Served, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header}
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings"):
        response = post(guarded, headers=headers, path=path)
        assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
        assert error_of(response)["code"] == "invalid_api_key"
    for path in ("/v1/models", "/metrics", "/live", "/nowhere"):
        assert httpx.get(f"{guarded.url}{path}", headers=headers).status_code == 401


def test_the_page_and_health_need_no_key(guarded: Served) -> None:
    for path in ("/", "/page/app.js", "/page/style.css", "/health"):
        response = httpx.get(f"{guarded.url}{path}")
        assert response.status_code == 200
        assert "default-src 'self'" in response.headers["content-security-policy"]
        assert response.headers["x-content-type-options"] == "nosniff"
    for path in ("/page/../app.py", "/page/%2e%2e/app.py", "/page/../../errors.py"):
        assert httpx.get(f"{guarded.url}{path}").status_code in (401, 404)


def test_keys_share_no_pages(guarded: Served) -> None:
    """Who has the other key cannot learn from times or numbers what was asked with this one."""
    prompt = "the quick brown fox jumps over the lazy dog " * 5

    def cached(key: str) -> int:
        client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0)
        found = client.completions.create(model="tiny", prompt=prompt, max_tokens=2)
        assert found.usage is not None and found.usage.prompt_tokens_details is not None
        return found.usage.prompt_tokens_details.cached_tokens or 0

    assert cached(KEYS[0]) == 0
    assert cached(KEYS[0]) > 30
    assert cached(KEYS[1]) == 0
    assert cached(KEYS[1]) > 30


def test_guessed_tokens_change_nothing(guarded: Served, server: Served) -> None:
    """One of these servers guesses from the text, the other does not."""
    body = BODY | {"prompt": "the lazy dog the lazy dog the lazy", "max_tokens": 60, "logprobs": 2}
    for temperature in (0, 0.7):
        asked = body | {"temperature": temperature, "seed": 3}
        guessed = post(guarded, asked, headers={"authorization": f"Bearer {KEYS[0]}"}).json()
        assert guessed["choices"] == post(server, asked).json()["choices"]


# Names, types and sizes


def test_another_name_of_the_server_is_refused(server: Served) -> None:
    """A website whose name points to the loopback cannot reach the server."""
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", ""):
        response = post(server, headers={"host": host})
        assert response.status_code == 421
        assert error_of(response)["code"] == "unknown_host"
    port = server.url.rpartition(":")[2]
    for name in ("localhost", "127.0.0.1", "[::1]"):
        assert post(server, headers={"host": f"{name}:{port}"}).status_code == 200


def test_a_body_must_be_json(server: Served) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert post(server, headers={"content-type": kind}).status_code == 415
    charset = {"content-type": "application/json; charset=utf-8"}
    assert post(server, headers=charset).status_code == 200
    for body in (b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"{}" * 2, b"[" * 100_000):
        response = post(server, body)
        assert response.status_code == 400, body[:20]
        error_of(response)


def test_unknown_paths_and_methods(server: Served) -> None:
    for method, path, allowed in [
        ("GET", "/v1/completions", {"POST"}),
        ("DELETE", "/health", {"GET", "HEAD"}),
        ("PUT", "/page/app.js", {"GET", "HEAD"}),
    ]:
        response = httpx.request(method, f"{server.url}{path}", json={})
        assert response.status_code == 405, path
        assert set(response.headers["allow"].split(", ")) == allowed
        error_of(response)
    for method, path, status in [
        ("GET", "/v2", 404),
        ("GET", "/page/nothing.js", 404),
        ("GET", "/v1/models/other", 404),
    ]:
        response = httpx.request(method, f"{server.url}{path}")
        assert response.status_code == status, path
        error_of(response)


def test_a_huge_body_is_refused(server: Served) -> None:
    response = post(server, b" " * (5 << 20))
    assert response.status_code == 413
    assert "at most 4194304 bytes" in error_of(response)["message"]

    def endless() -> Iterator[bytes]:
        for _ in range(80):
            yield b" " * 65536

    chunked = httpx.post(
        f"{server.url}/v1/completions",
        content=endless(),
        headers={"content-type": "application/json"},
        timeout=60,
    )
    assert chunked.status_code == 413


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b'"prompt": [' + b"null," * 200_000 + b"null]", 400),
        (b'"prompt": [' + b"1," * 1_000_000 + b"1]", 413),
        (b",".join(b'"%d" : 1' % name for name in range(100_000)), 413),
        (b'"messages": [' + b"{}," * 200_000 + b"{}]", 400),
    ],
)
def test_a_body_of_many_values_holds_nobody_up(server: Served, content: bytes, status: int) -> None:
    """One error is enough: a million of them took half a minute, in which nobody was answered."""
    response = post(server, b'{"model": "tiny", ' + content + b"}")
    assert response.status_code == status
    assert len(error_of(response)["message"]) < 200


def test_huge_headers_are_refused(server: Served) -> None:
    host = server.url.removeprefix("http://").encode()
    head = b"GET /health HTTP/1.1\r\nHost: " + host + b"\r\nX-Long: " + b"a" * 100_000
    assert b" 400 " in raw(server, head).partition(b"\r\n")[0]
    assert b" 431 " in raw(server, head + CLOSE + b"\r\n\r\n").partition(b"\r\n")[0]


def test_what_is_not_http_is_refused(server: Served) -> None:
    for data in (b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n"):
        answer = raw(server, data, half_close=True)
        assert b" 400 " in answer.partition(b"\r\n")[0] or answer == b""


# Times


def test_a_request_that_does_not_arrive_is_given_up(server: Served) -> None:
    host = server.url.removeprefix("http://").encode()
    began = time.monotonic()
    assert raw(server, b"") == b""  # nothing at all
    assert raw(server, b"POST /v1/completions HTTP/1.1\r\nHost: " + host) == b""
    head = CLOSE + b"\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{"
    # The first request is complete, the headers of the second never are.
    first = b"GET /health HTTP/1.1\r\nHost: " + host + b"\r\n\r\n"
    assert raw(server, first + b"GET /health HTTP/1.1\r\nHo").count(b"HTTP/1.1 200") == 1
    late = raw(server, b"POST /v1/completions HTTP/1.1\r\nHost: " + host + head)
    assert b" 408 " in late.partition(b"\r\n")[0]
    assert time.monotonic() - began < 110


def test_half_closed_connections_do_not_keep_requests(server: Served) -> None:
    body = json.dumps(BODY | {"max_tokens": 900, "ignore_eos": True}).encode()
    host = server.url.removeprefix("http://").encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: " + host + b"\r\nContent-Type: application/json"
    data = head + f"\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    raw(server, data, half_close=True)
    wait_until_idle(server)


def test_a_reader_that_is_slow_holds_nobody_up(server: Served) -> None:
    body = json.dumps(
        BODY | {"max_tokens": 900, "ignore_eos": True, "stream": True, "logprobs": 20}
    ).encode()
    host, _, port = server.url.removeprefix("http://").partition(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json"
    with socket.create_connection((host, int(port))) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        slow.recv(1000)
        for _ in range(3):
            assert post(server).status_code == 200
    wait_until_idle(server)


def test_an_answer_has_a_time_limit(model: Path) -> None:
    with served(model, "--time-limit", "0.3") as running:
        long = BODY | {"max_tokens": 1000, "n": 16, "ignore_eos": True}
        response = post(running, long)
        assert response.status_code == 504 and error_of(response)["code"] == "timeout"
        response = post(running, long | {"stream": True})
        while response.status_code == 504:  # not even its first token came in time
            response = post(running, long | {"stream": True})
        lines = response.text.split("\n\n")
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "timeout"
        wait_until_idle(running)


def test_a_full_queue_says_when_to_come_again(guarded: Served) -> None:
    key = {"authorization": f"Bearer {KEYS[0]}"}
    long = BODY | {"max_tokens": 1000, "n": 4, "ignore_eos": True}
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: post(guarded, long, headers=key), range(8)))
    refused = [each for each in found if each.status_code == 429]
    assert 0 < len(refused) < 8
    assert {each.status_code for each in found} == {200, 429}
    for response in refused:
        assert 1 <= int(response.headers["retry-after"]) <= 60
        assert error_of(response)["code"] == "queue_full"
    too_many = post(guarded, BODY | {"n": 5}, headers=key)
    assert too_many.status_code == 400
    assert "at most 4 answers, but asks for 5" in error_of(too_many)["message"]


def test_streams_end_before_the_process(model: Path) -> None:
    """SIGTERM: the answer that is being written is finished, the map's stream ends, then all."""
    with served(model) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(
            model="tiny", prompt="the", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        with httpx.stream("GET", f"{running.url}/live", timeout=60) as live:
            frames = live.iter_lines()
            assert next(frames).startswith("data: ")
            chunks = iter(stream)
            next(chunks)
            running.process.terminate()
            rest = list(chunks)
            assert rest[-1].choices[0].finish_reason == "length"
            for _ in frames:
                pass
        assert running.process.wait(60) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{running.url}/health")


def test_a_stream_gives_back_what_it_holds_if_nobody_reads_it() -> None:
    closed = []

    async def parts() -> AsyncGenerator[bytes]:
        yield b"never sent"

    async def gone(*_: Any) -> Any:
        raise OSError

    async def answer() -> None:
        held = contextlib.AsyncExitStack()
        held.callback(closed.append, True)
        await Stream(parts(), held)({"type": "http", "asgi": {"spec_version": "2.4"}}, gone, gone)

    with pytest.raises(ClientDisconnect):
        asyncio.run(answer())
    assert closed == [True]


def test_a_client_may_leave_while_the_last_part_is_sent() -> None:
    """The stream ends for two reasons in one turn of the loop: nothing is raised in it later."""
    raised = []

    async def answer() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, said: raised.append(said))
        left = asyncio.Event()

        async def parts() -> AsyncGenerator[bytes]:
            yield b"all of it"

        async def receive() -> Any:
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            await asyncio.sleep(0)
            if not message.get("more_body", True):
                left.set()
                await asyncio.sleep(0)

        stream = Stream(parts(), contextlib.AsyncExitStack())
        with contextlib.suppress(ClientDisconnect):
            await stream({"type": "http"}, receive, send)
        await asyncio.sleep(0.01)

    asyncio.run(answer())
    assert raised == []


def wait_until_idle(server: Served) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        text = httpx.get(f"{server.url}/metrics", timeout=60).text
        if "quire_ongoing_answers 0.0" in text and "quire_engine_running 0.0" in text:
            return
        time.sleep(0.1)
    raise AssertionError(text)
