"""torch.vmap over attention and its derivatives: the results of a loop, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func

import quire
from quire import AuxRequest, Dense, Paged, Ragged, attention, flex_attention
from quire.errors import TensorKindError
from quire.mods import causal

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:`torch.jit.script` is (deprecated|not supported)"
    ),  # torch's own use of it
    pytest.mark.filterwarnings("ignore::quire.request.EagerModWarning"),
]

N = 3


def looped(function: Callable[..., Any], dims: tuple[int | None, ...], args: list[Tensor]) -> Any:
    """Return what torch.vmap is defined to return."""
    pairs = list(zip(args, dims, strict=True))
    every = [
        function(*(x if dim is None else x.select(dim, n) for x, dim in pairs)) for n in range(N)
    ]
    if isinstance(every[0], Tensor):
        return torch.stack(every)
    return tuple(torch.stack(parts) for parts in zip(*every, strict=True))


def same(function: Callable[..., Any], dims: tuple[int | None, ...], args: list[Tensor]) -> None:
    found, expected = func.vmap(function, dims)(*args), looped(function, dims, args)
    if isinstance(found, Tensor):
        found, expected = (found,), (expected,)
    for actual, wanted in zip(found, expected, strict=True):
        assert torch.equal(actual, wanted)


def everything(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, sink: Tensor) -> Any:
    """Return all results; the mods depend on b."""
    out, aux = flex_attention(
        query,
        key,
        value,
        lambda score, b, h, q_idx, kv_idx: score + bias[b, h] * (q_idx - kv_idx),
        mask_mod=lambda b, h, q_idx, kv_idx: q_idx + b >= kv_idx,
        sink=sink,
        enable_gqa=True,
        return_aux=AuxRequest(True, True, True, True, True),
    )
    return out, *aux[:5]


MAPPED = [some for some in itertools.product((True, False), repeat=5) if any(some)]
NAMES = ("query", "key", "value", "bias", "sink")


@pytest.mark.parametrize(
    "mapped", MAPPED, ids=lambda some: ",".join(itertools.compress(NAMES, some))
)
@pytest.mark.parametrize("batch", [1, 2])
def test_any_tensors(mapped: tuple[bool, ...], batch: int) -> None:
    shapes = ((batch, 4, 40, 16), (batch, 2, 50, 16), (batch, 2, 50, 16), (batch, 4), (4,))
    args = [
        torch.randn(*((N,) if maps else ()), *shape)
        for maps, shape in zip(mapped, shapes, strict=True)
    ]
    dims = tuple(0 if maps else None for maps in mapped)
    same(everything, dims, args)

    def loss(*tensors: Tensor) -> Tensor:
        out, lse, *_ = everything(*tensors)
        return out.square().sum() + lse.sin().sum()

    same(func.grad(loss, argnums=(0, 1, 2, 3, 4)), dims, args)


@pytest.mark.parametrize("shared", [(0,), (1, 2)])
def test_one_batch_of_keys_for_many_queries(shared: tuple[int, ...]) -> None:
    query, key = torch.randn(N, 2, 4, 20, 8), torch.randn(1, 4, 30, 8)

    def attend(q: Tensor, k: Tensor) -> Tensor:
        return attention(q, Dense(k, k), mask=causal)

    dims = (0, None) if shared == (0,) else (None, 0)
    args = [
        query if dims[0] == 0 else query[0],
        key if dims[1] is None else key.expand(N, -1, -1, -1, -1),
    ]
    same(attend, dims, args)
    same(func.grad(lambda q, k: attend(q, k).square().sum(), argnums=(0, 1)), dims, args)


def test_other_dimensions() -> None:
    query, key = torch.randn(2, 4, N, 33, 16), torch.randn(2, 4, 33, 16, N)
    same(lambda q, k: flex_attention(q, k, k), (2, 4), [query, key])
    found = func.vmap(lambda q: flex_attention(q, q, q), 2, 1)(query)
    assert torch.equal(
        found, torch.stack([flex_attention(*3 * (query[:, :, n],)) for n in range(N)], 1)
    )


def test_inside_of_another() -> None:
    query, bias = torch.randn(N, 2, 1, 2, 20, 8), torch.randn(N, 2, 2)

    def attend(q: Tensor, table: Tensor) -> Tensor:
        return flex_attention(q, q, q, lambda s, b, h, i, j: s + table[h] * (i - j))

    both = func.vmap(func.vmap(attend))(query, bias)
    inner = func.vmap(func.vmap(attend), in_dims=(0, None))(query, bias[0])
    for n, m in itertools.product(range(N), range(2)):
        assert torch.equal(both[n, m], attend(query[n, m], bias[n, m]))
        assert torch.equal(inner[n, m], attend(query[n, m], bias[0, m]))


@pytest.mark.parametrize("size", [1, 2])
def test_a_block_mask_with_a_batch(size: int) -> None:
    mask = quire.create_block_mask(
        lambda b, h, q, k: (q >= k) & (q - k < 40 + 20 * b), size, None, 200, 200, BLOCK_SIZE=64
    )
    query = torch.randn(N, 2, 2, 200, 16)

    def attend(q: Tensor) -> Tensor:
        return flex_attention(q, q, q, block_mask=mask)

    same(attend, (0,), [query])
    same(func.grad(lambda q: attend(q).square().sum()), (0,), [query])


def test_a_mod_that_cannot_be_traced() -> None:
    query, bias = torch.randn(N, 2, 2, 6, 4), torch.randn(N, 2)

    def attend(q: Tensor, table: Tensor) -> Tensor:
        def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return s + torch.erfinv(torch.tanh(s * 0.1 + table[h])) * (1 + b)

        return flex_attention(q, q, q, mod)

    same(attend, (0, 0), [query, bias])
    same(attend, (0, None), [query, bias[0]])


def test_ragged_memory() -> None:
    def attend(q: Tensor, k: Tensor) -> Tensor:
        return attention(q, Ragged(k, k, [0, 5, 5, 17]), mask=causal)

    same(attend, (0, 0), [torch.randn(N, 17, 4, 8), torch.randn(N, 17, 2, 8)])


def test_paged_memory() -> None:
    table = torch.tensor([[0, 3, 1], [2, 5, 4]], dtype=torch.int32)

    def attend(q: Tensor, k: Tensor) -> Tensor:
        return attention(q, Paged(k, k, table, [9, 11]), mask=causal)

    same(attend, (0, 0), [torch.randn(N, 2, 4, 3, 8), torch.randn(N, 6, 2, 4, 8)])
    same(attend, (0, None), [torch.randn(N, 2, 4, 3, 8), torch.randn(6, 2, 4, 8)])
    query, pages = torch.randn(2, 4, 3, 8), torch.randn(6, 2, 4, 8)
    with pytest.raises(TensorKindError, match="page_table must be the same for all calls"):
        func.vmap(lambda t: attention(query, Paged(pages, pages, t, [9, 11])))(
            table.expand(N, 2, 3)
        )
    query = torch.randn(17, 4, 8)
    with pytest.raises(TensorKindError, match="offsets must be the same for all calls"):
        func.vmap(lambda t: attention(query, Ragged(query, query, t)))(torch.zeros(N, 3).long())


def test_a_plan() -> None:
    query = torch.randn(N, 1, 2, 20, 8)
    step = quire.plan(query[0], Dense(query[0], query[0]), mask=causal)
    same(lambda q: step(q, Dense(q, q)), (0,), [query])


# --- derivatives ----------------------------------------------------------------------------------


def test_gradients_of_samples() -> None:
    """The gradients of shared weights, for each sample: key, bias and sink are not mapped."""
    query, key, value = (
        torch.randn(N, 1, 4, 20, 8),
        torch.randn(1, 4, 20, 8),
        torch.randn(1, 4, 20, 8),
    )
    bias, sink = torch.randn(4), torch.randn(4)

    def loss(key: Tensor, value: Tensor, bias: Tensor, sink: Tensor, query: Tensor) -> Tensor:
        mod = lambda s, b, h, i, j: s * bias[h]  # noqa: E731
        return flex_attention(query, key, value, mod, sink=sink).square().sum()

    gradients = func.grad(loss, argnums=(0, 1, 2, 3))
    same(gradients, (None, None, None, None, 0), [key, value, bias, sink, query])


def test_many_gradients_at_once() -> None:
    query = torch.randn(2, 2, 3, 4)

    def attend(q: Tensor) -> Tensor:
        return flex_attention(q, q, q, mask_mod=causal)

    expected = torch.autograd.functional.jacobian(attend, query)
    assert torch.equal(func.jacrev(attend)(query), expected)
    assert torch.equal(func.jacrev(attend, chunk_size=1)(query), expected)
    _, pull = func.vjp(attend, query)
    units = torch.eye(query.numel()).view(-1, *query.shape)
    assert torch.equal(func.vmap(pull)(units)[0].view_as(expected), expected)


def test_tangents_for_each_sample() -> None:
    query, tangent = torch.randn(2, N, 1, 2, 20, 8)

    def pushed(q: Tensor, t: Tensor) -> Tensor:
        return func.jvp(lambda x: flex_attention(x, x, x, mask_mod=causal), (q,), (t,))[1]

    same(pushed, (0, 0), [query, tangent])
    same(pushed, (None, 0), [query[0], tangent])


# --- dropout --------------------------------------------------------------------------------------


def dropped(query: Tensor) -> Tensor:
    return flex_attention(query, query, query, dropout_p=0.5)


def test_randomness() -> None:
    query = torch.randn(1, 2, 10, 8).expand(N, 1, 2, 10, 8)
    with pytest.raises(RuntimeError, match="randomness error mode"):
        func.vmap(dropped)(query)
    first, second, _ = func.vmap(dropped, randomness="same")(query)
    assert torch.equal(first, second)
    torch.manual_seed(1)
    several = func.vmap(dropped, randomness="different")(query)
    assert not torch.equal(several[0], several[1])


@pytest.mark.parametrize("randomness", ["same", "different"])
@pytest.mark.parametrize("sink", [None, torch.zeros(2, dtype=torch.float64)])
def test_a_gradient_drops_what_was_dropped(randomness: str, sink: Tensor | None) -> None:
    """Of sum(out) by the values it is the weights, so it shows what was dropped."""
    query = torch.randn(N, 2, 2, 4, 3, dtype=torch.float64)
    sinks = None if sink is None else sink.expand(N, 2)
    one = torch.eye(4, dtype=torch.float64).expand(N, 2, 2, 4, 4)

    def attend(q: Tensor, v: Tensor, s: Tensor | None) -> Tensor:
        return flex_attention(q, q, v, dropout_p=0.5, sink=s)

    dims = (0, 0, None if sink is None else 0)
    torch.manual_seed(1)
    weights = func.vmap(attend, dims, randomness=randomness)(query, one, sinks)
    torch.manual_seed(1)
    grad = func.grad(lambda v, q, s: attend(q, v, s).sum())
    found = func.vmap(grad, (0, 0, dims[2]), randomness=randomness)(one, query, sinks)
    torch.testing.assert_close(found[..., 0], weights.sum(-2))
    assert torch.equal(weights[0] == 0, weights[1] == 0) == (randomness == "same")


def test_a_jacobian_has_one_set_of_dropped_weights() -> None:
    query, keep = torch.randn(1, 1, 4, 3), torch.Generator()

    def attend(q: Tensor) -> Tensor:
        return flex_attention(q, q, q, dropout_p=0.5, generator=keep.manual_seed(1))

    expected = torch.autograd.functional.jacobian(attend, query)
    assert torch.equal(func.jacrev(attend)(query), expected)
    torch.testing.assert_close(func.jacfwd(attend, randomness="same")(query), expected)
