"""Time and memory of quire and of PyTorch, also in a case in which PyTorch is better."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import quire
from quire.tools.demo.check import torch_eager
from quire.tools.demo.mod import HEAD_DIM, HEADS, mask_mod
from quire.tools.measure import Factory, Reading, race

SHORT = 128  # tokens: so few that the overhead of a call decides its time


class Comparison(NamedTuple):
    """The same work done by PyTorch and by quire."""

    name: str
    theirs: Factory
    ours: Factory


class Outcome(NamedTuple):
    """The figures of PyTorch and of quire."""

    name: str
    theirs: Reading
    ours: Reading


def comparisons(tokens: int) -> list[Comparison]:
    """Return everything that is measured."""
    flex: Callable[..., Factory] = partial(partial, _flex, tokens)
    short_flex: Callable[..., Factory] = partial(partial, _flex, SHORT)
    theirs, ours = torch_eager, quire.flex_attention
    return [
        Comparison("forward", flex(theirs), flex(ours)),
        Comparison("forward and backward", flex(theirs, training=True), flex(ours, training=True)),
        Comparison("causal, no mod: SDPA", partial(_sdpa, tokens), flex(ours, causal=True)),
        Comparison(f"  {SHORT} tokens", partial(_sdpa, SHORT), short_flex(ours, causal=True)),
    ]


def measure(
    contest: list[Comparison], seconds: float, threads: int, tick: Callable[[str, float], None]
) -> Iterator[Outcome]:
    """Run each comparison for about `seconds`. `tick` is called with its name and progress."""
    run = partial(race, seconds=seconds, threads=threads)
    for name, theirs, ours in contest:
        tick(name, 0.0)
        yield Outcome(name, *run(theirs, ours, tick=partial(tick, name)))


def _flex(
    tokens: int, attend: Callable[..., Tensor], *, training: bool = False, causal: bool = False
) -> Callable[[], object]:
    """Return a call of a flex_attention, after a first call and with its mask made."""

    def ready(length: int) -> Callable[[], object]:
        mod = quire.mods.causal if causal else mask_mod(length)
        mask = quire.create_block_mask(mod, None, None, Q_LEN=length, KV_LEN=length, device="cpu")
        operands = _operands(length, training)

        def call() -> None:
            out = attend(*operands, block_mask=mask)
            if training:
                torch.autograd.grad(out.sum(), operands)

        return call

    ready(SHORT)()
    return ready(tokens)


def _sdpa(tokens: int) -> Callable[[], object]:
    """Return a call of PyTorch's scaled_dot_product_attention, after a first call."""

    def ready(length: int) -> Callable[[], object]:
        query, key, value = _operands(length)
        return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)

    ready(SHORT)()
    return ready(tokens)


def _operands(tokens: int, training: bool = False) -> list[Tensor]:
    shape = (1, HEADS, tokens, HEAD_DIM)
    return [torch.randn(shape, requires_grad=training) for _ in range(3)]
