"""Rows whose scores are so far from 0 that their log-sum-exp is their largest score, rounded.

Their probabilities cannot be had from it: exp(score - lse) is 1 for each of n equal scores.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import quire
from quire import AuxRequest, Dense, Paged, Ragged, attention, attention_gradients, plans, reference
from quire.config import Backend
from quire.mods import causal

pytestmark = pytest.mark.every_width

LOWEST = torch.finfo(torch.float32).min
HQ, HKV, L, S, D = 4, 2, 37, 150, 8

ModOf = Callable[[Tensor], Callable[..., Any]]

MODS: dict[str, ModOf] = {
    "all are the lowest": lambda w: lambda score, b, h, q, kv: score * 0 + LOWEST + w[h],
    "all but tie": lambda w: lambda score, b, h, q, kv: score + LOWEST + w[h],
    "all tie at -1e9": lambda w: lambda score, b, h, q, kv: score - 1e9 + w[h],
    "all tie at 1e9": lambda w: lambda score, b, h, q, kv: score + 1e9 + w[h],
    "some rows": lambda w: lambda score, b, h, q, kv: torch.where(q % 5 == 2, LOWEST, score) + w[h],
    "where a mask would be": lambda w: (
        lambda score, b, h, q, kv: torch.where(q - 9 >= kv, score + w[h], LOWEST)
    ),
    "far apart": lambda w: lambda score, b, h, q, kv: score * w[h] - 1e9 * (kv % 7),
}


def leaves(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """query, key, value, what a mod loads, a sink."""
    shapes = ((1, HQ, L, D), (1, HKV, S, D), (1, HKV, S, D), (HQ,), (HQ,))
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


each_backend = pytest.mark.parametrize("backend", ["jit", "eager"])
each_mod = pytest.mark.parametrize("name", MODS)


def results(
    made: list[Tensor], mod: Callable[..., Any], backend: Backend | None, sink: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp and mass of keys; by the reference without a backend."""
    query, key, value = made[:3]
    if backend is None:
        found = reference.attention(query, key, value, score_mod=mod, sink=sink)
        return found.out, found.lse, found.key_mass
    out, aux = attention(
        *(query, Dense(key, value)),
        score_mod=mod,
        sink=sink,
        q_start=0,
        backend=backend,
        return_aux=AuxRequest(lse=True, key_mass=True),
    )
    assert aux.lse is not None and aux.key_mass is not None
    return out, aux.lse, aux.key_mass


@each_mod
@each_backend
@pytest.mark.parametrize("sink", [None, LOWEST, -1e9, 0.5])
def test_gradients_and_masses_are_those_of_the_softmax(
    name: str, backend: Backend, sink: float | None
) -> None:
    made = leaves()
    given = None if sink is None else made[4]
    if sink is not None:
        made[4].data.fill_(sink)
    weights = torch.randn(1, HQ, L, D), torch.randn(1, HQ, L)
    found = []
    for who in (backend, None):
        out, lse, mass = results(made, MODS[name](made[3]), who, given)
        total = (out * weights[0]).sum() + (lse * weights[1]).sum()
        wanted = made if given is not None else made[:4]
        found.append((mass, *torch.autograd.grad(total, wanted, materialize_grads=True)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@each_backend
def test_float64_has_a_limit_of_its_own(backend: Backend) -> None:
    made = leaves(torch.float64)
    for far in (-1e9, -1e18):
        mod = lambda score, b, h, q, kv: score + far  # noqa: B023, E731
        found = [
            torch.autograd.grad(results(made, mod, who, None)[0].square().sum(), made[:3])
            for who in (backend, None)
        ]
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_a_call_like_an_earlier_one() -> None:
    query, key, value, w, _ = leaves()
    mod = MODS["some rows"](w)
    expected = reference.attention(query, key, value, score_mod=mod).out
    theirs = torch.autograd.grad(expected.square().sum(), (query, key, value, w))
    for _ in range(3):
        out = quire.flex_attention(query, key, value, mod, enable_gqa=True)
        ours = torch.autograd.grad(out.square().sum(), (query, key, value, w))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@each_backend
def test_second_derivatives(backend: Backend) -> None:
    made = leaves()[:4]
    made[0] = made[0].detach()[:, :, :5].requires_grad_()
    found = []
    for who in (backend, None):
        out, lse, _ = results(made, MODS["all but tie"](made[3]), who, None)
        total = out.square().sum() + lse.mul(1e-38).square().sum()
        first = torch.autograd.grad(total, made, create_graph=True)
        again = sum(x.square().sum() for x in first)
        assert isinstance(again, Tensor)
        found.append(torch.autograd.grad(again, made, materialize_grads=True))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


@each_backend
@pytest.mark.parametrize("paged", [False, True])
def test_ragged_and_paged(backend: Backend, paged: bool) -> None:
    """Each sequence has the gradients that it has alone."""
    lengths = [20, 33]
    query = torch.randn(sum(lengths), HQ, D, requires_grad=True)
    key, value = (torch.randn(sum(lengths), HKV, D, requires_grad=True) for _ in range(2))
    sink = torch.full((HQ,), LOWEST, requires_grad=True)
    mod = lambda score, b, h, q, kv: torch.where(q % 3 == b, LOWEST, score)  # noqa: E731
    ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    memory: Any = Ragged(key, value, ends)
    options: dict[str, Any] = {"score_mod": mod, "mask": causal, "sink": sink, "backend": backend}
    if paged:
        pages = [x.new_zeros(6, HKV, 16, D) for x in (key, value)]
        table = torch.tensor([[0, 1, 0], [2, 3, 4]])
        for row, (first, last) in zip(table, itertools.pairwise(ends), strict=True):
            place = torch.arange(last - first)
            pages = [
                _put(into, row[place // 16], place % 16, x[first:last])
                for into, x in zip(pages, (key, value), strict=True)
            ]
        memory = Paged(*pages, table, torch.tensor(lengths))
        options["q_offsets"] = ends
    out = attention(query, memory, **options)
    rows = [range(a, b) for a, b in itertools.pairwise(ends)]
    expected = reference.ragged_attention(
        *(query, key, value, rows, rows), score_mod=mod, mask_mod=causal, sink=sink
    ).out
    above = torch.randn(out.shape)
    wanted = (query, key, value, sink)
    ours, theirs = (torch.autograd.grad(x, wanted, above) for x in (out, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def _put(pages: Tensor, page: Tensor, row: Tensor, tokens: Tensor) -> Tensor:
    """Pages [n, heads, size, d] with tokens [t, heads, d] in some rows."""
    return pages.transpose(1, 2).index_put((page, row), tokens).transpose(1, 2)


# Who computes


def refuse_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*_: Any) -> Any:
        raise AssertionError("the backward pass ran in tiles of torch ops")

    monkeypatch.setattr(plans.eager, "backward", unexpected)


@pytest.mark.parametrize("size", [0.0, 1e3, -1e4, 16000.0])
def test_other_rows_are_left_to_the_kernel(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_tiles(monkeypatch)
    made = leaves()
    mod = lambda score, b, h, q, kv: score + size  # noqa: E731
    out, _, mass = results(made, mod, "jit", None)
    expected, _, theirs = results(made, mod, None, None)
    found = [torch.autograd.grad(x.square().sum(), made[:3]) for x in (out, expected)]
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(mass, theirs, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("empty", [False, True])
def test_a_far_row_without_gradients_is_left_to_the_kernel(
    empty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of padding, of which nothing is used. Rows that read nothing are not far."""
    refuse_tiles(monkeypatch)
    made = leaves()
    lowest = -math.inf if empty else LOWEST
    mod = lambda score, b, h, q, kv: torch.where(q < 5, lowest, score)  # noqa: E731
    used = (torch.arange(L) >= 5).view(L, 1)
    found = [
        torch.autograd.grad(
            results(made, mod, who, made[4])[0].mul(used).square().sum(), [*made[:3], made[4]]
        )
        for who in ("jit", None)
    ]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_keys_that_are_some_of_those_behind_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lse may also cover other keys, so the kernel uses it, however large it is."""
    refuse_tiles(monkeypatch)
    query, key, value, *_ = (x.detach() for x in leaves())
    mod = lambda score, b, h, q, kv: score - 1e9  # noqa: E731
    memory = Dense(key, value)
    out, aux = attention(query, memory, score_mod=mod, q_start=0, return_aux=AuxRequest(lse=True))
    assert aux.lse is not None
    grads = attention_gradients(
        query, memory, out, aux.lse, torch.ones_like(out), score_mod=mod, q_start=0
    )
    assert all(x.isfinite().all() for x in grads[:3])
