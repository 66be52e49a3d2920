"""One stream of messages from a replica to the front, for all answers that the replica writes.

    replica: a step ends ─▶ parts of all its streams ─▶ Outboxes ─▶ one message of Ray
    front:   one message ─▶ Channels ─▶ the answer of each call

A message of Ray costs much more than a token, so what is ready at the same time goes together. A
call itself brings the status and the headers of its answer, and says if its replica has failed.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ray.serve.handle import DeploymentHandle

from quire.serve.routing import Forwarded

JOINED = "x-joined"
"""The header of an answer whose parts come by the channel."""

LINGER = 5.0
"""How many seconds a channel waits for the next stream."""

AGAIN = 0.05
"""How many seconds pass before a channel that has ended is opened again."""

Sender = tuple[str, int]
"""The name of a front, and the number that it gave a call."""

Batch = list[tuple[int, bytes | None]]
"""Parts, each with the number of its call. None ends the parts of a call."""


class _Outbox:
    """What one front has not been sent yet."""

    def __init__(self) -> None:
        self.batch: Batch = []
        self.filled = asyncio.Event()
        self.streams = 0  # how many are being written

    def put(self, number: int, part: bytes | None) -> None:
        """Add a part."""
        self.batch.append((number, part))
        self.filled.set()


class Outboxes:
    """What a replica has to send to fronts. There are two fronts while one takes over."""

    def __init__(self) -> None:
        self._boxes: defaultdict[str, _Outbox] = defaultdict(_Outbox)

    @contextmanager
    def stream(self, sender: Sender) -> Iterator[Callable[[bytes], None]]:
        """Return what sends a part of an answer."""
        front, number = sender
        box = self._boxes[front]
        box.streams += 1
        try:
            yield lambda part: box.put(number, part)
            box.put(number, None)  # unless it has failed: then the call says so
        finally:
            box.streams -= 1
            box.filled.set()

    async def batches(self, front: str) -> AsyncIterator[Batch]:
        """Return parts as they come. End when there has been no stream for a while."""
        box = self._boxes[front]
        with suppress(TimeoutError):
            while True:
                async with asyncio.timeout(None if box.streams else LINGER):
                    await box.filled.wait()
                batch, box.batch = box.batch, []
                box.filled.clear()
                yield batch
        if not box.streams:
            self._boxes.pop(front, None)


class Channels:
    """Replicas behind a handle of Ray Serve. A call returns a `ReplicaAnswer`."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._calls = handle.options(stream=True, method_name="answer")
        self._channels = handle.options(stream=True, method_name="parts")
        self._front, self._numbers = secrets.token_hex(8), itertools.count()
        self._parts: dict[int, ReplicaAnswer] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}  # by the name of the replica

    def remote(self, call: Forwarded) -> ReplicaAnswer:
        """Call a replica."""
        number = next(self._numbers)
        self._parts[number] = ReplicaAnswer(
            self, number, self._calls.remote(call, (self._front, number))
        )
        return self._parts[number]

    def open(self, replica: str) -> None:
        """Have somebody read what a replica sends."""
        if replica not in self._readers:
            # Ray would end it with the request that runs in this context.
            context = contextvars.Context()
            reader = asyncio.create_task(self._read(replica), context=context)
            self._readers[replica] = reader

    async def _read(self, replica: str) -> None:
        """Give the parts that a replica sends to their calls, as long as there are any."""
        while any(each.replica == replica for each in self._parts.values()):
            call = Forwarded("GET", "", place=replica)
            sent = self._channels.remote(call, replica, self._front)
            with suppress(Exception):  # the calls themselves say that their replica has failed
                async for batch in sent:
                    for number, part in batch:
                        if number in self._parts:  # else its client has left
                            self._parts[number].inbox.put_nowait(part)
            await asyncio.sleep(AGAIN)
        del self._readers[replica]

    def forget(self, number: int) -> None:
        """Give no more parts to a call."""
        self._parts.pop(number, None)


class ReplicaAnswer:
    """The answer to a call: its status and its headers, then the parts of its body."""

    def __init__(self, channels: Channels, number: int, call: Any) -> None:
        self._channels, self._number, self._call = channels, number, call
        self.replica: str | None = None  # whose channel has the parts
        self.inbox: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()
        self._watch: asyncio.Task[None] | None = None

    def __aiter__(self) -> ReplicaAnswer:
        return self

    async def __anext__(self) -> Any:
        if self.replica is None:
            part = await anext(self._call)
            if isinstance(part, tuple) and JOINED in part[1]:
                self.replica = part[1]["x-replica"]
                self._watch = asyncio.create_task(self._watched())
                self._channels.open(self.replica)
            return part
        found = await self.inbox.get()
        if found is None:
            raise StopAsyncIteration
        if isinstance(found, BaseException):
            raise found
        return found

    async def _watched(self) -> None:
        """Pass on what ends the call, if it fails. Else the last part says that it was the last."""
        try:
            async for _ in self._call:
                pass
        except BaseException as error:  # Ray also raises what asyncio raises in a cancelled task
            self.inbox.put_nowait(error)

    def cancel(self) -> None:
        """End the call. One that never began raises what has kept it."""
        self._channels.forget(self._number)
        if self._watch is not None:
            self._watch.cancel()
        self._call.cancel()
