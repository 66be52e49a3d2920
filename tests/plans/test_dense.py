"""Calls like an earlier one: they compute what the long way computes, and miss no error."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forking import forks
from threads import at_once
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

from quire import AuxRequest, BlockMask, Dense, attention, create_block_mask, flex_attention
from quire.config import config
from quire.errors import (
    ArgumentError,
    BlockMaskShapeError,
    CapturedIndexError,
    DeviceError,
    QuireError,
    ShapeError,
)
from quire.mods import causal


def operands(q_len: int = 3, kv_len: int = 20, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(2, heads, q_len, 8),
        torch.randn(2, heads, kv_len, 8),
        torch.randn(2, heads, kv_len, 6),
    )


def biased_by(table: Tensor) -> Callable[..., Tensor]:
    def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[kv_idx]

    return biased


def assert_as_the_long_way(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """A call that names backend="jit" is never recalled; both must give the same bits."""
    actual = flex_attention(q, k, v, **options)
    assert torch.equal(actual, flex_attention(q, k, v, **options, backend="jit"))


# --- what is recalled ----------------------------------------------------------------------------


@pytest.mark.parametrize("q_len", [1, 3, 5, 40])
def test_the_second_call_is_recalled_and_the_same(q_len: int, long_ways: list[None]) -> None:
    first, second = operands(q_len), operands(q_len)
    flex_attention(*first, biased_by(torch.randn(20)), mask_mod=causal)
    other = biased_by(torch.randn(20))  # an equal graph with another tensor
    del long_ways[:]
    actual = flex_attention(*second, other, mask_mod=causal)
    assert not long_ways
    assert torch.equal(actual, flex_attention(*second, other, mask_mod=causal, backend="jit"))


def test_a_cache_that_grows_and_shrinks_is_one_signature(long_ways: list[None]) -> None:
    q, k, v = operands(1, 400)
    flex_attention(q, k[:, :, :1], v[:, :, :1], mask_mod=causal)
    del long_ways[:]
    for length in (2, 128, 129, 400, 7):
        flex_attention(q, k[:, :, :length], v[:, :, :length], mask_mod=causal)
    assert not long_ways
    for length in (2, 128, 129, 400, 7, 0):
        assert_as_the_long_way(q, k[:, :, :length], v[:, :, :length], mask_mod=causal)


def test_queries_at_the_end_of_a_cache_move_with_it() -> None:
    q, k, v = operands(2, 60)
    mod = lambda score, b, h, q_idx, kv_idx: score - (q_idx - kv_idx) * 0.1  # noqa: E731
    for length in (10, 60, 3):
        memory = Dense(k[:, :, :length], v[:, :, :length])
        for q_start in (None, 0, 5):
            actual = attention(q, memory, score_mod=mod, q_start=q_start)
            expected = attention(q, memory, score_mod=mod, q_start=q_start, backend="jit")
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("shared", [False, True])
def test_one_batch_of_keys_for_all(shared: bool) -> None:
    q, k, v = operands()
    for _ in range(2):
        assert_as_the_long_way(q, k, v)
        assert_as_the_long_way(q, k[:1], v[:1])
        assert_as_the_long_way(q, k[:1].expand_as(k), v[:1].expand_as(v) if shared else v)


# --- what changes between calls ------------------------------------------------------------------


def test_closures_and_captured_tensors_are_read_at_every_call() -> None:
    q, k, v = operands()
    window, table = 3, torch.randn(20)

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.where(kv_idx - q_idx < window, score + table[kv_idx], -1.0)

    for _ in range(2):
        assert_as_the_long_way(q, k, v, score_mod=mod)
    window = 7
    assert_as_the_long_way(q, k, v, score_mod=mod)
    table.numpy()[:] = 2.0
    assert_as_the_long_way(q, k, v, score_mod=mod)
    for other in (
        torch.randn(20, 2)[:, 0],
        torch.randn(33),
        torch.randn(20).double(),
        torch.arange(20),
        torch.arange(20) > 5,
        torch.randn(1).expand(20),
    ):
        table = other
        assert_as_the_long_way(q, k, v, score_mod=mod)


@pytest.mark.parametrize("length", [19, 0])
def test_a_captured_tensor_that_became_too_short_is_an_error(length: int) -> None:
    q, k, v = operands()
    flex_attention(q, k, v, biased_by(torch.randn(20)))
    with pytest.raises(CapturedIndexError, match=f"with size {length} of a captured tensor"):
        flex_attention(q, k, v, biased_by(torch.randn(length)))


@pytest.mark.parametrize("shape", [(0,), (1000, 0), (0, 3)])
@pytest.mark.parametrize("q_len", [2, 9])
def test_an_empty_captured_tensor_where_nobody_looks(shape: tuple[int, ...], q_len: int) -> None:
    q, k, v = operands(q_len)
    table = torch.empty(shape)

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[(kv_idx,) * table.dim()]

    for _ in range(2):
        out = flex_attention(q, k, v, mod, mask_mod=lambda b, h, q_idx, kv_idx: kv_idx < 0)
        assert torch.equal(out, torch.zeros_like(out))


def _edit_in_place(mask: BlockMask) -> None:
    mask.kv_num_blocks[..., 0] = 1


def _edit_data(mask: BlockMask) -> None:
    mask.kv_num_blocks.data.fill_(1)


def _edit_numpy(mask: BlockMask) -> None:
    mask.kv_indices.numpy()[..., 0] = 1


def _replace_mask_mod(mask: BlockMask) -> None:
    mask.mask_mod = lambda b, h, q_idx, kv_idx: kv_idx % 2 == 0


@pytest.mark.parametrize("edit", [_edit_in_place, _edit_data, _edit_numpy, _replace_mask_mod])
@pytest.mark.parametrize("q_len", [4, 64])
def test_a_block_mask_is_read_at_every_call(
    edit: Callable[[BlockMask], None], q_len: int, long_ways: list[None]
) -> None:
    q, k, v = operands(q_len, 256)
    mask = create_block_mask(
        lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + 200, None, None, q_len, 256
    )
    before = flex_attention(q, k, v, block_mask=mask)
    del long_ways[:]
    assert torch.equal(flex_attention(q, k, v, block_mask=mask), before)
    assert not long_ways
    edit(mask)
    assert not torch.equal(flex_attention(q, k, v, block_mask=mask), before)
    assert_as_the_long_way(q, k, v, block_mask=mask)


def test_a_block_mask_of_another_length_is_refused() -> None:
    q, k, v = operands(4, 256)
    mask = create_block_mask(causal, None, None, 4, 256)
    flex_attention(q, k, v, block_mask=mask)
    with pytest.raises(BlockMaskShapeError, match="kv_len=200"):
        flex_attention(q, k[:, :, :200], v[:, :, :200], block_mask=mask)


def test_a_block_mask_on_another_device_is_refused() -> None:
    q, k, v = operands(4, 256)
    mask = create_block_mask(causal, None, None, 4, 256)
    flex_attention(q, k, v, block_mask=mask)
    with pytest.raises(DeviceError, match="on the same device"):
        flex_attention(q, k, v, block_mask=mask.to("meta"))


def test_a_mod_is_called_once_in_the_first_call_and_in_later_ones() -> None:
    q, k, v = (x.requires_grad_() for x in operands())
    calls: list[str] = []

    def counted_score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        calls.append("score")
        return score * 1.5

    def counted_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        calls.append("mask")
        return q_idx >= kv_idx

    for learns in (False, True):
        for _ in range(3):
            with torch.set_grad_enabled(learns):
                out = flex_attention(q, k, v, counted_score, mask_mod=counted_mask)
            if learns:
                out.sum().backward()
            assert sorted(calls) == ["mask", "score"]
            calls.clear()


def test_a_mod_that_changes_at_every_call_leaves_nothing_behind() -> None:
    q, k, v = operands()
    factors = iter([2.0, 3.0])

    def moody(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * next(factors)

    for _ in range(2):
        flex_attention(q, k, v, moody)
    assert_as_the_long_way(q, k, v, score_mod=lambda score, b, h, q_idx, kv_idx: score * 2.0)
    assert_as_the_long_way(q, k, v, score_mod=lambda score, b, h, q_idx, kv_idx: score * 3.0)


def test_far_positions_are_not_those_of_a_plan_for_near_ones() -> None:
    q, k, v = operands()

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.where(q_idx > 2**35, score * 0.0, score + kv_idx)

    attention(q, Dense(k, v), score_mod=mod)
    actual = attention(q, Dense(k, v), score_mod=mod, q_start=2**40)
    mean = v.mean(2, keepdim=True).expand_as(actual)
    torch.testing.assert_close(actual, mean)


# --- what surrounds a call -----------------------------------------------------------------------


def test_threads_dtypes_and_modes_around_the_second_call() -> None:
    q, k, v = operands(70, 90)
    out = flex_attention(q, k, v, mask_mod=causal)
    torch.set_num_threads(1)
    assert torch.equal(flex_attention(q, k, v, mask_mod=causal), out)
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    assert torch.equal(flex_attention(q, k, v, mask_mod=causal), out)
    with torch.inference_mode():
        assert torch.equal(flex_attention(q, k, v, mask_mod=causal), out)
    with torch.autocast("cpu", torch.bfloat16):
        assert flex_attention(q, k, v, mask_mod=causal).dtype == torch.bfloat16
    with torch.device("meta"):
        assert torch.equal(flex_attention(q, k, v, mask_mod=causal), out)


def test_numbers_that_depend_on_the_default_dtype() -> None:
    q, k, v = operands()

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + torch.where(kv_idx / 3 * 3 == kv_idx, 0.0, 1.0)

    for dtype in (torch.float32, torch.float64, torch.float16, torch.float32):
        torch.set_default_dtype(dtype)
        assert_as_the_long_way(q, k, v, score_mod=mod)


def test_gradients_are_never_forgotten() -> None:
    q, k, v = operands()
    table = torch.randn(20)
    flex_attention(q, k, v, biased_by(table))
    with torch.no_grad():
        assert not flex_attention(q, k.requires_grad_(), v, biased_by(table)).requires_grad
    assert flex_attention(q, k, v, biased_by(table)).requires_grad
    k.requires_grad_(False)
    assert flex_attention(q, k, v, biased_by(table.requires_grad_())).requires_grad
    table.requires_grad_(False)
    grad = torch.func.grad(lambda x: flex_attention(x, k, v, biased_by(table)).square().sum())(q)
    leaf = q.clone().requires_grad_()
    flex_attention(leaf, k, v, biased_by(table)).square().sum().backward()
    torch.testing.assert_close(grad, leaf.grad)


# Torch's own use of it; with Python 3.14 in other words.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is (deprecated|not supported)")
def test_transforms_of_a_call_that_is_known() -> None:
    q, k, v = operands()
    expected = flex_attention(q, k, v)
    assert torch.equal(torch.vmap(lambda x: flex_attention(x, k, v))(q[None])[0], expected)
    out, tangent = torch.func.jvp(lambda x: flex_attention(x, k, v), (q,), (q,))
    assert torch.equal(out, expected)
    with forward_ad.dual_level():
        dual = flex_attention(forward_ad.make_dual(q, q), k, v)
        assert torch.equal(forward_ad.unpack_dual(dual).tangent, tangent)


@pytest.mark.parametrize("known", [False, True])
def test_tensors_without_memory(known: bool) -> None:
    q, k, v = operands()
    if known:
        flex_attention(q, k, v)
        flex_attention(q, k, v, biased_by(torch.randn(20)))
    zeros = torch._efficientzerotensor(q.shape)
    torch.testing.assert_close(
        flex_attention(zeros, k, v), v.mean(2, keepdim=True).expand(-1, -1, 3, -1)
    )
    with FakeTensorMode():
        fake = torch.randn(20)
        with pytest.raises(AssertionError, match="convert all Tensors to FakeTensors"):
            flex_attention(q, k, v)  # as for every operator of PyTorch
    with pytest.raises(AssertionError, match="FakeTensor"):
        flex_attention(q, k, v, biased_by(fake))
    with pytest.raises(DeviceError, match="meta"):
        flex_attention(q.to("meta"), k.to("meta"), v.to("meta"))
    with pytest.raises(DeviceError, match="one device"):
        flex_attention(q, k, v.to("meta"))
    with pytest.raises(RuntimeError, match="meta"):
        flex_attention(q, k, v, biased_by(torch.empty(20, device="meta")))


def test_a_checked_call_is_checked(monkeypatch: pytest.MonkeyPatch, long_ways: list[None]) -> None:
    q, k, v = operands()
    out = flex_attention(q, k, v)
    monkeypatch.setenv("QUIRE_CHECK", "1")
    config.cache_clear()
    del long_ways[:]
    assert torch.equal(flex_attention(q, k, v), out)
    assert long_ways


def test_many_python_threads_at_once() -> None:
    q, k, v = operands(3, 300)
    tables = [torch.randn(300) for _ in range(8)]
    expected = [flex_attention(q, k, v, biased_by(t), backend="jit") for t in tables]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(50):
            if not torch.equal(flex_attention(q, k, v, biased_by(tables[i])), expected[i]):
                wrong.append(i)

    at_once(work, 8)
    assert not wrong


@forks
def test_a_forked_child_recalls_what_its_parent_planned() -> None:
    q, k, v = operands(64, 2000)
    out = flex_attention(q, k, v, mask_mod=causal)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        same = torch.equal(flex_attention(q, k, v, mask_mod=causal), out)
        os.write(write, bytes([same]))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1) == b"\1"


# --- what is asked for besides -------------------------------------------------------------------


def test_options_are_never_forgotten() -> None:
    q, k, v = operands()
    out = flex_attention(q, k, v)
    for scale in (0.5, 1, torch.tensor(0.25), 0.0, -1.0):
        assert_as_the_long_way(q, k, v, scale=scale)
    assert not torch.equal(flex_attention(q, k, v, sink=torch.zeros(2)), out)
    assert not torch.equal(flex_attention(q, k, v, dropout_p=0.5), out)
    _, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True))
    assert aux.lse.shape == q.shape[:3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": float("nan")}, "scale must be a finite number"),
        ({"scale": "1"}, "scale must be a finite number"),
        ({"dropout_p": torch.tensor(0.0)}, "dropout_p must be a number"),
        ({"dropout_p": -1.0}, "dropout_p must be a number"),
        ({"generator": 3}, r"generator must be a torch\.Generator"),
        ({"q_start": 0.0}, "q_start must be a position"),
        ({"q_start": True}, "q_start must be a position"),
        ({"score_mod": 3}, "score_mod must be a function"),
        ({"mask": 3}, "mask_mod must be a function"),
    ],
)
def test_wrong_options_are_errors_after_a_right_call(options: dict[str, Any], message: str) -> None:
    q, k, v = operands()
    attention(q, Dense(k, v))
    with pytest.raises(QuireError, match=message):
        attention(q, Dense(k, v), **options)


@pytest.mark.parametrize("start", [False, 0.0, -1, "0"])
def test_a_wrong_start_is_an_error_after_a_right_call(start: Any) -> None:
    q, k, v = operands()
    attention(q, Dense(k, v))
    with pytest.raises(ArgumentError, match=r"Dense\.start must be a position"):
        attention(q, Dense(k, v, start=start))


def test_wrong_shapes_are_errors_after_a_right_call() -> None:
    q, k, v = operands()
    flex_attention(q, k, v)
    with pytest.raises(ShapeError, match="agree in batch, heads and length"):
        flex_attention(q, k, v[:, :, :19])
    with pytest.raises(ShapeError, match="same embedding dimension"):
        flex_attention(q, k[..., :7], v)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        flex_attention(q, k[:, :1], v[:, :1])
    grouped = flex_attention(q, k[:, :1], v[:, :1], enable_gqa=True)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        flex_attention(q, k[:, :1], v[:, :1])
    assert torch.equal(flex_attention(q, k[:, :1], v[:, :1], enable_gqa=True), grouped)


def test_what_is_not_finite_is_computed_anew() -> None:
    q, k, v = operands()
    flex_attention(q, k, v, mask_mod=causal)
    k[0, 0, 1] = float("nan")
    v[1, 1, 2] = float("inf")
    actual = flex_attention(q, k, v, mask_mod=causal)
    assert bool(actual[0, 0, 1:].isnan().all())
    assert bool(actual[0, 0, 0].isfinite().all())
    assert bool(actual[1, 1, 2].isinf().all())
    assert bool(actual[1, 1, :2].isfinite().all())


# --- training


def test_a_training_step_is_recalled_too(long_ways: list[None]) -> None:
    table = torch.randn(40, requires_grad=True)
    leaves = [tensor.requires_grad_() for tensor in operands(30, 20)]

    def step(backend: str = "auto") -> tuple[Tensor, ...]:
        memory = Dense(*leaves[1:])
        out = attention(leaves[0], memory, score_mod=biased_by(table), mask=causal, backend=backend)
        return out, *torch.autograd.grad(out.square().sum(), (*leaves, table))

    first = step()
    assert len(long_ways) == 1
    for found, expected in zip(step(), first, strict=True):
        assert torch.equal(found, expected)
    assert len(long_ways) == 1
    for found, expected in zip(step("eager"), first, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_what_is_learned_is_part_of_a_signature(long_ways: list[None]) -> None:
    query, key, value = operands(30, 20)
    memory = Dense(key, value)
    for _ in range(2):
        assert not attention(query, memory).requires_grad
    assert attention(query.clone().requires_grad_(), memory).requires_grad
    assert len(long_ways) == 2
    value.requires_grad_()
    with torch.no_grad():
        assert not attention(query, memory).requires_grad
    assert len(long_ways) == 2
    out = attention(query, memory)  # as when the query alone had a gradient
    assert len(long_ways) == 2
    (grad,) = torch.autograd.grad(out.sum(), value)
    assert grad.shape == value.shape


def test_a_recalled_step_can_be_differentiated_twice(long_ways: list[None]) -> None:
    query, key, value = (x.double().requires_grad_() for x in operands(3, 5))
    attention(query, Dense(key, value), mask=causal)

    def second(backend: str) -> Tensor:
        out = attention(query, Dense(key, value), mask=causal, backend=backend)
        (slope,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), key)[0]

    torch.testing.assert_close(second("auto"), second("eager"))
    assert len(long_ways) == 2  # the first call, and the eager one


def test_a_recalled_step_notices_an_edit(long_ways: list[None]) -> None:
    table = torch.randn(40, requires_grad=True)
    query, key, value = operands(30, 20)
    for _ in range(2):
        out = attention(query, Dense(key, value), score_mod=biased_by(table))
    assert len(long_ways) == 1
    with torch.no_grad():
        table.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_recalled_step_keeps_what_is_not_finite_apart(long_ways: list[None]) -> None:
    query, key, value = (x.requires_grad_() for x in operands(20, 20))
    with torch.no_grad():
        key[:, :, -1] = torch.nan
    for _ in range(2):
        out = attention(query, Dense(key, value), mask=causal)
    assert len(long_ways) == 1
    (grad,) = torch.autograd.grad(out[:, :, :-1].sum(), query)
    assert grad[:, :, :-1].isfinite().all()


@pytest.mark.parametrize("block", [32, 64, 128])
def test_a_recalled_step_with_a_block_mask(block: int, long_ways: list[None]) -> None:
    """Blocks that the backward kernel's tiles straddle are looked up element by element."""
    size = 300
    query, key, value = (x.requires_grad_() for x in operands(size, size))
    mask = create_block_mask(
        lambda b, h, q, kv: (q // 50) * 30 >= kv, 2, 2, size, size, BLOCK_SIZE=block
    )

    def step(backend: str = "auto") -> tuple[Tensor, ...]:
        out = flex_attention(query, key, value, block_mask=mask, backend=backend)
        return torch.autograd.grad(out.square().sum(), (query, key, value))

    first = step()
    for _ in range(2):
        for found, expected in zip(step(), first, strict=True):
            assert torch.equal(found, expected)
    for found, expected in zip(step("eager"), first, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_recalled_step_whose_tensors_come_back_otherwise(long_ways: list[None]) -> None:
    """Hooks on saved tensors may keep them in other strides."""
    rows = [torch.randn(2, 30, 3, 8).transpose(1, 2).requires_grad_() for _ in range(3)]

    def step() -> tuple[Tensor, ...]:
        out = attention(rows[0], Dense(*rows[1:]), mask=causal)
        return torch.autograd.grad(out.square().sum(), rows)

    expected = [step() for _ in range(2)][1]
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: x.contiguous(), lambda x: x.clone(memory_format=torch.contiguous_format)
    ):
        found = step()
    assert len(long_ways) == 1
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, its)
