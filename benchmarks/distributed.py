"""One sequence over many processes: python benchmarks/distributed.py.

`plan` needs no processes: it makes plans for ranks that are imagined. A figure of keys is what a
rank receives, over what it would receive if every rank gathered all keys. `ranks` is the table of
docs/distributed.md. `speed` starts processes of one thread each on this machine, and compares them
with one process of as many threads; `waste` starts more processes than there are cores.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from _race import Table, run_parts

import quire
from quire import Dense, distributed
from quire.distributed import ContextPlan
from quire.mods import causal, document, sliding_window

MILLION, RANKS = 2**20, 64
LONGEST_TEXT = 2**16
BYTES_PER_KEY = 8 * 128 * 2 * 2  # key and value, 8 heads of 128 in bfloat16
LENGTH, HEADS, HEAD_DIM = 32_768, 2, 64


def texts(length: int) -> list[int]:
    """Return lengths of documents that add up to `length`; most are short, a few are long."""
    draw = torch.Generator().manual_seed(0)
    count = max(64, length // 128)
    sizes = (8 + 1.6 * torch.randn(count, generator=draw)).exp().long().clamp(16, LONGEST_TEXT)
    before = int((sizes.cumsum(0) < length).sum())
    return [*sizes[:before].tolist(), length - int(sizes[:before].sum())]


def masks(length: int) -> dict[str, Any]:
    """Return the masks of all rows."""
    return {
        "documents causal": causal & document(lengths=texts(length)),
        "window 4,096": sliding_window(4096),
        "causal": causal,
    }


def gathered(divided: ContextPlan) -> float:
    """Return how many keys a rank would receive if all keys were gathered, on average."""
    return divided.length * (1 - 1 / divided.num_ranks)


def plan(table: Table, seconds: float, threads: int) -> None:
    """Bytes, balance and time of a plan for a million tokens over 64 ranks."""
    wanted = {"documents causal": ("<= 0.1", "<= 1.05"), "window 4,096": ("<= 0.01", "<= 1.02")}
    for name, (keys, balance) in wanted.items():
        mask = masks(MILLION)[name]
        start = time.perf_counter()
        made = distributed.plan(mask, length=MILLION, num_ranks=RANKS, bytes_per_key=BYTES_PER_KEY)
        took = time.perf_counter() - start
        case, all_keys = f"{name}, {RANKS} ranks", gathered(made)
        others = {each.layout: each for each in made.compared}
        worst = round(others["contiguous"].balance, 2)
        most, mean = (float(x) / all_keys for x in (made.received.max(), made.received.mean()))
        table.add(f"{case}, keys of a rank at most", most, "all-gather", keys, layout=made.layout)
        table.add(f"{case}, keys of a rank on average", mean, "all-gather", keys)
        table.add(f"{case}, balance", made.balance, "x mean", balance, contiguous=worst)
        table.add(f"{case}, time to plan", took, "s", "<= 2")


def ranks(table: Table, seconds: float, threads: int) -> None:
    """From 8 to 1,024 ranks: balance, keys, and the time of a network of 10 and of 100 Gbit/s."""
    for name, mask in masks(MILLION).items():
        for count in (8, 16, 64, 256, 1024):
            start = time.perf_counter()
            made = distributed.plan(
                mask, length=MILLION, num_ranks=count, bytes_per_key=BYTES_PER_KEY
            )
            took = time.perf_counter() - start
            most = int(made.received.max())
            table.add(
                f"{name}, {count} ranks",
                made.balance,
                "balance",
                layout=made.layout,
                keys=f"{most:,} (all-gather {gathered(made):,.0f})",
                MiB=round(most * BYTES_PER_KEY / 2**20),
                ms_at_10=round(most * BYTES_PER_KEY * 8 / 10e9 * 1e3),
                ms_at_100=round(most * BYTES_PER_KEY * 8 / 100e9 * 1e3),
                seconds=round(took, 2),
            )


class Case:
    """One sequence of random numbers, whole or in shards, with or without a backward pass."""

    def __init__(
        self,
        mask: Any,
        learns: bool,
        group: dist.ProcessGroup | None = None,
        same_bits: bool | None = None,
    ) -> None:
        torch.manual_seed(0)
        whole = [torch.randn(1, HEADS, LENGTH, HEAD_DIM) for _ in range(4)]
        self.mask, self.plan, self.learns = mask, None, learns
        if group is not None:
            self.plan = distributed.plan(mask, length=LENGTH, mesh=group, same_bits=same_bits)
            whole = list(self.plan.shard(*whole, dim=2))
        self.query, self.key, self.value = (x.requires_grad_(learns) for x in whole[:3])
        self.above = whole[3]

    def run(self) -> float:
        """Compute once, and return the seconds that this process was busy."""
        start, memory = time.process_time(), Dense(self.key, self.value)
        if self.plan is None:
            out = quire.attention(self.query, memory, mask=self.mask)
        else:
            out = distributed.attention(self.query, memory, plan=self.plan)
        if self.learns:
            torch.autograd.grad(out, (self.query, self.key, self.value), self.above)
        return time.process_time() - start


class Workers:
    """Processes of one thread each, which compute a case together when they are told to."""

    def __init__(self, count: int, mask: str, learns: bool, same_bits: bool | None) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes = []
        for rank in range(count):
            ours, theirs = spawn.Pipe()
            where = (theirs, f"{self._folder.name}/store", rank, count)
            args = (*where, mask, learns, same_bits)
            spawn.Process(target=_work, args=args, daemon=True).start()
            self._pipes.append(ours)

    def run(self) -> float:
        """Compute once, and return the seconds that all processes were busy, together."""
        for pipe in self._pipes:
            pipe.send(True)
        return sum(pipe.recv() for pipe in self._pipes)

    def end(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.send(False)
        self._folder.cleanup()


def _work(pipe: Connection, *place: Any) -> None:
    store, rank, count, mask, learns, same_bits = place
    torch.set_num_threads(1)
    where = dist.FileStore(store, count)
    dist.init_process_group("gloo", store=where, rank=rank, world_size=count)
    case = Case(masks(LENGTH)[mask], learns, dist.group.WORLD, same_bits)
    while pipe.recv():
        pipe.send(case.run())


def compared(
    count: int, mask: str, learns: bool, seconds: float, bits: tuple[bool | None, ...] = (None,)
) -> list[tuple[float, float]]:
    """Return the time of one process over that of `count`, and their busy times over its own.

    That is for each of `bits`: whether gradients have the bits of one process. In a turn each
    contestant computes twice. For a virtual machine may return memory that is free for two seconds
    to its host, and get it back slowly: so the second time is like that of a model, in which one
    layer follows another.
    """
    contestants: list[Any] = [Case(masks(LENGTH)[mask], learns)]
    contestants += [Workers(count, mask, learns, each) for each in bits]
    best = [[float("inf")] * 2 for _ in contestants]
    for turn in range(1 + max(3, int(seconds))):
        for who in (n // 2 for n in range(2 * len(contestants))):
            start = time.perf_counter()
            busy = contestants[who].run()
            wall = time.perf_counter() - start
            if turn >= 1:  # the first turn compiles
                best[who] = [min(best[who][0], wall), min(best[who][1], busy)]
    for workers in contestants[1:]:
        workers.end()
    return [(best[0][0] / wall, busy / best[0][1]) for wall, busy in best[1:]]


def speed(table: Table, seconds: float, threads: int) -> None:
    """As many processes of one thread as there are threads, against one process."""
    for mask in ("causal", "documents causal"):
        case = f"{threads} processes, N {LENGTH:,}, {mask}"
        for figure, busy in compared(threads, mask, False, seconds):
            table.add(case, figure, "x 1 process", ">= 0.85", busy=round(busy, 3))
        (same, busy), (other, other_busy) = compared(threads, mask, True, seconds, (None, False))
        table.add(f"{case}, backward", same, "x 1 process", ">= 0.8", busy=round(busy, 3))
        other_case = f"{case}, backward, any bits"
        table.add(other_case, other, "x 1 process", "", busy=round(other_busy, 3))


def waste(table: Table, seconds: float, threads: int) -> None:
    """Twice as many processes as threads: the sum of their busy times."""
    for mask in ("causal", "documents causal"):
        ((_, busy),) = compared(2 * threads, mask, False, seconds)
        table.add(f"{2 * threads} processes, {mask}, busy times", busy, "x 1 process", "<= 1.1")


if __name__ == "__main__":
    run_parts("distributed", __doc__, (plan, ranks, speed, waste))
