"""Forward mode: tangents of results against forward mode through the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import quire
from quire import AuxRequest, Dense, Paged, Ragged, attention, flex_attention, reference
from quire.backends.eager.tiling import TILE_ELEMENTS
from quire.config import Backend
from quire.mods import causal

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:`torch.jit.script` is (deprecated|not supported)"
    ),  # torch's own use of it
    pytest.mark.filterwarnings("ignore::quire.request.EagerModWarning"),
]

NAMES = ("query", "key", "value", "bias", "sink")


def operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """query [2, 4, 7, 5], key [2, 2, 9, 5], value [2, 2, 9, 3], bias [4, 7, 9], sink [4]."""
    shapes = ((2, 4, 7, 5), (2, 2, 9, 5), (2, 2, 9, 3), (4, 7, 9), (4,))
    return tuple(torch.randn(shape, dtype=dtype) for shape in shapes)


def like(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.randn_like(x) for x in tensors)


def capped(bias: Tensor) -> Callable[..., Any]:
    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.tanh(score / 2) * 2 + bias[h, q_idx, kv_idx] * score

    return mod


def untraceable(bias: Tensor) -> Callable[..., Any]:
    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + torch.erfinv(torch.tanh(score * 0.1)) * bias[h, q_idx, kv_idx] * (1 + b)

    return mod


def ours(
    *given: Tensor, mod: Callable[..., Any] = capped, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    query, key, value, bias, sink = given
    out, aux = flex_attention(
        query,
        key,
        value,
        mod(bias),
        mask_mod=causal,
        sink=sink,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
        backend=backend,
    )
    assert aux.lse is not None
    return out, aux.lse


def theirs(*given: Tensor, mod: Callable[..., Any] = capped) -> tuple[Tensor, Tensor]:
    query, key, value, bias, sink = given
    found = reference.attention(query, key, value, score_mod=mod(bias), mask_mod=causal, sink=sink)
    return found.out, found.lse


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def of_some(attend: Callable[..., Any], given: tuple[Tensor, ...], some: tuple[int, ...]) -> Any:
    """Return attention as a function of some of its tensors."""

    def function(*moved: Tensor) -> Any:
        every = list(given)
        for place, tensor in zip(some, moved, strict=True):
            every[place] = tensor
        return attend(*every)

    return function


SOME = [(0,), (1,), (2,), (3,), (4,), (0, 1), (0, 1, 2), (2, 3), (0, 1, 2, 3, 4)]


@pytest.mark.parametrize("some", SOME, ids=lambda some: ",".join(NAMES[n] for n in some))
@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("mod", [capped, untraceable])
def test_tangents_of_any_tensors(
    some: tuple[int, ...], backend: Backend, mod: Callable[..., Any]
) -> None:
    given = operands()
    moved, tangents = tuple(given[n] for n in some), like(tuple(given[n] for n in some))

    def attend(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return ours(*tensors, mod=mod, backend=backend)

    def expect(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return theirs(*tensors, mod=mod)

    found = func.jvp(of_some(attend, given, some), moved, tangents)
    close(found, func.jvp(of_some(expect, given, some), moved, tangents))


def test_dual_tensors() -> None:
    given = operands()
    tangents = like(given)
    with forward_ad.dual_level():
        duals = map(forward_ad.make_dual, given, tangents)
        found = [forward_ad.unpack_dual(x).tangent for x in ours(*duals)]
        duals = map(forward_ad.make_dual, given, tangents)
        expected = [forward_ad.unpack_dual(x).tangent for x in theirs(*duals)]
    close(found, expected)


@pytest.mark.parametrize("q_len", [1, 3, 40, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes(q_len: int, dtype: torch.dtype) -> None:
    shapes = ((2, 4, q_len, 32), (2, 2, 300, 32), (2, 2, 300, 48))
    given = tuple(torch.randn(shape).to(dtype) for shape in shapes)
    tangents = like(given)

    def attend(*tensors: Tensor) -> Tensor:
        return flex_attention(*tensors, mask_mod=causal, enable_gqa=True)

    def expect(*tensors: Tensor) -> Tensor:
        return reference.attention(*tensors, mask_mod=causal).out

    _, found = func.jvp(attend, given, tangents)
    wide, directions = (tuple(x.double() for x in each) for each in (given, tangents))
    _, exact = func.jvp(expect, wide, directions)
    assert found.dtype == dtype
    error = (found.double() - exact).abs().max() / exact.abs().max()
    assert error < 8 * torch.finfo(dtype).eps


def test_dropout_drops_the_same_weights() -> None:
    given = operands()[:3]
    keep = torch.Generator()

    def attend(*tensors: Tensor) -> Tensor:
        return flex_attention(
            *tensors, enable_gqa=True, dropout_p=0.5, generator=keep.manual_seed(1)
        )

    tangents = like(given)
    _, expected = torch.autograd.functional.jvp(attend, given, tangents)
    close(func.jvp(attend, given, tangents)[1], expected)


def test_a_block_mask() -> None:
    mask = quire.create_block_mask(causal, None, None, 200, 200, BLOCK_SIZE=64)
    query, tangent = torch.randn(2, 1, 2, 200, 8, dtype=torch.float64)
    _, found = func.jvp(lambda x: flex_attention(x, x, x, block_mask=mask), (query,), (tangent,))
    expected = func.jvp(
        lambda x: reference.attention(x, x, x, mask_mod=causal).out, (query,), (tangent,)
    )
    close(found, expected[1])


def test_a_row_that_reads_nothing_has_no_tangent() -> None:
    query, tangent = torch.randn(2, 1, 1, 6, 4)

    def attend(x: Tensor) -> tuple[Tensor, Tensor]:
        out, aux = flex_attention(
            x, x, x, mask_mod=lambda b, h, q, k: q > k, return_aux=AuxRequest(lse=True)
        )
        return out, aux.lse

    (_, lse), (moved, slope) = func.jvp(attend, (query,), (tangent,))
    assert lse[0, 0, 0] == -math.inf
    assert not moved[0, 0, 0].any() and slope[0, 0, 0] == 0
    assert bool(moved[0, 0, 2:].any(-1).all())


def test_a_value_that_is_not_read_may_be_infinite() -> None:
    given = operands(torch.float32)[:3]
    given[2][:, :, -1] = math.inf
    given[1][:, :, -1] = math.nan
    tangents = like(given)
    _, found = func.jvp(
        lambda *x: flex_attention(*x, mask_mod=causal, enable_gqa=True), given, tangents
    )
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_an_infinite_output_has_a_finite_tangent_by_the_values(backend: Backend) -> None:
    query, key, value, tangent = torch.randn(4, 1, 1, 6, 4, dtype=torch.float64)
    value[0, 0, 0] = math.inf

    def attend(v: Tensor) -> Tensor:
        return flex_attention(query, key, v, backend=backend)

    _, found = func.jvp(attend, (value,), (tangent,))
    close(found, torch.softmax(query @ key.mT / 2, -1) @ tangent)


def test_scores_far_from_zero() -> None:
    query, key = torch.ones(1, 1, 3, 4), torch.full((1, 1, 5, 4), -1e9)
    value, tangent = torch.randn(2, 1, 1, 5, 4)
    _, found = func.jvp(lambda v: flex_attention(query, key, v), (value,), (tangent,))
    torch.testing.assert_close(found, tangent.mean(2, keepdim=True).expand_as(found))
    direction = torch.randn_like(query)
    _, found = func.jvp(lambda k: flex_attention(query, k, value), (key,), (torch.randn_like(key),))
    assert bool(found.isfinite().all()) and direction.shape == found.shape


# --- other memories -------------------------------------------------------------------------------

OFFSETS = [0, 5, 5, 17]
TABLE = torch.tensor([[0, 3, 1], [2, 5, 4]], dtype=torch.int32)


def ragged(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attention(query, Ragged(key, value, OFFSETS), mask=causal)


def ragged_reference(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    rows = [range(5), range(5, 5), range(5, 17)]
    return reference.ragged_attention(query, key, value, rows, rows, mask_mod=causal).out


def paged(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attention(query, Paged(key, value, TABLE, [9, 11]), mask=causal)


def paged_reference(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    every = []
    for b, length in enumerate((9, 11)):
        one = [
            x[TABLE[b].long()].transpose(0, 1).flatten(1, 2)[None, :, :length] for x in (key, value)
        ]
        found = reference.attention(query[b : b + 1], *one, mask_mod=causal, q_start=length - 3)
        every.append(found.out)
    return torch.cat(every)


@pytest.mark.parametrize("backend", ["jit", "eager"])
@pytest.mark.parametrize(
    ("attend", "expect", "shapes"),
    [
        pytest.param(ragged, ragged_reference, ((17, 4, 8), (17, 2, 8), (17, 2, 6)), id="ragged"),
        pytest.param(
            paged, paged_reference, ((2, 4, 3, 8), (6, 2, 4, 8), (6, 2, 4, 6)), id="paged"
        ),
    ],
)
def test_other_memories(
    attend: Callable[..., Tensor],
    expect: Callable[..., Tensor],
    shapes: tuple[tuple[int, ...], ...],
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUIRE_BACKEND", backend)
    quire.config.config.cache_clear()
    given = tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)
    tangents = like(given)
    for some in ((0,), (1,), (2,), (0, 1, 2)):
        moved, directions = (tuple(x[n] for n in some) for x in (given, tangents))
        found = func.jvp(of_some(attend, given, some), moved, directions)
        close(found, func.jvp(of_some(expect, given, some), moved, directions))
    monkeypatch.undo()
    quire.config.config.cache_clear()


# --- higher orders --------------------------------------------------------------------------------


def loss(attend: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    def function(*tensors: Tensor) -> Tensor:
        out, lse = attend(*tensors)
        return out.square().sum() + lse.sin().sum()

    return function


@pytest.mark.parametrize("place", range(5), ids=NAMES)
def test_second_derivatives_in_every_order(place: int) -> None:
    given = operands()
    x, t = given[place], torch.randn_like(given[place])
    f, g = (of_some(loss(attend), given, (place,)) for attend in (ours, theirs))
    _, expected = func.jvp(func.grad(g), (x,), (t,))
    close(func.jvp(func.grad(f), (x,), (t,))[1], expected)
    close(func.grad(lambda y: func.jvp(f, (y,), (t,))[1])(x), expected)
    close(func.grad(lambda y: (func.grad(f)(y) * t).sum())(x), expected)
    twice = func.jvp(lambda y: func.jvp(f, (y,), (t,))[1], (x,), (t,))[1]
    close(twice, (expected * t).sum())


def test_third_derivatives() -> None:
    given = operands()
    x, t = given[0], torch.randn_like(given[0])

    def thrice(f: Callable[..., Tensor]) -> Tensor:
        def twice(y: Tensor) -> Tensor:
            return func.jvp(lambda z: func.jvp(f, (z,), (t,))[1], (y,), (t,))[1]

        return func.jvp(twice, (x,), (t,))[1]

    close(*(thrice(of_some(loss(attend), given, (0,))) for attend in (ours, theirs)))


@pytest.mark.parametrize("place", range(5), ids=NAMES)
def test_jacobians(place: int) -> None:
    given = operands()
    f, g = (of_some(attend, given, (place,)) for attend in (ours, theirs))
    expected = func.jacrev(g, chunk_size=1)(given[place])
    close(func.jacfwd(f)(given[place]), expected)
    close(func.jacrev(f)(given[place]), expected)


def test_a_hessian_of_two_captured_tensors() -> None:
    """Directions of one of them leave the other as it is, expanded along all directions."""
    query, key, value, bias, _ = operands()
    query, head = query[:, :2], torch.arange(2).view(2, 1, 1)
    apart = torch.arange(9) - torch.arange(7).unsqueeze(1)

    def ours(slopes: Tensor, table: Tensor) -> Tensor:
        def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score * table[kv_idx - q_idx] + slopes[h] * (kv_idx - q_idx)

        return flex_attention(query, key, value, mod).square().sum()

    def theirs(slopes: Tensor, table: Tensor) -> Tensor:
        scores = query @ key.mT / math.sqrt(5) * table[apart] + slopes[head] * apart
        return (scores.softmax(-1) @ value).square().sum()

    given = bias[0, 0, :2].clone(), bias[1].flatten()[:18].clone()
    close(func.hessian(ours, (0, 1))(*given), func.hessian(theirs, (0, 1))(*given))


def test_hessians() -> None:
    given = (*operands()[:3], torch.randn(4, 7, 9, dtype=torch.float64), torch.randn(4).double())
    f, g = (of_some(loss(attend), given, (4,)) for attend in (ours, theirs))
    expected = func.jacfwd(func.grad(g))(given[4])
    close(func.hessian(f)(given[4]), expected)
    small = (given[0][:1, :, :2], given[1][:1], given[2][:1], *given[3:])
    f, g = (of_some(loss(attend), small, (0,)) for attend in (ours, theirs))
    close(
        func.hessian(f)(small[0]), func.jacrev(func.jacrev(g, chunk_size=1), chunk_size=1)(small[0])
    )


def test_gradcheck() -> None:
    shapes = ((1, 2, 3, 3), (1, 1, 4, 3), (1, 1, 4, 2), (2, 3, 4), (2,))
    given = tuple(torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    torch.autograd.gradcheck(ours, given, check_forward_ad=True)
    torch.autograd.gradgradcheck(ours, given, check_fwd_over_rev=True)


# --- memory ---------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = operation(*args, **(kwargs or {}))
        if isinstance(found, Tensor):
            self.elements = max(self.elements, found.numel())
        return found


@pytest.mark.parametrize("order", ["tangent", "forward over reverse"])
def test_no_tensor_is_as_large_as_the_scores(order: str) -> None:
    query, tangent = torch.randn(2, 1, 1, 2048, 8)

    def function(x: Tensor) -> Tensor:
        return attention(x, Dense(x, x), mask=causal, backend="eager").square().sum()

    with Largest() as largest:
        func.jvp(func.grad(function) if order != "tangent" else function, (query,), (tangent,))
    assert 0 < largest.elements <= TILE_ELEMENTS
