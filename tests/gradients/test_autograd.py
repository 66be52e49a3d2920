"""Gradients behave as autograd's do: guards, checkpoints, second passes, edits in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import quire
from quire import AuxRequest, create_block_mask, mods, plans, reference
from quire.aux_outputs import OF_KERNELS
from quire.errors import QuireError

N = 37


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def operands(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """query, key, value, a table and a sink."""
    qkv = [random(1, heads, N, 8, dtype=dtype) for heads in (4, 2, 2)]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return [*qkv, random(2 * N, dtype=wide), random(4, dtype=wide)]


def bias_of(table: Tensor) -> Callable[..., Tensor]:
    return lambda score, b, h, q, kv: torch.tanh(score) + table[q - kv + N]


def attend(query: Tensor, key: Tensor, value: Tensor, table: Tensor, sink: Tensor) -> Tensor:
    return quire.flex_attention(
        *(query, key, value), bias_of(table), sink=sink, mask_mod=mods.causal, enable_gqa=True
    )


def expect(query: Tensor, key: Tensor, value: Tensor, table: Tensor, sink: Tensor) -> Tensor:
    return reference.attention(
        query, key, value, score_mod=bias_of(table), sink=sink, mask_mod=mods.causal
    ).out


def gradients(compute: Callable[..., Tensor], tensors: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(compute(*tensors).square().sum(), tensors)


# Guards


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_without_gradients(guard: Callable[[], Any]) -> None:
    tensors = operands()
    with guard():
        out = attend(*tensors)
    assert not out.requires_grad
    torch.testing.assert_close(out.clone(), attend(*tensors).detach())


def test_gradients_within_no_grad() -> None:
    tensors = operands()
    with torch.no_grad(), torch.enable_grad():
        found = gradients(attend, tensors)
    assert all(map(torch.equal, found, gradients(attend, tensors)))


def test_tensors_of_inference_mode_need_no_gradient() -> None:
    """They may not be saved for a backward pass, as anywhere in torch; constants may be used."""
    with torch.inference_mode():
        key = torch.randn(1, 4, N, 8)
    query = random(1, 4, N, 8)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        quire.flex_attention(query, key, key)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """The gradients are those of operands that were cast, in the dtype of the tensors given."""
    tensors = operands()
    with torch.autocast("cpu", dtype=dtype):
        out = attend(*tensors)
        assert out.dtype == dtype
    found = torch.autograd.grad(out.float().square().sum(), tensors)
    cast = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors[:3]]
    narrow = attend(*cast, *tensors[3:])
    expected = torch.autograd.grad(narrow.float().square().sum(), [*cast, *tensors[3:]])
    for mine, its, tensor in zip(found, expected, tensors, strict=True):
        assert mine.dtype == tensor.dtype
        assert torch.equal(mine, its.to(tensor.dtype))


# More than once


def test_retain_graph() -> None:
    tensors = operands()
    loss = attend(*tensors).square().sum()
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    again = torch.autograd.grad(loss, tensors)
    assert all(map(torch.equal, first, again))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, tensors)


def test_gradients_accumulate() -> None:
    tensors = operands()
    for _ in range(2):
        attend(*tensors).square().sum().backward()
    expected = gradients(attend, tensors)
    for tensor, once in zip(tensors, expected, strict=True):
        assert torch.equal(tensor.grad, once + once)  # type: ignore[arg-type]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant: bool) -> None:
    """The forward pass runs again, and drops what it dropped."""
    tensors = operands()

    def layer(*tensors: Tensor) -> Tensor:
        return quire.flex_attention(
            *tensors[:3], bias_of(tensors[3]), sink=tensors[4], enable_gqa=True, dropout_p=0.5
        )

    torch.manual_seed(3)
    expected = gradients(layer, tensors)
    torch.manual_seed(3)
    out = checkpoint(layer, *tensors, use_reentrant=use_reentrant)
    torch.rand(10)  # a different state by the time of the second pass
    out.square().sum().backward()
    assert all(torch.equal(t.grad, grad) for t, grad in zip(tensors, expected, strict=True))


# Functions of functions


@pytest.mark.parametrize("argnums", [(0, 1, 2, 3, 4), (0,), (2,), (3,), (1, 4)], ids=str)
def test_torch_func_grad(argnums: tuple[int, ...]) -> None:
    tensors = operands(torch.float64)

    def loss(*tensors: Tensor) -> Tensor:
        return attend(*tensors).square().sum()

    found = torch.func.grad(loss, argnums=argnums)(*(tensor.detach() for tensor in tensors))
    expected = gradients(expect, tensors)
    torch.testing.assert_close(found, tuple(expected[n] for n in argnums))


def test_torch_func_vjp() -> None:
    tensors = [tensor.detach() for tensor in operands(torch.float64)]
    out, pull = torch.func.vjp(attend, *tensors)
    above = torch.randn_like(out)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    expected = torch.autograd.grad(expect(*leaves), leaves, above)
    torch.testing.assert_close(pull(above), expected)


def or_names_the_eager_path(compute: Callable[[], Any]) -> Any:
    """Return what `compute` returns, or None if its error recommends backend="eager"."""
    try:
        return compute()
    except QuireError as error:
        message = str(error)
    assert "backend" in message and "eager" in message
    return None


def test_second_derivatives_or_the_way_to_them() -> None:
    tensors = operands(torch.float64)

    def second(compute: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        loss = compute(*tensors).square().sum()
        grads = torch.autograd.grad(loss, tensors, create_graph=True)
        total = sum(grad.square().sum() for grad in grads)
        return torch.autograd.grad(total, tensors)  # type: ignore[arg-type]

    found = or_names_the_eager_path(lambda: second(attend))
    if found is not None:
        torch.testing.assert_close(found, second(expect))


def test_a_gradient_with_a_graph_is_the_gradient() -> None:
    """Whether or not there are second derivatives, asking for a graph changes no first one."""
    tensors = operands()
    loss = attend(*tensors).square().sum()
    found = or_names_the_eager_path(lambda: torch.autograd.grad(loss, tensors, create_graph=True))
    if found is not None:
        torch.testing.assert_close(found, gradients(attend, tensors), rtol=1e-4, atol=1e-5)


def test_second_derivatives_on_the_eager_path() -> None:
    """Messages may recommend backend="eager" for them, so it must have them."""
    query = random(1, 2, 9, 4, dtype=torch.float64)

    def second(attend: Callable[..., Any]) -> tuple[Tensor, ...]:
        out = attend(query, query, query)
        (grad,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), query)

    found = second(lambda *args: quire.flex_attention(*args, backend="eager"))
    torch.testing.assert_close(found, second(lambda *args: reference.attention(*args).out))


# Between forward and backward


@pytest.mark.parametrize("which", range(5))
def test_an_edit_in_place_is_noticed(which: int) -> None:
    """Of an operand, of what is captured, of a sink."""
    tensors = operands()
    out = attend(*tensors)
    with torch.no_grad():
        tensors[which].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("kind", ["score", "mask", "block mask"])
def test_an_edit_of_what_is_not_learned_is_noticed_too(kind: str) -> None:
    query, document = random(1, 2, N, 8), torch.arange(N) // 10
    offsets = torch.randn(N)
    mask = lambda b, h, q, kv: document[q] == document[kv]  # noqa: E731
    options: dict[str, Any] = {"score_mod": lambda s, b, h, q, kv: s + offsets[kv]}
    if kind == "mask":
        options = {"mask_mod": mask}
    elif kind == "block mask":
        options = {"block_mask": create_block_mask(mask, None, None, N, N, BLOCK_SIZE=16)}
    out = quire.flex_attention(query, query, query, **options)
    (offsets if kind == "score" else document)[3] = 7
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_other_names_for_other_tensors_change_nothing() -> None:
    query, bias, window = random(1, 2, N, 8), random(N), 5

    def forward() -> Tensor:
        out = quire.flex_attention(
            *(query, query, query),
            lambda s, b, h, q, kv: s + bias[kv],
            mask_mod=lambda b, h, q, kv: abs(q - kv) < window,
        )
        return out.square().sum()

    (expected,) = torch.autograd.grad(forward(), query)
    loss = forward()
    bias, window = torch.full((N,), 100.0), 2
    assert torch.equal(torch.autograd.grad(loss, query)[0], expected)


def test_the_blocks_are_those_of_the_forward_pass() -> None:
    query = random(1, 1, N, 8)
    mask = create_block_mask(mods.causal, None, None, N, N, BLOCK_SIZE=16)
    (expected,) = torch.autograd.grad(
        quire.flex_attention(query, query, query, None, mask).square().sum(), query
    )
    loss = quire.flex_attention(query, query, query, None, mask).square().sum()
    mask.kv_num_blocks.zero_()
    assert torch.equal(torch.autograd.grad(loss, query)[0], expected)


# What is asked for besides


def test_other_results_change_no_gradient() -> None:
    tensors = operands()
    options = {"sink": tensors[4], "mask_mod": mods.causal, "enable_gqa": True}
    expected = gradients(attend, tensors)
    every = AuxRequest(*[True] * len(OF_KERNELS))
    out, aux = quire.flex_attention(*tensors[:3], bias_of(tensors[3]), return_aux=every, **options)
    learned = [
        name for name, value in aux._asdict().items() if value is not None and value.requires_grad
    ]
    assert learned == ["lse"]
    found = torch.autograd.grad(out.square().sum(), tensors)
    assert all(map(torch.equal, found, expected))


# Who computes


def test_the_gradients_are_those_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of torch ops are for what is not finite, and for second derivatives."""

    def unexpected(*_: Any) -> Any:
        raise AssertionError("the backward pass ran in tiles of torch ops")

    monkeypatch.setattr(plans.eager, "backward", unexpected)
    tensors = operands()
    torch.testing.assert_close(
        gradients(attend, tensors), gradients(expect, tensors), rtol=1e-4, atol=1e-5
    )
