"""Weights that are not a softmax, and mods on probabilities: as the reference says, everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_as_good_as
from torch import Tensor

import quire
from quire import AuxRequest, Dense, Paged, Ragged, attention, create_block_mask, reference, weights
from quire.config import Backend
from quire.errors import ArgumentError, OptionError, ShapeError
from quire.mods import causal

BACKENDS: list[Backend] = ["eager", "jit"]
each_backend = pytest.mark.parametrize("backend", BACKENDS)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]

BIAS = torch.tensor([-2.0, -1.0, 0.5, 0.0])
inf, nan = math.inf, math.nan


def signed(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """A weight of the user's own, which is negative for some keys."""
    return torch.tanh(score) + 0.75


NEAR_ZERO = ("signed", "relu", "squared_relu")
"""Weights whose sum may be near 0. Divided by it, errors have no bound."""

WEIGHTS: dict[str, Callable[..., Tensor]] = {
    "sigmoid": weights.sigmoid(BIAS),
    "relu": weights.relu,
    "squared_relu": weights.squared_relu,
    "softplus": weights.softplus,
    "exp": weights.exp,
    "signed": signed,
}
each_weight = pytest.mark.parametrize("name", WEIGHTS)
normalised_or_not = pytest.mark.parametrize("normalise", [True, False])


def operands(
    q_len: int, kv_len: int, dtype: torch.dtype = torch.float32, group: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    query, key = torch.randn(2, 4, q_len, 20), torch.randn(2, 4 // group, kv_len, 20)
    return query.to(dtype), key.to(dtype), torch.randn(2, 4 // group, kv_len, 12).to(dtype)


def expected(
    tensors: tuple[Tensor, ...], name: str, normalise: bool, **options: Any
) -> reference.Reference:
    weighting = "shares" if normalise else "sums"
    return reference.attention(*tensors, score_mod=WEIGHTS[name], weighting=weighting, **options)


@each_backend
@each_weight
@normalised_or_not
@pytest.mark.parametrize(("q_len", "kv_len"), [(37, 41), (1, 300), (3, 5), (150, 290)])
def test_as_the_reference(
    name: str, normalise: bool, q_len: int, kv_len: int, backend: Backend
) -> None:
    tensors = operands(q_len, kv_len)
    out, aux = quire.flex_attention(
        *tensors,
        mask_mod=causal,
        weight=WEIGHTS[name],
        normalise=normalise,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True, max_scores=True, key_mass=True),
        backend=backend,
    )
    doubles = tuple(tensor.double() for tensor in tensors)
    peer, exact = (expected(x, name, normalise, mask_mod=causal) for x in (tensors, doubles))
    size = 1.0 if normalise else math.sqrt(kv_len)
    if not normalise or name not in NEAR_ZERO:
        assert_as_good_as(out, peer.out, exact.out, "out", size=size)
    assert aux.lse is not None and aux.max_scores is not None
    total = exact.lse.float()
    logs = torch.where(total >= 0, total, nan)  # the log of a negative sum is NaN
    torch.testing.assert_close(aux.lse.exp(), logs, rtol=1e-4, atol=1e-4, equal_nan=True)
    torch.testing.assert_close(aux.max_scores, exact.max_scores.float(), rtol=1e-5, atol=1e-5)


@each_backend
@pytest.mark.parametrize(
    ("name", "normalise"),
    [(name, False) for name in WEIGHTS]
    + [(name, True) for name in WEIGHTS if name not in NEAR_ZERO],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(name: str, normalise: bool, dtype: torch.dtype, backend: Backend) -> None:
    tensors = tuple(x.requires_grad_() for x in operands(37, 41, dtype))
    out = quire.flex_attention(
        *tensors, weight=WEIGHTS[name], normalise=normalise, enable_gqa=True, backend=backend
    )
    grad = torch.randn(out.shape).to(dtype)
    doubles = tuple(x.detach().double().requires_grad_() for x in tensors)
    peer, exact = (expected(x, name, normalise).out for x in (tensors, doubles))
    ours, theirs, truth = (
        torch.autograd.grad(x, by, grad.to(x.dtype))
        for x, by in ((out, tensors), (peer, tensors), (exact, doubles))
    )
    for what, a, b, c in zip("qkv", ours, theirs, truth, strict=True):
        assert_as_good_as(a, b, c, f"gradient of {what}", size=2.0 if normalise else 32.0)


@each_backend
def test_learned_biases_of_a_sigmoid(backend: Backend) -> None:
    bias = BIAS.clone().requires_grad_()
    tensors = operands(37, 41)
    out = quire.flex_attention(
        *tensors, weight=weights.sigmoid(bias), normalise=False, enable_gqa=True, backend=backend
    )
    (ours,) = torch.autograd.grad(out.square().sum(), bias)
    exact = reference.attention(
        *(x.double() for x in tensors), score_mod=weights.sigmoid(bias), weighting="sums"
    )
    (truth,) = torch.autograd.grad(exact.out.square().sum(), bias)
    torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-3)


@each_weight
@normalised_or_not
def test_same_bits_in_every_memory(name: str, normalise: bool) -> None:
    lengths = [300, 1, 40]
    keys, values = torch.randn(341, 2, 16), torch.randn(341, 2, 16)
    query = torch.randn(341, 4, 16)
    options: dict[str, Any] = {"weight": WEIGHTS[name], "normalise": normalise, "mask": causal}
    ragged = attention(query, Ragged(keys, values, [0, 300, 301, 341]), **options)
    first, pages, table = 0, torch.zeros(2, 64, 2, 16, 16), torch.zeros(3, 19, dtype=torch.int32)
    used = 0
    for b, length in enumerate(lengths):
        rows = slice(first, first + length)
        dense = attention(
            query[rows].transpose(0, 1)[None],
            Dense(keys[rows].transpose(0, 1)[None], values[rows].transpose(0, 1)[None]),
            **options,
        )
        assert torch.equal(dense[0].transpose(0, 1), ragged[rows])
        for page in range(-(-length // 16)):
            part = slice(rows.start + 16 * page, min(rows.start + 16 * (page + 1), rows.stop))
            for side, rows_of in enumerate((keys, values)):
                some = rows_of[part].transpose(0, 1)
                pages[side, used, :, : some.shape[1]] = some
            table[b, page] = used
            used += 1
        first += length
    paged = attention(
        query,
        Paged(pages[0], pages[1], table, torch.tensor(lengths)),
        q_offsets=[0, 300, 301, 341],
        **options,
    )
    assert torch.equal(paged, ragged)
    torch.set_num_threads(1)
    assert torch.equal(attention(query, Ragged(keys, values, [0, 300, 301, 341]), **options), paged)


@each_backend
def test_what_is_not_a_number(backend: Backend) -> None:
    """-inf is not read; 0 and infinities are multiplied and added; a sum of 0 gives 0."""
    query, key = torch.ones(1, 1, 6, 1), torch.ones(1, 1, 4, 1)
    value = torch.tensor([1.0, 2.0, 4.0, nan]).view(1, 1, 4, 1)
    table = torch.tensor(
        [
            [1.0, 2.0, 1.0, -inf],
            [-inf, -inf, -inf, -inf],
            [1.0, -1.0, 0.0, -inf],
            [inf, 1.0, 1.0, -inf],
            [nan, 1.0, 1.0, -inf],
            [1.0, 1.0, 1.0, 0.0],
        ]
    )

    def of_table(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return table[q_idx, kv_idx]

    for normalise in (True, False):
        options = {"score_mod": of_table, "weighting": "shares" if normalise else "sums"}
        exact = reference.attention(query, key, value, **options)  # type: ignore[arg-type]
        out, aux = quire.flex_attention(
            query,
            key,
            value,
            weight=of_table,
            normalise=normalise,
            backend=backend,
            return_aux=AuxRequest(argmax=True),
        )
        torch.testing.assert_close(out, exact.out, equal_nan=True)
        assert aux.argmax is not None and torch.equal(aux.argmax, exact.argmax)


@each_backend
def test_block_masks_and_dropout(backend: Backend) -> None:
    query, key, value = operands(200, 200, group=1)
    blocks = create_block_mask(causal, None, None, 200, 200, BLOCK_SIZE=64)
    options: dict[str, Any] = {"weight": weights.sigmoid(-3.0), "normalise": False}
    options["backend"] = backend
    out = quire.flex_attention(query, key, value, block_mask=blocks, **options)
    masked = quire.flex_attention(query, key, value, mask_mod=causal, **options)
    torch.testing.assert_close(out, masked, rtol=1e-5, atol=1e-5)
    dropped = [
        quire.flex_attention(
            query, key, value, dropout_p=0.5, generator=torch.Generator().manual_seed(3), **options
        )
        for _ in range(2)
    ]
    assert torch.equal(*dropped)
    assert not torch.equal(dropped[0], quire.flex_attention(query, key, value, **options))


def test_softmax_and_softmax_one_keep_the_running_maximum() -> None:
    query, key, value = (100 * x for x in operands(9, 9, group=1))
    plain = quire.flex_attention(query, key, value)
    assert torch.equal(quire.flex_attention(query, key, value, weight=weights.softmax), plain)
    one = quire.flex_attention(query, key, value, weight=weights.softmax_one)
    assert torch.equal(one, quire.flex_attention(query, key, value, sink=torch.zeros(4)))


@each_backend
def test_forward_mode_and_vmap(backend: Backend) -> None:
    query, key, value = operands(9, 11, torch.float64, group=1)

    def attend(query: Tensor, key: Tensor) -> Tensor:
        return quire.flex_attention(query, key, value, weight=weights.softplus, backend=backend)

    along = torch.randn_like(query), torch.randn_like(key)
    _, tangent = torch.func.jvp(attend, (query, key), along)
    step = 1e-6
    moved = [attend(query + s * along[0], key + s * along[1]) for s in (step, -step)]
    torch.testing.assert_close(tangent, (moved[0] - moved[1]) / (2 * step), rtol=1e-5, atol=1e-6)
    several = torch.randn(3, *query.shape, dtype=torch.float64)
    found = torch.func.vmap(attend, (0, None))(several, key)
    assert torch.equal(found, torch.stack([attend(x, key) for x in several]))


# --- mods on probabilities

GATE = torch.tensor([0.5, 1.0, 0.25, 2.0])
PROB_MODS: dict[str, Callable[..., Tensor]] = {
    "gate": lambda prob, b, h, q_idx, kv_idx: prob * GATE[h],
    "threshold": lambda prob, b, h, q_idx, kv_idx: torch.where(prob > 0.05, prob, 0.0),
    "power": lambda prob, b, h, q_idx, kv_idx: prob**1.5 * GATE[h],
}


@each_backend
@pytest.mark.parametrize("name", PROB_MODS)
def test_prob_mods(name: str, backend: Backend) -> None:
    tensors = tuple(x.requires_grad_() for x in operands(37, 41))
    sink, prob_mod = torch.randn(4), PROB_MODS[name]
    out, aux = attention(
        tensors[0],
        Dense(*tensors[1:]),
        mask=causal,
        prob_mod=prob_mod,
        sink=sink,
        backend=backend,
        return_aux=AuxRequest(lse=True, entropy=True),
    )
    doubles = tuple(x.detach().double().requires_grad_() for x in tensors)
    peer, exact = (
        reference.attention(
            *x, mask_mod=causal, prob_mod=prob_mod, q_start=4, sink=sink.to(x[0].dtype)
        )
        for x in (tensors, doubles)
    )
    grad = torch.randn_like(out)
    assert_as_good_as(out, peer.out, exact.out, "out", size=4.0)
    assert aux.lse is not None and aux.entropy is not None
    torch.testing.assert_close(aux.lse, exact.lse.float())
    torch.testing.assert_close(aux.entropy, exact.entropy.float(), rtol=1e-5, atol=1e-5)
    ours, theirs, truth = (
        torch.autograd.grad(x, by, grad.to(x.dtype))
        for x, by in ((out, tensors), (peer.out, tensors), (exact.out, doubles))
    )
    for what, a, b, c in zip("qkv", ours, theirs, truth, strict=True):
        assert_as_good_as(a, b, c, f"gradient of {what}", size=8.0)


def test_prob_mods_in_packed_memory() -> None:
    query, key, value = torch.randn(3, 41, 4, 8).unbind()
    rows = [range(5), range(5, 12), range(12, 41)]
    for name, prob_mod in PROB_MODS.items():
        out = attention(query, Ragged(key, value, [0, 5, 12, 41]), mask=causal, prob_mod=prob_mod)
        exact = reference.ragged_attention(
            query, key, value, rows, rows, mask_mod=causal, prob_mod=prob_mod
        )
        torch.testing.assert_close(out, exact.out, rtol=1e-4, atol=1e-5, msg=name)


def test_a_learned_gate_gets_its_gradient() -> None:
    gate = GATE.clone().requires_grad_()
    query, key, value = operands(9, 11, group=1)

    def gated(prob: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return prob * gate[h]

    out = quire.flex_attention(query, key, value, prob_mod=gated)
    (ours,) = torch.autograd.grad(out.sum(), gate)
    plain = quire.flex_attention(query, key, value)
    torch.testing.assert_close(ours, plain.sum((0, 2, 3)), rtol=1e-4, atol=1e-4)


def test_explain_says_that_there_are_two_passes() -> None:
    query, key, value = operands(9, 11, group=1)
    assert "second pass" in quire.explain(query, key, value, prob_mod=PROB_MODS["power"])
    assert "second pass" not in quire.explain(query, key, value, weight=weights.relu)


def test_refusals() -> None:
    query, key, value = operands(3, 3, group=1)
    with pytest.raises(ArgumentError, match="a sink is one more score"):
        quire.flex_attention(query, key, value, weight=weights.relu, sink=torch.zeros(4))
    with pytest.raises(ArgumentError, match="prob_mod must follow a softmax"):
        quire.flex_attention(query, key, value, weight=weights.relu, prob_mod=PROB_MODS["gate"])
    with pytest.raises(ArgumentError, match="normalise=False needs weight="):
        quire.flex_attention(query, key, value, normalise=False)
    with pytest.raises(OptionError, match="entropy must be that of a softmax"):
        quire.flex_attention(
            query, key, value, weight=weights.relu, return_aux=AuxRequest(entropy=True)
        )
    with pytest.raises(ShapeError, match="bias must be 0-D or 1-D"):
        weights.sigmoid(torch.zeros(2, 2))
