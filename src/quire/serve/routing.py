"""The request router of Ray Serve: a prompt goes to the replica that has its beginning."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from quire.serve.prefixes import in_order

SPARE = 32
"""How many requests a replica takes beyond its limit: those that only ask how it is."""


class Forwarded(NamedTuple):
    """A request on its way from the front to a replica.

    `start` stands for the first page of its prompt, if it has one. With `place`, it is for one
    replica, counted in the order of their names. If there are fewer now, the last one gets it.
    A GET asks how a replica is, and takes no place of it. All else takes one for each answer.
    `failed` are the names of replicas that have failed at it.
    """

    method: str
    path: str
    body: bytes = b""
    tenant: bytes = b""
    start: bytes | None = None
    place: int | None = None
    answers: int = 1
    failed: frozenset[str] = frozenset()


class PrefixRouter(RequestRouter):
    """Chooses a replica by the beginning of the prompt and by load."""

    # A replica that is busy may be late. Ray would give it a tenth of a second, and up to one.
    queue_len_response_deadline_s = 1.0
    max_queue_len_response_deadline_s = 4.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._counted: dict[str, tuple[ReplicaID, int]] = {}  # by request: where, how many answers

    @property
    def max_num_routing_tasks(self) -> int:
        """How many requests are routed at a time: all that wait.

        Ray would route two for each replica. While replicas are full, prompts would hold these
        places, and /health and /metrics, which find room in any replica, would wait behind them.
        """
        return int(self.num_pending_requests)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which they are to be tried."""
        if pending_request is not None:
            # Without this, Ray asks again at once while nobody is free, and its event loop never
            # hears that a replica has come back.
            pending_request.routing_context.should_backoff = True
        call = None if pending_request is None else _call(pending_request)
        if pending_request is None or call is None or (call.method == "GET" and call.place is None):
            return [candidate_replicas]
        if call.place is not None:
            return [sorted(candidate_replicas, key=_name)[: call.place + 1][-1:]]
        # It is asked again if the replica did not say in time whether it has room. Then it must not
        # count against itself, and another replica comes first.
        number = pending_request.metadata.internal_request_id
        late = self._counted.pop(number, (None,))[0]
        # If all are full, the request waits with others, or is refused by the front's gate.
        sound = [each for each in candidate_replicas if _name(each) not in call.failed]
        room = [each for each in sound or candidate_replicas if self._has_room(each, call.answers)]
        start = random.randbytes(8) if call.start is None else call.start
        order = in_order(start, room, _name, self._load)
        order.sort(key=lambda replica: replica.replica_id == late)
        if order and not pending_request.future.done():
            # It counts before it is sent, since others are chosen meanwhile.
            self._counted[number] = order[0].replica_id, call.answers
        return [order[:1]]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, **options: Any
    ) -> RunningReplica:
        """Return the replica that gets a request, and count the request there."""
        number = pending_request.metadata.internal_request_id
        try:
            chosen = await super()._choose_replica_for_request(pending_request, **options)
        except BaseException:  # cancelled, maybe when a replica was found
            self._counted.pop(number, None)
            raise
        if number in self._counted:
            self._counted[number] = chosen.replica_id, self._counted[number][1]
        return chosen

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count a request no longer, unless another replica has been asked meanwhile."""
        super().on_request_completed(replica_id, internal_request_id)
        if self._counted.get(internal_request_id, (None,))[0] == replica_id:
            self._counted.pop(internal_request_id, None)

    def _load(self, replica: RunningReplica) -> int:
        """Return how many answers a replica writes. What Ray counts are requests of all kinds."""
        counted = list(self._counted.values())
        return sum(answers for where, answers in counted if where == replica.replica_id)

    def _has_room(self, replica: RunningReplica, answers: int) -> bool:
        return self._load(replica) + answers <= int(replica.max_ongoing_requests) - SPARE


def _call(request: PendingRequest) -> Forwarded | None:
    found = [each for each in request.args if isinstance(each, Forwarded)]
    return found[0] if found else None


def _name(replica: RunningReplica) -> str:
    name: str = replica.replica_id.unique_id
    return name
