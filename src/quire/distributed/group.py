"""A group of processes: they agree before anything is sent, and an error on one ends all.

Every call begins with one small message from each rank to all others: what it is about to compute,
or the error that keeps it from that. So ranks that would compute different things, and ranks that
wait for one that has raised, find out before they send data. A rank that dies or never calls is
found by the time-out.
"""

from __future__ import annotations

import json
import math
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from quire.errors import ArgumentError, DistributedError, QuireError, RankError

TIMEOUT = timedelta(minutes=5)

Counts: TypeAlias = NDArray[np.int64]

MESSAGE_BYTES = 4096
"""The size of the message in which a rank says what it is about to compute."""


class Passing(NamedTuple):
    """Tensors that are on their way from the last rank, while others go to the next."""

    group: RankGroup | None = None
    arriving: tuple[Tensor, ...] = ()
    works: tuple[dist.Work | None, ...] = ()
    leaving: tuple[Tensor, ...] = ()  # kept until they are sent

    def wait(self) -> tuple[Tensor, ...]:
        """Return what has arrived."""
        for work in self.works:
            assert self.group is not None
            self.group.wait(work, "exchange of keys")
        return self.arriving


class RankGroup(NamedTuple):
    """Some ranks of torch.distributed; `process_group` is None if they are imagined."""

    rank: int
    size: int
    process_group: dist.ProcessGroup | None = None
    timeout: timedelta = TIMEOUT

    @staticmethod
    def of(mesh: DeviceMesh | dist.ProcessGroup | None, timeout: timedelta = TIMEOUT) -> RankGroup:
        """Return the ranks of a mesh or a process group; by default all, or this process alone."""
        if isinstance(mesh, DeviceMesh):
            if mesh.ndim != 1:
                raise RankError(
                    f"mesh must have one dimension, over which the sequence is cut, but has "
                    f"{mesh.ndim}: {mesh}. Choose one by its name: mesh['cp']."
                )
            mesh = mesh.get_group()
        if mesh is None:
            if not (dist.is_available() and dist.is_initialized()):
                return RankGroup(0, 1, timeout=timeout)
            mesh = dist.group.WORLD
        if not isinstance(mesh, dist.ProcessGroup):
            raise ArgumentError(
                f"mesh must be a DeviceMesh or a process group, but is a {type(mesh).__name__}. "
                f"Make one with torch.distributed.init_device_mesh, or leave it out for all "
                f"processes."
            )
        own = dist.get_rank(mesh)
        if own < 0:
            raise ArgumentError(
                "this process must be in the group that is given, but is not. Call this on the "
                "ranks of the group only."
            )
        return RankGroup(own, dist.get_world_size(mesh), mesh, timeout=timeout)

    def agree(self, facts: dict[str, object], error: Exception | None = None) -> list[Any]:
        """Raise on all ranks if one has an error, or other facts than rank 0; return all `note`s.

        The fact `note` may differ: it is what ranks tell each other.
        """
        if error is not None:
            facts = {"error": f"{type(error).__name__}: {error}"[: MESSAGE_BYTES // 8]}
        told = [facts] if self.size == 1 else self._told(facts)
        if error is not None:
            raise error
        for rank, other in enumerate(told):
            if "error" in other:
                raise DistributedError(
                    f"all ranks must be able to compute this call, but rank {rank} is not: "
                    f"{other['error']} Mend it there; nothing was sent."
                )
        first = told[0]
        for rank, other in enumerate(told):
            for name in sorted({*first, *other} - {"note"}):
                if first.get(name) != other.get(name):
                    raise DistributedError(
                        f"the {name} must be the same on all ranks, but is {first.get(name)} on "
                        f"rank 0 and {other.get(name)} on rank {rank}. Give all ranks the same "
                        f"arguments; nothing was sent."
                    )
        return [each.get("note") for each in told]

    def _told(self, facts: dict[str, object]) -> list[dict[str, Any]]:
        """Return the facts of all ranks."""
        written = json.dumps(facts, ensure_ascii=False).encode()
        assert len(written) <= MESSAGE_BYTES, "facts are short"
        mine = torch.frombuffer(bytearray(written.ljust(MESSAGE_BYTES)), dtype=torch.uint8)
        every = self.gather(mine)
        return [json.loads(bytes(each.tolist())) for each in every]

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have the same shape."""
        if self.size == 1:
            return [tensor]
        every = [torch.empty_like(tensor) for _ in range(self.size)]
        work = dist.all_gather(every, tensor, group=self._real(), async_op=True)
        self.wait(work, "gather")
        return every

    def exchange(
        self, leaving: Tensor, arriving: Tensor, num_sent: Counts, num_received: Counts
    ) -> None:
        """Send rows of `leaving` to each rank, in order, and fill `arriving` with theirs.

        `num_sent` and `num_received` [ranks] count rows. Rows are sent as bytes, in their dtype.
        """
        if self.size == 1:
            return
        work = dist.all_to_all_single(
            as_bytes(arriving),
            as_bytes(leaving),
            output_split_sizes=num_received.tolist(),
            input_split_sizes=num_sent.tolist(),
            group=self._real(),
            async_op=True,
        )
        self.wait(work, "exchange of keys")

    def pass_on(self, leaving: tuple[Tensor, ...], arriving: tuple[Tensor, ...]) -> Passing:
        """Begin to send tensors to the next rank, and to fill `arriving` with those of the last."""
        if self.size == 1:
            return Passing(self, leaving)
        group, works = self._real(), []
        after, before = (
            dist.get_global_rank(group, (self.rank + step) % self.size) for step in (1, -1)
        )
        for sent, into in zip(leaving, arriving, strict=True):
            works.append(dist.isend(sent, after, group=group))
            works.append(dist.irecv(into, before, group=group))
        return Passing(self, arriving, tuple(works), leaving)

    def wait(self, work: dist.Work | None, what: str) -> None:
        """Wait until an operation is done; a rank that is gone raises an error here."""
        assert work is not None, "this rank is in the group"
        try:
            work.wait(self.timeout)
        except QuireError:
            raise
        except RuntimeError as error:
            raise DistributedError(
                f"all {self.size} ranks must take part in the {what} within {self.timeout}, but "
                f"rank {self.rank} waited in vain: {error} See which rank ended or raised."
            ) from error

    def _real(self) -> dist.ProcessGroup:
        if self.process_group is None:
            raise DistributedError(
                f"a plan for {self.size} ranks must have a process group to send anything, but was "
                f"made with num_ranks. Give plan a mesh or a group."
            )
        return self.process_group


def as_bytes(rows: Tensor) -> Tensor:
    """Return rows [n, ...] as uint8 [n, bytes of a row]; contiguous rows share their memory."""
    return rows.reshape(len(rows), math.prod(rows.shape[1:])).view(torch.uint8)
