"""A prob_mod that multiplies the probability: one pass, and what the reference says."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_as_good_as
from torch import Tensor
from torch.profiler import profile

import quire
from quire import AuxRequest, Dense, Paged, Ragged, attention, create_block_mask, reference
from quire.config import Backend
from quire.errors import CapturedIndexError
from quire.mods import causal

BACKENDS: list[Backend] = ["eager", "jit"]
each_backend = pytest.mark.parametrize("backend", BACKENDS)
LENGTH = 41


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    seed = torch.Generator().manual_seed(7)
    sizes = {"gate": (4,), "by_key": (LENGTH,), "shared": (2, LENGTH)}
    return {
        name: torch.randn(size, generator=seed).to(dtype).requires_grad_()
        for name, size in sizes.items()
    }


def by_head(held: dict[str, Tensor], p: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Any:
    return p * held["gate"][h]


def by_key(held: dict[str, Tensor], p: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Any:
    return torch.where(k % 3 == 0, p * held["by_key"][k], p / 2)


def by_distance(
    held: dict[str, Tensor], p: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor
) -> Any:
    """Where the mask is false, the index may be out of range."""
    return p * held["by_key"][(q - k) * 8 // 8] * held["gate"][h] - p * held["shared"][b, q]


def window(held: dict[str, Tensor], p: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Any:
    return torch.where(q - k < 9, -p, 0.0)


MODS = {mod.__name__: mod for mod in (by_head, by_key, by_distance, window)}


def biased(
    held: dict[str, Tensor], score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor
) -> Any:
    return score + held["shared"][b, k]


def operands(q_len: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.Generator().manual_seed(q_len)
    shapes = (2, 4, q_len, 20), (2, 2, LENGTH, 20), (2, 2, LENGTH, 12)
    query, key, value = (torch.randn(s, generator=seed).to(dtype) for s in shapes)
    return query, key, value


@each_backend
@pytest.mark.parametrize("q_len", [1, LENGTH])
@pytest.mark.parametrize("name", MODS)
def test_results_and_gradients(name: str, q_len: int, backend: Backend) -> None:
    wanted = AuxRequest(lse=True, entropy=True, key_mass=True)
    found = []
    for which, dtype in (("ours", torch.float32), ("peer", torch.float32), ("exact", torch.double)):
        held, given = tensors(dtype), operands(q_len, dtype)
        inputs = [*(x.requires_grad_() for x in given), *held.values()]
        mods = {
            "score_mod": functools.partial(biased, held),
            "prob_mod": functools.partial(MODS[name], held),
        }
        if which == "ours":
            out, aux = attention(
                given[0], Dense(*given[1:]), mask=causal, backend=backend, return_aux=wanted, **mods
            )
        else:
            aux = reference.attention(*given, mask_mod=causal, q_start=LENGTH - q_len, **mods)
            out = aux.out
        above = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        grads = torch.autograd.grad(out, inputs, above, materialize_grads=True, allow_unused=True)
        found.append((aux, (out, *grads)))
    (ours, mine), (_, theirs), (exact, truth) = found
    for place, (a, b, c) in enumerate(zip(mine, theirs, truth, strict=True)):
        assert_as_good_as(a, b, c, f"{name}, result {place}", size=8.0)
    for field in ("lse", "entropy"):
        known = getattr(exact, field).float()
        torch.testing.assert_close(getattr(ours, field), known, rtol=1e-5, atol=1e-5)
    mass = exact.weights.sum(-2).float()
    torch.testing.assert_close(ours.key_mass, mass, rtol=1e-5, atol=1e-5)
    query, key, value = operands(q_len)
    text = quire.explain(query, Dense(key, value), prob_mod=mods["prob_mod"])
    assert "no second pass" in text


@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("q_len", [1, LENGTH])
def test_the_same_bits_everywhere(name: str, q_len: int) -> None:
    held, (query, key, value) = tensors(), operands(q_len)
    mod = functools.partial(MODS[name], held)
    prob_mod: Callable[..., Any] = lambda p, b, h, q, k: mod(p, b * 0, h, q, k)  # noqa: E731
    run = functools.partial(attention, mask=causal, prob_mod=prob_mod)
    with torch.no_grad():
        dense = run(query, Dense(key, value))
        packed = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
        ends = [0, LENGTH, 2 * LENGTH]
        rows = run(packed[0], Ragged(*packed[1:], ends), q_offsets=[0, q_len, 2 * q_len])
        padded = [torch.nn.functional.pad(x, (0, 0, 0, 7)) for x in (key, value)]
        pages = [x.unflatten(2, (-1, 8)).transpose(1, 2).flatten(0, 1) for x in padded]
        table = torch.arange(12, dtype=torch.int32).view(2, 6)
        paged = run(query, Paged(*pages, table, [LENGTH, LENGTH]))
        with profile():
            seen = run(query, Dense(key, value))
        alone = run(query[:1], Dense(key[:1], value[:1]))
    assert torch.equal(rows.unflatten(0, (2, q_len)).transpose(1, 2), dense)
    assert torch.equal(paged, dense) and torch.equal(seen, dense) and torch.equal(alone, dense[:1])


@each_backend
@pytest.mark.parametrize("q_len", [1, LENGTH])
def test_values_that_are_not_read_do_not_count(q_len: int, backend: Backend) -> None:
    """Infinities behind a mask, a score of -inf and factors of -inf: all of them add nothing."""
    query, key, value = operands(q_len)
    value[:, :, 5], value[:, :, 9] = torch.inf, torch.nan

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k != 5) & (k != 30)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.where(k == 9, -torch.inf, score)

    def prob_mod(prob: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return -prob / torch.where(k == 30, 0.0, 2.0)

    found, expected = (
        quire.flex_attention(
            query,
            key,
            v,
            score_mod=score_mod,
            mask_mod=mask,
            backend=backend,
            enable_gqa=True,
            **options,
        )
        for v, options in ((value, {"prob_mod": prob_mod}), (value.nan_to_num(0, 0, 0), {}))
    )
    torch.testing.assert_close(found, -expected / 2)


@each_backend
@pytest.mark.parametrize("q_len", [1, LENGTH])
def test_an_index_out_of_range_raises_where_it_is_read(q_len: int, backend: Backend) -> None:
    query, key, value = operands(q_len)
    short = torch.ones(30)

    def run(mask: Callable[..., Tensor] | None) -> Tensor:
        mod = lambda p, b, h, q, k: p * short[k]  # noqa: E731
        return quire.flex_attention(
            query, key, value, mask_mod=mask, prob_mod=mod, backend=backend, enable_gqa=True
        )

    assert torch.equal(
        run(lambda b, h, q, k: k < 30),
        quire.flex_attention(
            query,
            key,
            value,
            mask_mod=lambda b, h, q, k: k < 30,
            backend=backend,
            enable_gqa=True,
        ),
    )
    with pytest.raises(CapturedIndexError):
        run(None)


@each_backend
def test_dropout_and_block_masks_come_after(backend: Backend) -> None:
    query, key, value = operands(LENGTH)
    held = tensors()
    mod = functools.partial(by_head, held)
    blocks = create_block_mask(causal, None, None, LENGTH, LENGTH, BLOCK_SIZE=(16, 8))

    def run(**options: Any) -> Tensor:
        torch.manual_seed(3)
        return quire.flex_attention(
            query,
            key,
            value,
            block_mask=blocks,
            dropout_p=0.3,
            backend=backend,
            enable_gqa=True,
            **options,
        )

    gate = held["gate"].view(1, 4, 1, 1)
    torch.testing.assert_close(run(prob_mod=mod), run() * gate)
    (found,) = torch.autograd.grad(run(prob_mod=mod).sum(), held["gate"])
    torch.testing.assert_close(found, run().sum((0, 2, 3)), rtol=1e-4, atol=1e-4)


@each_backend
def test_derivatives_of_derivatives(backend: Backend) -> None:
    """One tensor is captured twice, by the score_mod and by the prob_mod."""
    seed = torch.Generator().manual_seed(1)
    shape = (1, 1, 4, 3)
    given = [torch.randn(shape, generator=seed).double().requires_grad_() for _ in range(3)]
    gate = torch.rand(4, generator=seed).double().requires_grad_()

    def attend(query: Tensor, key: Tensor, value: Tensor, gate: Tensor) -> Tensor:
        return quire.flex_attention(
            query,
            key,
            value,
            score_mod=lambda score, b, h, q, k: score * gate[k],
            mask_mod=causal,
            prob_mod=lambda prob, b, h, q, k: prob * gate[q] * gate[k],
            backend=backend,
        )

    assert torch.autograd.gradcheck(attend, (*given, gate))
    assert torch.autograd.gradgradcheck(attend, (*given, gate))
    along = tuple(torch.randn(x.shape, generator=seed).double() for x in (*given, gate))
    plain = tuple(x.detach() for x in (*given, gate))
    _, tangent = torch.func.jvp(attend, plain, along)
    step = 1e-6
    ahead, behind = (
        attend(*(x + s * t for x, t in zip(plain, along, strict=True))) for s in (step, -step)
    )
    torch.testing.assert_close(tangent, (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-7)
    gates = torch.stack([plain[3], plain[3] + 1])
    several = torch.func.vmap(attend, (None, None, None, 0))(*plain[:3], gates)
    torch.testing.assert_close(several, torch.stack([attend(*plain[:3], x) for x in gates]))


@each_backend
@pytest.mark.parametrize("kind", ["dense", "ragged", "paged"])
@pytest.mark.parametrize("with_sink", [False, True])
def test_scores_far_from_0(with_sink: bool, kind: str, backend: Backend) -> None:
    """exp(score - lse) of n equal scores of -1e9 is 1 in float32; the probability is 1 / n."""
    query, key = torch.ones(1, 4, 8, 4), torch.ones(1, 4, 8, 4)
    value = torch.randn(1, 4, 8, 4)
    far = torch.tensor([0.0, 1.0, -1e9, 3e4, 1e5, 3e6, -2e12, 5.0])
    sink = torch.tensor([-1e9, 0.0, 3e6, 1.0], requires_grad=True) if with_sink else None
    inputs = [x.requires_grad_() for x in (query, key, value)]

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score * (k % 3) + far[q]

    def prob_mod(prob: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return prob * prob + torch.where(prob > 0.01, prob, 0.0)

    mods: dict[str, Any] = {"score_mod": score_mod, "prob_mod": prob_mod}
    exact = reference.attention(*inputs, sink=sink, **mods).out
    rows = [x[0].transpose(0, 1) for x in inputs]
    if kind == "dense":
        out = attention(query, Dense(key, value), sink=sink, backend=backend, **mods)
    elif kind == "ragged":
        out = attention(rows[0], Ragged(*rows[1:], [0, 8]), sink=sink, backend=backend, **mods)
        out = out.transpose(0, 1)[None]
    else:
        memory = Paged(key, value, torch.zeros(1, 1, dtype=torch.int32), [8])
        out = attention(query, memory, sink=sink, backend=backend, **mods)
    torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-5)
    learned = inputs if sink is None else [*inputs, sink]
    found, wanted = (torch.autograd.grad(x.square().sum(), learned) for x in (out, exact))
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


@each_backend
def test_temperature_own_dropout_and_top_p(backend: Backend) -> None:
    query, key, value = operands(LENGTH)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    kept = torch.rand(4, LENGTH, LENGTH) < 0.8
    ranked = reference.attention(*inputs).weights.sort(-1, descending=True).values
    count = (ranked.cumsum(-1) < 0.7).sum(-1, keepdim=True)
    least = (ranked.gather(-1, count) + ranked.gather(-1, count + 1))[..., 0] / 2
    mods: list[Callable[..., Tensor]] = [
        lambda prob, b, h, q, k: prob ** (1 / 0.7),
        lambda prob, b, h, q, k: torch.where(kept[h, q, k], prob / 0.8, 0.0),
        lambda prob, b, h, q, k: torch.where(prob >= least[b, h, q], prob, 0.0),
    ]
    for mod in mods:
        out = attention(inputs[0], Dense(*inputs[1:]), prob_mod=mod, backend=backend)
        exact = reference.attention(*inputs, prob_mod=mod).out
        torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-5)
        found, wanted = (torch.autograd.grad(x.sum(), inputs) for x in (out, exact))
        for mine, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)
