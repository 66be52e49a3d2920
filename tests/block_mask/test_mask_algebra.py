"""Masks made of masks have exactly the elements that sets of elements would have."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from hypothesis import given
from mask_examples import (
    LENGTHS,
    aligned,
    allowed,
    always,
    block_masks,
    by_batch,
    causal,
    from_cells,
    never,
    only_first_queries,
    true_cells,
    untraceable,
    window,
)
from torch.nn.attention import flex_attention as torch_flex

import quire
from quire import mods, reference
from quire.block_mask import BlockMask, create_block_mask
from quire.block_mask.blocks import EMPTY, FULL, PARTIAL
from quire.errors import BlockMaskShapeError, DeviceError, SlicedMaskError
from quire.ir.trace import trace

SIGNS = {"&": operator.and_, "|": operator.or_}


def created(mod: Any, q_len: int = 13, kv_len: int = 18, block: Any = 4, **batch: int) -> BlockMask:
    return create_block_mask(
        mod, batch.get("B"), batch.get("H"), q_len, kv_len, "cpu", BLOCK_SIZE=block
    )


def captured(mask: BlockMask) -> list[torch.dtype]:
    return [tensor.dtype for tensor in trace(mask.mask_mod, "mask").captures]


# Any two masks


@pytest.mark.parametrize("sign", SIGNS)
@given(one=block_masks(), other=block_masks())
def test_the_elements_are_those_of_both(sign: str, one: BlockMask, other: BlockMask) -> None:
    join = SIGNS[sign]
    result = join(one, other)
    assert type(result) is BlockMask
    assert result.seq_lengths == LENGTHS
    assert torch.equal(allowed(result), join(allowed(one), allowed(other)))


@given(mask=block_masks())
def test_the_complement_has_every_other_element(mask: BlockMask) -> None:
    assert torch.equal(allowed(~mask), ~allowed(mask))
    assert torch.equal(allowed(~~mask), allowed(mask))


@pytest.mark.parametrize("sign", SIGNS)
@given(one=block_masks(), other=block_masks())
def test_no_block_is_computed_for_nothing(sign: str, one: BlockMask, other: BlockMask) -> None:
    result = SIGNS[sign](one, other)
    if result.shape[:2] != (2, 2) and {one.mask_mod, other.mask_mod} & {by_batch, untraceable}:
        return  # a mod that may tell batches apart, and a result that stands for all of them
    true = true_cells(allowed(result, result.shape[:2]), result.BLOCK_SIZE)
    cells = result._cells()
    assert torch.equal(cells == EMPTY, true == EMPTY)
    assert not ((cells == FULL) & (true != FULL)).any()
    rows, columns = (n // block for n, block in zip(LENGTHS, result.BLOCK_SIZE, strict=True))
    assert torch.equal(cells[..., :rows, :columns], true[..., :rows, :columns])


# Masks from mods


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("other", [window, aligned, always, never, causal, untraceable])
def test_masks_from_mods_give_the_mask_of_both_mods(sign: str, other: Any) -> None:
    compose = {"&": mods.and_masks, "|": mods.or_masks}[sign]
    result = SIGNS[sign](created(causal, B=2, H=2), created(other, B=2, H=2))
    expected = created(compose(causal, other), B=2, H=2)
    assert torch.equal(result._cells(), expected._cells())
    if other is not untraceable:
        assert result.equal(expected)
        assert captured(result) == []
    assert result.sparsity() == expected.sparsity()


@pytest.mark.parametrize("mod", [causal, window, aligned])
def test_the_complement_of_a_mask_from_a_mod_is_that_of_not_mask(mod: Any) -> None:
    result, expected = ~created(mod, 16, 16), created(mods.not_mask(mod), 16, 16)
    assert result.equal(expected)
    result, expected = ~created(mod), created(mods.not_mask(mod))
    assert result.sparsity() == expected.sparsity()


def test_a_border_block_that_is_full_needs_no_table() -> None:
    outside = ~created(causal)  # its last column is full, though it ends after two keys
    assert outside._cells()[0, 0, 0].tolist() == [1, 2, 2, 2, 2]
    assert captured(outside & created(window)) == []
    assert captured(outside | created(window)) == []


def test_windows_and_documents_combine() -> None:
    packed = BlockMask.from_lengths([5, 0, 8, 5], BLOCK_SIZE=4)
    both = packed & created(causal, 18, 18) & created(window, 18, 18)
    mod = mods.and_masks(mods.document(lengths=[5, 0, 8, 5]), causal, window)
    assert torch.equal(allowed(both), quire.create_mask(mod, 2, 2, 18, 18, "cpu"))
    assert captured(both) == [torch.int32]  # the documents, and no table of blocks


# What listed blocks say against their mod


def test_listed_blocks_stay_simple_where_the_mod_can_stay() -> None:
    diagonal = from_cells([[1, 0], [0, 1]], always)
    assert captured(diagonal & from_cells([[1, 1], [1, 1]], causal)) == []
    full = from_cells([[2, 0], [0, 2]], never)  # its mod would be wrong, and has nothing to say
    assert trace((full & from_cells([[1, 1], [1, 1]], causal)).mask_mod, "mask").output is (
        trace(causal, "mask").output
    )


def test_a_mod_is_not_believed_in_a_block_that_is_not_listed() -> None:
    one = from_cells([[0, 0], [0, 1]], lambda b, h, q_idx, kv_idx: kv_idx % 2 == 0)
    other = from_cells([[1, 1], [1, 1]], causal)
    union = one | other
    assert captured(union) == [torch.int8]
    assert torch.equal(allowed(union), allowed(one) | allowed(other))
    assert union._cells().tolist() == [[[[PARTIAL, EMPTY], [FULL, PARTIAL]]]]


def test_a_mod_is_not_asked_where_it_fails() -> None:
    one = from_cells([[1, 0], [0, 2]], only_first_queries)
    other = from_cells([[1, 1], [1, 1]], causal)
    for join in SIGNS.values():
        assert torch.equal(allowed(join(one, other)), join(allowed(one), allowed(other)))


def test_attention_does_not_ask_it_there_either() -> None:
    half = torch.rand(128) > 0.5
    one = from_cells([[1, 0], [0, 2]], lambda b, h, q_idx, kv_idx: half[q_idx], (128, 128))
    odd = from_cells([[0, 1], [1, 0]], lambda b, h, q_idx, kv_idx: kv_idx % 2 == 1, (128, 128))
    query, key, value = torch.randn(3, 1, 1, 256, 16).unbind(0)
    out = quire.flex_attention(query, key, value, block_mask=one | odd)
    expected = reference.attention(query, key, value, block_mask=one | odd).out
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_a_mask_for_all_batches_serves_all_of_them() -> None:
    everyone = from_cells([[1, 1], [1, 1]], lambda b, h, q_idx, kv_idx: kv_idx < 4 * b)
    both = everyone & from_cells([[1, 1], [1, 1]], causal)
    assert torch.equal(allowed(both), allowed(everyone) & quire.create_mask(causal, 2, 2, 8, 8))
    assert allowed(both)[1].any() and not allowed(both)[0].any()


def test_attention_reads_a_table_of_blocks() -> None:
    generator = torch.Generator().manual_seed(1)
    cells = torch.randint(0, 3, (2, 2, 3, 3), generator=generator)
    one = from_cells(cells, causal, (64, 64), (150, 170))
    other = from_cells(cells.flip(-1)[:, :1], window, (64, 64), (150, 170))
    query = torch.randn(2, 2, 150, 16, requires_grad=True)
    key, value = torch.randn(2, 2, 2, 170, 16).unbind(0)
    mask = one | other
    assert torch.int8 in captured(mask)
    out = quire.flex_attention(query, key, value, block_mask=mask)
    expected = reference.attention(query, key, value, block_mask=mask).out
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    mine, its = (torch.autograd.grad(result.sum(), query)[0] for result in (out, expected))
    torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


# Sizes


@pytest.mark.parametrize("blocks", [((8, 4), (4, 8)), (4, 2), (4, 32), (5, 64), ((16, 3), (4, 20))])
def test_the_finer_block_size_is_taken(blocks: Any) -> None:
    one, other = created(causal, block=blocks[0]), created(window, block=blocks[1])
    both = one & other
    assert tuple(map(min, one.BLOCK_SIZE, other.BLOCK_SIZE)) == both.BLOCK_SIZE
    assert torch.equal(allowed(both), allowed(one) & allowed(other))
    assert both.equal(created(mods.and_masks(causal, window), block=both.BLOCK_SIZE))


def test_batches_and_heads_broadcast() -> None:
    one, other = created(by_batch, B=2, H=2), created(causal)
    assert (one & other).shape == (other & one).shape == (2, 2, *LENGTHS)
    assert torch.equal(allowed(other | one), allowed(one) | allowed(other))


def test_masks_of_torchs_own_are_operands() -> None:
    theirs = torch_flex.create_block_mask(window, None, None, 13, 18, "cpu", BLOCK_SIZE=4)
    assert (created(causal) & theirs).equal(created(mods.and_masks(causal, window)))
    with pytest.raises(TypeError, match="unsupported operand"):
        created(causal) & causal  # type: ignore[operator]
    with pytest.raises(TypeError, match="unsupported operand"):
        created(causal) | True  # type: ignore[operator]


def test_the_mask_of_every_length_takes_on_the_other_ones() -> None:
    query = torch.empty(1, 1, 50, 8)
    noop = BlockMask.from_torch(torch_flex._create_empty_block_mask(query, query))
    for joined in (noop & created(causal), created(causal) & noop):
        assert joined.seq_lengths == LENGTHS
        assert torch.equal(joined._cells(), created(causal)._cells())
        assert torch.equal(allowed(joined), allowed(created(causal)))
    assert (noop | created(causal)).sparsity() == 0
    assert (noop & ~noop).BLOCK_SIZE == noop.BLOCK_SIZE


@pytest.mark.parametrize("sizes", [(0, 18), (13, 0), (0, 0)])
def test_empty_masks_combine(sizes: tuple[int, int]) -> None:
    mask = created(causal, *sizes)
    assert (mask & created(window, *sizes)).shape == (mask | ~mask).shape == (1, 1, *sizes)


def test_rows_beyond_the_queries_are_not_there() -> None:
    mask = from_cells([[1, 1], [1, 1]], always)
    mask.seq_lengths = (3, 8)
    assert (~mask)._cells().shape == (1, 1, 1, 2)
    assert not allowed(~mask).any()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            created(causal, 14, 18),
            r"same lengths, but have \(13, 18\) and \(14, 18\).*resize\(14, 18\)",
        ),
        (
            created(causal, block=6),
            r"must divide the other, but they are \(4, 4\) and \(6, 6\).*BLOCK_SIZE",
        ),
        (created(causal, B=3), r"same B, or one of them B=1, but have B=2 and B=3"),
    ],
)
def test_masks_that_do_not_fit_together(other: BlockMask, message: str) -> None:
    with pytest.raises(BlockMaskShapeError, match=message):
        created(causal, B=2) & other


def test_slices_and_devices_are_refused() -> None:
    mask = created(causal)
    for act in (lambda: mask[:, :, :1] & mask, lambda: ~mask[:, :, :1]):
        with pytest.raises(SlicedMaskError):
            act()
    with pytest.raises(DeviceError, match="cpu and meta"):
        mask & mask.to("meta")
    deep = from_cells(torch.ones(1, 1, 1, 2, 2, dtype=torch.int32))
    with pytest.raises(BlockMaskShapeError, match=r"but has \[1, 1, 1, 2, 2\]. Flatten its batch"):
        operator.invert(deep)
