"""What travels between ranks, when, and what memory a rank takes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quire import Dense
from quire.distributed import attention, exchange, local, plan
from quire.distributed import group as group_module
from quire.distributed.group import TALK
from quire.mods import sliding_window
from rank_cases.examples import DTYPES, Example
from rank_cases.results import gradients, same_results


def while_keys_arrive(group: object, examples: list[Example]) -> int:
    """Queries that read own keys are computed first; return how often that was before a wait."""
    worth, local.WORTH_A_CALL = local.WORTH_A_CALL, 0
    waited, early = exchange.Sending.wait, []
    compute = local._in_pages
    done: set[int] = set()

    def wait(self: exchange.Sending) -> tuple[Tensor, ...]:
        done.add(id(self.pages[0]))
        return waited(self)

    def in_pages(*args: Any, **named: Any) -> Any:
        early.append(id(args[3][0]) not in done)
        return compute(*args, **named)

    exchange.Sending.wait, local._in_pages = wait, in_pages  # type: ignore[method-assign]
    try:
        same_results(group, examples)
        gradients(group, examples)
    finally:
        exchange.Sending.wait, local._in_pages = waited, compute  # type: ignore[method-assign]
        local.WORTH_A_CALL = worth
    return sum(early)


def memory(group: Any, learns: bool) -> tuple[float, float]:
    """Return the most bytes that a call takes, and those of what the plan gives to this rank."""
    heads, width, length = 2, 64, 2**16
    divided = plan(sliding_window(256), length=length, mesh=group)
    tokens, received = len(divided.positions), int(divided.received[divided.rank])
    shape = (1, heads, tokens, width)
    q, k, v, above = (torch.randn(shape).requires_grad_(learns) for _ in range(4))
    for _ in range(2):  # the first one compiles
        divided = divided if learns else replace(divided)  # another one keeps no memory
        most = peak_bytes()
        out = attention(q, Dense(k, v), plan=divided)
        if learns:
            torch.autograd.grad(out, (q, k, v), above.detach())
        del out
        taken = most()
    row = heads * width * 4
    return taken, row * (2 * tokens + 2 * (tokens + received))  # queries, results, keys, values


M_MMAP_THRESHOLD = -3  # of malloc.h


def peak_bytes() -> Callable[[], float]:
    """Begin to watch the memory of this process, and return what tells the most above now.

    From now on, a large tensor is returned to the system at once when nobody has it any more.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(x.split()[1]) for x in lines if x.startswith(name)) * 1024

    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    return lambda: status("VmHWM") - before


def bytes_on_the_wire(group: object, example: Example) -> tuple[int, int]:
    """Return the bytes that this rank receives from others, and those that the plan counts."""
    whole, divided = example.tensors(), example.plan(group)
    with counting_bytes() as counted:
        example.together(divided, *divided.shard(*whole, dim=2))
    per_key = example.heads[1] * sum(example.width) * DTYPES[example.dtype].itemsize
    return sum(counted), int(divided.received[divided.rank]) * per_key * example.batch


def gradients_on_the_wire(group: object, example: Example) -> tuple[int, int]:
    """Return the gradients of keys that this rank receives, and those that the plan counts."""
    divided = example.plan(group)
    q, k, v = (x.requires_grad_() for x in divided.shard(*example.tensors(), dim=2))
    out = example.together(divided, q, k, v)
    with counting_bytes() as counted:
        out.sum().backward()
    per_key = example.heads[1] * sum(example.width) * 4  # sums are float32
    return sum(counted), int(divided.returned[divided.rank]) * per_key * example.batch


@contextmanager
def counting_bytes() -> Iterator[list[int]]:
    """Count the bytes of every tensor that this rank receives, without messages."""
    counted: list[int] = []
    real = dist.batch_isend_irecv

    def counting(ops: list[dist.P2POp]) -> Any:
        counted.extend(x.tensor.nbytes for x in ops if x.op is dist.irecv and x.tag != TALK)
        return real(ops)

    group_module.dist.batch_isend_irecv = counting
    try:
        yield counted
    finally:
        group_module.dist.batch_isend_irecv = real
