"""attn_mask over nested tensors: dense and cut to each sequence, or nested."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from api.nested.jagged import assert_same, nested, one_by_one, with_a_head
from torch import Tensor

from quire import jagged_scaled_dot_product_attention as attend
from quire.errors import ShapeError

Q_LENGTHS, KV_LENGTHS = [3, 12, 1, 7], [9, 2, 13, 7]
B, H, L, S = 4, 2, 12, 13

Mods = Callable[[int], dict[str, Any]]


def element(mask: Tensor, b: int, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """mask [B or 1, H or 1, L or 1, S or 1] at one place."""
    at = torch.as_tensor(b), h, q_idx, kv_idx
    return mask[tuple(i if size > 1 else i * 0 for i, size in zip(at, mask.shape, strict=True))]


def mods(mask: Tensor) -> Mods:
    if mask.dtype == torch.bool:
        return lambda b: {"mask_mod": lambda _, *place: element(mask, b, *place)}
    return lambda b: {"score_mod": lambda score, _, *place: score + element(mask, b, *place)}


def random_mask(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    return numbers > -0.5 if dtype == torch.bool else numbers


@pytest.fixture
def operands() -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = nested(Q_LENGTHS), nested(KV_LENGTHS, seed=1), nested(KV_LENGTHS, seed=2)
    return query, key, value


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (L, S),
        (L + 3, S + 2),
        (1, S),
        (L, 1),
        (1, 1),
        (H, L, S),
        (1, L, S),
        (B, H, L, S),
        (B, 1, 1, S),
        (1, H, L, 1),
    ],
    ids=str,
)
def test_a_dense_mask_is_cut_to_each_sequence(
    shape: tuple[int, ...], dtype: torch.dtype, operands: tuple[Tensor, Tensor, Tensor]
) -> None:
    mask = random_mask(shape, dtype)
    wide = mask.reshape(*[1] * (4 - mask.dim()), *shape)
    assert_same(attend(*operands, mask), one_by_one(*operands, mods(wide)))


@pytest.mark.parametrize("shape", [(L, S), (B, L, S), (1, 1, S)], ids=str)
def test_a_mask_of_one_head_has_no_dimension_for_it(shape: tuple[int, ...]) -> None:
    query, key = nested(Q_LENGTHS, heads=None), nested(KV_LENGTHS, heads=None, seed=1)
    mask = random_mask(shape, torch.bool)
    found = attend(query, key, key, mask)
    wide = mask.reshape(*[1] * (3 - mask.dim()), *shape).unsqueeze(1)
    q, k = with_a_head(query), with_a_head(key)
    assert_same(found, [part[0] for part in one_by_one(q, k, k, mods(wide))])


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [(), (1,), (H,)], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_mask_has_a_part_for_each_sequence(
    heads: tuple[int, ...], dtype: torch.dtype, operands: tuple[Tensor, Tensor, Tensor]
) -> None:
    sizes = zip(Q_LENGTHS, KV_LENGTHS, strict=True)
    parts = [random_mask((*heads, q, k), dtype) for q, k in sizes]
    wide = [part.reshape(1, *([1] if not heads else []), *part.shape) for part in parts]
    expected = one_by_one(*operands, lambda b: mods(wide[b])(0))
    mask = torch.nested.nested_tensor(parts)  # in the layout that has two ragged dimensions
    assert_same(attend(*operands, mask), expected)


def test_a_mask_that_is_ragged_in_the_queries(operands: tuple[Tensor, Tensor, Tensor]) -> None:
    parts = [random_mask((q, S), torch.bool) for q in Q_LENGTHS]
    mask = torch.nested.nested_tensor(parts, layout=torch.jagged)
    wide = [part[None, None] for part in parts]
    assert_same(attend(*operands, mask), one_by_one(*operands, lambda b: mods(wide[b])(0)))


def test_an_additive_mask_learns(operands: tuple[Tensor, Tensor, Tensor]) -> None:
    bias = torch.randn(H, L, S, requires_grad=True)
    attend(*operands, bias).values().square().sum().backward()
    copy = bias.detach().requires_grad_()
    parts = one_by_one(*operands, mods(copy[None]))
    torch.cat([part.square().flatten() for part in parts]).sum().backward()
    assert bias.grad is not None and copy.grad is not None
    torch.testing.assert_close(bias.grad, copy.grad)


def test_rows_that_a_mask_leaves_empty_are_zero(operands: tuple[Tensor, Tensor, Tensor]) -> None:
    mask = torch.ones(L, S, dtype=torch.bool)
    mask[0] = False
    parts = attend(*operands, mask).unbind()
    assert all(bool((part[:, 0] == 0).all()) for part in parts)
    assert bool((parts[1][:, 1:] != 0).all())


# What is refused

CUT = "It is cut to each sequence, so make it for the longest."


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            (S,),
            "attn_mask must have from 2 to 4 dimensions [batch, heads, queries, keys], but has "
            "shape [13]. Leave out dimensions from the left, or make them 1.",
        ),
        (
            (L - 1, S),
            f"attn_mask must be for 4 sequences, 2 heads, 12 queries and 13 keys, with 1 for what "
            f"is the same for all, but has shape [11, 13]. {CUT}",
        ),
        (
            (L, S - 1),
            f"attn_mask must be for 4 sequences, 2 heads, 12 queries and 13 keys, with 1 for what "
            f"is the same for all, but has shape [12, 12]. {CUT}",
        ),
        (
            (3, L, S),
            f"attn_mask must be for 4 sequences, 2 heads, 12 queries and 13 keys, with 1 for what "
            f"is the same for all, but has shape [3, 12, 13]. {CUT}",
        ),
    ],
    ids=str,
)
def test_dense_masks_that_do_not_fit(
    shape: tuple[int, ...], message: str, operands: tuple[Tensor, Tensor, Tensor]
) -> None:
    with pytest.raises(ShapeError) as caught:
        attend(*operands, torch.ones(shape, dtype=torch.bool))
    assert str(caught.value) == message


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_masks_that_do_not_fit(operands: tuple[Tensor, Tensor, Tensor]) -> None:
    fitting = list(zip(Q_LENGTHS, KV_LENGTHS, strict=True))
    wrong: dict[str, list[tuple[int, ...]]] = {
        "attn_mask must be for 4 sequences, but is nested with 3. Give a mask for each sequence.": [
            *fitting[:3]
        ],
        "attn_mask must have [heads, queries, keys] for each sequence, but for sequence 1 of 12 "
        "queries and 2 keys it has shape [11, 2]. Make it as large as the sequence.": [
            fitting[0],
            (11, 2),
            *fitting[2:],
        ],
    }
    for message, shapes in wrong.items():
        mask = torch.nested.nested_tensor([torch.ones(shape, dtype=torch.bool) for shape in shapes])
        with pytest.raises(ShapeError) as caught:
            attend(*operands, mask)
        assert str(caught.value) == message
