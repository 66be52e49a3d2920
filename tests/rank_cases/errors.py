"""Ranks that differ, fail, or are gone."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import quire
from quire import AuxRequest, Dense, Ragged
from quire.distributed import (
    attend_over_ranks,
    attention,
    context_parallel,
    exchange,
    passes,
    plan,
)
from quire.distributed.group import RankGroup
from quire.mods import causal, sliding_window
from quire.plans import CallPlan
from quire.runtime.backward import Pass
from rank_cases.examples import SOON, Example, slopes


def disagree(group: object, what: str) -> None:
    """Rank 1 does something else than the others."""
    odd = dist.get_rank(group) == 1  # type: ignore[arg-type]
    example = Example("causal documents", length=300, score="slopes")
    if odd and what == "length":
        example = replace(example, length=320)
    elif odd and what == "mask":
        example = replace(example, mask="documents")
    elif odd and what == "score_mod":
        example = replace(example, score="")
    elif odd and what == "dtype":
        example = replace(example, dtype="bfloat16")
    elif odd and what == "sink":
        example = replace(example, sink=True)
    q, k, v = example.plan(group).shard(*example.tensors(), dim=2)
    if odd and what == "bad input":
        k = k[:, :, 1:]
    more = {"return_aux": AuxRequest(lse=True), "backend": "eager"}
    if odd and what == "what learns":
        q.requires_grad_()
    example.together(
        example.plan(group), q, k, v, **{what: more[what]} if odd and what in more else {}
    )


def asks_for_too_much(group: object, what: str) -> None:
    """Rank 1 gives arguments that are refused before anything else is looked at."""
    odd = dist.get_rank(group) == 1  # type: ignore[arg-type]
    divided = plan(causal, length=300, mesh=group, timeout=SOON)  # type: ignore[arg-type]
    q, k, v = divided.shard(*Example(length=300).tensors(), dim=2)
    weights = AuxRequest(weights=[0])
    if what in ("mask", "q_start"):
        more: Any = {"mask": {"mask": sliding_window(9)}, "q_start": {"q_start": 5}}
        with context_parallel(divided):
            quire.attention(q, Dense(k, v), **more[what] if odd else {})
    elif what == "weights":
        attention(q, Dense(k, v), plan=divided, return_aux=weights if odd else AuxRequest())
    else:
        attention(q, Dense(k, v), plan=divided, **{"score": None} if odd else {})  # type: ignore[call-overload]


def fails(group: object, method: str, which: str) -> None:
    """Rank 1 has an error in the middle of a forward or a backward pass."""
    odd = dist.get_rank(group) == 1  # type: ignore[arg-type]
    example = Example(length=1100, heads=(6, 3), same_bits=False, method=method)
    divided = replace(example.plan(group), group=RankGroup.of(group, SOON))  # type: ignore[arg-type]
    own = [x.requires_grad_() for x in divided.shard(*example.tensors(), dim=2)]
    real = getattr(CallPlan, which)

    def broken(*args: Any, **named: Any) -> Any:
        raise ValueError("this is broken")

    if odd:
        setattr(CallPlan, which, broken)
    try:
        out = example.together(divided, *own)
        out.sum().backward()
    finally:
        setattr(CallPlan, which, real)


def has_no_memory(group: object, learns: bool) -> None:
    """Rank 1 cannot make the pages that it sends and receives."""
    odd = dist.get_rank(group) == 1  # type: ignore[arg-type]
    example = Example(length=1100, method="pages")
    divided = replace(example.plan(group), group=RankGroup.of(group, SOON))  # type: ignore[arg-type]
    own = [x.requires_grad_(learns) for x in divided.shard(*example.tensors(), dim=2)]
    real = exchange.fill_own

    def broken(*args: Any) -> None:
        raise MemoryError("there is none")

    if odd:
        exchange.fill_own = broken
    try:
        example.together(divided, *own)
    finally:
        exchange.fill_own = real


def fails_in_slices(group: object, rounds: int) -> None:
    """Rank 1 has an error while it computes slices, after it has sent the sums of some rounds."""
    odd = dist.get_rank(group) == 1  # type: ignore[arg-type]
    example = Example(length=1100, heads=(6, 3), same_bits=True, method="pages")
    divided = replace(example.plan(group), group=RankGroup.of(group, SOON))  # type: ignore[arg-type]
    own = [x.requires_grad_() for x in divided.shard(*example.tensors(), dim=2)]
    largest, real, done = passes.LARGEST_SUMS, Pass._launch, []

    def launch(*args: Any) -> None:
        if len(done) == rounds:
            raise ValueError("this is broken")
        done.append(real(*args))  # type: ignore[func-returns-value]

    passes.LARGEST_SUMS = 1  # one head at a time
    if odd:
        Pass._launch = launch  # type: ignore[method-assign]
    try:
        example.together(divided, *own).sum().backward()
    finally:
        passes.LARGEST_SUMS, Pass._launch = largest, real  # type: ignore[method-assign]


def patience(group: object, how: str, same_bits: bool) -> None:
    """Rank 1 never calls, is killed before it does, or between a forward and a backward pass."""
    odd = dist.get_rank(group) == 1  # type: ignore[arg-type]
    example = Example(length=1100, same_bits=same_bits)
    divided = plan(causal, length=1100, mesh=group, same_bits=same_bits, timeout=SOON)  # type: ignore[arg-type]
    own = [x.requires_grad_() for x in divided.shard(*example.tensors(), dim=2)]
    dist.barrier(group)  # type: ignore[arg-type]
    if odd and how == "never calls":
        time.sleep(6)
        return
    if odd and how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    out = example.together(divided, *own)
    dist.barrier(group)  # type: ignore[arg-type]
    if odd and how == "is killed later":
        os.kill(os.getpid(), signal.SIGKILL)
    if odd and how == "has no backward pass":
        time.sleep(6)
        return
    out.sum().backward()


def refused_sequences(group: object) -> None:
    """Offsets that are not the plan's, on one rank alone, raise on all ranks."""
    divided = plan(causal, lengths=[50, 70], mesh=group)  # type: ignore[arg-type]
    (x,) = divided.shard(torch.randn(120, 2, 8), dim=0)
    offsets = divided.offsets if divided.rank else [0, 0, len(x)]
    attention(x, Ragged(x, x, offsets), plan=divided)


def decodes_differently(group: dist.ProcessGroup, what: str) -> None:
    """Rank 1 gives other arguments than the others, or a part of another cache."""
    rank = dist.get_rank(group)
    odd = rank == 1
    width = 8 if odd and what == "width" else 16
    part = Dense(torch.randn(1, 2, 1024, 16), torch.randn(1, 2, 1024, width), start=1024 * rank)
    given = {"mask": causal, "q_start": 3000, "scale": 0.1, "sink": torch.zeros(4)}
    other = {
        "mask": {"mask": sliding_window(9)},
        "score_mod": {"score_mod": slopes},
        "q_start": {"q_start": 5},
        "scale": {"scale": 1.0},
        "sink": {"sink": torch.ones(4)},
        "shape of the sink": {"sink": torch.zeros(3)},
    }
    given |= other.get(what, {}) if odd else {}
    attend_over_ranks(torch.zeros(1, 4, 1, 16), part, mesh=group, timeout=SOON, **given)


def gathers(group: dist.ProcessGroup, what: str) -> None:
    """Rank 1 gives a shard that is not of the plan, or not as the others."""
    divided = plan(causal, length=300, mesh=group, timeout=SOON)
    (shard,) = divided.shard(torch.zeros(2, 300, 4), dim=1)
    other = {"tokens": shard[:, 1:], "dtype": shard.half(), "size": shard[..., 1:]}
    divided.gather(other[what] if divided.rank == 1 else shard, dim=1)
