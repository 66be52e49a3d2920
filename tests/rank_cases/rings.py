"""The method `ring`: its results, the order of its steps, and the memory it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import quire
from quire import Dense
from quire.distributed import attention, context_parallel, plan
from quire.distributed.group import Passing, RankGroup
from quire.errors import OptionError
from quire.mods import causal, sliding_window
from quire.plans import CallPlan
from rank_cases.examples import Example, assert_as_good_as_alone
from rank_cases.traffic import peak_bytes


def in_a_ring(group: object, examples: list[Example]) -> None:
    """Results and gradients of the method `ring` are as good as those of one process."""
    for example in examples:
        assert_as_good_as_alone(group, example)


def order_in_a_ring(group: object, learns: bool) -> list[str]:
    """Return what a rank does in which order: begin to send, compute, wait for what arrives."""
    divided = plan(None, length=700, mesh=group, method="ring")  # type: ignore[arg-type]
    q, k, v = (
        x.requires_grad_(learns) for x in divided.shard(*Example(length=700).tensors(), dim=2)
    )
    out, done = attention(q, Dense(k, v), plan=divided), []
    real = RankGroup.pass_on, CallPlan.forward, CallPlan.backward, Passing.wait

    def noted(what: str, function: Callable[..., Any]) -> Any:
        def run(*args: Any, **named: Any) -> Any:
            if what != "wait" or args[0].works:
                done.append(what)
            return function(*args, **named)

        return run

    RankGroup.pass_on = noted("send", real[0])  # type: ignore[method-assign]
    CallPlan.forward = noted("compute", real[1])  # type: ignore[method-assign]
    CallPlan.backward = noted("compute", real[2])  # type: ignore[method-assign]
    Passing.wait = noted("wait", real[3])  # type: ignore[method-assign]
    try:
        if learns:
            torch.autograd.grad(out.sum(), (q, k, v))
        else:
            attention(q, Dense(k, v), plan=divided)
    finally:
        RankGroup.pass_on, CallPlan.forward, CallPlan.backward, Passing.wait = real  # type: ignore[method-assign]
    return done


def memory_of_a_ring(group: Any, learns: bool) -> tuple[float, float]:
    """Return the most bytes that a call takes, and those of this rank's keys and values.

    Values and results are small. The mask is a window, so nearly all keys that go round are not
    read.
    """
    tokens, width = 2**15, 256
    length = tokens * group.size()
    divided = plan(sliding_window(64), length=length, mesh=group, method="ring")
    q, k, v = (torch.ones(1, 1, tokens, x) for x in (width, width, 2))
    for x in (k, v):
        x.requires_grad_(learns)
    for _ in range(2):  # the first one compiles
        most = peak_bytes()
        out = attention(q, Dense(k, v), plan=divided)
        if learns:
            most = peak_bytes()
            torch.autograd.grad(out, (k, v), out.detach())
        taken = most()
        del out
    return taken, k.nbytes + v.nbytes


def weights_in_a_ring(group: object) -> None:
    """Sums of weights cannot be merged as results of a softmax."""
    divided = plan(causal, length=300, mesh=group, method="ring")  # type: ignore[arg-type]
    q, k, v = divided.shard(*Example(length=300).tensors(), dim=2)
    with (
        context_parallel(divided),
        pytest.raises(OptionError, match="must be those of a softmax with the method 'ring'"),
    ):
        quire.attention(q, Dense(k, v), weight=quire.weights.relu)
