"""Keys and values of float8 are read exactly, by every kernel and for every width of vectors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quire import AuxRequest, Dense, Paged, Ragged, attention, reference
from quire.mods import causal

pytestmark = pytest.mark.every_width

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LENGTHS = (1, 3, 5, 70)  # the decode kernel with one row, with sets of rows; the forward kernel
ALL = AuxRequest(lse=True, max_scores=True, argmax=True, entropy=True)


def every(dtype: torch.dtype) -> Tensor:
    """All 256 numbers of a dtype: NaN, infinities, zeros and subnormal numbers among them."""
    return torch.arange(256, dtype=torch.uint8).view(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a, 7e7, 8e8, 9e9), torch.nan_to_num(b, 7e7, 8e8, 9e9))


@pytest.mark.parametrize("q_len", LENGTHS)
@pytest.mark.parametrize("width", [256, 250, 3])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_value(dtype: torch.dtype, width: int, q_len: int) -> None:
    """A row that reads one key gives its value."""
    codes = every(dtype)
    value = torch.stack([codes.roll(-shift)[:width] for shift in range(0, 256, 3)])[None, None]
    keys = value.shape[2]
    query, key = torch.randn(1, 2, q_len, 16), torch.randn(1, 1, keys, 16).to(dtype)
    for first in range(0, keys, q_len if q_len > 5 else 17):
        options: dict[str, Any] = {"mask": lambda b, h, q, kv, n=first: kv == q + n}
        out = attention(query, Dense(key, value), q_start=0, **options, backend="jit")
        held = value[0, 0, first : first + q_len].float()
        assert same(out[0, 0, : len(held)], held)
        assert not out[0, :, len(held) :].any()


@pytest.mark.parametrize("q_len", LENGTHS)
@pytest.mark.parametrize("width", [64, 33, 128])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_key(dtype: torch.dtype, width: int, q_len: int) -> None:
    """A query of one 1 and zeros has the score of one number of each key."""
    codes = every(dtype)
    column = width - 1 if q_len == 3 else width // 3
    key = torch.zeros(256, width).to(dtype)
    key[:, column] = codes
    query = torch.zeros(1, 1, q_len, width)
    query[..., column] = 1.0
    value = torch.zeros(1, 1, 256, 4).to(dtype)
    for first in (0, 100, 256 - q_len):
        options: dict[str, Any] = {"mask": lambda b, h, q, kv, n=first: kv == q + n, "scale": 1.0}
        found = [
            attention(query, Dense(x, value), q_start=0, return_aux=ALL, backend="jit", **options)
            for x in (key[None, None], key[None, None].float())
        ]
        ours, theirs = (aux.max_scores for _, aux in found)
        assert ours is not None and theirs is not None
        assert same(ours, theirs)
        wanted = codes[first : first + q_len].float()
        torch.testing.assert_close(ours[0, 0], wanted, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("q_len", LENGTHS)
@pytest.mark.parametrize("widths", [(64, 64), (128, 96), (72, 40), (7, 5)])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_the_same_bits_as_the_same_numbers_of_float32(
    dtype: torch.dtype, widths: tuple[int, int], q_len: int
) -> None:
    """In dense, ragged and paged memory, though numbers are read in other units."""
    query = torch.randn(1, 4, q_len, widths[0])
    key, value = (torch.randn(1, 2, 300, width).to(dtype) for width in widths)
    options: dict[str, Any] = {"mask": causal, "return_aux": ALL, "backend": "jit"}
    expected, wanted = attention(query, Dense(key.float(), value.float()), **options)
    found = [attention(query, Dense(key, value), **options)]
    packed = [x[0].transpose(0, 1) for x in (query, key, value)]
    ragged, aux = attention(
        packed[0], Ragged(*packed[1:], [0, 300]), q_offsets=[0, q_len], **options
    )
    found.append((ragged.transpose(0, 1)[None], aux._replace(**_in_rows(aux))))
    pages = [x.view(1, 2, 20, 15, -1)[0].transpose(0, 1) for x in (key, value)]
    table = torch.arange(20, dtype=torch.int32)[None]
    found.append(attention(query, Paged(*pages, table, [300]), **options))
    for out, aux in found:
        assert torch.equal(out, expected)
        for name in ("lse", "max_scores", "argmax", "entropy"):
            assert torch.equal(getattr(aux, name), getattr(wanted, name))


def _in_rows(aux: Any) -> dict[str, Tensor]:
    names = ("lse", "max_scores", "argmax", "entropy")
    return {name: getattr(aux, name).transpose(0, 1)[None] for name in names}


@pytest.mark.parametrize("q_len", [1, 40])
@pytest.mark.parametrize("scale_of", ["row", "head", "tensor"])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_scales_of_rows_heads_and_tensors(dtype: torch.dtype, scale_of: str, q_len: int) -> None:
    """A scale may be expanded: one for a head or for all, as vLLM has."""
    shape = {"row": (20, 2, 15), "head": (1, 2, 1), "tensor": (1, 1, 1)}[scale_of]
    key_scale, value_scale = (2.0 ** torch.randint(-3, 4, shape).float() for _ in range(2))
    key_scale, value_scale = (x.expand(20, 2, 15) for x in (key_scale, value_scale))
    key, value = (torch.randn(20, 2, 15, width).to(dtype) for width in (64, 48))
    table = torch.randperm(20, dtype=torch.int32)[None]
    query = torch.randn(1, 4, q_len, 64, requires_grad=True)
    scaled = Paged(key, value, table, [299], key_scale=key_scale, value_scale=value_scale)
    wide = Paged(
        key.float() * key_scale[..., None], value.float() * value_scale[..., None], table, [299]
    )
    outs = [attention(query, x, mask=causal, backend="jit") for x in (scaled, wide)]
    assert torch.equal(*outs)  # powers of two are exact
    above = torch.randn_like(outs[0])
    assert torch.equal(*(torch.autograd.grad(out, query, above)[0] for out in outs))


@pytest.mark.parametrize("backend", ["jit", "eager"])
def test_gradients_of_float8(backend: Any) -> None:
    dtype = torch.float8_e5m2
    key, value = (torch.randn(10, 2, 8, 16).to(dtype).requires_grad_() for _ in range(2))
    scale = 2.0 ** torch.randint(-2, 3, (10, 2, 8)).float()
    table = torch.randperm(10, dtype=torch.int32)[None]
    query = torch.randn(1, 4, 30, 16)
    memory = Paged(key, value, table, [77], key_scale=scale, value_scale=scale)
    out = attention(query, memory, mask=causal, backend=backend)
    above = torch.randn_like(out)
    found = torch.autograd.grad(out, (key, value), above)
    wide = [x.detach().float().requires_grad_() for x in (key, value)]
    rows = [x * scale[..., None] for x in wide]
    out = attention(query, Paged(*rows, table, [77]), mask=causal, backend=backend)
    expected = torch.autograd.grad(out, wide, above)
    for mine, other in zip(found, expected, strict=True):
        assert mine.dtype == dtype
        assert torch.equal(mine.float(), other.to(dtype).float())


def test_a_tangent_over_float8() -> None:
    query = torch.randn(1, 2, 20, 16)
    key, value = (torch.randn(1, 2, 30, 16).to(torch.float8_e4m3fn) for _ in range(2))
    moves = torch.randn_like(query)

    def tangent(key: Tensor, value: Tensor) -> Tensor:
        attend = lambda query: attention(query, Dense(key, value), mask=causal)  # noqa: E731
        return torch.func.jvp(attend, (query,), (moves,))[1]

    torch.testing.assert_close(tangent(key, value), tangent(key.float(), value.float()))


@given(st.data())
def test_random_codes(data: st.DataObject) -> None:
    """Any bytes, whatever they mean: as the reference, where that is finite."""
    dtype = data.draw(st.sampled_from(FLOAT8))
    keys, q_len = data.draw(st.integers(1, 200)), data.draw(st.sampled_from((1, 2, 9, 33)))
    width, value_width = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 70))
    seed = torch.Generator().manual_seed(data.draw(st.integers(0, 2**30)))
    key, value = (
        torch.randint(0, 256, (1, 1, keys, n), dtype=torch.uint8, generator=seed).view(dtype)
        for n in (width, value_width)
    )
    query = torch.randn(1, 2, q_len, width, generator=seed) / 64
    expected = reference.attention(query, key.float(), value.float(), q_start=0)
    out = attention(query, Dense(key, value), q_start=0, backend="jit")
    torch.testing.assert_close(out, expected.out, equal_nan=True, rtol=2e-4, atol=2e-3)
