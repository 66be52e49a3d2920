"""The router of the front, without a cluster: replicas are busy, late, lost, or come back."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from quire.serve.routing import SPARE, Forwarded, PrefixRouter

pytestmark = pytest.mark.timeout(60)


class Replica:
    """A replica that has `load` requests, and takes `limit`. It says so late for a while."""

    def __init__(self, name: str, load: int = 0, limit: int = SPARE + 4, late: float = 0.0) -> None:
        self.replica_id = ReplicaID(name, DeploymentID("Replica"))
        self.max_ongoing_requests, self._load = limit, load
        self._prompt_from = time.monotonic() + late

    async def get_queue_len(self, *, deadline_s: float) -> int:
        if time.monotonic() < self._prompt_from:
            await asyncio.sleep(2 * deadline_s)
        return self._load


def pending(call: Forwarded, number: int = 0) -> PendingRequest:
    return PendingRequest(
        args=[call],
        kwargs={},
        metadata=RequestMetadata(request_id=str(number), internal_request_id=str(number)),
    )


async def routed(router: PrefixRouter, request: PendingRequest) -> str:
    chosen = await router._choose_replica_for_request(request)
    return str(chosen.replica_id.unique_id)


class CountedRouter(PrefixRouter):
    """Counts how often it is asked."""

    asked = 0

    async def choose_replicas(self, *args: Any, **options: Any) -> list[list[RunningReplica]]:
        self.asked += 1
        return await super().choose_replicas(*args, **options)


def in_router(check: Callable[[PrefixRouter], Awaitable[None]]) -> None:
    """Run a check, in whose short time Ray asks a few times, and not in a loop without a pause."""

    async def run() -> None:
        source = DeploymentHandleSource.UNKNOWN
        router = CountedRouter(DeploymentID("Replica"), source, use_replica_queue_len_cache=True)
        await check(router)
        assert router.asked < 100

    asyncio.run(run())


CALLS = [
    Forwarded("GET", "/health"),
    Forwarded("GET", "/metrics", place=1),
    Forwarded("POST", "/v1/completions", start=b"x"),
    Forwarded("POST", "/v1/embeddings"),
]


@pytest.mark.parametrize("call", CALLS)
def test_a_router_hears_of_a_replica_while_it_looks_for_one(call: Forwarded) -> None:
    """No matter whether it knew none, or a full one."""

    async def check(router: PrefixRouter) -> None:
        for known in ([], [Replica("full", load=SPARE + 4)]):
            router.update_replicas(known)  # type: ignore[arg-type]
            await asyncio.sleep(0.05)
            wanted = asyncio.create_task(routed(router, pending(call)))
            await asyncio.sleep(0.2)
            assert not wanted.done()
            router.update_replicas([Replica("new")])  # type: ignore[list-item]
            assert await asyncio.wait_for(wanted, 20) == "new"

    in_router(check)


def test_numbers_are_those_of_the_replica_that_is_left() -> None:
    """Place 1 of one replica is that replica, until the other is back."""

    async def check(router: PrefixRouter) -> None:
        router.update_replicas([Replica("a")])  # type: ignore[list-item]
        call = Forwarded("GET", "/metrics", place=1)
        assert await asyncio.wait_for(routed(router, pending(call)), 20) == "a"
        router.update_replicas([Replica("a"), Replica("b")])  # type: ignore[list-item]
        assert await asyncio.wait_for(routed(router, pending(call)), 20) == "b"

    in_router(check)


def test_who_gives_up_leaves_nothing_behind() -> None:
    async def check(router: PrefixRouter) -> None:
        router.update_replicas([])
        given_up = [
            asyncio.create_task(routed(router, pending(call, number)))
            for number, call in enumerate(CALLS)
        ]
        await asyncio.sleep(0.05)
        for each in given_up:
            each.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)
        async with asyncio.timeout(20):
            while router.curr_num_routing_tasks or router.num_pending_requests:
                await asyncio.sleep(0.01)
        router.update_replicas([Replica("new")])  # type: ignore[list-item]
        later = [routed(router, pending(call, number)) for number, call in enumerate(CALLS)]
        found = await asyncio.wait_for(asyncio.gather(*later), 20)
        assert Counter(found) == {"new": len(CALLS)}

    in_router(check)


def prompt(answers: int = 1) -> Forwarded:
    return Forwarded("POST", "/v1/completions", answers=answers)


def ask_all(router: PrefixRouter, calls: list[Forwarded], first: int = 0) -> list[Any]:
    """Ask for a replica for each call, and return the tasks."""
    return [
        asyncio.create_task(routed(router, pending(call, number)))
        for number, call in enumerate(calls, first)
    ]


def test_requests_whose_replicas_are_late_do_not_wait_for_each_other() -> None:
    """As many as there are places: each has chosen one, and must not take it for another's."""

    async def check(router: PrefixRouter) -> None:
        router.queue_len_response_deadline_s = 0.2
        router.update_replicas([Replica(name, late=0.1) for name in "ab"])  # type: ignore[misc]
        found = await asyncio.wait_for(asyncio.gather(*ask_all(router, 8 * [prompt()])), 20)
        assert Counter(found) == {"a": 4, "b": 4}

    in_router(check)


def test_a_place_is_free_when_its_request_ends_or_leaves() -> None:
    async def check(router: PrefixRouter) -> None:
        replica = Replica("a")
        router.update_replicas([replica])  # type: ignore[list-item]
        await asyncio.gather(*ask_all(router, 4 * [prompt()]))
        waiting = ask_all(router, 2 * [prompt()], first=4)
        await asyncio.wait(waiting, timeout=0.2)
        assert not any(each.done() for each in waiting)
        router.on_request_completed(replica.replica_id, "0")
        _, left = await asyncio.wait(waiting, timeout=20, return_when="FIRST_COMPLETED")
        assert len(left) == 1
        left.pop().cancel()
        (last,) = ask_all(router, [prompt()], first=6)
        router.on_request_completed(replica.replica_id, "1")
        assert await asyncio.wait_for(last, 20) == "a"

    in_router(check)


def test_who_leaves_as_a_replica_is_found_takes_no_place() -> None:
    async def check(router: PrefixRouter) -> None:
        router.update_replicas([Replica("a")])  # type: ignore[list-item]
        for number in range(8):
            request = pending(prompt(), number)
            asking = asyncio.create_task(routed(router, request))
            while not request.future.done():
                await asyncio.sleep(0)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        found = await asyncio.wait_for(asyncio.gather(*ask_all(router, 4 * [prompt()])), 20)
        assert found == 4 * ["a"]

    in_router(check)


def test_who_only_looks_takes_no_place_of_a_prompt() -> None:
    async def check(router: PrefixRouter) -> None:
        router.update_replicas([Replica("a")])  # type: ignore[list-item]
        looks = [Forwarded("GET", "/live", place=0), Forwarded("GET", "/health")]
        for number, call in enumerate(4 * looks):
            request = pending(call, number)
            await router._choose_replica_for_request(request)
            router.on_send_request(ReplicaID("a", DeploymentID("Replica")))
        found = await asyncio.wait_for(asyncio.gather(*ask_all(router, 4 * [prompt()], 9)), 20)
        assert found == 4 * ["a"]

    in_router(check)


def test_a_request_of_many_answers_takes_many_places() -> None:
    async def check(router: PrefixRouter) -> None:
        router.update_replicas([Replica("a"), Replica("b")])  # type: ignore[list-item]
        found = await asyncio.wait_for(asyncio.gather(*ask_all(router, 2 * [prompt(4)])), 20)
        assert sorted(found) == ["a", "b"]
        (more,) = ask_all(router, [prompt()], first=2)
        await asyncio.wait([more], timeout=0.2)
        assert not more.done()
        router.on_request_completed(ReplicaID("b", DeploymentID("Replica")), str(found.index("b")))
        assert await asyncio.wait_for(more, 20) == "b"

    in_router(check)


def test_a_replica_that_has_failed_is_not_asked_again_while_there_is_another() -> None:
    async def check(router: PrefixRouter) -> None:
        router.update_replicas([Replica("a"), Replica("b")])  # type: ignore[list-item]
        for name in "ab":
            call = prompt()._replace(start=b"x", failed=frozenset(name))
            found = await asyncio.wait_for(routed(router, pending(call, ord(name))), 20)
            assert found != name
        call = prompt()._replace(failed=frozenset("ab"))
        assert await asyncio.wait_for(routed(router, pending(call)), 20) in "ab"

    in_router(check)
