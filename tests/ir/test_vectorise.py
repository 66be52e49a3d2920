"""Mods over tiles: traced ones by the interpreter, all others by torch.vmap."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.errors import (
    CapturedIndexError,
    DivisionByZeroError,
    ModResultError,
    TracedBranchError,
)
from quire.ir.trace import trace
from quire.ir.vectorise import Opaque, evaluate, evaluate_live

SIZES = (2, 3, 4, 5)
TABLE = torch.randn(3, 9, generator=torch.Generator().manual_seed(0))
PLACES = tuple(torch.arange(size) + start for size, start in zip(SIZES, (1, 0, 3, 2), strict=True))


def scores() -> Tensor:
    return torch.randn(SIZES, generator=torch.Generator().manual_seed(1))


def one_by_one(mod: Callable[..., Any], score: Tensor | None = None) -> Tensor:
    """The definition: the mod called for every element, on 0-d tensors."""
    results = []
    for at in itertools.product(*(range(size) for size in SIZES)):
        indices = [place[i] for place, i in zip(PLACES, at, strict=True)]
        results.append(torch.as_tensor(mod(*([] if score is None else [score[at]]), *indices)))
    return torch.stack(results).view(SIZES)


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) | (b == h)


def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * 2 + TABLE[h, q_idx - kv_idx] + b


def untraceable(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.atan2(score, TABLE[h].sum()) + TABLE[..., kv_idx][h]


def test_a_mask_by_trace_and_by_vmap() -> None:
    expected = one_by_one(causal)
    assert torch.equal(evaluate(causal, "mask", *PLACES), expected)
    assert torch.equal(evaluate(trace(causal, "mask"), "mask", *PLACES), expected)


def test_a_traced_mask_has_the_shape_it_depends_on() -> None:
    traced = trace(lambda b, h, q_idx, kv_idx: q_idx > 4, "mask")
    assert evaluate(traced, "mask", *PLACES).shape == (1, 1, 4, 1)


@pytest.mark.parametrize("mod", [biased, untraceable])
def test_scores_by_vmap(mod: Callable[..., Any]) -> None:
    score = scores()
    got = evaluate(mod, "score", *PLACES, score=score)
    torch.testing.assert_close(got, one_by_one(mod, score))


def test_scores_by_trace() -> None:
    score = scores()
    got = evaluate(trace(biased, "score"), "score", *PLACES, score=score)
    torch.testing.assert_close(got, one_by_one(biased, score))


@pytest.mark.parametrize("axis", range(4))
def test_empty_axes(axis: int) -> None:
    places = [torch.arange(0 if at == axis else size) for at, size in enumerate(SIZES)]
    shape = [len(place) for place in places]
    for mask in (causal, trace(causal, "mask")):
        assert evaluate(mask, "mask", *places).expand(shape).shape == tuple(shape)
    for score_mod in (biased, trace(biased, "score")):
        got = evaluate(score_mod, "score", *places, score=torch.zeros(shape))
        assert got.expand(shape).shape == tuple(shape)


@pytest.mark.parametrize("value", [True, False])
def test_a_mask_may_be_a_python_bool(value: bool) -> None:
    got = evaluate(lambda b, h, q_idx, kv_idx: value, "mask", *PLACES)
    assert got.dtype == torch.bool and bool(got.all()) == value


# Mistakes of mods that run by vmap


@pytest.mark.parametrize(
    ("kind", "result", "message"),
    [
        (
            "score",
            lambda score, *_: None,
            "score_mod '<lambda>' must return one scalar, but returned NoneType. Return a single "
            "value for each element.",
        ),
        (
            "score",
            lambda score, *_: TABLE,
            "score_mod '<lambda>' must return one scalar for each element, but returned a tensor "
            "of shape [3, 9]. Reduce or index it.",
        ),
        (
            "mask",
            lambda b, h, q_idx, kv_idx: q_idx,
            "mask_mod '<lambda>' must return a truth value, but returned torch.int64. Compare, as "
            "in q_idx >= kv_idx, or convert with .bool().",
        ),
    ],
)
def test_wrong_results(kind: Any, result: Callable[..., Any], message: str) -> None:
    score = scores() if kind == "score" else None
    with pytest.raises(ModResultError) as caught:
        evaluate(result, kind, *PLACES, score=score)
    assert str(caught.value) == message


def test_a_python_branch() -> None:
    def branching(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return h == 0 if q_idx > kv_idx else h == 1

    with pytest.raises(TracedBranchError) as caught:
        evaluate(branching, "mask", *PLACES)
    assert str(caught.value) == (
        "mask_mod 'branching' must be computed for all elements at once, but asks for the value of "
        "a single element, as a Python branch does. Write torch.where(condition, a, b)."
    )


def test_an_index_out_of_range() -> None:
    def reading(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.atan(score) + TABLE[h, q_idx + kv_idx]

    with pytest.raises(CapturedIndexError) as caught:
        evaluate(reading, "score", *PLACES, score=scores())
    assert str(caught.value) == (
        "the indices in score_mod 'reading' must be inside of the captured tensor, but index 9 is "
        "out of bounds for dimension 1 with size 9. Clamp the index to the tensor's size."
    )
    live = (PLACES[2].view(-1, 1) + PLACES[3]) < 9
    got = evaluate(reading, "score", *PLACES, score=scores(), live=live)
    assert got.shape == SIZES and not got[~live.expand(SIZES)].any()
    assert torch.equal(got[1, 2, 0, 0], torch.atan(scores()[1, 2, 0, 0]) + TABLE[2, 5])


def test_a_division_by_zero() -> None:
    def dividing(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.atan(score) + q_idx // h

    with pytest.raises(DivisionByZeroError) as caught:
        evaluate(dividing, "score", *PLACES, score=scores())
    assert str(caught.value) == (
        "the divisor of integers must not be 0, but is 0 in score_mod 'dividing'. Clamp it with "
        ".clamp(min=1)."
    )
    live = torch.tensor([False, True, True]).view(-1, 1, 1)
    got = evaluate(dividing, "score", *PLACES, score=scores(), live=live)
    assert not got[:, 0].any()


@pytest.mark.parametrize("mod", [biased, trace(biased, "score")])
def test_only_what_is_live_is_computed(mod: Callable[..., Any]) -> None:
    score = scores()
    live = causal(*(place.view(shape) for place, shape in zip(PLACES, AXES, strict=True)))
    got = evaluate_live(mod, "score", PLACES, score, live)
    expected = torch.where(live, one_by_one(biased, score), 0.0)
    torch.testing.assert_close(got, expected)


AXES = ((-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1))


# Mods without a graph


def test_an_opaque_mod_knows_its_captures() -> None:
    weight, scale = torch.randn(3), torch.tensor(2.0)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.atan(score * scale) + torch.stack([weight, weight]).sum(0)[h]

    opaque = Opaque.of(mod, "score", torch.float32, torch.device("cpu"))
    assert {id(each) for each in opaque.captures} == {id(weight), id(scale)}
    assert opaque.__name__ == "mod"
    got = evaluate(opaque, "score", *PLACES, score=scores())
    assert torch.equal(got, evaluate(mod, "score", *PLACES, score=scores()))


def test_the_captures_of_an_opaque_mod_can_be_replaced() -> None:
    table = torch.randn(3, 9)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.atan(score) + table[h, q_idx]

    opaque = Opaque.of(mod, "score", torch.float32, torch.device("cpu"))
    other = torch.zeros(3, 9, requires_grad=True)
    replaced = dataclasses.replace(opaque, captures=(other,))
    got = evaluate(replaced, "score", *PLACES, score=scores())
    assert torch.equal(got, torch.atan(scores()))
    got.sum().backward()
    assert other.grad is not None
    assert torch.equal(other.grad[:, 3:7], torch.full((3, 4), float(SIZES[0] * SIZES[3])))
