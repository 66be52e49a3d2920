"""Gradients are the same bits: in every run, on any number of threads, whichever are asked for."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import quire
from quire import AuxRequest, create_block_mask, mods

pytestmark = pytest.mark.every_width

B, HQ, HKV, L, S = 2, 6, 2, 200, 261
SHAPES: dict[str, tuple[int, ...]] = {
    "query": (B, HQ, L, 20),
    "key": (B, HKV, S, 20),
    "value": (B, HKV, S, 12),
    "sink": (HQ,),
    "scalar": (),
    "slopes": (HQ,),
    "table": (HQ, L + S),
    "pairs": (1, 1, L, S),
    "gathered": (5,),
}


def leaves(dtype: torch.dtype, wanted: set[str] | None = None) -> dict[str, Tensor]:
    """The same numbers each time; those that are wanted require grad."""
    random = torch.Generator().manual_seed(1)
    found = {}
    for name, shape in SHAPES.items():
        tensor = torch.randn(shape, generator=random, dtype=torch.float64)
        narrow = dtype if name in ("query", "key", "value") else torch.float32
        tensor = tensor.to(torch.float64 if dtype == torch.float64 else narrow)
        found[name] = tensor.requires_grad_(wanted is None or name in wanted)
    return found


def gradients(given: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """Of a function of the output and the log-sum-exp, for all that require one."""

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        bias = given["table"][h, q_idx - kv_idx + S] + given["pairs"][0, 0, q_idx, kv_idx]
        near = given["slopes"][h] * (q_idx - kv_idx) * 0.01
        return score * given["scalar"] + bias - near + given["gathered"][kv_idx % 5]

    out, aux = quire.flex_attention(
        *(given[name] for name in ("query", "key", "value")),
        mod,
        sink=given["sink"],
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
        generator=torch.Generator().manual_seed(3),
        **options,
    )
    above = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    wanted = {name: tensor for name, tensor in given.items() if tensor.requires_grad}
    loss = (out * above).sum() + aux.lse.sum()
    found = torch.autograd.grad(loss, list(wanted.values()), materialize_grads=True)
    return dict(zip(wanted, found, strict=True))


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    return [name for name, grad in found.items() if not torch.equal(grad, expected[name])]


MASK = mods.and_masks(mods.causal, mods.document(lengths=[70, 130, 61]))
OPTIONS: dict[str, dict[str, Any]] = {
    "everything is read": {},
    "causal documents": {"mask_mod": MASK},
    "a block mask": {"block_mask": create_block_mask(MASK, None, None, L, S, BLOCK_SIZE=64)},
    "dropout": {"mask_mod": mods.causal, "dropout_p": 0.2},
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in OPTIONS),
        ("causal documents", torch.bfloat16),
        ("everything is read", torch.float64),
    ],
    ids=str,
)
def test_threads_and_runs_do_not_matter(name: str, dtype: torch.dtype) -> None:
    expected = gradients(leaves(dtype), **OPTIONS[name])
    assert all(bool(grad.any()) for grad in expected.values())
    for threads in (2, 3, 1):
        torch.set_num_threads(threads)
        found = gradients(leaves(dtype), **OPTIONS[name])
        assert not differing(found, expected), f"{threads} threads"


def test_which_others_are_asked_for_does_not_matter() -> None:
    """Alone, in pairs, and all but one."""
    expected = gradients(leaves(torch.float32), mask_mod=MASK)
    names = set(SHAPES)
    pairs = [{"query", "key"}, {"query", "value"}, {"key", "table"}, {"sink", "pairs"}]
    alone = [{name} for name in SHAPES]
    all_but_one = [names - {name} for name in ("query", "key", "value", "table")]
    for wanted in itertools.chain(alone, pairs, all_but_one):
        found = gradients(leaves(torch.float32, wanted), mask_mod=MASK)
        assert found.keys() == wanted
        assert not differing(found, expected), wanted


def test_a_log_sum_exp_alone_has_no_gradient_of_values() -> None:
    """Exactly none, and every time the same ones of the rest."""
    query, key, value = (torch.randn(1, 2, 37, 20, requires_grad=True) for _ in range(3))
    _, aux = quire.flex_attention(query, key, value, return_aux=AuxRequest(lse=True))
    found = []
    for _ in range(10):
        loss = (aux.lse * torch.arange(37)).sum()
        leaves = (query, key, value)
        found.append(torch.autograd.grad(loss, leaves, retain_graph=True, materialize_grads=True))
        torch.randn(3, 50)  # memory that is given back is used again
    assert not any(bool(grads[2].any()) for grads in found)
    assert all(all(map(torch.equal, grads, found[0])) for grads in found)


def test_a_sink_learns_alone() -> None:
    """Its gradient is found without that of any score."""
    random = torch.Generator().manual_seed(1)
    query, key = (torch.randn(1, 2, 37, 20, generator=random) for _ in range(2))
    grads = []
    for learned in (False, True):
        sink = torch.zeros(2, requires_grad=True)
        given = query.clone().requires_grad_(learned)
        out = quire.flex_attention(given, key, key, sink=sink, mask_mod=mods.causal)
        grads += torch.autograd.grad(out.square().sum(), sink)
    assert grads[0].all() and torch.equal(*grads)


def test_what_needs_no_gradient_gets_none() -> None:
    given = leaves(torch.float32, {"value", "slopes"})
    query, key, value = (given[name] for name in ("query", "key", "value"))
    out = quire.flex_attention(
        *(query, key, value), mods.alibi(HQ, given["slopes"]), enable_gqa=True
    )
    out.sum().backward()
    assert query.grad is None and key.grad is None
    assert value.grad is not None and given["slopes"].grad is not None
