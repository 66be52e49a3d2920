"""The tangent kernel: the results of the forward kernel, and tangents, from one launch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
from compare import assert_as_good_as
from torch import Tensor, func

from quire import AuxRequest, Dense, Paged, Ragged, attention, create_block_mask, plans, reference
from quire.aux_outputs import OF_KERNELS
from quire.mods import causal

pytestmark = [
    pytest.mark.every_width,
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is (deprecated|not supported)"),
]

HQ, HKV, D, DV = 4, 2, 24, 20
EVERYTHING = AuxRequest(*[True] * len(OF_KERNELS))._replace(key_mass=False)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def unexpected(*_: object, **__: object) -> NoReturn:
    raise AssertionError("one launch of the tangent kernel is enough")


@pytest.fixture
def _one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans.eager, "tangent", unexpected)
    monkeypatch.setattr(plans.CallPlan, "forward", unexpected)


def sequence(q_len: int, kv_len: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = ((1, HQ, q_len, D), (1, HKV, kv_len, D), (1, HKV, kv_len, DV))
    return [torch.randn(shape).to(dtype) for shape in shapes]


# --- what can be computed in one launch


class Case(NamedTuple):
    """The arguments of attention, and of the reference, given a bias [HQ, S] and a sink [HQ]."""

    ours: Callable[[Tensor, Tensor], dict[str, Any]]
    theirs: Callable[[Tensor, Tensor], dict[str, Any]]

    @property
    def reads(self) -> set[int]:
        """Which tensors are read: query, key, value, perhaps the bias and the sink."""
        given = self.theirs(torch.zeros(1, 1), torch.zeros(1))
        return {0, 1, 2, *([3] if "score_mod" in given else []), *([4] if "sink" in given else [])}


def both(arguments: Callable[[Tensor, Tensor], dict[str, Any]]) -> Case:
    return Case(
        lambda bias, sink: {
            {"mask_mod": "mask"}.get(name, name): value
            for name, value in arguments(bias, sink).items()
        },
        arguments,
    )


def capped(bias: Tensor) -> Callable[..., Any]:
    return lambda score, b, h, q, k: torch.tanh(score) * 2 + bias[h, k] * score


def only_bias(bias: Tensor) -> Callable[..., Any]:
    return lambda score, b, h, q, k: bias[h, k] * 1.5


def hidden(bias: Tensor) -> Callable[..., Any]:
    return lambda score, b, h, q, k: torch.where(k % 3 == 1, -math.inf, score * bias[h, k])


DOCUMENTS = torch.arange(1000) // 37


def same_document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]) | (kv_idx < 9)


BLOCKS = create_block_mask(causal, None, None, 70, 150, BLOCK_SIZE=64)

CASES = {
    "nothing": both(lambda bias, sink: {}),
    "causal": both(lambda bias, sink: {"mask_mod": causal}),
    "documents": both(lambda bias, sink: {"mask_mod": same_document}),
    "a captured bias": both(lambda bias, sink: {"score_mod": capped(bias), "mask_mod": causal}),
    "scores unread": both(lambda bias, sink: {"score_mod": only_bias(bias)}),
    "-inf by a mod": both(lambda bias, sink: {"score_mod": hidden(bias)}),
    "a sink": both(lambda bias, sink: {"mask_mod": causal, "sink": sink}),
    "blocks": Case(
        lambda bias, sink: {"mask": BLOCKS, "score_mod": capped(bias), "sink": sink},
        lambda bias, sink: {"mask_mod": causal, "score_mod": capped(bias), "sink": sink},
    ),
}


def ours(case: Case, *given: Tensor) -> tuple[Tensor, Tensor]:
    query, key, value, bias, sink = given
    found = attention(
        query, Dense(key, value), return_aux=EVERYTHING, q_start=0, **case.ours(bias, sink)
    )
    return found[0], found[1].lse


def theirs(case: Case, *given: Tensor) -> tuple[Tensor, Tensor]:
    query, key, value, bias, sink = given
    found = reference.attention(query, key, value, **case.theirs(bias, sink))
    return found.out, found.lse


def pushed(
    function: Callable[..., Any], case: Case, given: list[Tensor], moved: dict[int, Tensor]
) -> Any:
    """Return the results and their tangents, if only some of the tensors move."""

    def of_some(*some: Tensor) -> Any:
        every = list(given)
        for place, tensor in zip(moved, some, strict=True):
            every[place] = tensor
        return function(case, *every)

    return func.jvp(of_some, tuple(given[n] for n in moved), tuple(moved.values()))


SOME = [(0,), (1,), (2,), (3,), (4,), (0, 2), (0, 1, 2, 3, 4)]


@pytest.mark.usefixtures("_one_launch")
@pytest.mark.parametrize("name", CASES)
def test_results_of_the_forward_pass_and_tangents_of_the_reference(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    given = [*sequence(70, 150, torch.float64), torch.randn(HQ, 150).double()]
    given.append(torch.randn(HQ).double())
    every = []
    for some in (each for each in SOME if case.reads & set(each)):
        moved = {place: torch.randn_like(given[place]) for place in some}
        found, tangents = pushed(ours, case, given, moved)
        _, expected = pushed(theirs, case, given, moved)
        torch.testing.assert_close(tangents, expected, rtol=1e-9, atol=1e-9)
        every.append(found)
    monkeypatch.undo()
    same = ours(case, *given)
    assert all(torch.equal(*pair) for found in every for pair in zip(found, same, strict=True))


@pytest.mark.usefixtures("_one_launch")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_len", [5, 17, 33, 150])
def test_every_dtype(dtype: torch.dtype, q_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["a captured bias"]
    given = [*sequence(q_len, 150, dtype), torch.randn(HQ, 150).to(dtype), torch.zeros(HQ)]
    moved = {place: torch.randn_like(given[place]) for place in (0, 1, 2, 3)}
    found, tangents = pushed(ours, case, given, moved)
    wide = [x.double() for x in given]
    _, truth = pushed(theirs, case, wide, {n: x.double() for n, x in moved.items()})
    _, peer = pushed(theirs, case, given, moved)
    assert_as_good_as(tangents[0], peer[0].to(dtype), truth[0], size=4.0)
    monkeypatch.undo()
    assert all(map(torch.equal, found, ours(case, *given)))


def test_dropout_drops_weights_but_not_the_mean() -> None:
    given = sequence(40, 150, torch.float64)
    tangents = [torch.randn_like(x) for x in given]

    def attend(*tensors: Tensor) -> Tensor:
        query, key, value = tensors
        keep = torch.Generator().manual_seed(1)
        return attention(query, Dense(key, value), dropout_p=0.5, generator=keep, mask=causal)

    # Two gradients make a tangent, and gradients are compared with the reference elsewhere.
    expected = torch.autograd.functional.jvp(attend, tuple(given), tuple(tangents))
    found = func.jvp(attend, tuple(given), tuple(tangents))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("_one_launch")
def test_rows_apart_and_shared() -> None:
    """Tensors and tangents have strides of their own; a tangent may be one row for all."""
    given = [x[..., ::2] for x in sequence(40, 150, torch.float64)]
    tangents = [torch.randn(x.mT.shape).double().mT for x in given]
    tangents[1] = torch.randn(1, 1, 1, D // 2).double().expand(given[1].shape)
    found, expected = (
        func.jvp(function, tuple(given), tuple(tangents))
        for function in (
            lambda q, k, v: attention(q, Dense(k, v), mask=causal),
            lambda q, k, v: reference.attention(q, k, v, mask_mod=causal, q_start=110).out,
        )
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("_one_launch")
def test_scores_far_from_zero_are_precise() -> None:
    """All scores are the same, so every weight is 1 / n, which is not exp(score - lse) here."""
    query, key = torch.ones(1, 1, 9, 4), torch.full((1, 1, 150, 4), -1e9)
    value, by_key, by_value = (torch.randn(1, 1, 150, 4) for _ in range(3))
    _, found = func.jvp(
        lambda k, v: attention(query, Dense(k, v)), (key, value), (by_key, by_value)
    )
    slope = by_key.sum(-1, keepdim=True) / 2
    expected = (slope * value + by_value).mean(2) - slope.mean(2) * value.mean(2)
    torch.testing.assert_close(found, expected.unsqueeze(2).expand_as(found))


# --- the same bits


def tangents_of(query: Tensor, memory: Callable[..., Any], *given: Tensor) -> tuple[Tensor, ...]:
    """Return out, lse and their tangents, in a direction that the operands themselves give."""
    slopes = torch.linspace(0.1, 0.4, HQ, dtype=torch.float64)

    def attend(query: Tensor, slopes: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score - slopes[h] * (q_idx - kv_idx)

        options = {"score_mod": alibi, "mask": causal, "return_aux": AuxRequest(lse=True)}
        out, aux = attention(query, memory(*given), **options)
        return out, aux.lse

    inputs = (query, slopes, *given)
    (out, lse), (moved, slope) = func.jvp(attend, inputs, tuple(x * 0.5 for x in inputs))
    return out, lse, moved, slope


def alone(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    return tangents_of(query, Dense, key, value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ragged_is_dense(dtype: torch.dtype) -> None:
    lengths = [7, 130, 1, 0, 64, 257]
    parts = [sequence(length, length, dtype) for length in lengths]
    query, key, value = (
        torch.cat([part[i][0].transpose(0, 1) for part in parts]) for i in (0, 1, 2)
    )
    offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    found = tangents_of(query, lambda k, v: Ragged(k, v, offsets), key, value)
    for part, start, stop in zip(parts, offsets, offsets[1:], strict=False):
        for ours, expected in zip(found, alone(*part), strict=True):
            assert torch.equal(ours[start:stop].transpose(0, 1), expected[0])


@pytest.mark.parametrize("page", [16, 50])
def test_paged_is_dense(page: int) -> None:
    lengths, q_len = [40, 141, 300], 40
    parts = [sequence(q_len, length, torch.float32) for length in lengths]
    counts = [-(-length // page) for length in lengths]
    numbers = torch.randperm(sum(counts))
    table = torch.zeros(3, max(counts), dtype=torch.int32)
    pages = [torch.zeros(sum(counts), HKV, page, width) for width in (D, DV)]
    for b, (part, count) in enumerate(zip(parts, counts, strict=True)):
        own, numbers = numbers[:count], numbers[count:]
        table[b, :count] = own
        for held, rows in zip(pages, part[1:], strict=True):
            whole = torch.nn.functional.pad(rows[0], (0, 0, 0, count * page - rows.shape[2]))
            held[own] = whole.unflatten(1, (count, page)).transpose(0, 1)
    query = torch.cat([part[0] for part in parts])
    found = tangents_of(query, lambda k, v: Paged(k, v, table, lengths), *pages)
    for b, part in enumerate(parts):
        for ours, expected in zip(found, alone(*part), strict=True):
            assert torch.equal(ours[b : b + 1], expected)


def test_threads_and_batches_do_not_matter() -> None:
    every = [sequence(300, 300, torch.float32) for _ in range(3)]
    batch = [torch.cat(x) for x in zip(*every, strict=True)]
    results, before = [], torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            results.append(alone(*batch))
        finally:
            torch.set_num_threads(before)
    assert all(map(torch.equal, *results))
    for b, part in enumerate(every):
        for ours, expected in zip(results[0], alone(*part), strict=True):
            assert torch.equal(ours[b : b + 1], expected)


# --- when it is not enough


def test_numbers_that_are_not_finite_are_computed_again() -> None:
    query, key, value = sequence(40, 40, torch.float32)
    value[:, :, -1], key[:, :, -2] = math.inf, math.nan
    found, tangents = func.jvp(
        lambda *x: attention(x[0], Dense(*x[1:]), mask=causal),
        (query, key, value),
        (query, key, value.nan_to_num(1.0, 1.0, 1.0)),
    )
    same = attention(query, Dense(key, value), mask=causal)
    assert torch.equal(found.nan_to_num(9.0), same.nan_to_num(9.0))
    assert bool(tangents[:, :, :-2].isfinite().all())


def test_an_index_out_of_range_raises() -> None:
    query, key, value = sequence(40, 40, torch.float32)
    bias = torch.randn(39)

    def attend(bias: Tensor) -> Tensor:
        mod = lambda score, b, h, q, k: score + bias[k]  # noqa: E731
        return attention(query, Dense(key, value), score_mod=mod)

    with pytest.raises(IndexError, match=r"out of range|out of bounds"):
        func.jvp(attend, (bias,), (torch.ones(39),))


def test_what_autograd_records_is_still_recorded() -> None:
    query, key, value = sequence(40, 40, torch.float64)
    value.requires_grad_()
    direction = torch.randn_like(query)
    gradients = []
    for attend in (
        lambda q: attention(q, Dense(key, value)),
        lambda q: reference.attention(q, key, value).out,
    ):
        out, moved = func.jvp(attend, (query,), (direction,))
        gradients += torch.autograd.grad(out.sum() + moved.square().sum(), value)
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)
