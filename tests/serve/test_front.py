"""Every wait of the front has an end, whatever replicas do: here they do nothing, or die."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence
from typing import Any

import httpx2 as httpx
import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)

from ray.exceptions import ActorDiedError, TaskCancelledError
from ray.serve.exceptions import RequestCancelledError

from quire.serve import front, problems
from quire.serve.front import Front
from quire.serve.routing import Forwarded
from quire.serve.settings import Settings

pytestmark = pytest.mark.timeout(60)

Event = tuple[int, dict[str, str]] | bytes | BaseException | None
END = b"no more"
HEAD = (200, {"content-type": "text/event-stream", "x-replica": "a"})


class Parts:
    """The parts of an answer of a replica. Without END, nothing comes after the last one."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events
        self.cancelled = False

    def __aiter__(self) -> Parts:
        return self

    async def __anext__(self) -> Event:
        if not self._events:
            await asyncio.Event().wait()
        event = self._events.pop(0)
        if event is END:
            raise StopAsyncIteration
        if isinstance(event, BaseException):
            raise event
        return event

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """Replicas that begin every answer as they are told to, or each as in `turns`."""

    def __init__(self, *events: Event, turns: Sequence[list[Event]] = ()) -> None:
        self._events, self._turns = events, list(turns)
        self.calls: list[Parts] = []
        self.asked: list[Forwarded] = []

    def options(self, **_: Any) -> Handle:
        return self

    def remote(self, call: Forwarded) -> Parts:
        self.asked.append(call)
        self.calls.append(Parts(self._turns.pop(0) if self._turns else list(self._events)))
        return self.calls[-1]


def ask(handle: Handle, method: str, path: str) -> httpx.Response:
    """Return what the front answers."""
    made = Front(handle, Settings(model="tiny", time_limit=0.1), replicas=2)  # type: ignore[arg-type]

    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(made.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, json={} if method == "POST" else None)

    response = asyncio.run(answer())
    assert made._gate.inside == 0
    assert all(call.cancelled for call in handle.calls)
    return response


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "PATIENCE", 1.2)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/health", 503, "replica_lost"),
        ("GET", "/v1/models", 503, "replica_lost"),
        ("GET", "/live", 503, "replica_lost"),
        ("POST", "/v1/completions", 504, "timeout"),
        ("POST", "/v1/embeddings", 504, "timeout"),
    ],
)
def test_replicas_that_do_not_answer(method: str, path: str, status: int, code: str) -> None:
    response = ask(Handle(), method, path)
    assert response.status_code == status and response.json()["error"]["code"] == code


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("begun", [[], [(200, {"x-replica": "a"})]])
def test_numbers_of_replicas_that_do_not_answer(begun: list[Event]) -> None:
    response = ask(Handle(*begun), "GET", "/metrics")
    assert response.status_code == 200
    assert 'replica="front"' in response.text and 'replica="a"' not in response.text


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    "last",
    [
        None,
        ActorDiedError(),
        TaskCancelledError(),
        RequestCancelledError("x"),
        asyncio.CancelledError(),
    ],
)
def test_a_stream_that_stops_ends_with_an_error(last: Exception | None) -> None:
    events: list[Event] = [HEAD, b"data: {}\n\n", *([last] if last else [])]
    response = ask(Handle(*events), "POST", "/v1/completions")
    assert response.status_code == 200
    first, second = response.text.strip().split("\n\n")
    assert first == "data: {}" and "replica_lost" in second


def test_replicas_that_die_are_asked_a_few_times() -> None:
    handle = Handle(ActorDiedError())
    response = ask(handle, "POST", "/v1/completions")
    assert response.status_code == 503 and response.json()["error"]["code"] == "replica_lost"
    assert len(handle.calls) == front.TRIES


@pytest.mark.parametrize(
    "failure", [ActorDiedError(), TaskCancelledError(), asyncio.CancelledError()]
)
def test_a_stream_without_a_byte_of_its_answer_is_asked_again(failure: BaseException) -> None:
    """A replica tells the status first, and may die while it reads the prompt."""
    handle = Handle(turns=[[HEAD, failure], [failure], [HEAD, b"data: {}\n\n", END]])
    response = ask(handle, "POST", "/v1/completions")
    assert response.status_code == 200 and response.text == "data: {}\n\n"
    assert len(handle.calls) == 3


def test_a_replica_whose_engine_has_failed_is_passed_over() -> None:
    body = problems.response(problems.engine_failed()).body
    failed: list[Event] = [(503, {"content-type": "application/json", "x-replica": "a"})]
    failed += [bytes(body), END]
    sound: list[Event] = [(200, {"content-type": "application/json", "x-replica": "b"}), b"{}", END]
    handle = Handle(turns=[failed.copy(), sound])
    assert ask(handle, "POST", "/v1/completions").status_code == 200
    assert [call.failed for call in handle.asked] == [frozenset(), {"a"}]
    handle = Handle(*failed)
    response = ask(handle, "POST", "/v1/completions")
    assert response.status_code == 503 and response.json()["error"]["code"] == "engine_failed"
    assert len(handle.calls) == front.TRIES


def test_time_in_the_queue_does_not_count_against_a_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The front waits for 2.6 s in all: 1.6 s until the stream begins, and 1.6 s in it."""
    monkeypatch.setattr(front, "PATIENCE", 2.5)

    class Slow(Parts):
        async def __anext__(self) -> Event:
            await asyncio.sleep(0.8)
            return await super().__anext__()

    handle = Handle()
    events: list[Event] = [HEAD, b"data: 1\n\n", b"data: 2\n\n", END]
    handle.remote = lambda _: handle.calls.append(Slow(events)) or handle.calls[-1]  # type: ignore
    assert ask(handle, "POST", "/v1/completions").text == "data: 1\n\ndata: 2\n\n"


def test_each_answer_takes_a_place_at_the_front() -> None:
    """Of 2 replicas for 4 answers each, 12 may be inside."""
    made = Front(Handle(), Settings(model="x", max_ongoing=4), replicas=2)  # type: ignore[arg-type]

    async def answer() -> list[int]:
        transport = httpx.ASGITransport(made.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = {"prompt": ["x", "y"], "n": 2}
            asked = [
                asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(4)
            ]
            done, waiting = await asyncio.wait(asked, return_when="FIRST_COMPLETED")
            assert made._gate.inside == 12 and len(waiting) == 3
            for each in waiting:
                each.cancel()
            await asyncio.wait(waiting)
            return [each.result().status_code for each in done]

    assert asyncio.run(answer()) == [429]
