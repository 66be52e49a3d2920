"""The specification holds what it says, by examples that can be checked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quire import BlockMask, create_block_mask
from quire.reference import Reference, attention

inf, nan = math.inf, math.nan


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def column(*values: float) -> Tensor:
    """One batch, one head, a row of length 1 for each value: [1, 1, n, 1]."""
    return torch.tensor(values, dtype=torch.float64).view(1, 1, -1, 1)


def one_row(scores: list[float], values: list[float], **options: Any) -> Reference:
    """A single query over keys whose scores are as given."""
    return attention(column(1), column(*scores), column(*values), scale=1.0, **options)


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


# Softmax


def test_it_is_softmax_attention() -> None:
    query, key, value = random(2, 3, 5, 4), random(2, 3, 7, 4), random(2, 3, 7, 6)
    expected = scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(attention(query, key, value).out, expected)


def test_by_hand() -> None:
    result = one_row([0.0, math.log(3)], [4.0, 8.0])
    torch.testing.assert_close(result.probabilities.flatten(), column(0.25, 0.75).flatten())
    torch.testing.assert_close(result.out, column(7.0))
    torch.testing.assert_close(result.lse, torch.full((1, 1, 1), math.log(4), dtype=torch.float64))
    assert result.max_scores.item() == math.log(3)


def test_the_default_scale_is_one_over_the_root_of_the_head_dimension() -> None:
    query, key, value = random(1, 1, 3, 16), random(1, 1, 3, 16), random(1, 1, 3, 2)
    default, explicit = attention(query, key, value), attention(query, key, value, scale=0.25)
    torch.testing.assert_close(default.out, explicit.out)


@pytest.mark.parametrize("size", [1e4, -1e4, 3e38])
def test_large_scores_neither_overflow_nor_vanish(size: float) -> None:
    result = one_row([size, size], [1.0, 3.0])
    torch.testing.assert_close(result.out, column(2.0))
    torch.testing.assert_close(result.lse.item(), size + math.log(2))


@pytest.mark.parametrize("size", [1e4, -1e9, 1e9, torch.finfo(torch.float32).min])
def test_the_slope_of_the_log_sum_exp_is_the_softmax(size: float) -> None:
    """In float32 the sum of equal scores cannot be told from one of them."""
    key = torch.full((1, 1, 4, 1), size, requires_grad=True)
    one = torch.ones(1, 1, 1, 1)
    result = attention(one, key, torch.zeros_like(key), scale=1.0)
    assert result.lse.item() == pytest.approx(size + math.log(4))
    (slope,) = torch.autograd.grad(result.lse.sum(), key)
    assert slope.flatten().tolist() == [0.25] * 4


def test_scores_far_apart() -> None:
    result = one_row([1e4, -1e4], [1.0, 3.0])
    assert result.out.item() == 1.0
    assert result.lse.item() == 1e4


# Argmax and entropy


def test_argmax_and_entropy_by_hand() -> None:
    result = one_row([0.0, math.log(3), math.log(4)], [1.0, 1.0, 1.0])
    assert result.argmax.item() == 2
    assert result.argmax.dtype == torch.int64
    expected = math.log(8) - (3 * math.log(3) + 4 * math.log(4)) / 8
    assert result.entropy.item() == pytest.approx(expected)
    assert not result.entropy.requires_grad


@pytest.mark.parametrize(
    ("scores", "place"),
    [
        ([1.0, 3.0, 3.0], 1),
        ([-inf, -5.0, -inf], 1),
        ([1.0, inf, inf], 1),
        ([inf, 1.0, nan, nan], 2),
        ([-inf, -inf], -1),
    ],
)
def test_the_argmax_is_the_first_of_equals_and_nan_is_largest(
    scores: list[float], place: int
) -> None:
    mod = lambda score, b, h, q_idx, kv_idx: torch.tensor(scores, dtype=score.dtype)[kv_idx]  # noqa: E731
    keys = [0.0] * len(scores)
    assert one_row(keys, keys, score_mod=mod).argmax.item() == place


def test_the_argmax_is_an_absolute_position_of_a_key_that_is_read() -> None:
    options: dict[str, Any] = {"kv_start": 10, "q_start": 12}
    assert one_row([1.0, 0.0, 3.0, 9.0], [1.0] * 4, **options).argmax.item() == 13
    masked = one_row([1.0, 0.0, 3.0, 9.0], [1.0] * 4, mask_mod=causal, **options)
    assert masked.argmax.item() == 12


def test_equal_probabilities_have_the_largest_entropy() -> None:
    result = one_row([7.0] * 5, [1.0] * 5)
    assert result.argmax.item() == 0
    assert result.entropy.item() == pytest.approx(math.log(5))
    assert one_row([1e4, -1e4], [1.0, 1.0]).entropy.item() == 0.0


def test_a_sink_takes_its_share_of_the_entropy_and_adds_no_term() -> None:
    result = one_row([0.0, 0.0], [1.0, 1.0], sink=torch.tensor([math.log(2)]))
    assert result.entropy.item() == pytest.approx(0.5 * math.log(4))
    assert result.argmax.item() == 0


def test_dropout_changes_neither() -> None:
    keep = torch.tensor([True, False]).view(1, 1, 1, 2)
    result = one_row([0.0, 0.0], [1.0, 1.0], keep=keep, dropout_p=0.5)
    assert result.entropy.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("bad", [nan, inf])
def test_the_entropy_of_a_row_that_is_nan(bad: float) -> None:
    assert one_row([0.0, bad], [1.0, 1.0]).entropy.isnan().all()


# The mass of keys


def test_the_mass_of_keys_by_hand() -> None:
    """Two queries, of which the first sees one key."""
    result = attention(
        column(1, 1),
        column(0.0, math.log(3)),
        column(1, 1),
        scale=1.0,
        mask_mod=causal,
        sink=torch.tensor([math.log(4)], dtype=torch.float64),
    )
    assert result.key_mass.flatten().tolist() == pytest.approx([1 / 5 + 1 / 8, 3 / 8])
    assert not result.key_mass.requires_grad


def test_dropout_does_not_change_the_mass_of_keys() -> None:
    keep = torch.tensor([True, False]).view(1, 1, 1, 2)
    result = one_row([0.0, 0.0], [1.0, 1.0], keep=keep, dropout_p=0.5)
    assert result.key_mass.flatten().tolist() == [0.5, 0.5]
    assert result.probabilities.flatten().tolist() == [1.0, 0.0]


@pytest.mark.parametrize("bad", [nan, inf])
def test_a_row_that_is_nan_spoils_the_mass_of_what_it_reads(bad: float) -> None:
    query = column(0.0, bad)
    mass = attention(query, column(1, 1, 1), column(1, 1, 1), mask_mod=causal).key_mass
    assert mass.isnan().flatten().tolist() == [True, True, False]


# Rows that read nothing


@pytest.mark.parametrize(
    "options",
    [
        {"mask_mod": lambda b, h, q_idx, kv_idx: q_idx < 0},
        {"mask_mod": lambda b, h, q_idx, kv_idx: False},
        {"score_mod": lambda score, b, h, q_idx, kv_idx: score - inf},
        {"score_mod": lambda score, b, h, q_idx, kv_idx: -inf},
        {"block_mask": create_block_mask(lambda b, h, q, kv: q < 0, 1, 2, 5, 7)},
        {"sink": torch.full((2,), -inf, dtype=torch.float64), "mask_mod": lambda *_: False},
    ],
    ids=["mask", "Python False", "score", "Python -inf", "block mask", "sink"],
)
def test_a_row_that_may_attend_nowhere_is_zero(options: dict[str, Any]) -> None:
    tensors = random(1, 2, 5, 4), random(1, 2, 7, 4), random(1, 2, 7, 3)
    result = attention(*tensors, **options)
    assert not result.out.any()
    assert (result.lse == -inf).all()
    assert (result.max_scores == -inf).all()
    assert (result.argmax == -1).all()
    assert (result.entropy == 0).all()
    assert (result.key_mass == 0).all()
    loss = result.out.sum() + result.out.square().sum()
    for grad in torch.autograd.grad(loss, tensors, materialize_grads=True):
        assert not grad.any()


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 3), (3, 0), (0, 0)])
def test_no_queries_or_no_keys(q_len: int, kv_len: int) -> None:
    result = attention(random(1, 2, q_len, 4), random(1, 2, kv_len, 4), random(1, 2, kv_len, 3))
    assert result.out.shape == (1, 2, q_len, 3)
    assert not result.out.any()
    assert (result.lse == -inf).all()
    assert (result.max_scores == -inf).all()
    assert (result.argmax == -1).all()
    assert (result.entropy == 0).all()
    assert torch.equal(result.key_mass, torch.zeros(1, 2, kv_len, dtype=torch.float64))


def test_a_sink_alone() -> None:
    result = one_row([0.0], [5.0], sink=torch.tensor([2.0]), mask_mod=lambda *_: False)
    assert result.out.item() == 0.0
    assert result.lse.item() == 2.0
    assert result.max_scores.item() == -inf
    assert (result.argmax.item(), result.entropy.item()) == (-1, 0.0)


# What is not finite


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_a_bad_value_reaches_the_rows_that_read_it(bad: float) -> None:
    query, key, value = random(1, 1, 5, 4), random(1, 1, 5, 4), random(1, 1, 5, 3)
    with torch.no_grad():
        value[0, 0, 2, 1] = bad
    out = attention(query, key, value, mask_mod=causal).out
    assert torch.isfinite(out[0, 0, :, [0, 2]]).all()
    assert torch.isfinite(out[0, 0, :2]).all()
    torch.testing.assert_close(out[0, 0, 2:, 1], torch.full((3,), bad).double(), equal_nan=True)


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_a_bad_value_reaches_the_gradients_of_what_its_readers_read(bad: float) -> None:
    tensors = random(1, 1, 5, 4), random(1, 1, 5, 4), random(1, 1, 5, 3)
    query, key, value = tensors
    with torch.no_grad():
        value[0, 0, 2] = bad
    # Row 2 alone reads key 2; it also reads key 1, which rows 1, 3 and 4 read as well.
    reads = {0: [0], 1: [1], 2: [1, 2], 3: [1, 3], 4: [1, 4]}
    table = torch.tensor([[kv in reads[q] for kv in range(5)] for q in range(5)])
    out = attention(query, key, value, mask_mod=lambda b, h, q, kv: table[q, kv]).out
    grad_query, grad_key, grad_value = torch.autograd.grad(out.sum(), tensors)
    assert finite_rows(grad_query) == [True, True, False, True, True]
    assert finite_rows(grad_key) == [True, False, False, True, True]
    assert finite_rows(grad_value) == [True] * 5


@pytest.mark.parametrize("which", ["query", "key"])
@pytest.mark.parametrize("bad", [nan, inf])
def test_a_bad_query_or_key_reaches_the_rows_that_read_it(which: str, bad: float) -> None:
    tensors = {name: random(1, 1, 5, 4) for name in ("query", "key", "value")}
    with torch.no_grad():
        tensors[which][0, 0, 2] = bad
    result = attention(**tensors, mask_mod=causal)
    spoilt = [2] if which == "query" else [2, 3, 4]
    assert finite_rows(result.out) == [row not in spoilt for row in range(5)]
    grads = torch.autograd.grad(result.out.sum(), list(tensors.values()))
    assert finite_rows(grads[0]) == [row not in spoilt for row in range(5)]
    # Keys that only sound rows read keep their gradients.
    last_read = max(spoilt)
    assert finite_rows(grads[1]) == [kv > last_read for kv in range(5)]
    assert finite_rows(grads[2]) == [kv > last_read for kv in range(5)]


def test_a_score_of_minus_infinity_is_not_read() -> None:
    value = torch.tensor([1.0, nan], dtype=torch.float64).view(1, 1, 2, 1).requires_grad_()
    key = torch.tensor([1.0, nan], dtype=torch.float64).view(1, 1, 2, 1).requires_grad_()
    query, weight = column(1.0).requires_grad_(), torch.ones((), requires_grad=True)

    def hide(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.where(kv_idx == 0, score * weight, -inf)

    out = attention(query, key, value, score_mod=hide).out
    assert out.item() == 1.0
    for grad in torch.autograd.grad(out, (query, key, value, weight)):
        assert torch.isfinite(grad).all()


def test_a_score_of_nan_or_infinity_makes_its_row_nan() -> None:
    bad = torch.tensor([[0.0, nan, 0.0], [0.0, inf, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    result = attention(
        random(1, 1, 3, 2),
        random(1, 1, 3, 2),
        random(1, 1, 3, 2),
        score_mod=lambda score, b, h, q_idx, kv_idx: score + bad[q_idx, kv_idx],
    )
    assert finite_rows(result.out) == [False, False, True]
    assert result.out[0, 0, :2].isnan().all()
    assert result.lse[0, 0, 0].isnan()
    assert result.lse[0, 0, 1] == inf
    assert result.max_scores[0, 0, 1] == inf


def finite_rows(tensor: Tensor) -> list[bool]:
    return torch.isfinite(tensor[0, 0]).all(-1).tolist()


# Mods


def test_scores_are_scaled_before_the_mod_sees_them() -> None:
    seen = attention(
        column(2.0), column(3.0), column(1.0), scale=0.5, score_mod=lambda score, *_: score + 10
    )
    assert seen.max_scores.item() == 13.0


def test_a_score_mod_is_not_asked_where_the_mask_is_false() -> None:
    """Neither its values, nor its slope, nor its indices matter there."""
    bias = torch.ones(3, dtype=torch.float64, requires_grad=True)

    def beyond(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + bias[q_idx - kv_idx - 1] * torch.log(q_idx - kv_idx)

    tensors = random(1, 1, 4, 2), random(1, 1, 4, 2), random(1, 1, 4, 2)
    out = attention(*tensors, score_mod=beyond, mask_mod=lambda b, h, q, kv: q > kv).out
    assert torch.isfinite(out).all()
    for grad in torch.autograd.grad(out.sum(), (*tensors, bias)):
        assert torch.isfinite(grad).all()
        assert grad.any()


def test_a_mod_sees_batch_head_and_positions() -> None:
    """The score of each element is replaced by a number that names it."""
    result = attention(
        random(2, 2, 3, 1),
        random(2, 2, 2, 1),
        random(2, 2, 2, 1),
        score_mod=lambda score, b, h, q_idx, kv_idx: b * 1000 + h * 100 + q_idx * 10 + kv_idx,
        q_start=5,
        kv_start=2,
    )
    expected = [
        [[1000 * b + 100 * h + 10 * q + 3 for q in (5, 6, 7)] for h in (0, 1)] for b in (0, 1)
    ]
    assert result.max_scores.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    seen = []

    def spy(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen.append(score.dtype)
        return score

    query, key, value = (random(1, 1, 3, 2, dtype=dtype) for _ in range(3))
    result = attention(query, key, value, score_mod=spy)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert set(seen) == {wide}
    assert result.out.dtype == dtype
    assert result.lse.dtype == result.max_scores.dtype == wide


def test_the_maximum_has_no_gradient() -> None:
    result = attention(random(1, 1, 3, 2), random(1, 1, 3, 2), random(1, 1, 3, 2))
    assert result.lse.requires_grad
    assert not result.max_scores.requires_grad


def test_its_gradients() -> None:
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    keep = torch.rand(2, 2, 3, 4) > 0.3

    def compute(query: Tensor, key: Tensor, value: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        result = attention(
            *(query, key, value),
            score_mod=lambda score, b, h, q_idx, kv_idx: torch.tanh(score) + bias[kv_idx],
            mask_mod=lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx != 1),
            sink=sink,
            keep=keep,
            dropout_p=0.3,
        )
        return result.out, result.lse

    tensors = random(2, 2, 3, 2), random(1, 1, 4, 2), random(1, 1, 4, 3), bias, sink
    assert torch.autograd.gradcheck(compute, tensors)


# Heads and batches


def test_query_head_h_reads_key_head_h_over_group() -> None:
    query, key = torch.zeros(1, 6, 1, 1), torch.zeros(1, 2, 1, 1)
    value = torch.tensor([10.0, 20.0]).view(1, 2, 1, 1)
    assert attention(query, key, value).out.flatten().tolist() == [10, 10, 10, 20, 20, 20]


def test_one_batch_of_keys_serves_all() -> None:
    query, key, value = random(3, 2, 4, 2), random(1, 2, 5, 2), random(1, 2, 5, 2)
    each = [attention(query[b : b + 1], key, value).out for b in range(3)]
    torch.testing.assert_close(attention(query, key, value).out, torch.cat(each))


# Block masks


def test_blocks_that_are_not_listed_do_not_exist() -> None:
    """The second key block is listed for the first query block only, whatever the mask_mod says."""
    mask = BlockMask.from_kv_blocks(
        torch.tensor([[[2, 1]]]), torch.tensor([[[[1, 0], [0, 1]]]]), BLOCK_SIZE=2
    )
    tensors = [random(1, 1, 4, 2) for _ in range(3)]
    expected = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]])
    assert torch.equal(attention(*tensors, block_mask=mask).probabilities[0, 0] > 0, expected > 0)


def test_full_blocks_do_not_ask_the_mask_mod() -> None:
    counts, indices = torch.tensor([[[1, 1]]]), torch.tensor([[[[0, 1], [1, 0]]]])
    full_counts, full_indices = torch.tensor([[[0, 1]]]), torch.tensor([[[[0, 1], [0, 1]]]])
    mask = BlockMask.from_kv_blocks(
        counts, indices, full_counts, full_indices, BLOCK_SIZE=2, mask_mod=causal
    )
    tensors = [random(1, 1, 4, 2) for _ in range(3)]
    expected = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]])
    assert torch.equal(attention(*tensors, block_mask=mask).probabilities[0, 0] > 0, expected > 0)
    mask.mask_mod = lambda b, h, q_idx, kv_idx: kv_idx < 0
    only_full = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]])
    assert torch.equal(attention(*tensors, block_mask=mask).probabilities[0, 0] > 0, only_full > 0)


def test_a_block_mask_and_a_mask_mod_both_hold() -> None:
    tensors = [random(1, 1, 6, 2) for _ in range(3)]
    mask = create_block_mask(causal, None, None, 6, 6, BLOCK_SIZE=4)
    both = attention(*tensors, block_mask=mask, mask_mod=lambda b, h, q, kv: kv % 2 == 0)
    expected = torch.tril(torch.ones(6, 6)) * (torch.arange(6) % 2 == 0)
    assert torch.equal(both.probabilities[0, 0] > 0, expected > 0)


def test_a_block_mask_counts_from_its_own_first_row() -> None:
    tensors = [random(1, 1, 4, 2) for _ in range(3)]
    mask = create_block_mask(causal, None, None, 4, 4, BLOCK_SIZE=2)
    here, there = (attention(*tensors, block_mask=mask, q_start=start).out for start in (0, 100))
    assert torch.equal(here, there)


# Sinks and dropout


def test_a_sink_is_a_key_without_a_value() -> None:
    query, key, value = random(2, 2, 3, 2), random(2, 2, 4, 2), random(2, 2, 4, 3)
    sink = random(2)
    result = attention(query, key, value, sink=sink)
    scores = attention(query, key, value)
    logits = torch.cat([sink.view(1, 2, 1, 1).expand(2, 2, 3, 1), _scores(query, key)], -1)
    weights = logits.softmax(-1)[..., 1:]
    torch.testing.assert_close(result.out, weights @ value)
    torch.testing.assert_close(result.lse, logits.logsumexp(-1))
    torch.testing.assert_close(result.max_scores, scores.max_scores)
    from_lse = torch.exp(_scores(query, key) - result.lse.unsqueeze(-1))
    torch.testing.assert_close(result.probabilities, from_lse)


def _scores(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])


def test_dropout_comes_after_the_softmax() -> None:
    options = {"keep": torch.tensor([True, False]), "dropout_p": 0.5}
    result = one_row([0.0, math.log(3)], [4.0, 8.0], **options)
    torch.testing.assert_close(result.out, column(2 * 0.25 * 4.0))
    torch.testing.assert_close(result.lse.item(), math.log(4))


def test_dropout_of_everything() -> None:
    result = one_row([0.0, 1.0], [4.0, 8.0], keep=torch.tensor([False, False]), dropout_p=1.0)
    assert result.out.item() == 0.0
    assert torch.isfinite(result.lse).all()
