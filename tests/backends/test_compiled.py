"""The compiled path: the same numbers as the reference, and code that is made once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_matches_reference
from hypothesis import given
from strategies import DTYPES, LAYOUTS, Case, cases
from threads import at_once
from torch import Tensor

import quire
from quire import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
    mods,
    reference,
)
from quire.codegen.llvm import jit
from quire.config import config
from quire.errors import CapturedIndexError, DivisionByZeroError, KernelMismatchError
from quire.runtime import cache as object_cache_module
from quire.runtime import mods as compiled_mods
from quire.runtime import prepare
from quire.runtime.cache import ObjectCache
from quire.runtime.forward import ForwardPlan


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> list[str]:
    """The code that is compiled from now on, with empty caches."""
    made: list[str] = []
    compile_object = jit.compile_object

    def counted(text: str, target: Any) -> bytes:
        made.append(text)
        return compile_object(text, target)

    monkeypatch.setattr(jit, "compile_object", counted)
    monkeypatch.setattr(
        object_cache_module, "object_cache", lambda: ObjectCache(tmp_path / "cache")
    )
    prepare.kernel_of.cache_clear()
    compiled_mods.compiled.cache_clear()
    compiled_mods._codes.clear()
    return made


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


# --- the same numbers ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::quire.EagerModWarning")
@given(cases())
def test_any_call_is_as_good_as_the_reference(case: Case) -> None:
    assert_matches_reference(case, "auto")  # jit, or eager for what cannot be traced


LARGE = Case(
    batch=1,
    kv_batch=1,
    kv_heads=1,
    group=3,
    q_len=150,
    kv_len=290,
    head_dim=20,
    value_dim=12,
    score="score * 0.5 - (q_idx - kv_idx).abs() * 0.01",
    mask="(q_idx - kv_idx).abs() <= 90",
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_than_one_tile(dtype: torch.dtype, layout: str) -> None:
    assert_matches_reference(_replace(LARGE, dtype=dtype, layout=layout), "jit")


@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    [(1, 1), (3, 2), (8, 17), (31, 33), (64, 64), (100, 7), (128, 128), (256, 96), (512, 512)],
)
def test_head_dims_are_multiples_of_nothing(head_dim: int, value_dim: int) -> None:
    case = _replace(LARGE, head_dim=head_dim, value_dim=value_dim, q_len=40, kv_len=140)
    assert_matches_reference(case, "jit")


@pytest.mark.parametrize("group", [1, 2, 3, 5, 8])
def test_any_number_of_heads_in_a_group(group: int) -> None:
    assert_matches_reference(_replace(LARGE, group=group, kv_heads=2, q_len=20), "jit")


@pytest.mark.parametrize("q_len", [1, 9])
def test_no_batches_and_no_heads(q_len: int) -> None:
    for batch, heads in ((0, 2), (2, 0)):
        query, key = random(batch, heads, q_len, 4), random(batch, 2, 9, 4)
        out = flex_attention(query, key, key, mask_mod=causal, enable_gqa=True, backend="jit")
        assert out.shape == (batch, heads, q_len, 4)


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 9), (9, 0), (0, 0)])
def test_a_block_mask_of_no_queries_or_no_keys(q_len: int, kv_len: int) -> None:
    mask = create_block_mask(causal, None, None, q_len, kv_len, BLOCK_SIZE=16)
    query, key = random(1, 2, q_len, 4), random(1, 2, kv_len, 4)
    out = flex_attention(query, key, key, block_mask=mask, backend="jit")
    assert torch.equal(out, torch.zeros(1, 2, q_len, 4))


def _replace(case: Case, **changes: Any) -> Case:
    return Case(**{**case.__dict__, **changes})


LENGTH = 60
READY: dict[str, Callable[..., Any]] = {
    "causal": mods.causal,
    "sliding_window": mods.sliding_window(7),
    "dilated": mods.dilated_sliding_window(9, 3),
    "global": mods.global_sliding_window(5, torch.arange(LENGTH) % 11 == 0),
    "prefix_lm": mods.prefix_lm(13),
    "document": mods.document(lengths=[11, 1, 30, 18]),
    "shared_prefix": mods.shared_prefix([0, 10, 30, 60], [0, 0, 0]),
    "block_diffusion": mods.block_diffusion(30, 6),
    "neighbourhood": mods.neighbourhood((6, 10), (3, 5)),
    "tree": mods.tree(torch.tensor([-1, *(i // 2 for i in range(LENGTH - 1))])),
    "padding": mods.padding(torch.tensor([17, 60])),
    "alibi": mods.alibi(4),
    "softcap": mods.softcap(3.0),
    "relative": mods.relative_position_bias(torch.linspace(-1, 1, 128).view(32, 4)),
    "table": mods.table_bias(torch.linspace(-1, 1, 4 * 60 * 60).view(4, 60, 60)),
    "distance": mods.distance_bias(torch.linspace(-1, 1, 4 * 119).view(4, 119)),
}


@pytest.mark.parametrize("name", READY)
def test_ready_made_mods(name: str) -> None:
    q, k, v = (random(2, 4, LENGTH, 16) for _ in range(3))
    mod = READY[name]
    kind = "score_mod" if quire.ir.trace.mod_kind(mod) == "score" else "mask_mod"
    actual = flex_attention(q, k, v, **{kind: mod}, backend="jit")
    expected = reference.attention(q.double(), k.double(), v.double(), **{kind: mod}).out
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [(128, 128), (16, 16), (128, 64), (50, 30), (300, 300), (7, 200)])
def test_the_block_size_of_a_mask_does_not_matter(size: tuple[int, int]) -> None:
    q, k, v = (random(1, 2, 300, 24) for _ in range(3))
    mask = mods.and_masks(mods.causal, mods.document(lengths=[70, 130, 100]))
    alone, aux = flex_attention(
        q, k, v, mask_mod=mask, return_aux=AuxRequest(lse=True), backend="jit"
    )
    blocks = create_block_mask(mask, None, None, 300, 300, BLOCK_SIZE=size)
    same, same_aux = flex_attention(
        q, k, v, block_mask=blocks, return_aux=AuxRequest(lse=True), backend="jit"
    )
    assert torch.equal(alone, same)
    assert torch.equal(aux.lse, same_aux.lse)


@pytest.mark.parametrize("size", [16, 48, 128])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_hand_made_block_mask_is_honoured_as_given(size: int, batch: int) -> None:
    """Blocks in any order, full ones whose mask_mod says no, absent ones where it says yes."""
    length, rows = 200, -(-200 // size)
    kinds = torch.randint(0, 3, (batch, 2, rows, rows))
    lists = []
    for kind in (1, 2):
        chosen = kinds == kind
        order = torch.rand(chosen.shape).masked_fill(~chosen, 2.0).argsort(-1)
        lists += [chosen.sum(-1).int(), order.int()]
    mask = BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=size, mask_mod=causal, seq_lengths=(length, length)
    )
    q, k, v = (random(2, 2, length, 16) for _ in range(3))
    actual = flex_attention(q, k, v, block_mask=mask, backend="jit")
    expected = reference.attention(q.double(), k.double(), v.double(), block_mask=mask).out
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


# --- what is not finite, and what is large -------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_reaches_what_reads_it(
    which: str, bad: float, dtype: torch.dtype
) -> None:
    q, k, v = (random(1, 2, 150, 16, dtype=dtype) for _ in range(3))
    {"key": k, "value": v}[which][0, 1, 140, 3] = bad
    mask = lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) | (kv_idx < 3)  # noqa: E731
    actual = flex_attention(q, k, v, mask_mod=mask, backend="jit")
    expected = reference.attention(q.double(), k.double(), v.double(), mask_mod=mask).out
    assert torch.equal(actual.isfinite(), expected.isfinite())
    assert not bool(actual[0, 1, 141:].isfinite().all())


@pytest.mark.parametrize("factor", [1e2, 1e4])
def test_large_scores(factor: float) -> None:
    q, k, v = (random(1, 2, 140, 16) for _ in range(3))
    actual = flex_attention(q, k, v, scale=factor, backend="jit")
    assert bool(actual.isfinite().all())
    peer = reference.attention(q, k, v, scale=factor).out
    exact = reference.attention(q.double(), k.double(), v.double(), scale=factor).out
    error, theirs = ((x.double() - exact).abs().max() for x in (actual, peer))
    assert error <= 4 * theirs + 1e-6


def test_scores_that_a_mod_makes_infinite() -> None:
    q, k, v = (random(1, 1, 40, 8) for _ in range(3))

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        low = torch.where(kv_idx % 3 == 0, -math.inf, score)
        return torch.where((q_idx == 5) & (kv_idx == 7), math.nan, low)

    actual, aux = flex_attention(
        q, k, v, mod, return_aux=AuxRequest(lse=True, max_scores=True), backend="jit"
    )
    expected = reference.attention(q.double(), k.double(), v.double(), score_mod=mod)
    for ours, theirs in zip((actual, aux.lse, aux.max_scores), expected, strict=False):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5, equal_nan=True)


# --- code is made once ---------------------------------------------------------------------------


def test_constants_and_tensors_are_arguments(compilations: list[str]) -> None:
    q, k, v = (random(1, 2, 50, 8) for _ in range(3))
    results = []
    for window in (3, 10, 30):
        bias = random(2, 99)

        def mod(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, bias: Tensor = bias) -> Any:
            return s + bias[h, q_idx - kv_idx + 49] * 0.7

        def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, window: int = window) -> Any:
            return q_idx - kv_idx < window

        results.append(flex_attention(q, k, v, mod, mask_mod=mask, backend="jit"))
        exact = reference.attention(q, k, v, score_mod=mod, mask_mod=mask).out
        torch.testing.assert_close(results[-1], exact, rtol=1e-5, atol=1e-5)
    assert len(compilations) == 2, "the core, and one mod"


def test_a_changed_closure_is_never_stale() -> None:
    q, k, v = (random(1, 1, 30, 8) for _ in range(3))
    window = 3
    bias = torch.zeros(30)

    def mod(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(q_idx - kv_idx < window, s + bias[kv_idx], -math.inf)

    before = flex_attention(q, k, v, mod, backend="jit")
    window = 9
    after = flex_attention(q, k, v, mod, backend="jit")
    bias.numpy()[:] = 1.0 * torch.arange(30).numpy()
    edited = flex_attention(q, k, v, mod, backend="jit")
    torch.testing.assert_close(edited, reference.attention(q, k, v, score_mod=mod).out)
    assert not torch.equal(before, after)
    assert not torch.equal(after, edited)


def test_a_new_process_reads_what_an_old_one_wrote(compilations: list[str]) -> None:
    q = random(1, 1, 30, 8)
    first = flex_attention(q, q, q, mask_mod=causal, backend="jit")
    made = len(compilations)
    prepare.kernel_of.cache_clear()
    compiled_mods.compiled.cache_clear()
    compiled_mods._codes.clear()
    assert torch.equal(flex_attention(q, q, q, mask_mod=causal, backend="jit"), first)
    assert len(compilations) == made


def test_many_python_threads_at_once() -> None:
    inputs = [tuple(random(1, 2, 90 + i, 16) for _ in range(3)) for i in range(8)]
    expected = [flex_attention(*x, mask_mod=causal, backend="jit") for x in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(20):
            if not torch.equal(
                flex_attention(*inputs[i], mask_mod=causal, backend="jit"), expected[i]
            ):
                wrong.append(i)

    at_once(work, 8)
    assert not wrong


# --- mistakes ------------------------------------------------------------------------------------


def test_an_index_out_of_range_says_what_the_eager_path_says() -> None:
    q = random(1, 2, 40, 8)
    table = random(39)
    messages = []
    for backend in ("jit", "eager"):
        with pytest.raises(CapturedIndexError) as error:
            flex_attention(
                q, q, q, lambda s, b, h, q_idx, kv_idx: s + table[kv_idx], backend=backend
            )
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert "index 39 is out of bounds for dimension 0 with size 39" in messages[0]


def test_dividing_by_zero_says_what_the_eager_path_says() -> None:
    q = random(1, 2, 40, 8)
    messages = []
    for backend in ("jit", "eager"):
        with pytest.raises(DivisionByZeroError) as error:
            flex_attention(
                q, q, q, mask_mod=lambda b, h, q_idx, kv_idx: q_idx % kv_idx == 0, backend=backend
            )
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    safe = lambda s, b, h, q_idx, kv_idx: s + q_idx // kv_idx  # noqa: E731
    masked = flex_attention(q, q, q, safe, mask_mod=lambda b, h, q_idx, kv_idx: kv_idx > 0)
    assert bool(masked.isfinite().all())


@pytest.mark.parametrize(
    "index",
    [
        lambda h, q_idx, kv_idx: kv_idx,
        lambda h, q_idx, kv_idx: q_idx,
        lambda h, q_idx, kv_idx: q_idx + kv_idx - 29,
        lambda h, q_idx, kv_idx: (q_idx * kv_idx) // 30,
    ],
    ids=["key", "query", "both", "irregular"],
)
def test_an_index_out_of_range_where_the_mask_is_false_is_nobodys_mistake(index: Any) -> None:
    q = random(1, 2, 40, 8)
    table = random(30)
    mask = lambda b, h, q_idx, kv_idx: (q_idx < 30) & (kv_idx < 30)  # noqa: E731
    mod = lambda s, b, h, q_idx, kv_idx: s + table[index(h, q_idx, kv_idx)]  # noqa: E731
    actual = flex_attention(q, q, q, mod, mask_mod=mask, backend="jit")
    safe = lambda s, b, h, q_idx, kv_idx: (  # noqa: E731
        s + table[index(h, q_idx, kv_idx).clamp(max=29)]
    )
    expected = reference.attention(q, q, q, score_mod=safe, mask_mod=mask).out
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


# --- the largest scores --------------------------------------------------------------------------

LOWEST = torch.finfo(torch.float32).min
LARGEST_SCORES: dict[str, tuple[Callable[..., Any], list[int]]] = {
    "all of them the lowest number": (lambda s, b, h, q, kv: s * 0 + LOWEST, [*range(200)]),
    "all of them large": (lambda s, b, h, q, kv: s * 0 + 3e38, [*range(200)]),
    "one large": (lambda s, b, h, q, kv: (kv == 3) * 2.5e38 + s, [3]),
    "a larger one": (lambda s, b, h, q, kv: torch.where(kv == 3, 3e38, 2.6e38) + s, [3]),
    "a less low one": (lambda s, b, h, q, kv: torch.where(kv == 3, -2.5e38, -3e38) + s, [3]),
    "the lowest, but for what is masked": (
        lambda s, b, h, q, kv: torch.where(kv < 9, LOWEST, -math.inf) + s * 0,
        [*range(9)],
    ),
}


@pytest.mark.parametrize("queries", [1, 3, 40])
@pytest.mark.parametrize("name", LARGEST_SCORES)
def test_scores_up_to_the_largest_float(name: str, queries: int) -> None:
    """A finite score stays finite. A row of scores of the lowest float is not an empty row."""
    mod, read = LARGEST_SCORES[name]
    q, k, v = random(1, 1, queries, 16), random(1, 1, 200, 16), random(1, 1, 200, 16)
    request = AuxRequest(lse=True, max_scores=True)
    out, aux = flex_attention(q, k, v, mod, return_aux=request, backend="jit")
    mean = v[..., read, :].mean(-2, keepdim=True).expand_as(out)
    torch.testing.assert_close(out, mean, rtol=1e-5, atol=1e-5)
    expected = reference.attention(q, k, v, score_mod=mod)
    torch.testing.assert_close(out, expected.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(aux.lse, expected.lse, rtol=1e-6, atol=0.0)
    assert aux.lse.isfinite().all() and aux.max_scores.isfinite().all()


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("sign", [-1, 1])
def test_products_up_to_the_largest_float(sign: int, queries: int) -> None:
    q, k = torch.full((1, 1, queries, 16), 1e19), torch.full((1, 1, 200, 16), sign * 1.6e18)
    v = random(1, 1, 200, 16)
    out, aux = flex_attention(q, k, v, scale=1.0, return_aux=AuxRequest(lse=True), backend="jit")
    torch.testing.assert_close(out, v.mean(-2, keepdim=True).expand_as(out), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(aux.lse, torch.full_like(aux.lse, sign * 2.56e38))


# --- checking itself -----------------------------------------------------------------------------


def test_a_checked_run_is_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (random(2, 4, 70, 16) for _ in range(3))
    plain = flex_attention(q, k, v, mods.softcap(5.0), mask_mod=causal, backend="jit")
    monkeypatch.setenv("QUIRE_CHECK", "1")
    config.cache_clear()
    assert torch.equal(flex_attention(q, k, v, mods.softcap(5.0), mask_mod=causal), plain)


def test_a_kernel_that_is_wrong_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CHECK", "1")
    config.cache_clear()
    right = ForwardPlan.run

    def wrong(*args: Any) -> Any:
        result = right(*args)
        result.out[..., 0] += 0.01
        return result

    monkeypatch.setattr(ForwardPlan, "run", wrong)
    q = random(1, 2, 20, 8)
    with pytest.raises(KernelMismatchError, match="out of batches 0 to 0, heads 0 to 1, queries"):
        flex_attention(q, q, q, backend="jit")


def found_out(monkeypatch: pytest.MonkeyPatch, check: str, shape: tuple[int, ...]) -> int:
    """In how many of 20 runs one wrong row, the last one, is found."""
    monkeypatch.setenv("QUIRE_CHECK", check)
    config.cache_clear()
    right = ForwardPlan.run

    def wrong(*args: Any) -> Any:
        result = right(*args)
        result.out[-1, -1, -1, 0] += 0.01
        return result

    monkeypatch.setattr(ForwardPlan, "run", wrong)
    q, found = random(*shape), 0
    for _ in range(20):
        try:
            flex_attention(q, q, q, backend="jit")
        except KernelMismatchError:
            found += 1
    monkeypatch.setattr(ForwardPlan, "run", right)
    return found


def test_one_wrong_row_of_a_small_result_is_always_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_out(monkeypatch, "1", (1, 1, 1000, 8)) == 20


def test_the_number_of_rows_that_are_checked_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_out(monkeypatch, "2", (1, 1, 1000, 8)) < 20
    assert found_out(monkeypatch, "1000", (1, 1, 1000, 8)) == 20
