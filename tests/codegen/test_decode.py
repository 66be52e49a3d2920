"""The kernel for few queries: the reference's numbers, and the panel kernel's dropout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_as_good_as
from guards import guarded
from strategies import LAYOUTS
from torch import Tensor

from quire import AuxRequest, BlockMask, create_block_mask, flex_attention, reference
from quire.codegen.convention import MOST_ROWS, Form
from quire.errors import CapturedIndexError, DivisionByZeroError
from quire.runtime import forward as division
from quire.runtime import prepare
from quire.runtime.launch import LoadedKernel
from quire.runtime.prepare import kernel

pytestmark = pytest.mark.every_width

ALL = AuxRequest(lse=True, max_scores=True)
LENGTHS = [1, 2, 3, 4, 5, MOST_ROWS, MOST_ROWS + 1]  # sets of rows; the last one is a panel


@pytest.fixture(autouse=True)
def _as_if_there_were_many_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sequences stand for long ones: up to MOST_ROWS queries have the decode kernel."""
    monkeypatch.setattr(division, "FEW_ROWS", MOST_ROWS)


def operands(
    q_len: int,
    kv_len: int = 150,
    head_dim: int = 16,
    value_dim: int = 16,
    *,
    group: int = 2,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(2, 2 * group, q_len, head_dim).to(dtype),
        torch.randn(2, 2, kv_len, head_dim).to(kv_dtype or dtype),
        torch.randn(2, 2, kv_len, value_dim).to(kv_dtype or dtype),
    )


def assert_matches(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """out, lse and max_scores are as good as the reference's."""
    out, aux = flex_attention(q, k, v, **options, enable_gqa=True, return_aux=ALL, backend="jit")
    peers = reference.attention(q, k.to(q.dtype), v.to(q.dtype), **options)
    exact = reference.attention(q.double(), k.double(), v.double(), **options)
    for name, actual in (("out", out), ("lse", aux.lse), ("max_scores", aux.max_scores)):
        assert_as_good_as(actual, getattr(peers, name), getattr(exact, name), name, size=4.0)


def documents(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (kv_idx // 50 == (q_idx + b) % 3) & (kv_idx % 7 != h)


# --- sizes and layouts ---------------------------------------------------------------------------


@pytest.mark.parametrize("q_len", LENGTHS)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float16),
    ],
    ids=str,
)
def test_dtypes(q_len: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    assert_matches(*operands(q_len, dtype=dtype, kv_dtype=kv_dtype), mask_mod=documents)


@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    [
        *((1, 1), (3, 130), (7, 9), (8, 0), (8, 64), (31, 33)),
        *((64, 0), (64, 65), (71, 72), (128, 127), (130, 3)),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_head_dims_and_layouts(head_dim: int, value_dim: int, layout: str) -> None:
    q, k, v = map(LAYOUTS[layout], operands(3, 140, head_dim, value_dim))
    assert_matches(q, k, v)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(64, 64), (96, 96), (128, 128), (128, 64), (64, 96)]
)
def test_common_widths(
    head_dim: int, value_dim: int, kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def kernel_for_any(form: Form, dtypes: tuple[torch.dtype, ...], **_: int) -> LoadedKernel:
        made.append(kernel(form, dtypes))
        return made[-1]

    for group, kv_len in ((1, 1), (2, 66), (3, 130), (4, 513), (6, 1101)):
        q, k, v = operands(1, kv_len, head_dim, value_dim, group=group, kv_dtype=kv_dtype)
        assert_matches(q, k, v)
        known = flex_attention(q, k, v, enable_gqa=True, return_aux=ALL, backend="jit")
        with monkeypatch.context() as patch:
            patch.setattr(prepare, "kernel", kernel_for_any)
            for_any = flex_attention(q, k, v, enable_gqa=True, return_aux=ALL, backend="jit")
        assert torch.equal(known[0], for_any[0])
        assert torch.equal(known[1].lse, for_any[1].lse)
    assert [x.spec.head_dim for x in made] == [0] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", [2, 6, 10, 12])
def test_nothing_is_read_behind_a_row(width: int, dtype: torch.dtype) -> None:
    """Between rows are NaNs, and nothing at all behind the last one."""
    rows = torch.full((2, 2, 2, 40, 16), math.nan, dtype=dtype)
    k, v = rows[..., :width].copy_(torch.randn(2, 2, 2, 40, width))
    assert_matches(torch.randn(2, 4, 1, width, dtype=dtype), guarded(k), guarded(v))


@pytest.mark.parametrize("first", [0, 100, 130, 511, 640, 1020])
@pytest.mark.parametrize("width", [1, 120, 500, 1030])
def test_windows_of_keys_that_begin_and_end_anywhere(first: int, width: int) -> None:
    q, k, v = operands(2, 2100)
    assert_matches(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: (kv_idx - first) % 2100 < width)
    assert_matches(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: (kv_idx - first).abs() > width)


@pytest.mark.parametrize("kv_len", [400, 1024, 1100])
@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q_idx, kv_idx: (kv_idx < 128) | (kv_idx >= 256),
        lambda b, h, q_idx, kv_idx: (kv_idx < 128) | (kv_idx >= 384),
        lambda b, h, q_idx, kv_idx: kv_idx // 128 % 2 == 0,
        lambda b, h, q_idx, kv_idx: kv_idx // 128 % 2 == 1,
        lambda b, h, q_idx, kv_idx: (kv_idx // 128 % 4 == 1) | (kv_idx == 500),
        lambda b, h, q_idx, kv_idx: (kv_idx // 256 != 1) & (kv_idx != 5),
    ],
)
def test_holes_between_whole_blocks(mask: Callable[..., Tensor], kv_len: int) -> None:
    assert_matches(*operands(1, kv_len, 64, 64), mask_mod=mask)


@pytest.mark.parametrize("kv_len", [0, 1, 7, 8, 9, 127, 128, 129, 257])
@pytest.mark.parametrize("q_len", LENGTHS)
def test_lengths(q_len: int, kv_len: int) -> None:
    assert_matches(*operands(q_len, kv_len), mask_mod=lambda b, h, q_idx, kv_idx: kv_idx != 3)


# --- heads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("q_len", [1, 4])
def test_groups_of_heads(group: int, q_len: int) -> None:
    q, k, v = operands(q_len, group=group)
    bias = torch.randn(2 * group)
    assert_matches(q, k, v, score_mod=lambda s, b, h, q_idx, kv_idx: s + bias[h] * kv_idx / 50)
    assert_matches(q, k, v, sink=bias)


@pytest.mark.parametrize("q_len", LENGTHS)
@pytest.mark.parametrize("group", [1, 2, 4])
def test_heads_of_a_group_that_read_other_keys(q_len: int, group: int) -> None:
    q, k, v = operands(q_len, 300, group=group)
    lengths = torch.tensor([10, 290, 0, 150, 299, 3, 128, 256])
    masks: list[Callable[..., Any]] = [
        lambda b, h, q_idx, kv_idx: h >= 2,
        lambda b, h, q_idx, kv_idx: kv_idx < h * 60,
        lambda b, h, q_idx, kv_idx: kv_idx < lengths[h],
        lambda b, h, q_idx, kv_idx: kv_idx >= lengths[h] + q_idx,
    ]
    for mask in masks:
        assert_matches(q, k, v, mask_mod=mask)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("per_batch", [False, True])
@pytest.mark.parametrize("size", [(128, 128), (2, 16), (1, 50)])
def test_a_block_mask_for_each_head(group: int, per_batch: bool, size: tuple[int, int]) -> None:
    """Heads of one group read other blocks, so they are not computed together."""
    q, k, v = operands(4, 300, group=group)
    mask = create_block_mask(
        lambda b, h, q_idx, kv_idx: (kv_idx // 60) % (2 * group) == (h + b + q_idx // 2) % 3,
        2 if per_batch else None,
        2 * group,
        4,
        300,
        BLOCK_SIZE=size,
    )
    assert_matches(q, k, v, block_mask=mask)


def test_a_hand_made_block_mask_is_honoured_as_given() -> None:
    counts, full_counts = torch.tensor([[[1]]]), torch.tensor([[[1]]])
    indices, full_indices = torch.tensor([[[[2, 0, 1]]]]), torch.tensor([[[[0, 1, 2]]]])
    mask = BlockMask.from_kv_blocks(
        *(x.int() for x in (counts, indices, full_counts, full_indices)),
        BLOCK_SIZE=128,
        mask_mod=lambda b, h, q_idx, kv_idx: kv_idx % 2 == q_idx % 2,
        seq_lengths=(3, 300),
    )
    assert_matches(*operands(3, 300), block_mask=mask)


# --- dropout, and what is not finite -------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("p", [0.3, 1.0])
def test_dropout_drops_what_the_panel_kernel_drops(dtype: torch.dtype, p: float) -> None:
    q, k, v = operands(9, 200, group=3, dtype=dtype)

    def attend(query: Tensor) -> Tensor:
        return flex_attention(
            *(query, k, v),
            enable_gqa=True,
            dropout_p=p,
            generator=torch.Generator().manual_seed(3),
            backend="jit",
        )

    panel = attend(q)
    for q_len in range(1, MOST_ROWS + 1):
        torch.testing.assert_close(attend(q[:, :, :q_len]), panel[:, :, :q_len])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_what_is_not_finite_reaches_what_reads_it(
    bad: float, which: str, dtype: torch.dtype
) -> None:
    q, k, v = operands(4, 200, dtype=dtype)
    {"key": k, "value": v}[which][0, 1, 140, 3] = bad
    mask = lambda b, h, q_idx, kv_idx: (kv_idx < 140) | (q_idx >= 2)  # noqa: E731
    actual = flex_attention(q, k, v, mask_mod=mask, enable_gqa=True, backend="jit")
    expected = reference.attention(q.double(), k.double(), v.double(), mask_mod=mask).out
    assert torch.equal(actual.isfinite(), expected.isfinite())
    assert torch.equal(actual.isnan(), expected.isnan())
    assert bool(actual[0, 2:, :2].isfinite().all())


def test_scores_that_a_mod_makes_infinite() -> None:
    q, k, v = operands(4)

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        low = torch.where((kv_idx % 3 == 0) | (q_idx == 3), -math.inf, score)
        return torch.where((q_idx == 1) & (kv_idx == 7), math.nan, low)

    assert_matches(q, k, v, score_mod=mod)


def test_rows_that_read_nothing() -> None:
    q, k, v = operands(3, 300)
    mask = lambda b, h, q_idx, kv_idx: (q_idx != 1) & ((h != 2) | (kv_idx > 130))  # noqa: E731
    assert_matches(q, k, v, mask_mod=mask)
    out = flex_attention(q, k, v, mask_mod=mask, enable_gqa=True, backend="jit")
    assert torch.equal(out[:, :, 1], torch.zeros_like(out[:, :, 1]))


# --- captured tensors ----------------------------------------------------------------------------

KEYS = 150
Index = Callable[[Tensor, Tensor], Any]
INDICES: dict[str, tuple[Index, int]] = {
    "key": (lambda q, k: k, KEYS),
    "key from the end": (lambda q, k: k - KEYS, KEYS),
    "query - key": (lambda q, k: q - k + KEYS - 1, KEYS + 3),
    "key - query": (lambda q, k: k - q + 3, KEYS + 3),
    "from both ends": (lambda q, k: k - q, KEYS),
    "clamped above": (lambda q, k: (k + q).clamp(max=60), 61),
    "clamped below": (lambda q, k: (k - q - 100).clamp(min=0), KEYS - 100),
    "clamped on both sides": (lambda q, k: (k - q).clamp(-2, 70) + 2, 73),
    "irregular": (lambda q, k: (k * k + q) % 37, 37),
}
"""Indices of four queries and 150 keys, and the length that is just enough."""


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.uint8, torch.bool],
    ids=str,
)
@pytest.mark.parametrize("q_len", [4, 20])
def test_tables_that_are_just_long_enough(index: str, dtype: torch.dtype, q_len: int) -> None:
    """And one element shorter is an error, on the same code."""
    at, length = INDICES[index]
    if index in ("query - key", "key - query"):
        length += q_len - 4
    offset = q_len - 4 if index == "key - query" else 0
    inside = torch.randint(0, 2 if dtype == torch.bool else 9, (length,))
    around = torch.full((length + 200,), 100).to(dtype)  # what no load may see
    around[100 : 100 + length] = inside.to(dtype)
    q, k, v = operands(q_len, KEYS)

    def mod(start: int) -> Callable[..., Tensor]:
        table = around[100 + start : 100 + length]
        return lambda s, b, h, q_idx, kv_idx: s + table[at(q_idx, kv_idx) + offset].float() * 0.2

    actual = flex_attention(q, k, v, mod(0), enable_gqa=True, backend="jit")
    exact = reference.attention(q.double(), k.double(), v.double(), score_mod=mod(0)).out
    torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-5)
    with pytest.raises(CapturedIndexError, match="out of bounds"):
        flex_attention(q, k, v, mod(1), enable_gqa=True, backend="jit")


@pytest.mark.parametrize("q_len", [4, 20])
@pytest.mark.parametrize("limit", [0, 1, 7, 8, 127, 128, 148, 149, 500])
def test_clamps_of_indices_that_a_table_would_hold(q_len: int, limit: int) -> None:
    """The limit is reached at the first key of a block, within it, at its last one, or never."""
    q, k, v = operands(q_len, KEYS)
    table = torch.randn(600)

    def above(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        place = (kv_idx - q_idx + q_len).clamp(max=limit + q_len)
        return score + table[place] + place * 0.01

    def below(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[(q_idx - kv_idx + KEYS).clamp(min=limit)]

    assert_matches(q, k, v, score_mod=above)
    assert_matches(q, k, v, score_mod=below)


@pytest.mark.parametrize("q_len", [4, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tables_of_two_dimensions(q_len: int, dtype: torch.dtype) -> None:
    q, k, v = operands(q_len, KEYS, dtype=dtype)
    pairs, wide = torch.randn(q_len, KEYS), torch.randn(q_len + KEYS, q_len + KEYS)
    mods: list[Callable[..., Any]] = [
        lambda h, q_idx, kv_idx: pairs[q_idx, kv_idx],
        lambda h, q_idx, kv_idx: pairs.t()[kv_idx, q_idx],
        lambda h, q_idx, kv_idx: pairs.t().contiguous().t()[q_idx, kv_idx],
        lambda h, q_idx, kv_idx: pairs[q_idx][kv_idx],
        lambda h, q_idx, kv_idx: wide[kv_idx - q_idx + q_len][q_idx - kv_idx + KEYS],
        lambda h, q_idx, kv_idx: wide[:, ::3][kv_idx + h, (q_idx - kv_idx).clamp(0, 5)],
        lambda h, q_idx, kv_idx: wide[q_idx + kv_idx, q_idx + kv_idx],
    ]
    for bias in mods:
        mod = lambda s, b, h, q_idx, kv_idx, bias=bias: s + bias(h, q_idx, kv_idx)  # noqa: E731
        actual = flex_attention(q, k, v, mod, enable_gqa=True, backend="jit")
        exact = reference.attention(q.double(), k.double(), v.double(), score_mod=mod).out
        torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("q_len", [3, 20])
@pytest.mark.parametrize("first", [0, 1])
def test_a_mistake_in_a_mask_is_found_whatever_was_read_instead(q_len: int, first: int) -> None:
    q, k, v = operands(q_len)
    table = torch.full((KEYS - 1,), first)
    heads = table[: q.shape[1] - 1]
    rows = table[: q_len - 1]
    masks: list[Callable[..., Any]] = [
        lambda b, h, q_idx, kv_idx: table[kv_idx] > 0,
        lambda b, h, q_idx, kv_idx: heads[h] > 0,
        lambda b, h, q_idx, kv_idx: rows[q_idx] > 0,
        lambda b, h, q_idx, kv_idx: table[kv_idx] == table[q_idx],
        lambda b, h, q_idx, kv_idx: table[(kv_idx * 7 + q_idx) % KEYS] > 0,
    ]
    for mask in masks:
        with pytest.raises(CapturedIndexError, match="out of bounds"):
            flex_attention(q, k, v, mask_mod=mask, enable_gqa=True, backend="jit")


@pytest.mark.parametrize("q_len", [3, 20])
def test_an_index_that_wraps_around_between_the_ends_is_found(q_len: int) -> None:
    q, k, v = operands(q_len, 5)
    table = torch.randn(1)

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        for _ in range(62):
            kv_idx = kv_idx + kv_idx  # 0 at the first key, and at the fifth
        return score + table[kv_idx]

    with pytest.raises(CapturedIndexError, match="out of bounds"):
        flex_attention(q, k, v, mod, enable_gqa=True, backend="jit")


def test_mistakes_where_the_mask_is_false_are_nobodys() -> None:
    q, k, v = operands(3)
    table = torch.randn(100)
    mask = lambda b, h, q_idx, kv_idx: (kv_idx < 100) & (kv_idx > 0)  # noqa: E731
    mod = lambda s, b, h, q_idx, kv_idx: s + table[kv_idx] + q_idx // kv_idx  # noqa: E731
    safe = lambda s, b, h, q_idx, kv_idx: (  # noqa: E731
        s + table[kv_idx.clamp(max=99)] + q_idx // kv_idx.clamp(min=1)
    )
    actual = flex_attention(q, k, v, mod, mask_mod=mask, enable_gqa=True, backend="jit")
    expected = reference.attention(q, k, v, score_mod=safe, mask_mod=mask).out
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(DivisionByZeroError):
        flex_attention(
            *(q, k, v),
            lambda s, b, h, q_idx, kv_idx: s + q_idx // kv_idx,
            enable_gqa=True,
            backend="jit",
        )
