"""What is not read does not matter: empty rows have no gradient, and NaN stays where it is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_as_good_as
from torch import Tensor

import quire
from quire import AuxRequest, create_block_mask, mods, reference

pytestmark = pytest.mark.every_width

inf, nan = math.inf, math.nan
L, S = 37, 150


def bias_of(w: Tensor) -> Callable[..., Any]:
    return lambda score, b, h, q, kv: score + w[h, (q - kv) % 10]


EMPTY: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "a mask": lambda w: {"mask_mod": lambda b, h, q, kv: kv < 0},
    "a mask and a mod": lambda w: {
        "mask_mod": lambda b, h, q, kv: q + kv < 0,
        "score_mod": bias_of(w),
    },
    "a score": lambda w: {"score_mod": lambda score, b, h, q, kv: score * w[h, 0] - inf},
    "a block mask": lambda w: {
        "block_mask": create_block_mask(lambda b, h, q, kv: q < 0, 1, 2, L, S),
        "score_mod": bias_of(w),
    },
    "no keys": lambda w: {"score_mod": bias_of(w)},
}


@pytest.mark.parametrize("q_len", [1, 4, L])
@pytest.mark.parametrize("name", EMPTY)
def test_where_nothing_is_read_every_gradient_is_zero(name: str, q_len: int) -> None:
    keys = 0 if name == "no keys" else S
    query = torch.randn(1, 2, q_len, 8, requires_grad=True)
    key, value = (torch.randn(1, 2, keys, 8, requires_grad=True) for _ in range(2))
    w = torch.randn(2, 10, requires_grad=True)
    options = EMPTY[name](w)
    if "block_mask" in options:
        options["block_mask"] = create_block_mask(lambda b, h, q, kv: q < 0, 1, 2, q_len, keys)
    out = quire.flex_attention(query, key, value, **options)
    grads = torch.autograd.grad(out.exp().sum(), (query, key, value, w), materialize_grads=True)
    assert not any(bool(grad.any()) for grad in grads)


@pytest.mark.parametrize("blocks", [False, True])
def test_empty_rows_among_others(blocks: bool) -> None:
    """Also with a sink, whose gradient then comes from the others alone."""
    mask = lambda b, h, q, kv: (q % 3 != 1) & (q >= kv) & (q > 16)  # noqa: E731
    query, key = (torch.randn(1, 2, L, 8, requires_grad=True) for _ in range(2))
    w, sink = torch.randn(2, 10, requires_grad=True), torch.randn(2, requires_grad=True)
    given = {"mask_mod": mask}
    if blocks:
        given = {"block_mask": create_block_mask(mask, None, None, L, L, BLOCK_SIZE=16)}
    options: dict[str, Any] = {"score_mod": bias_of(w), "sink": sink, **given}
    leaves = (query, key, w, sink)
    above = torch.randn(1, 2, L, 8)
    ours = torch.autograd.grad(quire.flex_attention(query, key, key, **options), leaves, above)
    theirs = torch.autograd.grad(reference.attention(query, key, key, **options).out, leaves, above)
    empty = [q for q in range(L) if q % 3 == 1 or q <= 16]
    assert not ours[0][:, :, empty].any()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


# NaN and inf in a row that some queries read, far enough in to be in the second block of keys

MODS: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "a mask": lambda w: {"mask_mod": mods.causal},
    "a block mask": lambda w: {
        "block_mask": create_block_mask(mods.causal, None, None, S, S, BLOCK_SIZE=64)
    },
    "a window": lambda w: {"mask_mod": mods.sliding_window(9), "score_mod": bias_of(w)},
    "a mask and a mod": lambda w: {
        "mask_mod": mods.causal,
        "score_mod": lambda score, b, h, q, kv: torch.tanh(score) * w[h, 1] + w[h, (q - kv) % 10],
    },
    "a score": lambda w: {
        "score_mod": lambda score, b, h, q, kv: torch.where(q >= kv, score * w[h, 0], -inf)
    },
    "a slope where the mask is false": lambda w: {
        "mask_mod": lambda b, h, q, kv: q > kv,
        "score_mod": lambda score, b, h, q, kv: score + w[h, 0] * torch.log(q - kv),
    },
}


@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [nan, inf])
@pytest.mark.parametrize("name", MODS)
def test_what_is_not_finite_reaches_what_reads_it(name: str, bad: float, which: str) -> None:
    shapes = {"query": (1, 2, S, 8), "key": (1, 1, S, 8), "value": (1, 1, S, 5), "w": (2, 10)}
    tensors = {label: torch.randn(shape) for label, shape in shapes.items()}
    tensors[which][0, 0, 140] = bad
    weights = torch.randn(1, 2, S, 5)
    found = []
    for dtype, attend in (
        (torch.float32, _ours),
        (torch.float32, _reference),
        (torch.float64, _reference),
    ):
        leaves = {
            label: tensor.to(dtype, copy=True).requires_grad_() for label, tensor in tensors.items()
        }
        out = attend(leaves, MODS[name](leaves["w"]))
        loss = (out * weights.to(dtype)).sum()
        grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        found.append([out.detach(), *grads])
    # All queries add up in the gradients of keys, of values and of what is captured.
    size = math.sqrt(2 * S)
    for label, actual, peer, truth in zip(("out", *shapes), *found, strict=True):
        assert_as_good_as(actual, peer, truth, f"{name}: {label}", size=size)
    if which != "query" and name != "a window":
        assert found[0][1][:, :, :140].isfinite().all()  # the queries that do not see it


def _ours(leaves: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    operands = leaves["query"], leaves["key"], leaves["value"]
    out, _ = quire.flex_attention(
        *operands, **options, enable_gqa=True, return_aux=AuxRequest(lse=True), backend="jit"
    )
    return out


def _reference(leaves: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    return reference.attention(leaves["query"], leaves["key"], leaves["value"], **options).out


@pytest.mark.parametrize("bad", [nan, inf])
def test_a_gradient_from_above_reaches_what_its_row_reads(bad: float) -> None:
    query, key, value = (torch.randn(1, 1, 60, 4, requires_grad=True) for _ in range(3))
    w = torch.randn(60, requires_grad=True)
    above = torch.ones(1, 1, 60, 4)
    above[0, 0, 31] = bad
    out = quire.flex_attention(
        *(query, key, value),
        lambda score, b, h, q, kv: score + w[kv],
        mask_mod=lambda b, h, q, kv: q // 10 == kv // 10,
    )
    grads = torch.autograd.grad(out, (query, key, value, w), above)
    spoilt = [~grad.isfinite().view(60, -1).all(-1) for grad in grads]
    assert spoilt[0].nonzero().flatten().tolist() == [31]
    for rows in spoilt[1:]:
        assert rows.nonzero().flatten().tolist() == [*range(30, 40)]
