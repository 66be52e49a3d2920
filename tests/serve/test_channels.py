"""What replicas send together, and who gets it: without Ray's processes."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)

from ray.exceptions import ActorDiedError

from quire.serve import channels
from quire.serve.channels import JOINED, Batch, Channels, Outboxes, Sender
from quire.serve.routing import Forwarded

pytestmark = pytest.mark.timeout(60)
CALL = Forwarded("POST", "/v1/completions")
Writer = Callable[[Callable[[bytes], None]], Awaitable[None]]


class Call:
    """What a method of a replica returns, as Ray gives it to the front."""

    def __init__(self, items: AsyncIterator[Any]) -> None:
        self._items = items
        self.cancelled = False

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Any:
        return await anext(self._items)

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """A replica, "a", whose streams `write` writes."""

    def __init__(self, write: Writer) -> None:
        self.outboxes, self.write = Outboxes(), write
        self.messages: list[Batch] = []
        self.opened = 0
        self.fails = False  # whether the channel fails when it is opened next

    def options(self, *, method_name: str, **_: Any) -> Any:
        return type("Method", (), {"remote": staticmethod(getattr(self, method_name))})

    def answer(self, _: Forwarded, sender: Sender) -> Call:
        async def items() -> AsyncIterator[Any]:
            with self.outboxes.stream(sender) as send:
                yield 200, {JOINED: "1", "x-replica": "a"}
                await self.write(send)

        return Call(items())

    def parts(self, call: Forwarded, replica: str, front: str) -> Call:
        async def items() -> AsyncIterator[Batch]:
            self.opened += 1
            if self.fails:
                self.fails = False
                raise ActorDiedError
            async for batch in self.outboxes.batches(front):
                self.messages.append(batch)
                yield batch

        assert call.place == replica == "a"
        return Call(items())


def channels_of(handle: Any) -> Channels:
    return Channels(handle)


async def read(parts: Any) -> list[bytes]:
    """Return the parts of an answer."""
    status, _ = await anext(parts)
    assert status == 200
    try:
        return [part async for part in parts]
    finally:
        parts.cancel()


def test_what_is_ready_goes_together_and_to_its_own_call() -> None:
    steps = asyncio.Event()

    async def write(send: Callable[[bytes], None]) -> None:
        for number in range(3):
            await steps.wait()
            send(b"%d" % number)
            await asyncio.sleep(0.05)

    async def run() -> None:
        handle = Handle(write)
        front = channels_of(handle)
        asked = [asyncio.create_task(read(front.remote(CALL))) for _ in range(5)]
        await asyncio.sleep(0.05)
        steps.set()
        assert await asyncio.gather(*asked) == [[b"0", b"1", b"2"]] * 5
        assert handle.opened == 1 and len(handle.messages) <= 4
        assert sorted(handle.messages[0]) == [(number, b"0") for number in range(5)]
        assert not front._parts

    asyncio.run(run())


def test_a_call_that_fails_says_so_after_its_parts() -> None:
    async def write(send: Callable[[bytes], None]) -> None:
        send(b"0")
        await asyncio.sleep(0.05)
        raise ActorDiedError

    async def run() -> None:
        parts = channels_of(Handle(write)).remote(CALL)
        assert await anext(parts) == (200, {JOINED: "1", "x-replica": "a"})
        assert await anext(parts) == b"0"
        with pytest.raises(ActorDiedError):
            await anext(parts)
        parts.cancel()

    asyncio.run(run())


def test_a_channel_ends_when_nobody_writes_and_opens_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "LINGER", 0.05)

    async def write(send: Callable[[bytes], None]) -> None:
        await asyncio.sleep(0.2)  # longer than a channel lingers: it waits for a stream
        send(b"x")

    async def run() -> None:
        handle = Handle(write)
        front = channels_of(handle)
        for turn in (1, 2):
            assert await read(front.remote(CALL)) == [b"x"]
            while front._readers:
                await asyncio.sleep(0.01)
            assert handle.opened == turn and not handle.outboxes._boxes

    asyncio.run(run())


def test_who_leaves_gets_nothing_more() -> None:
    async def write(send: Callable[[bytes], None]) -> None:
        for _ in range(3):
            send(b"x")
            await asyncio.sleep(0.05)

    async def run() -> None:
        front = channels_of(Handle(write))
        gone, stays = front.remote(CALL), front.remote(CALL)
        await anext(gone)
        gone.cancel()
        assert await read(stays) == [b"x"] * 3
        assert gone.inbox.empty() and gone._call.cancelled

    asyncio.run(run())


def test_a_channel_that_fails_is_opened_again() -> None:
    async def write(send: Callable[[bytes], None]) -> None:
        send(b"x")

    async def run() -> None:
        handle = Handle(write)
        handle.fails = True
        assert await read(channels_of(handle).remote(CALL)) == [b"x"]
        assert handle.opened == 2

    asyncio.run(run())
