"""Plans: what attention computes, with everything but captured numbers as it was at the start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import quire
from quire import Dense, attention, create_block_mask, plan
from quire.errors import (
    ArgumentError,
    BackendError,
    BlockMaskShapeError,
    CapturedIndexError,
    DeviceError,
    DtypeError,
    NotCallableError,
    QuireError,
)


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def operands(q_len: int = 3, kv_len: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(2, 4, q_len, 8),
        torch.randn(2, 2, kv_len, 8),
        torch.randn(2, 2, kv_len, 6),
    )


# --- the same numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize("q_start", [None, 0, 7])
@pytest.mark.parametrize("mask", [None, causal])
def test_a_plan_takes_other_lengths_and_layouts(q_start: int | None, mask: Any) -> None:
    q, k, v = operands()
    slopes = torch.linspace(0.1, 0.4, 4)

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - slopes[h] * (q_idx - kv_idx)

    options: dict[str, Any] = {"score_mod": mod, "mask": mask, "q_start": q_start}
    step = plan(q, Dense(k, v), **options)
    for q_len, kv_len in ((1, 1), (3, 20), (3, 140), (5, 40), (40, 7), (2, 0), (0, 5)):
        q, k, v = operands(q_len, kv_len)
        for keys in (k, k.transpose(2, 3).contiguous().transpose(2, 3), k[:1].expand_as(k)):
            expected = attention(q, Dense(keys, v), **options, backend="jit")
            assert torch.equal(step(q, Dense(keys, v)), expected)


def test_a_cache_that_grows() -> None:
    q, k, v = operands(1, 300)
    step = plan(q, Dense(k[:, :, :1], v[:, :, :1]), mask=causal)
    for length in range(1, 300, 23):
        memory = Dense(k[:, :, :length], v[:, :, :length])
        assert torch.equal(step(q, memory), attention(q, memory, mask=causal, backend="jit"))
    assert len(step._known) == 1


def test_a_shard_of_keys() -> None:
    q, k, v = operands()
    step = plan(q, Dense(k, v), mask=causal)
    memory = Dense(k, v, start=100)
    assert torch.equal(step(q, memory), attention(q, memory, mask=causal))


def test_far_positions() -> None:
    q, k, v = operands()

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.where(q_idx > 2**35, score * 0.0, score + kv_idx)

    actual = plan(q, Dense(k, v), score_mod=mod, q_start=2**40)(q, Dense(k, v))
    mean = v.mean(2, keepdim=True).repeat_interleave(2, 1).expand_as(actual)
    torch.testing.assert_close(actual, mean)


# --- what stays, and what is read again ----------------------------------------------------------


def test_a_plan_keeps_what_it_was_given() -> None:
    q, k, v = operands(4, 200)
    window = 5
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx < window * 30, None, None, 4, 200)

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.where(kv_idx < window, score, score * 0.5)

    step = plan(q, Dense(k, v), score_mod=mod, mask=mask, q_start=0)
    before = step(q, Dense(k, v))
    window = 2
    mask.kv_num_blocks.zero_()
    mask.mask_mod = causal
    assert torch.equal(step(q, Dense(k, v)), before)
    assert not torch.equal(attention(q, Dense(k, v), score_mod=mod, q_start=0), before)


def test_what_captured_tensors_hold_is_read_at_every_call() -> None:
    q, k, v = operands()
    table = torch.randn(20)
    mod = lambda score, b, h, q_idx, kv_idx: score + table[kv_idx]  # noqa: E731
    step = plan(q, Dense(k, v), score_mod=mod)

    def assert_same() -> None:
        expected = attention(q, Dense(k, v), score_mod=mod, backend="jit")
        assert torch.equal(step(q, Dense(k, v)), expected)

    assert_same()
    table.numpy()[:] = torch.arange(20.0).numpy()
    assert_same()
    table.data = torch.randn(20, 3)[:, 1]  # elsewhere, and not side by side
    assert_same()
    table.data = torch.randn(30)
    assert_same()


def test_a_captured_tensor_that_became_another_is_refused() -> None:
    q, k, v = operands()
    table = torch.randn(20)
    step = plan(q, Dense(k, v), score_mod=lambda s, b, h, q_idx, kv_idx: s + table[kv_idx])
    step(q, Dense(k, v))
    for other in (torch.randn(20, 20), torch.randn(20).double(), torch.tensor(1.0)):
        table.data = other
        with pytest.raises(ArgumentError, match="Make a new plan"):
            step(q, Dense(k, v))
    for length in (19, 0):
        table.data = torch.randn(length)
        with pytest.raises(CapturedIndexError, match=f"with size {length} of a captured tensor"):
            step(q, Dense(k, v))


def test_a_plan_computes_no_gradients() -> None:
    q, k, v = operands()
    table = torch.randn(20, requires_grad=True)
    step = plan(
        q.requires_grad_(),
        Dense(k, v),
        score_mod=lambda s, b, h, q_idx, kv_idx: s + table[kv_idx],
    )
    assert not step(q, Dense(k, v)).requires_grad
    assert not step(torch.nn.Parameter(q), Dense(k, v)).requires_grad


# --- around a call -------------------------------------------------------------------------------


def test_modes_around_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = operands()
    step = plan(q, Dense(k, v), mask=causal)
    out = step(q, Dense(k, v))
    with torch.autocast("cpu", torch.bfloat16):
        assert step(q, Dense(k, v)).dtype == torch.bfloat16
    with torch.inference_mode(), torch.device("meta"):
        assert torch.equal(step(q, Dense(k, v)), out)
    monkeypatch.setenv("QUIRE_CHECK", "1")
    quire.config.config.cache_clear()
    assert torch.equal(step(q, Dense(k, v)), out)
    assert torch.equal(torch.vmap(lambda x: step(x, Dense(k, v)))(q[None])[0], out)


# --- mistakes ------------------------------------------------------------------------------------


def test_wrong_calls_say_what_attention_says() -> None:
    q, k, v = operands()
    step = plan(q, Dense(k, v))
    wrong: list[tuple[Any, Any]] = [
        (q, (k, v)),
        (None, Dense(k, v)),
        (q, Dense(k, None)),  # type: ignore[arg-type]
        (q, Dense(k, v[:, :, :3])),
        (q, Dense(k, v, start=-1)),
        (q, Dense(k, v, start=False)),
        (q[0], Dense(k, v)),
        (q[:, :3], Dense(k, v)),
    ]
    for query, memory in wrong:
        with pytest.raises(QuireError) as expected:
            attention(query, memory)
        with pytest.raises(type(expected.value)) as actual:
            step(query, memory)
        assert str(actual.value) == str(expected.value)
    with pytest.raises(DeviceError, match="meta"):
        step(q.to("meta"), Dense(k.to("meta"), v.to("meta")))
    with pytest.raises(DtypeError, match=r"query must be torch\.float32, as the plan was made for"):
        step(q.double(), Dense(k, v))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.double(), "keys or values are float64 and queries are not"),
    ],
)
def test_what_no_kernel_computes_is_refused(change: Any, message: str) -> None:
    q, k, v = operands()
    step = plan(q, Dense(k, v))
    with pytest.raises(BackendError, match=message):
        step(q, Dense(change(k), change(v)))
    with pytest.raises(BackendError, match=message):
        plan(q, Dense(change(k), change(v)))


def test_what_cannot_be_planned() -> None:
    q, k, v = operands()
    with (
        pytest.warns(quire.EagerModWarning),
        pytest.raises(BackendError, match="cannot be traced"),
    ):
        plan(q, Dense(k, v), score_mod=lambda s, b, h, q_idx, kv_idx: torch.asinh(s))
    with pytest.raises(NotCallableError, match="mask_mod must be a function"):
        plan(q, Dense(k, v), mask=5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="q_start must be a position"):
        plan(q, Dense(k, v), q_start=-1)


def test_a_block_mask_fixes_the_lengths() -> None:
    q, k, v = operands(3, 200)
    mask = create_block_mask(causal, None, None, 3, 200)
    step = plan(q, Dense(k, v), mask=mask)
    expected = attention(q, Dense(k, v), mask=mask, backend="jit")
    for _ in range(2):
        assert torch.equal(step(q, Dense(k, v)), expected)
    with pytest.raises(BlockMaskShapeError, match="kv_len=199"):
        step(q, Dense(k[:, :, 1:], v[:, :, 1:]))
