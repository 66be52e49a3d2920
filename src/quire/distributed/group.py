"""A group of processes: they agree before anything is sent, and an error on one ends all.

Every call begins with one small message from each rank to all others: what it is about to compute,
or the error that keeps it from that. So ranks that would compute different things, and ranks that
wait for one that has raised, find out before they send data. A message is waited for from each
rank apart: so one that dies or never calls is known by its number.

An error on a rank becomes a part of the next message: `agreeing` agrees after a block, and raises
its error on all ranks. `telling` sends the error of a block in place of the rank's next message,
and waits for nobody, since others may compute for a while before they agree again.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from quire.errors import ArgumentError, DistributedError, QuireError, RankError

TIMEOUT = timedelta(minutes=5)

_Begun: TypeAlias = "list[dist.Work] | RuntimeError"

Exchanged: TypeAlias = tuple[Sequence[Tensor], Sequence[Tensor]]
"""What leaves to each rank, and what arrives from each."""

MESSAGE_BYTES = 4096
"""The size of the message in which a rank says what it is about to compute."""

TALK, KEYS = 7101, 7102
"""Tags of what is sent from rank to rank, which others hardly use: nothing else arrives in its
place."""

TOLD = "quire: the other ranks of the group are told of this error."

_LAST_WORDS: deque[object] = deque(maxlen=64)
"""Messages that nobody has waited for. A message is lost if its memory is freed too early."""


class Passing(NamedTuple):
    """Tensors that are on their way from other ranks, while others leave."""

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
        told = [facts] if self.size == 1 else self._told(facts if error is None else _about(error))
        if error is not None:
            if self.size > 1:
                error.add_note(TOLD)
            raise error
        for rank, other in enumerate(told):
            if "error" in other:
                raise DistributedError(
                    f"all ranks must be able to compute this call, but rank {rank} is not: "
                    f"{other['error']} Mend it there."
                )
        first = told[0]
        for rank, other in enumerate(told):
            for name in {**first, **other}:
                if name != "note" and first.get(name) != other.get(name):
                    raise DistributedError(
                        f"the {name} must be the same on all ranks, but is {first.get(name)} on "
                        f"rank 0 and {other.get(name)} on rank {rank}. Give all ranks the same "
                        f"arguments; nothing was sent."
                    )
        return [each.get("note") for each in told]

    @contextmanager
    def agreeing(self, facts: dict[str, object]) -> Iterator[list[Any]]:
        """Agree after the block on the facts that it adds; an error in it is raised on all ranks.

        The list is filled with all `note`s.
        """
        notes: list[Any] = []
        error = None
        try:
            yield notes
        except Exception as raised:  # whatever it is, the other ranks must not wait for this one
            error = raised
        notes += self.agree(facts, error)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the other ranks of an error in the block: they raise when they next agree."""
        try:
            yield
        except DistributedError:  # the others have it, too, or are gone
            raise
        except Exception as error:
            if self.size > 1 and TOLD not in getattr(error, "__notes__", ()):
                _LAST_WORDS.append(self._talked(_about(error)))
                error.add_note(TOLD)
            raise

    def _told(self, facts: dict[str, object]) -> list[dict[str, Any]]:
        """Return the facts of all ranks."""
        every, works = self._talked(facts)
        end = time.monotonic() + self.timeout.total_seconds()
        missing: dict[int, str] = {}
        for rank, begun in works.items():
            left = timedelta(seconds=max(1e-3, end - time.monotonic()))
            try:
                if isinstance(begun, RuntimeError):
                    raise begun
                for work in begun:
                    work.wait(left)
            except RuntimeError as error:
                # A time-out ends the connections to all ranks, and most messages are there by then.
                if not every[rank][-1]:
                    missing[rank] = str(error).splitlines()[0]
        if missing:
            raise DistributedError(
                f"all {self.size} ranks must take part in a call within {self.timeout}, but rank "
                f"{self.rank} has no message from rank {', '.join(map(str, missing))}: "
                f"{'; '.join(sorted({*missing.values()}))}. See why it ended, raised or did not "
                f"call."
            )
        return [json.loads(each.cpu().numpy().tobytes()) for each in every]

    def _talked(self, facts: dict[str, object]) -> tuple[list[Tensor], dict[int, _Begun]]:
        """Begin to send the own message to all ranks; return theirs, and what fills them."""
        written = json.dumps(facts, ensure_ascii=False).encode()
        assert len(written) <= MESSAGE_BYTES, "facts are short"
        message = torch.frombuffer(bytearray(written.ljust(MESSAGE_BYTES)), dtype=torch.uint8)
        mine = message.to(self._device)
        every = [mine if n == self.rank else torch.zeros_like(mine) for n in range(self.size)]
        begun: dict[int, _Begun] = {}
        for rank in range(self.size):
            if rank != self.rank:
                try:
                    begun[rank] = self._between([(rank, every[rank])], [(rank, mine)], TALK)
                except RuntimeError as error:
                    begun[rank] = error
        return every, begun

    def _between(
        self,
        arriving: Iterable[tuple[int, Tensor]],
        leaving: Iterable[tuple[int, Tensor]],
        tag: int,
    ) -> list[dist.Work]:
        """Begin to receive tensors from ranks, and to send others to ranks; not the empty ones.

        All begin together, as some backends would wait for the first one else.
        """
        ops = [
            dist.P2POp(op, as_bytes(x), dist.get_global_rank(self._real(), rank), self._real(), tag)
            for op, each in ((dist.irecv, arriving), (dist.isend, leaving))
            for rank, x in each
            if x.numel()
        ]
        return dist.batch_isend_irecv(ops) if ops else []

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have the same shape."""
        if self.size == 1:
            return [tensor]
        every = [torch.empty_like(tensor) for _ in range(self.size)]
        work = dist.all_gather(every, tensor, group=self._real(), async_op=True)
        self.wait(work, "gather")
        return every

    def exchange(self, *parts: Exchanged) -> Passing:
        """Begin to send a tensor to each rank, and to fill one with what it sends; or several.

        All are contiguous.
        """
        others = [*range(self.rank + 1, self.size), *range(self.rank)]
        for leaving, arriving in parts:
            arriving[self.rank].copy_(leaving[self.rank])
        comes = [(rank, arriving[rank]) for _, arriving in parts for rank in others]
        leaves = [(rank, leaving[rank]) for leaving, _ in parts for rank in others]
        works = self._between(comes, leaves, KEYS)
        return Passing(self, _tensors(comes), tuple(works), _tensors(leaves))

    def pass_on(self, leaving: tuple[Tensor, ...], arriving: tuple[Tensor, ...]) -> Passing:
        """Begin to send tensors to the next rank, and to fill `arriving` with those of the last."""
        if self.size == 1:
            return Passing(self, leaving)
        after, before = ((self.rank + step) % self.size for step in (1, -1))
        works = self._between([(before, x) for x in arriving], [(after, x) for x in leaving], KEYS)
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

    @property
    def _device(self) -> str:
        """Return a device whose tensors the group can send: the CPU, if it can."""
        devices = [x.split(":")[0] for x in dist.get_backend_config(self._real()).split(",")]
        return "cpu" if "cpu" in devices else devices[0]

    def _real(self) -> dist.ProcessGroup:
        if self.process_group is None:
            raise DistributedError(
                f"a plan for {self.size} ranks must have a process group to send anything, but was "
                f"made with num_ranks. Give plan a mesh or a group."
            )
        return self.process_group


def _about(error: Exception) -> dict[str, object]:
    """Return the facts of a rank that has an error."""
    return {"error": f"{type(error).__name__}: {error}"[: MESSAGE_BYTES // 8]}


def _tensors(numbered: list[tuple[int, Tensor]]) -> tuple[Tensor, ...]:
    return tuple(x for _, x in numbered)


def as_bytes(rows: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as uint8, since it is sent as bytes."""
    return rows.view(-1).view(torch.uint8)
