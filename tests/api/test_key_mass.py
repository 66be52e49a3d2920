"""How much attention each key receives: the numbers of the reference, on every path."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_as_good_as
from torch import Tensor

import quire
from quire import AuxRequest, Dense, attention, create_block_mask, mods, reference
from quire.backends.eager import tiling
from quire.config import Backend, config

BACKENDS: list[Backend] = ["eager", "jit"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
MASS = AuxRequest(key_mass=True)

inf, nan = math.inf, math.nan

each_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tiles so small that there are several in each direction."""
    monkeypatch.setattr(tiling, "TILE_SIDE", 8)
    monkeypatch.setattr(tiling, "TILE_ELEMENTS", 500)


def operands(
    q_len: int, kv_len: int, group: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    query, key = torch.randn(2, 2 * group, q_len, 20), torch.randn(2, 2, kv_len, 20)
    return query.to(dtype), key.to(dtype), torch.randn(2, 2, kv_len, 12).to(dtype)


def mass_of(tensors: tuple[Tensor, ...], backend: Backend, **options: Any) -> Tensor:
    """Call flex_attention for the mass alone, and return it."""
    _, aux = quire.flex_attention(
        *tensors, **options, enable_gqa=True, return_aux=MASS, backend=backend
    )
    assert aux.key_mass is not None and [*map(type, aux)].count(type(None)) == 5
    return aux.key_mass


def check(tensors: tuple[Tensor, ...], backend: Backend, **options: Any) -> Tensor:
    """Compare the mass with the reference in float64. Errors grow with the number of queries."""
    mass = mass_of(tensors, backend, **options)
    peer, exact = (
        reference.attention(*given, **options).key_mass
        for given in (tensors, [tensor.double() for tensor in tensors])
    )
    size = math.sqrt(max(1, tensors[0].shape[2]))
    assert_as_good_as(mass, peer, exact, "key mass", size=size)
    return mass


@each_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_len", [1, 3, 5, 37])
def test_dtypes_and_lengths(q_len: int, dtype: torch.dtype, backend: Backend) -> None:
    mass = check(operands(q_len, 41, group=3, dtype=dtype), backend)
    assert mass.shape == (2, 6, 41)
    assert mass.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(mass.sum(-1), mass.new_full((2, 6), q_len))


MASKS: dict[str, Callable[..., Any]] = {
    "causal": mods.causal,
    "window": mods.sliding_window(5),
    "empty rows and keys": lambda b, h, q_idx, kv_idx: (q_idx % 3 != 1) & (kv_idx > 4 + b + h),
    "nothing": lambda b, h, q_idx, kv_idx: q_idx < 0,
}


@each_backend
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_masks_mods_and_sinks(name: str, blocks: bool, backend: Backend) -> None:
    tensors, mask = operands(33, 29, group=2), MASKS[name]
    options: dict[str, Any] = {"mask_mod": mask}
    if blocks:
        options = {"block_mask": create_block_mask(mask, 2, 4, 33, 29, BLOCK_SIZE=(8, 16))}
    sink = torch.tensor([0.5, -inf, 30.0, 2.0])
    check(tensors, backend, **options)
    mass = check(tensors, backend, score_mod=mods.softcap(2.0), sink=sink, **options)
    assert bool((mass >= 0).all()) and (name == "nothing") == (not mass.any())


@each_backend
def test_dropout_does_not_change_it(backend: Backend) -> None:
    tensors = operands(20, 30)
    mass = mass_of(tensors, backend)
    assert torch.equal(mass_of(tensors, backend, dropout_p=0.6), mass)


@each_backend
def test_one_batch_of_keys_has_a_mass_for_each_batch_of_queries(backend: Backend) -> None:
    query, key, value = operands(20, 30)
    mass = check((query, key[:1], value[:1]), backend)
    assert mass.shape == (2, 2, 30) and not torch.equal(mass[0], mass[1])


@each_backend
@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (3, 0), (0, 0)])
def test_no_queries_or_no_keys(q_len: int, kv_len: int, backend: Backend) -> None:
    assert torch.equal(mass_of(operands(q_len, kv_len), backend), torch.zeros(2, 2, kv_len))


@each_backend
@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [nan, inf])
def test_what_is_not_finite(bad: float, which: str, backend: Backend) -> None:
    tensors = operands(20, 20)
    tensors[["query", "key", "value"].index(which)][0, 1, 7] = bad
    mass = check(tensors, backend, mask_mod=mods.causal)
    spoilt = {"query": range(8), "key": range(20), "value": range(0)}[which]
    assert mass[0, 1].isnan().nonzero().flatten().tolist() == [*spoilt]


@each_backend
def test_positions_are_absolute(backend: Backend) -> None:
    """The last query sits at the last key, and a cache may begin anywhere."""
    query, key, value = operands(5, 30)
    _, aux = attention(
        query,
        Dense(key, value, start=100),
        mask=mods.causal,
        return_aux=AuxRequest(key_mass=True, lse=True),
        backend=backend,
    )
    options: dict[str, Any] = {"mask_mod": mods.causal, "q_start": 125, "kv_start": 100}
    expected = reference.attention(query, key, value, **options)
    torch.testing.assert_close(aux.key_mass, expected.key_mass)
    torch.testing.assert_close(aux.lse, expected.lse)


@each_backend
def test_it_has_no_gradient_and_others_keep_theirs(backend: Backend) -> None:
    tensors = tuple(tensor.requires_grad_() for tensor in operands(9, 20))
    bias = torch.randn(20, requires_grad=True)

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[kv_idx]

    out, aux = quire.flex_attention(*tensors, mod, return_aux=MASS, backend=backend)
    assert aux.key_mass is not None and not aux.key_mass.requires_grad
    alone = quire.flex_attention(*tensors, mod, backend=backend)
    leaves = (*tensors, bias)
    grads, expected = (torch.autograd.grad(x.square().sum(), leaves) for x in (out, alone))
    assert all(map(torch.equal, grads, expected))


def test_a_mod_outside_of_the_table() -> None:
    with pytest.warns(quire.EagerModWarning):
        check(operands(20, 30), "auto", score_mod=lambda score, b, h, q, kv: torch.asinh(score))


@each_backend
def test_checked_calls_have_it_too(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = operands(20, 30)
    mass = mass_of(tensors, backend)
    monkeypatch.setenv("QUIRE_CHECK", "1")
    config.cache_clear()
    assert torch.equal(mass_of(tensors, backend), mass)
