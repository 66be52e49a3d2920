"""The method `ring`: its results, the order of its steps, and the memory it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import assert_as_good_as
from torch import Tensor

import quire
from quire import AuxRequest, Dense
from quire.distributed import context_parallel, plan
from quire.distributed.group import RankGroup
from quire.errors import OptionError
from quire.mods import causal
from rank_cases.examples import Example


def in_a_ring(group: object, examples: list[Example]) -> None:
    """Results and gradients of the method `ring` are as good as those of one process."""
    wanted = AuxRequest(lse=True, max_scores=True)
    for example in examples:
        whole, divided = example.tensors(), example.plan(group)
        above = example.alone(*whole).cos()
        found: list[list[Tensor]] = []
        for dtype in (None, torch.float64):
            tensors = [x.to(dtype or x.dtype, copy=True).requires_grad_() for x in whole]
            out, aux = example.alone(*tensors, return_aux=wanted)
            out.backward(above.to(out.dtype))
            grads = [x.grad for x in tensors if x.grad is not None]
            found.append([out.detach(), aux.lse.detach(), *grads])
        own = [x.clone().requires_grad_() for x in divided.shard(*whole, dim=2)]
        out, aux = example.together(divided, *own, return_aux=wanted)
        out.backward(divided.shard(above, dim=2)[0])
        mine = [out, aux.lse, *(x.grad for x in own)]
        for x, peer, truth in zip(mine, *found, strict=True):
            assert_as_good_as(divided.gather(x, dim=2), peer, truth, f"{example}", size=8.0)
        assert aux.max_scores is not None and not aux.max_scores.requires_grad


def keys_of_two_others(group: object) -> int:
    """Return in how many places of memory keys arrive that go round."""
    example = Example(length=400, method="ring", layout="contiguous", width=(24, 16))
    divided, places, real = example.plan(group), set(), RankGroup.pass_on

    def pass_on(self: RankGroup, *keys: tuple[Tensor, ...]) -> Any:
        places.add(keys[1][0].data_ptr())
        return real(self, *keys)

    RankGroup.pass_on = pass_on  # type: ignore[method-assign, assignment]
    try:
        example.together(divided, *divided.shard(*example.tensors(), dim=2))
    finally:
        RankGroup.pass_on = real  # type: ignore[method-assign]
    return len(places)


def weights_in_a_ring(group: object) -> None:
    """Sums of weights cannot be merged as results of a softmax."""
    divided = plan(causal, length=300, mesh=group, method="ring")  # type: ignore[arg-type]
    q, k, v = divided.shard(*Example(length=300).tensors(), dim=2)
    with (
        context_parallel(divided),
        pytest.raises(OptionError, match="must be those of a softmax with the method 'ring'"),
    ):
        quire.attention(q, Dense(k, v), weight=quire.weights.relu)
