"""Gradients of any call are as good as those of the reference, on the path that is the default."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from compare import assert_matches_reference
from hypothesis import example, given
from strategies import DTYPES, LAYOUTS, Case, long_cases

import quire
from quire import AuxRequest, reference

pytestmark = pytest.mark.every_width

BASE = Case(
    batch=2,
    kv_batch=2,
    kv_heads=1,
    group=3,
    q_len=37,
    kv_len=145,
    head_dim=20,
    value_dim=13,
    score="torch.tanh(score) * scalar + table[h, q_idx - kv_idx + n]",
    mask="(q_idx + 100 >= kv_idx) & (q_idx % 7 != 4)",
    has_sink=True,
)


@given(long_cases())
@example(replace(BASE, score="score * heads[h]", mask="kv_idx < 0"))
@example(replace(BASE, q_len=0, kv_len=5, block_size=(16, 16)))
@example(replace(BASE, q_len=5, kv_len=0))
def test_any_call(case: Case) -> None:
    assert_matches_reference(case, "auto")


# What a mod may capture

CAPTURES = {
    "a scalar": "score * scalar + scalar",
    "a number for each head": "score - heads[h] * (q_idx - kv_idx) / n",
    "a temperature for each head": "score * torch.exp(heads[h])",
    "a number for each query": "score + rows[q_idx]",
    "a number for each key": "score * columns[kv_idx]",
    "a number for each key of each batch": "score + batches[b, kv_idx]",
    "rows of a row": "score + batches[b][kv_idx]",
    "a relative table": "score + table[h, q_idx - kv_idx + n]",
    "a relative table for the first head": "score + table[0, q_idx - kv_idx + n]",
    "one bias for each pair": "score + pairs[b, h, q_idx, kv_idx]",
    "the pairs of the first batch and head": "score + pairs[0, 0, q_idx, kv_idx]",
    "repeated indices": "score + columns[kv_idx // 9] * rows[q_idx // 5]",
    "indices from a tensor": "score + heads[doc[kv_idx] % heads.shape[0]]",
    "negative indices": "score + columns[kv_idx - n] + table[h, -1 - kv_idx]",
    "indices of both signs": "score + table[h, (q_idx - kv_idx) % 11 - 5]",
    "one tensor twice": "score * columns[kv_idx] + columns[n - 1 - kv_idx]",
    "what the score decides": "score + torch.where(score > 0, heads[h], scalar)",
    "no score at all": "columns[kv_idx] + scalar",
    "what does not matter": "score + 0.0 * rows[q_idx]",
    "rows": "score + (rows_of[q_idx] * columns_of[kv_idx]).sum()",
    "rows, column by column": "score + rows_of.T[0, q_idx] * columns_of.T[:, kv_idx].amax()",
    "distances": "score - (rows_of[q_idx] - columns_of[kv_idx]).norm()",
    "distances of 0": "score - (columns_of[q_idx] - columns_of[kv_idx]).norm()",
    "rows at the same place": "score + columns_of[kv_idx // 9] @ columns_of[kv_idx - n]",
    "irregular rows": "score + columns_of[(q_idx * kv_idx) % 11].mean()",
    "a row as a whole": "score * (columns_of[3] * rows_of[q_idx // 2]).amin()",
    "long rows": "score + (many_of[q_idx] @ many_of[kv_idx]) / 64",
}


@pytest.mark.parametrize("q_len", [1, 4, 37, 130])
@pytest.mark.parametrize("name", CAPTURES)
def test_every_kind_of_capture(name: str, q_len: int) -> None:
    assert_matches_reference(replace(BASE, score=CAPTURES[name], q_len=q_len), "jit")


def test_a_bias_for_each_pair_serves_many() -> None:
    """A tensor that is expanded has the gradient of what it was expanded from."""
    pairs = torch.randn(1, 1, 37, 145, requires_grad=True)
    query, key = torch.randn(2, 3, 37, 20), torch.randn(2, 3, 145, 20)
    grads = []
    for attend in (quire.flex_attention, lambda *a, **o: reference.attention(*a, **o).out):
        wide = pairs.expand(2, 3, -1, -1)
        out = attend(query, key, key, score_mod=lambda s, b, h, q, k, w=wide: s + w[b, h, q, k])  # type: ignore[operator]
        grads += torch.autograd.grad(out.square().sum(), pairs)
    assert grads[0].shape == (1, 1, 37, 145)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


# Shapes and layouts

TRAITS: dict[str, dict[str, Any]] = {
    "plain": {"score": None, "mask": None, "has_sink": False},
    "causal": {"score": None, "mask": "q_idx >= kv_idx", "q_len": 145},
    "groups of five": {"group": 5, "kv_heads": 2},
    "every head its own keys": {"group": 1, "kv_heads": 3},
    "one batch of keys": {"batch": 3, "kv_batch": 1},
    "more values than keys": {"head_dim": 3, "value_dim": 33},
    "more keys than values": {"head_dim": 70, "value_dim": 1},
    "dropout": {"dropout_p": 0.4},
    "everything dropped": {"dropout_p": 1.0},
    "blocks": {"block_size": (16, 40)},
    "large blocks": {"block_size": (128, 128)},
    "blocks of a mask of each head": {"mask": "q_idx >= kv_idx + h * 20", "block_size": (16, 16)},
    "nothing is read": {"mask": "kv_idx < 0"},
    "nothing is read, by the score": {"score": "torch.where(q_idx > 9, score, -float('inf'))"},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("trait", TRAITS)
def test_each_trait_in_each_dtype(trait: str, dtype: torch.dtype) -> None:
    assert_matches_reference(replace(BASE, dtype=dtype, **TRAITS[trait]), "jit")


@pytest.mark.parametrize("q_len", range(1, 6))
@pytest.mark.parametrize("group", [1, 3])
def test_few_queries(q_len: int, group: int) -> None:
    assert_matches_reference(replace(BASE, q_len=q_len, group=group, kv_len=261), "jit")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout(layout: str) -> None:
    assert_matches_reference(replace(BASE, layout=layout), "jit")


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (1, 0), (0, 0)])
def test_no_queries_or_no_keys(q_len: int, kv_len: int) -> None:
    assert_matches_reference(replace(BASE, q_len=q_len, kv_len=kv_len), "jit")


@pytest.mark.parametrize("empty", [(0, 2, 9, 4), (1, 0, 9, 4)])
def test_no_batches_and_no_heads(empty: tuple[int, ...]) -> None:
    query = torch.ones(empty, requires_grad=True)
    key = torch.ones(empty[0], 2, 9, 4, requires_grad=True)
    bias = torch.ones(9, requires_grad=True)
    out = quire.flex_attention(
        *(query, key, key), lambda s, b, h, q, kv: s + bias[kv], enable_gqa=True
    )
    grads = torch.autograd.grad(out.sum(), (query, key, bias), materialize_grads=True)
    assert [grad.shape for grad in grads] == [query.shape, key.shape, bias.shape]
    assert not any(bool(grad.any()) for grad in grads)


# What comes from above

ABOVE: dict[str, Any] = {
    "expanded from one number": lambda x: torch.full((), 0.5, dtype=x.dtype).expand_as(x),
    "the same for every row": lambda x: x[:, :, :1].expand_as(x),
    "the same for every column": lambda x: x[..., :1].expand_as(x),
    "the same for every head": lambda x: x[:, :1].expand_as(x),
    "heads inside": LAYOUTS["heads inside"],
    "head dim outside": LAYOUTS["head dim outside"],
    "with gaps": LAYOUTS["with gaps"],
    "negative": lambda x: torch._neg_view(x),
    "zero": lambda x: torch.zeros_like(x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ABOVE)
def test_how_a_gradient_from_above_lies_in_memory_does_not_matter(
    name: str, dtype: torch.dtype
) -> None:
    query, key, value = (
        torch.randn(shape).to(dtype).requires_grad_()
        for shape in ((2, 6, 37, 20), (2, 2, 145, 20), (2, 2, 145, 13))
    )
    bias = torch.randn(200, requires_grad=True)
    out, aux = quire.flex_attention(
        *(query, key, value),
        lambda s, b, h, q, kv: s + bias[q - kv],
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    above, above_lse = (
        ABOVE[name](torch.randn(out.shape).to(dtype)),
        torch.randn(37).expand(2, 6, -1),
    )
    leaves = (query, key, value, bias)
    found, expected = (
        torch.autograd.grad((out, aux.lse), leaves, grads, retain_graph=True)
        for grads in (
            (above, above_lse),
            (above.clone().resolve_neg().contiguous(), above_lse.clone()),
        )
    )
    rounding = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, its, **rounding)  # type: ignore[arg-type]


@pytest.mark.parametrize("which", ["out", "lse"])
def test_one_of_two_outputs_is_used(which: str) -> None:
    leaves = [torch.randn(1, 2, 37, 8, requires_grad=True) for _ in range(3)]
    names = ["query", "key", "value"]
    ours, aux = quire.flex_attention(*leaves, return_aux=AuxRequest(lse=True))
    theirs = reference.attention(*leaves)
    used = [(ours, theirs.out)] if which == "out" else [(aux.lse, theirs.lse)]
    for mine, its in used:
        grads, expected = (
            torch.autograd.grad(x.square().sum(), leaves, materialize_grads=True)
            for x in (mine, its)
        )
        for name, grad, truth in zip(names, grads, expected, strict=True):
            torch.testing.assert_close(grad, truth, rtol=1e-4, atol=1e-5, msg=name)


# Dropout


@pytest.mark.parametrize("q_len", [3, 37, 145])
def test_what_the_forward_pass_drops_the_backward_pass_drops(q_len: int) -> None:
    """Values that name their keys show the weights; the gradient of values is made of the same."""
    query, key = torch.randn(2, 2, q_len, 8), torch.randn(2, 2, 145, 8)
    value = torch.eye(145).expand(2, 2, -1, -1).clone().requires_grad_()
    out = quire.flex_attention(
        *(query, key, value), dropout_p=0.5, generator=torch.Generator().manual_seed(1)
    )
    weights, above = out.detach(), torch.randn(out.shape)
    assert 0.4 < (weights == 0).double().mean() < 0.6
    (grad,) = torch.autograd.grad(out, value, above)
    torch.testing.assert_close(grad, weights.transpose(-2, -1) @ above, rtol=1e-4, atol=1e-5)
