"""Sums over slices go from rank to rank: threads take the place of processes here."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from rank_cases.examples import MASKS
from torch import Tensor

import quire
from quire import Dense, distributed
from quire.distributed import ContextPlan, plan
from quire.distributed.exchange import AddedSlices
from quire.distributed.group import Exchanged, Passing
from quire.distributed.layouts import LAYOUTS
from quire.distributed.local import SideBySide
from quire.mods import causal
from quire.runtime.slices import Round


class Threads(NamedTuple):
    """A group of threads that exchange rows."""

    rank: int
    size: int
    table: dict[int, Sequence[Tensor]]
    barrier: threading.Barrier
    received: list[int]

    def agree(self, facts: dict[str, object]) -> None:
        """No thread has an error."""

    def exchange(self, parts: Exchanged) -> Passing:
        leaving, arriving = parts
        self.table[self.rank] = leaving
        self.barrier.wait(20)
        for rank, into in enumerate(arriving):
            assert into.shape == self.table[rank][self.rank].shape
            into.copy_(self.table[rank][self.rank])
        self.received.append(sum(map(len, arriving)))
        self.barrier.wait(20)
        return Passing()


def added(made: ContextPlan, sums: Tensor) -> tuple[Tensor, int]:
    """Return the total of own rows, and how many pages this rank has received."""
    _, batch, heads, _, width = sums.shape
    side = SideBySide.of(made, batch)
    own = torch.from_numpy(np.flatnonzero(made.of_slices == made.rank))
    rows = AddedSlices(made, side.columns, {"key": torch.empty(batch, heads, 0, width)})
    mine = sums[own][:, :, :, side.rows]
    if not len(own):
        mine = sums[:1, :, :, side.rows] * 0
    rows.take(Round(0, batch, 0, heads, 0, len(mine)), {"key": mine})
    total = rows.total("key")
    assert total is not None
    return total, sum(made.group.received)  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("mask", ["causal", "window", "causal documents", "random", "by batch"])
def test_the_order_is_that_of_one_process(mask: str, num_ranks: int) -> None:
    length, batch, by_batch = 2300 if mask == "random" else 4000, 2, mask == "by batch"
    torch.manual_seed(0)
    for layout in LAYOUTS:
        made = plan(
            MASKS[mask],
            length=length,
            num_ranks=num_ranks,
            layout=layout,
            batch=batch if by_batch else None,
            same_bits=True,
        )
        needs = made.slice_needs
        assert needs is not None
        reads = torch.from_numpy(needs).repeat_interleave(made.block, 2)[..., :length]
        sums = torch.randn(len(needs), batch, 1, length, 2) * reads[:, :, None, :, None]
        total = torch.zeros_like(sums[0])
        for each in sums:
            total += each
        table: dict[int, tuple[Tensor, Any]] = {}
        barrier = threading.Barrier(num_ranks)
        groups = [Threads(n, num_ranks, table, barrier, []) for n in range(num_ranks)]
        plans = [replace(made, group=each) for each in groups]  # type: ignore[arg-type]
        with ThreadPoolExecutor(num_ranks) as pool:
            found = list(pool.map(added, plans, [sums] * num_ranks))
        for mine, (rows, pages) in zip(plans, found, strict=True):
            assert torch.equal(rows, total[:, :, mine.rows])
            planned = int(made.returned[mine.rank]) // made.block
            assert by_batch or pages == batch * planned


def test_memory_of_sums_is_zero_again_after_each_pass() -> None:
    """Layers of a model use it one after the other, with more and with fewer heads."""
    divided = plan(causal, length=1500, same_bits=True)
    for heads in (2, 1, 3, 2):
        tensors = [torch.randn(1, heads, 1500, 16, requires_grad=True) for _ in range(3)]
        above = torch.randn(1, heads, 1500, 16)
        query, key, value = tensors
        found = distributed.attention(query, Dense(key, value), plan=divided)
        wanted = quire.attention(query, Dense(key, value), mask=causal)
        for one, other in zip(
            torch.autograd.grad(found, tensors, above),
            torch.autograd.grad(wanted, tensors, above),
            strict=True,
        ):
            assert torch.equal(one, other)
        assert [int(memory.count_nonzero()) for memory in divided.kept._free] == [0, 0]
