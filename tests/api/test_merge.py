"""Results over some keys, merged, are the result over all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import pytest
import torch
from compare import assert_as_good_as
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from quire import AuxRequest, Dense, Ragged, attention, merge_attention, reference
from quire.config import Backend
from quire.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    QuireError,
    RankError,
    ShapeError,
    TensorKindError,
)
from quire.mods import causal, sliding_window

LSE = AuxRequest(lse=True)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Result = tuple[Tensor, Tensor]


def far_apart(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """The first rows read nothing at all, and each of the others two keys."""
    return (q_idx >= 5) & ((kv_idx == 0) | (kv_idx == q_idx))


MASKS = {"none": None, "causal": causal, "window": sliding_window(3), "far apart": far_apart}


def tensors(q_len: int, kv_len: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = ((2, 4, q_len, 8), (2, 2, kv_len, 8), (2, 2, kv_len, 6))
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def shards(key: Tensor, value: Tensor, cuts: Sequence[int]) -> list[Dense]:
    """[0, 3, 3, 9]: keys 0 to 2, none, and 3 to 8."""
    return [Dense(key[:, :, a:b], value[:, :, a:b], start=a) for a, b in pairwise(cuts)]


def attend(query: Tensor, memory: Dense | Ragged, **options: Any) -> Result:
    out, aux = attention(query, memory, return_aux=LSE, **options)
    assert aux.lse is not None
    return out, aux.lse


def merged(parts: Sequence[Result]) -> Result:
    return reduce(lambda x, y: merge_attention(*x, *y), parts)


@st.composite
def cut_keys(draw: st.DrawFn) -> list[int]:
    kv_len = draw(st.sampled_from([1, 9, 40, 300]))
    inner = draw(st.lists(st.integers(0, kv_len), max_size=4))
    return [0, *sorted(inner), kv_len]


@given(
    cut_keys(),
    st.sampled_from(DTYPES),
    st.sampled_from(sorted(MASKS)),
    st.sampled_from([1, 3, 40]),
    st.sampled_from(["jit", "eager"]),
)
def test_shards_are_attention_over_all_keys(
    cuts: list[int], dtype: torch.dtype, mask: str, q_len: int, backend: Backend
) -> None:
    query, key, value = tensors(q_len, cuts[-1], dtype)
    options: dict[str, Any] = {"mask": MASKS[mask], "q_start": 0, "backend": backend}
    parts = [attend(query, shard, **options) for shard in shards(key, value, cuts)]
    wide = torch.promote_types(dtype, torch.float32)
    out, lse = merged([(parts[0][0].to(wide), parts[0][1]), *parts[1:]])
    assert out.dtype == lse.dtype == wide
    peer, truth = (
        reference.attention(*(x.to(kind) for x in (query, key, value)), mask_mod=MASKS[mask])
        for kind in (dtype, torch.float64)
    )
    assert_as_good_as(out.to(dtype), peer.out, truth.out)
    assert_as_good_as(lse, peer.lse, truth.lse, "lse", size=math.log(cuts[-1]) + 1)


def test_packed_sequences() -> None:
    """Five keys or fewer of each sequence on one side, the rest on the other."""
    query, key, value = torch.randn(3, 20, 4, 8)
    offsets, lengths = torch.tensor([0, 4, 4, 13, 20]), torch.tensor([4, 0, 9, 7])
    first = lengths.clamp(max=5)
    near = Ragged(key, value, offsets, first)
    keys = torch.cat([torch.arange(a + 5, max(a + 5, b)) for a, b in pairwise(offsets.tolist())])
    rest = Ragged(key[keys], value[keys], torch.tensor([0, *(lengths - first)]).cumsum(0))
    parts = [attend(query, memory, q_offsets=offsets) for memory in (near, rest)]
    assert parts[1][1].isneginf().any() and parts[0][0].shape == (20, 4, 8)
    out, lse = merged(parts)
    expected = attend(query, Ragged(key, value, offsets))
    torch.testing.assert_close((out, lse), expected)
    assert torch.equal(out[:4], parts[0][0][:4])  # the first sequence has no other keys


def test_a_sink_on_one_side() -> None:
    query, key, value = tensors(9, 9, torch.float32)
    sink = torch.linspace(-2, 2, 4)
    near, far = shards(key, value, [0, 4, 9])
    options: dict[str, Any] = {"mask": far_apart, "q_start": 0}
    parts = [attend(query, near, **options), attend(query, far, sink=sink, **options)]
    expected = attend(query, Dense(key, value), sink=sink, **options)
    torch.testing.assert_close(merged(parts), expected)
    torch.testing.assert_close(merged(parts[::-1]), expected)


# --- exactly -------------------------------------------------------------------------------------


def sides(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Rows of which the second reads nothing in a, the third nothing in b, the fourth nothing."""
    lse_dtype = torch.promote_types(dtype, torch.float32)
    out_a, out_b = torch.randn(2, 2, 4, 3).to(dtype)
    lse_a, lse_b = torch.randn(2, 2, 4, dtype=lse_dtype)
    for out, lse, rows in ((out_a, lse_a, [1, 3]), (out_b, lse_b, [2, 3])):
        out[:, rows], lse[:, rows] = 0.0, -math.inf
    return [out_a, lse_a, out_b, lse_b]


def bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_who_read_nothing_adds_nothing(dtype: torch.dtype) -> None:
    out_a, lse_a, out_b, lse_b = sides(dtype)
    out_b[0, 1, 0] = out_a[0, 2, 0] = -0.0
    out, lse = merge_attention(out_a, lse_a, out_b, lse_b)
    assert out.dtype == dtype and lse.dtype == lse_a.dtype
    assert torch.equal(bits(out[:, 1]), bits(out_b[:, 1]))
    assert torch.equal(bits(out[:, 2]), bits(out_a[:, 2]))
    assert torch.equal(lse[:, 1], lse_b[:, 1]) and torch.equal(lse[:, 2], lse_a[:, 2])
    assert not bits(out[:, 3]).any() and lse[:, 3].isneginf().all()


def test_the_order_of_two_sides_does_not_matter() -> None:
    out_a, lse_a, out_b, lse_b = sides()
    one = merge_attention(out_a, lse_a, out_b, lse_b)
    other = merge_attention(out_b, lse_b, out_a, lse_a)
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def test_weights_add_up_to_one_however_large_scores_are() -> None:
    lse_a, lse_b = 2e4 + 8 * torch.rand(2, 1000)
    out, lse = merge_attention(torch.ones(1000, 1), lse_a, torch.ones(1000, 1), lse_b)
    torch.testing.assert_close(out, torch.ones(1000, 1), rtol=0, atol=1.2e-7)
    assert (lse >= torch.maximum(lse_a, lse_b)).all()


@pytest.mark.parametrize(
    ("lse_a", "lse_b", "out", "lse"),
    [
        (math.inf, 0.0, 2.0, math.inf),
        (0.0, math.inf, 4.0, math.inf),
        (math.inf, -math.inf, 2.0, math.inf),
        (math.inf, math.inf, math.nan, math.inf),
        (math.nan, 0.0, math.nan, math.nan),
        (math.inf, math.nan, math.nan, math.nan),
        (math.nan, -math.inf, 2.0, math.nan),
        (500.0, -500.0, 2.0, 500.0),
    ],
)
def test_what_is_not_finite(lse_a: float, lse_b: float, out: float, lse: float) -> None:
    found = merge_attention(
        *(torch.tensor([2.0]), torch.tensor(lse_a)), *(torch.tensor([4.0]), torch.tensor(lse_b))
    )
    expected = torch.tensor([out]), torch.tensor(lse)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_finite_as_attention_has_them(bad: float) -> None:
    """A score of NaN or inf: the rows that read it, and no others, are those of the whole call."""
    query, key, value = tensors(9, 9, torch.float32)
    key[0, 0, 6, 0], query[:, :, :, 0] = bad, query[:, :, :, 0].abs() + 0.1
    options: dict[str, Any] = {"mask": causal, "q_start": 0}
    parts = [attend(query, shard, **options) for shard in shards(key, value, [0, 4, 9])]
    expected = attend(query, Dense(key, value), **options)
    assert expected[0].isnan().any() and not expected[0][1].isnan().any()
    torch.testing.assert_close(merged(parts), expected, equal_nan=True)


def test_dtypes_of_both_sides() -> None:
    out_a, lse_a, out_b, lse_b = sides(torch.bfloat16)
    out, lse = merge_attention(out_a.float(), lse_a, out_b, lse_b)
    assert out.dtype == lse.dtype == torch.float32
    narrow, _ = merge_attention(out_a, lse_a, out_b.float(), lse_b)
    assert torch.equal(narrow, out.bfloat16())
    doubles = out_a.double() * (1 + 1e-12)
    wide, lse = merge_attention(doubles, lse_a, out_b, lse_b)
    assert wide.dtype == torch.float64 and lse.dtype == torch.float32
    assert torch.equal(wide[:, 2], doubles[:, 2])  # b read nothing there
    torch.testing.assert_close(wide.float(), out)


# --- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", sorted(MASKS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_are_those_of_the_whole_call(mask: str, dtype: torch.dtype) -> None:
    leaves = [x.requires_grad_() for x in tensors(50, 50, dtype)]
    query, key, value = leaves
    options: dict[str, Any] = {"mask": MASKS[mask], "q_start": 0}
    whole = attend(query, Dense(key, value), **options)
    split = shards(key, value, [0, 2, 17, 17, 45, 50])
    found = merged([attend(query, shard, **options) for shard in split])
    above = torch.randn_like(whole[0]), torch.randn_like(whole[1])
    torch.testing.assert_close(found, whole)
    mine, expected = (torch.autograd.grad(x, leaves, above) for x in (found, whole))
    tolerance = {"rtol": 1e-4, "atol": 2e-5} if dtype == torch.float32 else {}
    torch.testing.assert_close(mine, expected, **tolerance)


def differentiable(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Merge, and replace an lse of -inf by 0: finite differences of -inf would be NaN."""
    out, lse = merge_attention(*tensors)
    return out, torch.where(lse.isneginf(), 0.0, lse)


def test_gradcheck() -> None:
    arguments = [x.requires_grad_() for x in sides(torch.float64)]
    assert gradcheck(differentiable, arguments)
    assert gradgradcheck(differentiable, arguments)


def test_gradcheck_of_a_chain() -> None:
    first, second = sides(torch.float64), sides(torch.float64)
    arguments = [x.requires_grad_() for x in (*first, *second)]

    def chain(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        parts = [tensors[i : i + 2] for i in range(0, 8, 2)]
        out, lse = merged(parts)  # type: ignore[arg-type]
        return out, torch.where(lse.isneginf(), 0.0, lse)

    assert gradcheck(chain, arguments)


def test_who_read_nothing_has_gradient_zero() -> None:
    """Also where the other side is not finite, and where nobody read: never NaN."""
    arguments = sides()
    out_a, _, out_b, _ = arguments
    out_b[:, 1], out_a[:, 2] = math.inf, math.nan
    for x in arguments:
        x.requires_grad_()
    out, lse = merge_attention(*arguments)
    above = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad((out, lse), arguments, above)
    of_out_a, of_lse_a, of_out_b, of_lse_b = grads
    for grad, read, unread in (
        (of_out_a, 2, [1, 3]),
        (of_lse_a, 2, [1, 3]),
        (of_out_b, 1, [2, 3]),
        (of_lse_b, 1, [2, 3]),
    ):
        assert not grad[:, unread].any()
        assert torch.equal(grad[:, read], above[grad.dim() == 2][:, read])


# --- in torch's other worlds ---------------------------------------------------------------------


def test_it_is_traced_into_one_graph_and_mapped() -> None:
    arguments = sides()
    expected = merge_attention(*arguments)
    torch._dynamo.reset()
    compiled = torch.compile(merge_attention, backend="eager", fullgraph=True)
    assert all(map(torch.equal, compiled(*arguments), expected))
    assert all(map(torch.equal, torch.vmap(merge_attention)(*arguments), expected))


# --- refusals ------------------------------------------------------------------------------------

GIVEN = {
    "out_a": torch.zeros(2, 4, 9, 8),
    "lse_a": torch.zeros(2, 4, 9),
    "out_b": torch.zeros(2, 4, 9, 8),
    "lse_b": torch.zeros(2, 4, 9),
}
REFUSED: list[tuple[dict[str, object], type[QuireError], str]] = [
    (
        {"lse_a": None},
        ArgumentError,
        "lse_a must be a torch.Tensor, but is NoneType. Convert it with torch.as_tensor.",
    ),
    (
        {"out_b": torch.zeros(2, 4, 9, 8).to_sparse()},
        TensorKindError,
        "out_b must be a strided tensor, but has layout torch.sparse_coo. Convert it with "
        ".to_dense().",
    ),
    (
        {"out_a": torch.zeros(2, 4, 9, 8, dtype=torch.int64)},
        DtypeError,
        "out_a must be one of float32, bfloat16, float16, float64, but is int64. Convert it "
        "with .to(dtype).",
    ),
    (
        {"lse_b": torch.zeros(2, 4, 9, dtype=torch.bfloat16)},
        DtypeError,
        "lse_b must be one of float32, float64, but is bfloat16. Convert it with .to(dtype).",
    ),
    (
        {"lse_b": torch.zeros(2, 4, 9, dtype=torch.float64)},
        DtypeError,
        "lse_a and lse_b must have one dtype, but are torch.float32 and torch.float64. Convert one "
        "with .to(dtype).",
    ),
    (
        {"out_b": torch.zeros(2, 4, 9, 8, device="meta")},
        DeviceError,
        "both sides must be on one device, but out_a is on cpu and out_b on meta. Move them with "
        ".to(device).",
    ),
    (
        {"out_a": torch.tensor(0.0)},
        RankError,
        "out_a must be [batch, heads, length, head_dim] or [total, heads, head_dim], but has shape "
        "[]. Give what attention returned.",
    ),
    (
        {"out_b": torch.zeros(2, 4, 8, 8)},
        ShapeError,
        "out_b must have shape [2, 4, 9, 8], since out_a has [2, 4, 9, 8], but has [2, 4, 8, 8]. "
        "Give results for the same queries.",
    ),
    (
        {"lse_a": torch.zeros(2, 4, 9, 1)},
        ShapeError,
        "lse_a must have shape [2, 4, 9], since out_a has [2, 4, 9, 8], but has [2, 4, 9, 1]. Give "
        "results for the same queries.",
    ),
    (
        {"lse_b": torch.zeros(1, 4, 9)},
        ShapeError,
        "lse_b must have shape [2, 4, 9], since out_a has [2, 4, 9, 8], but has [1, 4, 9]. Give "
        "results for the same queries.",
    ),
]


@pytest.mark.parametrize(("wrong", "kind", "message"), REFUSED)
def test_refusals(wrong: dict[str, Any], kind: type[QuireError], message: str) -> None:
    with pytest.raises(kind) as caught:
        merge_attention(**GIVEN | wrong)
    assert str(caught.value) == message
