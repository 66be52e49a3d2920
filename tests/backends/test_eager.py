"""The tiled path: as good as the reference in every case, in memory linear in the sequence."""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from compare import assert_as_good_as, assert_matches_reference
from hypothesis import example, given
from strategies import DTYPES, LAYOUTS, Case, cases
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import quire
from quire import AuxRequest, create_block_mask, reference
from quire.backends.eager import tile, tiling
from quire.memory import One, Placed
from quire.request import Problem

inf, nan = math.inf, math.nan

pytestmark = pytest.mark.filterwarnings("ignore::quire.EagerModWarning")

flex_attention: Callable[..., Any] = functools.partial(
    quire.flex_attention, enable_gqa=True, backend="eager"
)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small enough for every test to need several in each direction, and for one thread."""
    torch.set_num_threads(1)
    monkeypatch.setattr(tiling, "TILE_SIDE", 8)
    monkeypatch.setattr(tiling, "TILE_ELEMENTS", 500)


def set_tiles(case: Case) -> None:
    tiling.TILE_SIDE, tiling.TILE_ELEMENTS = case.tile_side, case.tile_elements


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


# Against the reference


@given(cases())
@example(Case(score="score * heads[h] + table[h, q_idx - kv_idx + n]", mask="q_idx >= kv_idx"))
@example(Case(mask="kv_idx < 0", has_sink=True))
def test_any_call_is_as_good_as_the_reference(case: Case) -> None:
    set_tiles(case)
    assert_matches_reference(case)


BASE = Case(
    score="torch.tanh(score) * scalar + table[h, q_idx - kv_idx + n]",
    mask="(q_idx + 9 >= kv_idx) & (q_idx != 4)",
    has_sink=True,
)
TRAITS: dict[str, dict[str, Any]] = {
    "plain": {"score": None, "mask": None, "has_sink": False},
    "many heads to a key head": {"group": 5, "kv_heads": 1},
    "every head its own keys": {"group": 1, "kv_heads": 3},
    "one batch of keys": {"batch": 3, "kv_batch": 1},
    "dropout": {"dropout_p": 0.4},
    "everything dropped": {"dropout_p": 1.0},
    "block mask": {"block_size": (8, 16)},
    "blocks of one": {"block_size": (1, 1), "kv_len": 9},
    "one block": {"block_size": (128, 128)},
    "decoding": {"q_len": 1, "kv_len": 61},
    "one key": {"kv_len": 1},
    "wide values": {"head_dim": 1, "value_dim": 17},
    "a sum of captured rows": {"score": "score + (rows_of[q_idx] * columns_of[kv_idx]).sum()"},
    "an op outside of the table": {"score": "torch.asinh(score * heads[h]) + columns[kv_idx]"},
    "no score in the mod": {"score": "columns[kv_idx] + scalar"},
    "a constant": {"score": "0.5"},
    "a tile each": {"tile_elements": 1, "q_len": 5, "kv_len": 4, "kv_heads": 1},
    "one tile": {"tile_side": 512, "tile_elements": 2**20},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("trait", TRAITS)
def test_each_trait_in_each_dtype(trait: str, dtype: torch.dtype) -> None:
    case = replace(BASE, dtype=dtype, **TRAITS[trait])
    set_tiles(case)
    assert_matches_reference(case)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout(layout: str) -> None:
    assert_matches_reference(replace(BASE, layout=layout))


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (0, 0)])
def test_no_queries_or_no_keys(q_len: int, kv_len: int) -> None:
    assert_matches_reference(replace(BASE, q_len=q_len, kv_len=kv_len))


def test_no_batches_and_no_heads() -> None:
    assert flex_attention(*(torch.ones(0, 2, 3, 4) for _ in range(3))).shape == (0, 2, 3, 4)
    keys = torch.ones(1, 2, 3, 4)
    assert flex_attention(torch.ones(1, 0, 3, 4), keys, keys).shape == (1, 0, 3, 4)


# What is not finite


def _spoil(which: str, bad: float) -> list[Tensor]:
    tensors = [torch.randn(1, 2, 11, 4) for _ in range(3)]
    if which != "nothing":
        tensors[["query", "key", "value"].index(which)][0, 1, 6] = bad
    return tensors


SPECIAL_MODS: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "no mod": lambda w: {},
    "mask": lambda w: {"mask_mod": causal},
    "mask and score": lambda w: {
        "mask_mod": causal,
        "score_mod": lambda score, b, h, q, kv: 5 * torch.tanh(score / 5) * w[h],
    },
    "mask and an op outside of the table": lambda w: {
        "mask_mod": causal,
        "score_mod": lambda score, b, h, q, kv: torch.asinh(score * w[h]),
    },
    "unread by its score": lambda w: {
        "score_mod": lambda score, b, h, q, kv: torch.where(q >= kv, score * w[h], -inf),
    },
    "an infinite slope where the mask is false": lambda w: {
        "mask_mod": lambda b, h, q, kv: q > kv,
        "score_mod": lambda score, b, h, q, kv: score + w[h] * torch.log(q - kv),
    },
    "the same outside of the table": lambda w: {
        "mask_mod": lambda b, h, q, kv: q > kv,
        "score_mod": lambda score, b, h, q, kv: torch.asinh(score) + w[h] * torch.log(q - kv),
    },
    "a score of NaN": lambda w: {
        "score_mod": lambda score, b, h, q, kv: torch.where((kv == 5) & (q > 7), nan, score * w[h]),
    },
    "a score of infinity": lambda w: {
        "score_mod": lambda score, b, h, q, kv: torch.where((kv == 5) & (q > 7), inf, score * w[h]),
    },
    "scores of 1e4": lambda w: {"score_mod": lambda score, b, h, q, kv: score * 1e4 * w[h]},
}


@pytest.mark.parametrize(
    ("which", "bad"),
    [("nothing", 0.0), *itertools.product(("query", "key", "value"), (nan, inf, -inf))],
)
def test_what_is_not_finite_reaches_what_reads_it(which: str, bad: float) -> None:
    """Forward and gradients, of captures as well."""
    tensors = [*_spoil(which, bad), torch.tensor([0.5, -1.5])]
    weights = torch.randn(1, 2, 11, 4)
    for name, make in SPECIAL_MODS.items():
        found = []
        for dtype, is_reference in (
            (torch.float32, False),
            (torch.float32, True),
            (torch.float64, True),
        ):
            leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in tensors]
            options = make(leaves[3])
            if is_reference:
                outputs = reference.attention(*leaves[:3], **options)[:3]
            else:
                aux = AuxRequest(lse=True, max_scores=True)
                out, rest = flex_attention(*leaves[:3], **options, return_aux=aux)
                outputs = (out, rest.lse, rest.max_scores)
            loss = (outputs[0] * weights.to(dtype)).sum()
            grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
            found.append([tensor.detach() for tensor in (*outputs, *grads)])
        size = 1e4 if name == "scores of 1e4" else 1.0
        labels = ("out", "lse", "max", "dq", "dk", "dv", "dw")
        for label, actual, peer, truth in zip(labels, *found, strict=True):
            assert_as_good_as(actual, peer, truth, f"{name}: {label}", size=size)


def test_bad_gradients_from_above_reach_what_their_rows_read() -> None:
    query, key, value = (random(1, 1, 20, 4) for _ in range(3))
    above = torch.ones(1, 1, 20, 4, dtype=torch.float64)
    above[0, 0, 10] = nan
    out = flex_attention(query, key, value, mask_mod=lambda b, h, q, kv: q // 5 == kv // 5)
    spoilt = [row // 5 == 2 for row in range(20)]
    for grad in torch.autograd.grad(out, (key, value), above):
        assert grad[0, 0].isnan().any(-1).tolist() == spoilt


# Derivatives


def _differentiable(opaque: bool, dropout_p: float) -> tuple[Callable[..., Any], list[Tensor]]:
    """Return a call as a function of every tensor that has a derivative."""
    tensors = [random(2, 2, 3, 3), random(1, 1, 4, 3), random(1, 1, 4, 2)]
    tensors += [random(8), random(), random(2)]

    def compute(query: Tensor, key: Tensor, value: Tensor, *learned: Tensor) -> Any:
        bias, factor, sink = learned

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            changed = score * factor + bias[q_idx - kv_idx] * torch.tanh(score)
            return torch.asinh(changed) if opaque else changed

        out, aux = flex_attention(
            *(query, key, value, score_mod),
            mask_mod=lambda b, h, q_idx, kv_idx: (q_idx + 1 >= kv_idx) & (b + h != 2),
            sink=sink,
            dropout_p=dropout_p,
            generator=torch.Generator().manual_seed(0),
            return_aux=AuxRequest(lse=True),
        )
        return out, aux.lse

    return compute, tensors


@pytest.mark.parametrize(("opaque", "dropout_p"), [(False, 0.4), (True, 0.0)])
def test_first_and_second_derivatives(
    opaque: bool, dropout_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiling, "TILE_SIDE", 2)
    monkeypatch.setattr(tiling, "TILE_ELEMENTS", 16)
    compute, tensors = _differentiable(opaque, dropout_p)
    assert torch.autograd.gradcheck(compute, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(compute, tensors, fast_mode=True)


@pytest.mark.parametrize("opaque", [False, True], ids=["traced", "opaque"])
def test_torch_func_grad_agrees_with_backward(opaque: bool) -> None:
    compute, tensors = _differentiable(opaque, dropout_p=0.3)

    def loss(*tensors: Tensor) -> Tensor:
        out, lse = compute(*tensors)
        return out.square().sum() + lse.sum()

    expected = torch.autograd.grad(loss(*tensors), tensors)
    plain = [tensor.detach() for tensor in tensors]
    found = torch.func.grad(loss, argnums=tuple(range(6)))(*plain)
    torch.testing.assert_close(found, expected)
    only_bias = torch.func.grad(loss, argnums=3)(*plain)
    torch.testing.assert_close(only_bias, expected[3])
    second = torch.func.grad(torch.func.grad(loss, argnums=4), argnums=4)(*plain)
    (first,) = torch.autograd.grad(loss(*tensors), tensors[4], create_graph=True)
    torch.testing.assert_close(second, torch.autograd.grad(first, tensors[4])[0])


@pytest.mark.parametrize("opaque", [False, True], ids=["traced", "opaque"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_captures_that_depend_on_each_other_and_on_the_query(
    opaque: bool, create_graph: bool
) -> None:
    """The derivative through one capture is not counted again for the other."""
    base, key, value = random(1, 2, 9, 3), random(1, 2, 9, 3), random(1, 2, 9, 3)
    weight = random(9)

    def loss(attend: Callable[..., Tensor]) -> Tensor:
        double = weight * 2

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            changed = score * weight[h] + double[q_idx]
            return torch.asinh(changed) if opaque else changed

        return attend(base * weight[0], key, value, score_mod=score_mod).square().sum()

    ours = loss(flex_attention)
    grads = torch.autograd.grad(ours, (base, weight), create_graph=create_graph)
    expected = loss(lambda *args, **options: reference.attention(*args, **options).out)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (base, weight)))


def test_each_gradient_alone_is_the_same() -> None:
    compute, tensors = _differentiable(opaque=False, dropout_p=0.2)

    def loss(wanted: list[int]) -> Tensor:
        leaves = [t if i in wanted else t.detach() for i, t in enumerate(tensors)]
        out, lse = compute(*leaves)
        return out.square().sum() + lse.sum()

    together = torch.autograd.grad(loss(list(range(6))), tensors)
    for i, expected in enumerate(together):
        torch.testing.assert_close(torch.autograd.grad(loss([i]), tensors[i])[0], expected)


def test_the_log_sum_exp_alone_has_a_gradient_and_the_maximum_has_none() -> None:
    query, key, value = (random(1, 1, 9, 3) for _ in range(3))
    aux = flex_attention(query, key, value, return_aux=AuxRequest(lse=True, max_scores=True))[1]
    (grad,) = torch.autograd.grad(aux.lse.sum(), query)
    expected = reference.attention(query, key, value).lse.sum()
    torch.testing.assert_close(grad, torch.autograd.grad(expected, query)[0])
    assert not aux.max_scores.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_gradient_has_the_dtype_of_its_tensor(dtype: torch.dtype) -> None:
    tensors = [random(1, 1, 20, 4, dtype=torch.float32) for _ in range(3)]
    bias = random(20, dtype=dtype)

    def loss(attend: Callable[..., Tensor], bias: Tensor) -> Tensor:
        return attend(*tensors, score_mod=lambda s, b, h, q, kv: s + bias[kv]).square().sum()

    (grad,) = torch.autograd.grad(loss(flex_attention, bias), bias)
    assert grad.dtype == dtype
    wide = bias.detach().double().requires_grad_()
    truth = loss(lambda *args, **options: reference.attention(*args, **options).out, wide)
    (expected,) = torch.autograd.grad(truth, wide)
    rounding = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    torch.testing.assert_close(grad.double(), expected, atol=8 * rounding, rtol=8 * rounding)


def test_a_sink_of_minus_infinity_is_none() -> None:
    """Also in a row that reads nothing else: its log-sum-exp is then -inf as well."""
    query, key, value = (random(1, 2, 9, 4) for _ in range(3))
    sink = torch.tensor([-inf, 0.5], dtype=torch.float64, requires_grad=True)
    out, aux = flex_attention(
        *(query, key, value),
        sink=sink,
        mask_mod=lambda b, h, q, kv: q > kv,
        return_aux=AuxRequest(lse=True),
    )
    assert aux.lse[0, :, 0].tolist() == [-inf, 0.5]
    (grad,) = torch.autograd.grad(out.square().sum(), sink)
    assert grad[0] == 0
    assert grad[1].isfinite()
    assert grad[1] != 0


def test_a_captured_scalar_and_a_module_learn() -> None:
    class Softcap(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cap = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, score: Tensor, *_: Tensor) -> Tensor:
            return self.cap * torch.tanh(score / self.cap)

    softcap = Softcap()
    query = torch.randn(1, 1, 9, 4)
    flex_attention(query, query, query, softcap).sum().backward()
    grad = softcap.cap.grad
    assert grad is not None
    softcap.cap.grad = None
    reference.attention(query, query, query, score_mod=softcap).out.sum().backward()
    torch.testing.assert_close(grad, softcap.cap.grad)


# Between forward and backward


@pytest.mark.parametrize("opaque", [False, True], ids=["traced", "opaque"])
@pytest.mark.parametrize("learned", [False, True])
def test_a_capture_that_was_changed_in_place_is_noticed(opaque: bool, learned: bool) -> None:
    query = random(1, 1, 9, 4)
    bias = torch.randn(9, dtype=torch.float64, requires_grad=learned)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.asinh(score + bias[q_idx]) if opaque else score + bias[q_idx]

    out = flex_attention(query, query, query, score_mod)
    with torch.no_grad():
        bias[3] = 5.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_the_backward_pass_uses_the_tensors_of_the_forward_pass() -> None:
    """A variable that a mod captures may be bound to another tensor in between."""
    query, bias = random(1, 1, 9, 4), random(9)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[kv_idx]

    def forward() -> Tensor:
        out: Tensor = flex_attention(query, query, query, score_mod).square().sum()
        return out

    (expected,) = torch.autograd.grad(forward(), query)
    loss = forward()
    bias = torch.full((9,), 100.0)
    torch.testing.assert_close(torch.autograd.grad(loss, query)[0], expected)


def test_the_backward_pass_uses_the_blocks_of_the_forward_pass() -> None:
    query = random(1, 1, 16, 4)
    mask = create_block_mask(causal, None, None, 16, 16, BLOCK_SIZE=4)
    (expected,) = torch.autograd.grad(flex_attention(query, query, query, None, mask).sum(), query)
    out = flex_attention(query, query, query, None, mask)
    mask.kv_num_blocks.zero_()
    mask.full_kv_num_blocks.zero_()
    assert torch.equal(torch.autograd.grad(out.sum(), query)[0], expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_recomputes_the_same_dropout(use_reentrant: bool) -> None:
    query = random(1, 2, 20, 4)

    def layer(query: Tensor) -> Tensor:
        out: Tensor = flex_attention(query, query, query, mask_mod=causal, dropout_p=0.5)
        return out

    torch.manual_seed(3)
    layer(query).square().sum().backward()
    expected, query.grad = query.grad, None
    torch.manual_seed(3)
    out = checkpoint(layer, query, use_reentrant=use_reentrant)
    torch.rand(10)  # a different state by the time of the recomputation
    out.square().sum().backward()
    assert torch.equal(query.grad, expected)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_without_gradients(guard: Callable[[], Any]) -> None:
    compute, tensors = _differentiable(opaque=True, dropout_p=0.0)
    with guard():
        out, lse = compute(*tensors)
    assert not out.requires_grad
    assert not lse.requires_grad
    torch.testing.assert_close(out, compute(*tensors)[0].detach())


def test_calls_from_two_threads_do_not_meet() -> None:
    compute, tensors = _differentiable(opaque=True, dropout_p=0.3)
    batches = [[t * scale for t in tensors] for scale in (0.5, 2.0)]

    def gradients(batch: list[Tensor]) -> tuple[Tensor, ...]:
        out, lse = compute(*batch)
        return torch.autograd.grad(out.sum() + lse.sum(), batch)

    expected = [gradients(batch) for batch in batches]
    found: dict[int, list[tuple[Tensor, ...]]] = {0: [], 1: []}

    def work(which: int) -> None:
        for _ in range(3):
            leaves = [tensor.detach().requires_grad_() for tensor in batches[which]]
            found[which].append(gradients(leaves))

    threads = [threading.Thread(target=work, args=(which,)) for which in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for which, results in found.items():
        assert len(results) == 3
        for result in results:
            assert all(map(torch.equal, result, expected[which]))


# Memory and work


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any op has made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor) and not func.is_view:
                self.numel = max(self.numel, value.numel())
        return result


@pytest.mark.parametrize("opaque", [False, True], ids=["traced", "opaque"])
def test_nothing_is_larger_than_a_tile_or_an_operand(opaque: bool) -> None:
    """Nor is more kept for second derivatives."""
    length, kept = 100, 0
    tensors = [random(1, heads, length, 3, dtype=torch.float32) for heads in (4, 2, 2)]
    bias = random(2 * length, dtype=torch.float32)
    limit = max(tensors[0].numel(), tiling.TILE_ELEMENTS)
    assert limit < 4 * length * length / 30

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        changed = score + bias[q_idx - kv_idx]
        return torch.asinh(changed) if opaque else changed

    def near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx).abs() < 20

    def count(saved: Tensor) -> Tensor:
        nonlocal kept
        kept += saved.numel()
        return saved

    counted = torch.autograd.graph.saved_tensors_hooks(count, lambda saved: saved)
    with LargestTensor() as largest, counted:
        out = flex_attention(*tensors, score_mod, mask_mod=near, dropout_p=0.1)
        grads = torch.autograd.grad(out.square().sum(), (*tensors, bias), create_graph=True)
    assert largest.numel <= limit
    assert kept < 4 * length * length  # not even one matrix of scores
    if not opaque:
        with LargestTensor() as largest:
            grads[0].sum().backward()
        assert largest.numel <= limit


def test_keys_are_not_repeated_for_the_heads_of_a_group() -> None:
    query, key = torch.randn(1, 16, 4, 8), torch.randn(1, 1, 50, 8)
    with LargestTensor() as largest:
        flex_attention(query, key, key)
    assert largest.numel <= max(query.numel(), tiling.TILE_ELEMENTS) < 16 * key.numel()


@pytest.mark.parametrize(
    ("sizes", "side", "elements"),
    [
        (tiling.Sizes(3, 8, 2, 50, 70), 8, 500),
        (tiling.Sizes(3, 8, 2, 50, 70), 64, 64),
        (tiling.Sizes(1, 64, 1, 20, 20), 8, 500),
        (tiling.Sizes(5, 2, 2, 1, 3000), 8, 500),
        (tiling.Sizes(2, 3, 3, 7, 0), 8, 500),
    ],
    ids=str,
)
def test_tiles_cover_every_element_once(
    sizes: tiling.Sizes, side: int, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiling, "TILE_SIDE", side)
    monkeypatch.setattr(tiling, "TILE_ELEMENTS", elements)
    seen = torch.zeros(sizes.batch, sizes.q_heads, sizes.q_len, sizes.kv_len, dtype=torch.int32)
    rows = torch.zeros(seen.shape[:3], dtype=torch.int32)
    batch, q_heads, kv_heads, q_len, kv_len = sizes
    query, key = torch.empty(batch, q_heads, q_len, 1), torch.empty(batch, kv_heads, kv_len, 1)
    placed = Placed(query, key, key, One(q_len, 0, 0, kv_len))
    for stripe in tiling.stripes(Problem(scale=1.0), placed):
        rows[stripe.rows] += 1
        heads, group = stripe.heads, sizes.group
        assert (stripe.kv_heads.stop - stripe.kv_heads.start) * group >= heads.stop - heads.start
        for keys in stripe.tiles:
            part = seen[(*stripe.rows, keys.positions)]
            part += 1
            assert part.numel() <= max(elements, group)
    assert (seen == 1).all()
    assert (rows == 1).all()


def test_only_listed_blocks_are_visited_and_full_ones_are_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scored, asked = torch.zeros(2, 64, 64, dtype=torch.int64)

    def counting(
        mod: Any, kind: str, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, **more: Any
    ) -> Any:
        (scored if kind == "score" else asked)[q[:, None], kv] += 1
        return evaluate(mod, kind, b, h, q, kv, **more)

    evaluate = tile.evaluate
    monkeypatch.setattr(tile, "evaluate", counting)
    block_mask = create_block_mask(causal, None, None, 64, 64, BLOCK_SIZE=16)
    query = torch.randn(1, 1, 64, 4, requires_grad=True)
    out = flex_attention(query, query, query, lambda score, *_: score * 2, block_mask)
    row, column = torch.arange(64)[:, None] // 16, torch.arange(64) // 16
    assert torch.equal(scored, (row >= column).long())
    assert torch.equal(asked, (row == column).long())
    out.sum().backward()
    assert torch.equal(scored, 2 * (row >= column).long())
    assert torch.equal(asked, 2 * (row == column).long())


def test_tiles_whose_mask_is_empty_are_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    scored = []
    raw_scores = tile.Tile.raw_scores
    monkeypatch.setattr(
        tile.Tile, "raw_scores", lambda self, rows: scored.append(1) or raw_scores(self, rows)
    )
    query = torch.randn(1, 4, 80, 4)
    flex_attention(query, query, query)
    everything = len(scored)
    scored.clear()
    flex_attention(query, query, query, mask_mod=lambda b, h, q, kv: (q - kv).abs() < 4)
    assert 0 < len(scored) < everything / 2


# Dropout


def _dropped(**options: Any) -> Tensor:
    """Return which elements dropout keeps: values are numbers of keys, so the output shows them."""
    options = {"length": 40, "dropout_p": 0.3, "seed": 0, **options}
    length = options["length"]
    zeros, names = torch.zeros(2, 2, length, 1), torch.eye(length).expand(2, 2, -1, -1)
    out: Tensor = flex_attention(
        zeros,
        zeros,
        names,
        dropout_p=options["dropout_p"],
        generator=torch.Generator().manual_seed(options["seed"]),
    )
    return out > 0


def test_dropout_keeps_the_right_share_in_every_direction() -> None:
    kept = _dropped(length=128).double()
    assert abs(kept.mean().item() - 0.7) < 0.01
    for dims in ((0, 1, 2), (0, 1, 3)):
        assert (kept.mean(dims) - 0.7).abs().max() < 0.12
    flat = kept.flatten(2) - kept.mean()
    for other in (kept.roll(1, -1), kept.roll(1, -2), kept.flip(0), kept.flip(1)):
        correlation = (flat * (other.flatten(2) - kept.mean())).mean() / flat.var()
        assert abs(correlation) < 0.02


def test_dropout_depends_on_the_seed_and_the_position_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = _dropped()
    assert torch.equal(_dropped(), expected)
    assert not torch.equal(_dropped(seed=1), expected)
    assert torch.equal(_dropped(length=50)[..., :40, :40], expected)
    monkeypatch.setattr(tiling, "TILE_SIDE", 512)
    monkeypatch.setattr(tiling, "TILE_ELEMENTS", 2**20)
    assert torch.equal(_dropped(), expected)


def test_dropout_draws_from_the_default_generator() -> None:
    query = torch.randn(1, 1, 9, 4)

    def outputs() -> Iterator[Tensor]:
        torch.manual_seed(7)
        for _ in range(2):
            yield flex_attention(query, query, query, dropout_p=0.5)

    first, second = outputs()
    again, _ = outputs()
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
