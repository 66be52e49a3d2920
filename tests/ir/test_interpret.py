"""The living definition of ops: shapes, loads, the mistakes that it reports, gradients, vmap."""

from __future__ import annotations

import math
import re
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from ir.oracle import SIZES, assert_traces_to_torch, scores
from ir.random_graphs import RandomMod, random_mods
from torch import Tensor
from torch_version import TORCH

from quire.errors import CapturedIndexError, DivisionByZeroError
from quire.ir.graph import Node, const
from quire.ir.interpret import MEANING, interpret
from quire.ir.trace import Traced, trace
from quire.ir.vectorise import evaluate

I64, F32, BOOL = torch.int64, torch.float32, torch.bool


def index(name: str) -> Node:
    return Node("input", (), I64, name)


def load(*indices: Node, dtype: torch.dtype = F32, slot: int = 0) -> Node:
    return Node("load", indices, dtype, slot)


# Random mods


@given(random_mods("mask"))
def test_random_masks_are_what_torch_makes_of_them(mod: RandomMod) -> None:
    assert_traces_to_torch(mod, "mask")


@given(random_mods("score"))
def test_random_scores_are_what_torch_makes_of_them(mod: RandomMod) -> None:
    assert_traces_to_torch(mod, "score")


@given(random_mods("score"))
def test_random_scores_in_float64(mod: RandomMod) -> None:
    assert_traces_to_torch(mod, "score", scores(dtype=torch.float64))


@given(random_mods("score", smooth=True))
def test_random_smooth_scores_are_close(mod: RandomMod) -> None:
    score = scores(dtype=torch.float64)
    traced = trace(mod, "score", score_dtype=torch.float64)
    places = tuple(map(torch.arange, SIZES))
    ours = evaluate(traced, "score", *places, score=score).expand(SIZES)
    theirs = evaluate(mod, "score", *places, score=score)
    torch.testing.assert_close(ours, theirs.double(), equal_nan=True, rtol=1e-5, atol=1e-5)


@given(random_mods("score"))
def test_a_trace_can_be_traced(mod: RandomMod) -> None:
    once = trace(mod, "score")
    again = trace(once, "score")
    assert again.output is once.output
    assert all(a is b for a, b in zip(once.captures, again.captures, strict=True))


# Floor division and remainder


@pytest.mark.parametrize("divisor", [-16, -3, -1, 1, 2, 5, 16])
@pytest.mark.parametrize("dtype", [torch.int32, I64, torch.int8], ids=str)
def test_integers_divide_as_in_python(divisor: int, dtype: torch.dtype) -> None:
    numbers = list(range(-40, 41))
    env = {"x": torch.tensor(numbers, dtype=dtype)}
    args = (Node("input", (), dtype, "x"), const(divisor, dtype))
    quotient = interpret(Node("floordiv", args, dtype), env)
    remainder = interpret(Node("mod", args, dtype), env)
    assert quotient.tolist() == [number // divisor for number in numbers]
    assert remainder.tolist() == [number % divisor for number in numbers]


@pytest.mark.parametrize("divisor", [-2.5, -0.5, 0.75, 3.0])
def test_floats_divide_as_in_python(divisor: float) -> None:
    numbers = [number / 4 for number in range(-40, 41)]
    env = {"x": torch.tensor(numbers, dtype=torch.float64)}
    args = (Node("input", (), torch.float64, "x"), const(divisor, torch.float64))
    quotient = interpret(Node("floordiv", args, torch.float64), env)
    remainder = interpret(Node("mod", args, torch.float64), env)
    assert quotient.tolist() == [number // divisor for number in numbers]
    assert remainder.tolist() == [number % divisor for number in numbers]


def by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx // h == kv_idx % h


def test_an_integer_divided_by_zero_names_the_line() -> None:
    with pytest.raises(DivisionByZeroError) as caught:
        evaluate(trace(by_head, "mask"), "mask", *map(torch.arange, SIZES))
    assert str(caught.value) == (
        "the divisor of integers must not be 0, but is at test_interpret.py:"
        f"{by_head.__code__.co_firstlineno + 1}: `return q_idx // h == kv_idx % h`. Clamp it with "
        ".clamp(min=1), or mask these positions away with a mask_mod: a score_mod is read only "
        "where the mask holds."
    )
    assert isinstance(caught.value, RuntimeError)  # as PyTorch raises
    assert isinstance(caught.value, ZeroDivisionError)  # as Python raises


def test_a_divisor_may_be_zero_where_nobody_looks() -> None:
    traced = trace(lambda score, b, h, q_idx, kv_idx: score + q_idx % h, "score")
    places = tuple(map(torch.arange, SIZES))
    live = torch.ones(1, SIZES[1], 1, 1, dtype=torch.bool)
    live[:, 0] = False
    score = torch.zeros(SIZES)
    got = evaluate(traced, "score", *places, score=score, live=live)
    assert got[1, 2, :, 0].tolist() == [0, 1, 0, 1, 0]
    with pytest.raises(DivisionByZeroError):
        evaluate(traced, "score", *places, score=score, live=~live)


def test_a_float_divided_by_zero_is_a_value() -> None:
    traced = trace(lambda score, b, h, q_idx, kv_idx: (q_idx + 1.0) // h, "score")
    got = evaluate(traced, "score", *map(torch.arange, SIZES), score=torch.zeros(SIZES))
    assert got[0, 0, 0, 0].item() == math.inf


# Shapes


def test_a_value_has_the_shape_of_what_it_depends_on() -> None:
    env = {
        "h": torch.arange(3).view(1, -1, 1, 1),
        "q_idx": torch.arange(5).view(1, 1, -1, 1),
        "kv_idx": torch.arange(7).view(1, 1, 1, -1),
    }
    per_head = Node("neg", (index("h"),), I64)
    both = Node("lt", (index("q_idx"), index("kv_idx")), BOOL)
    assert interpret(per_head, env).shape == (1, 3, 1, 1)
    assert interpret(both, env).shape == (1, 1, 5, 7)
    assert interpret(const(1, I64), env).shape == ()


def test_inputs_are_converted_to_what_was_traced() -> None:
    assert interpret(index("q_idx"), {"q_idx": torch.tensor([1], dtype=torch.int32)}).dtype == I64


def test_constants_do_not_follow_the_default_device() -> None:
    root = Node("add", (index("q_idx"), const(1, I64)), I64)
    env = {"q_idx": torch.arange(3)}
    with torch.device("meta"):
        assert interpret(root, env).tolist() == [1, 2, 3]


def test_values_are_let_go_at_their_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[Tensor]] = []

    def negative(x: Tensor) -> Tensor:
        result = torch.neg(x)
        held.append(weakref.ref(result))
        assert sum(each() is not None for each in held) <= 2
        return result

    monkeypatch.setitem(MEANING, "neg", negative)
    node = index("q_idx")
    for _ in range(20):
        node = Node("neg", (node,), I64)
    assert interpret(node, {"q_idx": torch.arange(3)}).tolist() == [0, 1, 2]
    assert len(held) == 20


# Loads


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_loads_of_any_rank_and_stride(rank: int) -> None:
    names = ["b", "h", "q_idx", "kv_idx"][:rank]
    sizes = SIZES[:rank]
    table = torch.randn([2 * size for size in reversed(sizes)]).permute(*reversed(range(rank)))
    table = table[tuple(slice(None, None, 2) for _ in sizes)]
    assert table.shape == sizes and (rank == 1 or not table.is_contiguous())
    env = {
        name: torch.arange(size).view([-1 if axis == at else 1 for axis in range(rank)])
        for at, (name, size) in enumerate(zip(names, sizes, strict=True))
    }
    root = load(*map(index, names))
    assert torch.equal(interpret(root, env, [table]), table)
    last = load(*(Node("sub", (const(-1, I64), index(name)), I64) for name in names))
    assert torch.equal(interpret(last, env, [table]), table.flip(*range(rank)))


def test_a_load_without_indices_is_the_tensor() -> None:
    scale = torch.tensor(2.0, requires_grad=True)
    assert interpret(load(), {}, [scale]) is scale


def test_a_load_takes_indices_of_any_integer_dtype() -> None:
    narrow = Node("input", (), torch.int32, "q_idx")
    env = {"q_idx": torch.tensor([2, 0, -1])}
    assert interpret(load(narrow), env, [torch.tensor([5.0, 6.0, 7.0])]).tolist() == [7, 5, 7]


def bias_mod(bias: Tensor) -> Traced:
    def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[h, q_idx - kv_idx]

    return trace(biased, "score")


def test_an_index_out_of_range_names_the_line() -> None:
    traced = bias_mod(torch.zeros(3, 4))
    with pytest.raises(CapturedIndexError) as caught:
        evaluate(traced, "score", *map(torch.arange, SIZES), score=torch.zeros(SIZES))
    assert re.sub(r"py:\d+", "py:N", str(caught.value)) == (
        "index -5 is out of bounds for dimension 1 with size 4 of a captured tensor of shape "
        "[3, 4] at test_interpret.py:N: `return score + bias[h, q_idx - kv_idx]`. Clamp the index, "
        "or mask these positions away with a mask_mod: a score_mod is read only where the mask "
        "holds."
    )
    assert isinstance(caught.value, IndexError)


def test_an_index_may_be_out_of_range_where_nobody_looks() -> None:
    bias = torch.arange(3.0 * 5).view(3, 5)
    traced = bias_mod(bias)
    b, h, q_idx, kv_idx = map(torch.arange, SIZES)
    causal = q_idx.view(-1, 1) >= kv_idx
    score = torch.zeros(SIZES)
    got = evaluate(traced, "score", b, h, q_idx, kv_idx, score=score, live=causal)
    for q in range(SIZES[2]):
        for kv in range(q + 1):
            assert torch.equal(got[1, :, q, kv], bias[:, q - kv])
    with pytest.raises(CapturedIndexError, match="index -6 is out of bounds"):
        evaluate(traced, "score", b, h, q_idx, kv_idx, score=score, live=~causal)


@pytest.mark.parametrize(("low", "high"), [(-4, 3)])
def test_the_ends_of_the_range(low: int, high: int) -> None:
    env = {"q_idx": torch.tensor([low, high])}
    assert interpret(load(index("q_idx")), env, [torch.arange(4.0)]).tolist() == [0, 3]
    for outside in (low - 1, high + 1):
        with pytest.raises(CapturedIndexError, match=f"index {outside} is out of bounds"):
            interpret(load(index("q_idx")), {"q_idx": torch.tensor(outside)}, [torch.arange(4.0)])


def test_an_empty_tensor_may_be_loaded_where_nobody_looks() -> None:
    env = {"q_idx": torch.arange(3)}
    nobody = torch.zeros(3, dtype=torch.bool)
    assert interpret(load(index("q_idx")), env, [torch.zeros(0)], live=nobody).tolist() == [0] * 3
    with pytest.raises(CapturedIndexError, match="dimension 0 with size 0"):
        interpret(load(index("q_idx")), env, [torch.zeros(0)])
    assert interpret(load(index("q_idx")), {"q_idx": torch.arange(0)}, [torch.zeros(0)]).shape == (
        0,
    )


# Under vmap


def test_a_trace_runs_under_vmap() -> None:
    bias = torch.randn(3, 11)
    traced = bias_mod(bias)
    h, q_idx, kv_idx = torch.tensor([0, 2, 1]), torch.tensor([5, 6, 7]), torch.tensor([1, 9, 0])
    score, b = torch.randn(3), torch.zeros(3, dtype=I64)
    got = torch.vmap(traced)(score, b, h, q_idx, kv_idx)
    assert torch.equal(got, score + bias[h, q_idx - kv_idx])


def test_an_index_out_of_range_under_vmap_names_the_line() -> None:
    traced = bias_mod(torch.zeros(3, 4))
    place = torch.zeros(1, dtype=I64)
    with pytest.raises(CapturedIndexError, match=r"out of bounds.* at test_interpret.py:\d+: `ret"):
        torch.vmap(traced)(torch.zeros(1), place, place, place + 9, place)


# Gradients


def test_gradients_reach_the_score_and_captured_tensors() -> None:
    table = torch.randn(4, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    score = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    env = {"q_idx": torch.arange(2).view(-1, 1), "kv_idx": torch.arange(3)}

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.tanh(score * scale) + table[q_idx + kv_idx].square()

    traced = trace(mod, "score", score_dtype=torch.float64)

    def run(score: Tensor, *captures: Tensor) -> Tensor:
        return interpret(traced.output, {"score": score, **env}, captures)

    assert torch.autograd.gradcheck(run, (score, *traced.captures))


KINKS = torch.tensor([-30.0, -1.0, -0.5, 0.0, 0.5, 1.0, 30.0], dtype=torch.float64)


def derivatives(form: Any) -> tuple[Tensor, Tensor]:
    """At each of KINKS: of the trace, and of PyTorch's own."""
    traced = trace(
        lambda score, b, h, q_idx, kv_idx: form(score), "score", score_dtype=torch.float64
    )
    ours, theirs = (KINKS.clone().requires_grad_() for _ in range(2))
    interpret(traced.output, {"score": ours}).sum().backward()
    form(theirs).sum().backward()
    assert ours.grad is not None and theirs.grad is not None
    return ours.grad, theirs.grad


@pytest.mark.parametrize(
    "form",
    [
        torch.relu,
        torch.nn.functional.gelu,
        torch.nn.functional.softplus,
        torch.nn.functional.silu,
        torch.abs,
        torch.log1p,
        torch.expm1,
        lambda x: x**3,
        lambda x: torch.maximum(x, torch.zeros_like(x)),
        lambda x: x.masked_fill(x > 0, 1.0),
    ],
)
def test_derivatives_are_torch_s_also_at_kinks(form: Any) -> None:
    ours, theirs = derivatives(form)
    finite = form(KINKS).isfinite()
    torch.testing.assert_close(ours[finite], theirs[finite])


@pytest.mark.parametrize(
    ("clamp", "inside", "at_the_bound"),
    [
        (lambda x: x.clamp(min=0.0), KINKS >= 0, KINKS == 0),
        (lambda x: x.clamp(max=0.0), KINKS <= 0, KINKS == 0),
        (lambda x: x.clamp(-1.0, 1.0), KINKS.abs() <= 1, KINKS.abs() == 1),
    ],
)
def test_the_derivative_of_clamp_at_its_bound_is_that_of_torch_2_13(
    clamp: Any, inside: Tensor, at_the_bound: Tensor
) -> None:
    ours, theirs = derivatives(clamp)
    torch.testing.assert_close(ours, inside.double())
    changed = at_the_bound if TORCH >= (2, 14) else torch.zeros_like(at_the_bound)
    torch.testing.assert_close(theirs, (inside & ~changed).double())
