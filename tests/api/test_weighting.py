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
from quire.errors import (
    ArgumentError,
    DtypeError,
    ModResultError,
    ModSignatureError,
    NotCallableError,
    OptionError,
    QuireError,
    ShapeError,
)
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


@each_backend
@pytest.mark.parametrize("q_len", [1, 20])
def test_a_sum_whose_inverse_overflows(q_len: int, backend: Backend) -> None:
    query, key = torch.ones(1, 1, q_len, 4), torch.ones(1, 1, 4, 4)
    value = torch.randn(1, 1, 4, 4, requires_grad=True)

    def tiny(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return 1e-40 * (kv_idx + 1)

    exact = reference.attention(query, key, value, score_mod=tiny, weighting="shares").out
    out, aux = quire.flex_attention(
        query,
        key,
        value,
        weight=tiny,
        backend=backend,
        return_aux=AuxRequest(weights=[0]),
    )
    torch.testing.assert_close(out, exact)
    assert aux.weights is not None
    torch.testing.assert_close(aux.weights[0, 0, 0], torch.tensor([0.1, 0.2, 0.3, 0.4]))
    found, wanted = (torch.autograd.grad(x.sum(), value)[0] for x in (out, exact))
    torch.testing.assert_close(found, wanted)


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


@each_backend
@normalised_or_not
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("q_len", [1, 20])
def test_keys_that_a_score_mod_hides(
    q_len: int, name: str, normalise: bool, backend: Backend
) -> None:
    """A score of -inf says that a key is not read; most weights of it are 0, or a number."""
    query, key, value = operands(q_len, 41)
    value[:, :, ::3] = nan
    tensors = tuple(x.requires_grad_() for x in (query, key, value))
    options: dict[str, Any] = {
        "score_mod": lambda score, b, h, q, k: torch.where(k % 3 == 0, -inf, score),
        "weight": WEIGHTS[name],
    }
    out, aux = attention(
        tensors[0],
        Dense(*tensors[1:]),
        normalise=normalise,
        backend=backend,
        return_aux=AuxRequest(max_scores=True, argmax=True),
        **options,
    )
    weighting = "shares" if normalise else "sums"
    exact = reference.attention(*tensors, weighting=weighting, q_start=41 - q_len, **options)
    torch.testing.assert_close(aux.max_scores, exact.max_scores)
    assert aux.argmax is not None and torch.equal(aux.argmax, exact.argmax)
    assert out.isfinite().all()
    if normalise and name in NEAR_ZERO:
        return
    torch.testing.assert_close(out, exact.out, rtol=1e-4, atol=1e-4)
    found, wanted = (torch.autograd.grad(x.sum(), tensors) for x in (out, exact.out))
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-3)


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


@pytest.mark.parametrize("name", ["weight", "prob_mod"])
def test_what_is_no_mod_is_named_as_it_was_given(name: str) -> None:
    tensors = operands(3, 3, group=1)
    with pytest.raises(NotCallableError, match=f"^{name} must be a function .* but is a int"):
        quire.flex_attention(*tensors, **{name: 3})  # type: ignore[arg-type]
    with pytest.raises(ModSignatureError, match=f"^{name} must take 5 arguments"):
        quire.flex_attention(*tensors, **{name: lambda score: score})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{"weight": weights.softmax_one}, {"prob_mod": PROB_MODS["gate"]}]
)
@pytest.mark.parametrize("query", [None, [1.0], torch.randn(3)])
def test_what_is_no_query_is_named(query: Any, options: dict[str, Any]) -> None:
    _, key, value = operands(3, 3, group=1)
    with pytest.raises(QuireError, match=r"^query must "):
        attention(query, Dense(key, value), **options)


def test_softmax_one_is_where_the_query_is() -> None:
    query, key, value = operands(3, 3, group=1)
    expected = attention(query, Dense(key, value), weight=weights.softmax_one)
    with torch.device("meta"):
        assert torch.equal(
            attention(query, Dense(key, value), weight=weights.softmax_one), expected
        )


@each_backend
def test_a_prob_mod_without_a_result(backend: Backend) -> None:
    def nothing(prob: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> None: ...

    with pytest.raises(ModResultError, match=r"^prob_mod 'nothing' must return one scalar"):
        quire.flex_attention(*operands(3, 3, group=1), prob_mod=nothing, backend=backend)


@pytest.mark.parametrize("normalise", [0, None, "no", torch.tensor([True, False])])
def test_normalise_is_a_truth_value(normalise: Any) -> None:
    for weight in (None, weights.relu):
        with pytest.raises(ArgumentError, match="normalise must be True or False, but is"):
            quire.flex_attention(*operands(3, 3, group=1), weight=weight, normalise=normalise)


@pytest.mark.parametrize("bias", [None, "a", 1j, True, torch.tensor([1, 2])])
def test_what_is_no_bias(bias: Any) -> None:
    with pytest.raises((ArgumentError, DtypeError), match=r"^bias must "):
        weights.sigmoid(bias)


@each_backend
@normalised_or_not
def test_the_log_of_a_sum_of_0(normalise: bool, backend: Backend) -> None:
    """It is -inf, as for a softmax without keys, and what is 0 above it gives no NaN below."""
    query, key = (torch.randn(1, 4, 9, 8, requires_grad=True) for _ in range(2))
    signs = torch.tensor([1.0, -1.0, 0.0]).repeat(3)

    def attend(above_lse: float) -> tuple[Tensor, ...]:
        out, aux = quire.flex_attention(
            query,
            key,
            key,
            weight=lambda score, b, h, q, k: torch.where(q == 2, signs[k], 2.0) + 0.0 * score,
            normalise=normalise,
            backend=backend,
            return_aux=AuxRequest(lse=True),
        )
        assert aux.lse is not None and (aux.lse[:, :, 2] == -inf).all()
        assert aux.lse.isfinite().sum() == 4 * 8
        above = torch.full_like(aux.lse, above_lse)
        return torch.autograd.grad((out, aux.lse), (query, key), (torch.ones_like(out), above))

    for above_lse in (0.0, 1.0):
        assert all(x.isfinite().all() for x in attend(above_lse))


@each_backend
def test_rows_of_no_sequence_have_no_weights(backend: Backend) -> None:
    query = torch.randn(6, 4, 8, requires_grad=True)
    key = torch.randn(6, 4, 8)
    out, aux = attention(
        query,
        Ragged(key, key, [0, 3, 6]),
        q_offsets=[0, 3, 6],
        q_lengths=[2, 3],
        weight=weights.softplus,
        backend=backend,
        return_aux=AuxRequest(lse=True, max_scores=True),
    )
    assert aux.lse is not None and aux.max_scores is not None
    rows = [range(2), range(3, 6)]
    exact = reference.ragged_attention(
        query,
        key,
        key,
        rows,
        [range(3), range(3, 6)],
        score_mod=weights.softplus,
        weighting="shares",
    )
    torch.testing.assert_close(aux.lse, exact.lse.log())
    torch.testing.assert_close(aux.max_scores, exact.max_scores)
    assert (aux.lse[2] == -inf).all() and not out[2].any()
    above = aux.lse.detach().isfinite().float()
    (grad,) = torch.autograd.grad(aux.lse, query, above)
    assert grad.isfinite().all() and not grad[2].any()
