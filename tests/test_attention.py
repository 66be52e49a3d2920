"""attention(): absolute positions, memories, and how mods are prepared."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import quire
from quire import AuxOutput, AuxRequest, Dense, EagerModWarning, create_block_mask, reference
from quire.ir.trace import Traced
from quire.ir.vectorise import Opaque
from quire.request import Request, _warned, checked_call

attention: Callable[..., Any] = functools.partial(quire.attention, backend="eager")


@pytest.fixture(autouse=True)
def _nothing_warned_yet() -> None:
    _warned.clear()
    torch.set_num_threads(1)


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def tensors(q_len: int = 5, kv_len: int = 9, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(2, heads, q_len, 4, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, kv_len, 4, dtype=torch.float64)
    return query, key, value


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected)


# Positions


def positions(query: Tensor, memory: Dense, **options: Any) -> tuple[list[int], list[int]]:
    """The q_idx and kv_idx that a mod is given, read off the maxima of the scores."""
    found = []
    for mod in (lambda s, b, h, q, kv: q + 0.0 * s, lambda s, b, h, q, kv: -1.0 * kv + 0.0 * s):
        aux = AuxRequest(max_scores=True)
        _, result = attention(query, memory, score_mod=mod, return_aux=aux, **options)
        found.append([abs(round(each)) for each in result.max_scores[0, 0].tolist()])
    return found[0], found[1]


@pytest.mark.parametrize(
    ("q_len", "kv_len", "start", "q_start", "first_query", "first_key"),
    [
        (3, 3, 0, None, 0, 0),
        (1, 9, 0, None, 8, 0),
        (3, 9, 0, None, 6, 0),
        (3, 9, 100, None, 106, 100),
        (9, 3, 0, None, 0, 0),
        (9, 3, 100, None, 94, 100),
        (3, 9, 0, 0, 0, 0),
        (3, 9, 4096, 20, 20, 4096),
    ],
)
def test_the_last_query_sits_at_the_last_key(
    q_len: int, kv_len: int, start: int, q_start: int | None, first_query: int, first_key: int
) -> None:
    query, key, value = tensors(q_len, kv_len)
    q_idx, kv_idx = positions(query, Dense(key, value, start), q_start=q_start)
    assert q_idx == list(range(first_query, first_query + q_len))
    assert set(kv_idx) == {first_key}


def test_the_causal_mask_of_training_works_in_decoding() -> None:
    query, key, value = tensors(9, 9)
    whole = attention(query, Dense(key, value), mask=causal)
    for step in range(9):
        memory = Dense(key[:, :, : step + 1], value[:, :, : step + 1])
        close(
            attention(query[:, :, step : step + 1], memory, mask=causal),
            whole[:, :, step : step + 1],
        )


def test_shards_merge_by_their_log_sum_exp() -> None:
    query, key, value = tensors(9, 9)
    whole = attention(query, Dense(key, value), mask=causal)
    parts = []
    for start in (0, 4):
        stop = 4 if start == 0 else 9
        shard = Dense(key[:, :, start:stop], value[:, :, start:stop], start=start)
        aux = AuxRequest(lse=True)
        out, found = attention(query, shard, mask=causal, q_start=0, return_aux=aux)
        parts.append((out, found.lse.unsqueeze(-1)))
    total = torch.logaddexp(parts[0][1], parts[1][1])
    close(sum(out * torch.exp(lse - total) for out, lse in parts), whole)


def test_a_block_mask_counts_from_its_own_first_row_and_column() -> None:
    query, key, value = tensors(5, 9)
    mask = create_block_mask(causal, None, None, 5, 9, BLOCK_SIZE=4)
    expected = reference.attention(query, key, value, mask_mod=causal).out
    for q_start, start in ((None, 0), (0, 0), (50, 7)):
        close(attention(query, Dense(key, value, start), mask=mask, q_start=q_start), expected)


def test_a_block_mask_of_torch_is_one_too() -> None:
    query, key, value = tensors(8, 8)
    theirs = torch_flex.create_block_mask(causal, None, None, 8, 8, device="cpu", BLOCK_SIZE=4)
    expected = reference.attention(query, key, value, mask_mod=causal).out
    close(attention(query, Dense(key, value), mask=theirs), expected)


# Results


def test_what_is_returned() -> None:
    query, key, value = tensors()
    memory = Dense(key, value)
    plain = attention(query, memory)
    assert isinstance(plain, Tensor)
    expected = reference.attention(query, key, value)
    out, aux = attention(query, memory, return_aux=AuxRequest(lse=True))
    assert isinstance(aux, AuxOutput)
    assert aux.max_scores is None
    assert torch.equal(out, plain)
    close(aux.lse, expected.lse)
    _, aux = attention(query, memory, return_aux=AuxRequest(max_scores=True))
    assert aux.lse is None
    close(aux.max_scores, expected.max_scores)
    assert attention(query, memory, return_aux=AuxRequest())[1] == AuxOutput(None, None)


def test_groups_of_heads_need_no_permission() -> None:
    query, key, value = tensors(heads=6)
    close(attention(query, Dense(key, value)), reference.attention(query, key, value).out)


def test_everything_at_once() -> None:
    query, key, value = tensors(heads=4)
    sink, bias = torch.randn(4).double(), torch.randn(16).double()
    options: dict[str, Any] = {
        "score_mod": lambda score, b, h, q, kv: score + bias[q - kv],
        "scale": 0.7,
        "sink": sink,
    }
    found = attention(query, Dense(key, value), mask=causal, **options)
    close(found, reference.attention(query, key, value, mask_mod=causal, q_start=4, **options).out)


def test_autocast_casts_operands_and_nothing_else() -> None:
    query, key, value = (tensor.float() for tensor in tensors(20, 20))
    narrow = [tensor.bfloat16() for tensor in (query, key, value)]
    expected = attention(narrow[0], Dense(*narrow[1:]), mask=causal)
    leaf = query.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(leaf, Dense(key, value), mask=causal)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, expected)  # the sums inside are not cast
        out.float().square().sum().backward()
        wide = attention(query.double(), Dense(key.double(), value.double()))
        assert wide.dtype == torch.float64
    assert leaf.grad is not None
    inside = leaf.grad.clone()
    leaf.grad = None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(leaf, Dense(key, value), mask=causal)
    out.float().square().sum().backward()
    assert torch.equal(inside, leaf.grad)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_keys_and_values_may_be_narrower_than_queries(dtype: torch.dtype) -> None:
    query, key, value = tensors(20, 20)
    key, value = key.to(dtype), value.to(dtype)
    out = attention(query.float(), Dense(key, value))
    assert out.dtype == torch.float32
    exact = reference.attention(query.float(), key.float(), value.float()).out
    torch.testing.assert_close(out, exact)
    chosen = quire.attention(query.float(), Dense(key, value))  # by whichever backend can
    torch.testing.assert_close(chosen, exact)


# Mods


def prepared(**options: Any) -> Any:
    """The problem that backends are given."""
    query, key, value = tensors()
    return checked_call(Request(query, Dense(key, value), **options)).problem


def test_a_mod_is_traced() -> None:
    problem = prepared(score_mod=lambda score, *_: score * 2, masks=(causal,))
    assert isinstance(problem.score_mod, Traced)
    assert isinstance(problem.mask_mod, Traced)


def test_a_mod_outside_of_the_table_warns_once_and_names_op_and_line() -> None:
    weight = torch.ones(3, requires_grad=True)
    plain = torch.ones(3)

    def strange(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.lgamma(score.abs() + 1) + torch.stack([weight, plain]).sum()

    with pytest.warns(EagerModWarning, match=r"torch\.lgamma .* at test_attention\.py") as caught:
        problem = prepared(score_mod=strange)
    assert caught[0].filename == __file__
    assert isinstance(problem.score_mod, Opaque)
    assert all(x is y for x, y in zip(problem.captures, (weight, plain), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared(score_mod=strange)


def strange_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.lgamma(q_idx + 1.0) >= 0


ENTRIES: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "attention": lambda q, k, v: attention(q, Dense(k, v), mask=strange_mask),
    "flex_attention": lambda q, k, v: quire.flex_attention(q, k, v, mask_mod=strange_mask),
    "block mask": lambda q, k, v: quire.flex_attention(
        *(q, k, v), block_mask=create_block_mask(strange_mask, 1, 1, 9, 9)
    ),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_warning_points_at_the_caller(entry: str) -> None:
    with pytest.warns(EagerModWarning) as caught:
        ENTRIES[entry](*tensors(9, 9))
    assert [Path(each.filename).name for each in caught] == ["test_attention.py"]


def test_a_mod_that_fails_on_symbols_still_runs() -> None:
    """Here isinstance looks for a tensor, which a symbol is not."""
    query, key, value = tensors()

    def picky(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if not isinstance(score, Tensor):
            raise RuntimeError("I take tensors")
        return score * 2

    with pytest.warns(EagerModWarning, match="'picky' cannot be traced.*I take tensors"):
        out = attention(query, Dense(key, value), score_mod=picky)
    close(out, reference.attention(query, key, value, scale=1.0).out)


def test_an_error_of_the_users_own_comes_through() -> None:
    def broken(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + undefined  # type: ignore[name-defined]  # noqa: F821

    query, key, value = tensors()
    with pytest.raises(NameError, match="undefined"):
        attention(query, Dense(key, value), score_mod=broken)


class Window:
    """A mask in every form in which Python has functions."""

    def __init__(self, size: int) -> None:
        self.size = size

    def near(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx).abs() < self.size

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.near(b, h, q_idx, kv_idx)

    @staticmethod
    def sized(size: int, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx).abs() < size


class WindowModule(torch.nn.Module):
    def forward(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, size: int = 3) -> Tensor:
        return (q_idx - kv_idx).abs() < size


@pytest.mark.parametrize(
    "mask",
    [
        Window(3).near,
        Window(3),
        functools.partial(Window.sized, 3),
        WindowModule(),
        lambda *args: (args[2] - args[3]).abs() < 3,
        lambda b, h, q_idx, kv_idx, size=3: (q_idx - kv_idx).abs() < size,
    ],
    ids=["bound method", "callable", "partial", "module", "variadic", "default"],
)
def test_every_form_of_function_is_a_mask(mask: Any) -> None:
    query, key, value = tensors(9, 9)
    expected = reference.attention(query, key, value, mask_mod=Window(3).near).out
    close(attention(query, Dense(key, value), mask=mask), expected)


@pytest.mark.parametrize("answer", [True, False])
def test_a_mask_may_return_a_python_bool(answer: bool) -> None:
    query, key, value = tensors()
    out = attention(query, Dense(key, value), mask=lambda b, h, q_idx, kv_idx: answer)
    close(out, reference.attention(query, key, value).out * answer)


def test_a_window_that_changes_is_seen() -> None:
    """Mods are read at every call."""
    query, key, value = tensors(9, 9)
    window = Window(2)
    for size in (2, 5):
        window.size = size
        expected = reference.attention(query, key, value, mask_mod=Window(size).near).out
        close(attention(query, Dense(key, value), mask=window.near), expected)


def test_an_index_out_of_range_where_the_mask_is_false_is_never_read() -> None:
    query, key, value = tensors(9, 9)
    bias = torch.randn(3, dtype=torch.float64)
    near = Window(3).near

    def table(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[(q_idx - kv_idx).abs()]

    def strange(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.asinh(score) + bias[(q_idx - kv_idx).abs()]

    for mod in (table, strange):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EagerModWarning)
            out = attention(query, Dense(key, value), score_mod=mod, mask=near)
        close(out, reference.attention(query, key, value, score_mod=mod, mask_mod=near).out)


def test_scores_of_inf_are_as_in_the_reference() -> None:
    query, key, value = tensors()
    out, aux = attention(
        query,
        Dense(key, value),
        score_mod=lambda score, b, h, q, kv: torch.where(kv == 2, math.inf, score),
        return_aux=AuxRequest(lse=True),
    )
    assert out.isnan().all()
    assert (aux.lse == math.inf).all()
