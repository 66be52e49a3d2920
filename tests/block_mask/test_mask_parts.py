"""Masks for other lengths, and for some of the queries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mask_examples import (
    LENGTHS,
    MODS,
    allowed,
    always,
    block_masks,
    by_batch,
    causal,
    from_cells,
    only_first_queries,
    true_cells,
    untraceable,
    window,
)
from torch.nn.attention import flex_attention as torch_flex

import quire
from quire.block_mask import BlockMask, create_block_mask
from quire.block_mask.blocks import EMPTY
from quire.errors import (
    ArgumentError,
    BlockIndexError,
    BlockMaskShapeError,
    CapturedIndexError,
    SlicedMaskError,
)
from quire.ir.trace import trace


def noop() -> BlockMask:
    query = torch.empty(1, 1, 50, 8)
    return BlockMask.from_torch(torch_flex._create_empty_block_mask(query, query))


# resize


@pytest.mark.parametrize("lengths", [(13, 18), (5, 18), (13, 7), (4, 4), (30, 41), (3, 50), (0, 9)])
@pytest.mark.parametrize("mod", MODS)
def test_a_mask_from_a_mod_is_made_anew(mod: Any, lengths: tuple[int, int]) -> None:
    batch = (2, 3) if mod is by_batch else (1, 1)
    mask = create_block_mask(mod, *batch, *LENGTHS, "cpu", BLOCK_SIZE=(4, 8))
    expected = create_block_mask(mod, *batch, *lengths, "cpu", BLOCK_SIZE=(4, 8))
    assert mask.resize(*lengths).equal(expected)


def test_a_mask_for_all_batches_is_made_anew_as_it_was() -> None:
    mask = create_block_mask(by_batch, None, None, 13, 18, "cpu", BLOCK_SIZE=4)
    expected = create_block_mask(by_batch, None, None, 20, 30, "cpu", BLOCK_SIZE=4)
    assert mask.resize(20, 30).equal(expected)


def test_full_blocks_stay_apart_or_together() -> None:
    for separate in (True, False):
        mask = create_block_mask(causal, 1, 1, 16, 16, "cpu", 4, separate_full_blocks=separate)
        longer = mask.resize(30, 30)
        assert (longer.full_kv_num_blocks is not None) == separate
        assert torch.equal(allowed(longer), quire.create_mask(causal, 2, 2, 30, 30))


def test_what_was_combined_can_be_resized() -> None:
    one, other = (create_block_mask(mod, 1, 1, *LENGTHS, "cpu", 4) for mod in (causal, window))
    for mask in (one & other, one | other, ~one, ~one & other):
        whole = allowed(mask.resize(21, 27))
        assert torch.equal(whole[..., :13, :18], allowed(mask))
        assert torch.equal(whole, allowed(mask.resize(40, 40).resize(21, 27)))


@given(mask=block_masks(), lengths=st.tuples(st.integers(0, 13), st.integers(0, 18)))
def test_every_mask_can_be_cropped(mask: BlockMask, lengths: tuple[int, int]) -> None:
    cropped = mask.resize(*lengths)
    assert cropped.seq_lengths == lengths
    assert torch.equal(allowed(cropped), allowed(mask)[..., : lengths[0], : lengths[1]])


@pytest.mark.parametrize(
    ("cells", "mod", "stray"),
    [
        ([[1, 0], [0, 1]], always, "the empty block in row 0 and column 1"),
        ([[1, 0], [2, 2]], causal, "the full block in row 1 and column 1 of batch 0 and head 0"),
        ([[1, 2], [0, 0]], only_first_queries, "a block in which it cannot be called"),
        ([[1, 1], [1, 1]], by_batch, "the partial block in row 0 and column 1"),
    ],
)
def test_listed_blocks_cannot_be_extended(cells: Any, mod: Any, stray: str) -> None:
    mask = from_cells(cells, mod)
    with pytest.raises(BlockMaskShapeError, match=rf"at most \(8, 8\).*{stray}.*List the blocks"):
        mask.resize(8, 9)
    assert torch.equal(allowed(mask.resize(8, 5)), allowed(mask)[..., :5])


def test_listed_blocks_that_their_mod_explains_can_be_extended() -> None:
    everything = from_cells([[1, 1], [1, 1]], causal)
    longer = create_block_mask(causal, 1, 1, 11, 11, "cpu", 4)
    assert everything.resize(11, 11).equal(longer)


def test_a_mod_says_itself_that_it_ends() -> None:
    with pytest.raises(CapturedIndexError, match="index 6 is out of bounds"):
        BlockMask.from_lengths([2, 4]).resize(7, 7)


def test_resize_refuses_what_is_no_length() -> None:
    mask = from_cells([[1]])
    with pytest.raises(
        ArgumentError, match="q_len must be a whole number of at least 0, but is -1"
    ):
        mask.resize(-1, 4)
    with pytest.raises(SlicedMaskError):
        mask[:, :, :1].resize(2, 2)
    endless = noop()
    assert endless.resize(70, 80) is endless


# for_queries


@given(mask=block_masks(), bounds=st.tuples(st.integers(0, 13), st.integers(0, 13)).map(sorted))
def test_a_part_has_the_elements_of_its_queries(mask: BlockMask, bounds: list[int]) -> None:
    part = mask.for_queries(*bounds)
    start, stop = bounds
    assert part.seq_lengths == (stop - start, 18)
    assert part.BLOCK_SIZE == mask.BLOCK_SIZE
    assert not part.is_sliced
    assert torch.equal(allowed(part), allowed(mask)[:, :, start:stop])


@pytest.mark.parametrize("start", [0, 3, 4, 5])
def test_a_part_of_whole_blocks_computes_no_block_for_nothing(start: int) -> None:
    mask = create_block_mask(window, 2, 2, 40, 40, "cpu", 4)
    part = mask.for_queries(start, start + 11)
    empty = true_cells(allowed(part), (4, 4)) == EMPTY
    assert torch.equal(part._cells() == EMPTY, empty)
    assert empty.any()


def test_parts_of_parts_and_sums() -> None:
    mask = create_block_mask(causal, None, None, 40, 40, "cpu", 4)
    part = mask.for_queries(3, 33).for_queries(7, 20)
    assert torch.equal(allowed(part), allowed(mask)[:, :, 10:23])
    both = part & create_block_mask(window, None, None, 13, 40, "cpu", 4)
    assert torch.equal(allowed(both), allowed(part) & quire.create_mask(window, 2, 2, 13, 40))


def test_the_mod_of_a_part_is_moved_and_no_more() -> None:
    mask = create_block_mask(causal, None, None, 40, 40, "cpu", 4)
    moved = trace(lambda b, h, q_idx, kv_idx: q_idx + 9 >= kv_idx, "mask")
    assert trace(mask.for_queries(9, 30).mask_mod, "mask").output is moved.output
    listed = from_cells([[2, 0], [0, 2]], lambda b, h, q_idx, kv_idx: kv_idx < 3)
    (table,) = trace(listed.for_queries(2, 7).mask_mod, "mask").captures
    assert table.dtype == torch.int8  # its blocks straddle rows that its mod does not explain
    assert trace(listed.for_queries(1, 4).mask_mod, "mask").captures == ()


@pytest.mark.parametrize("heads", [1, 2])
def test_decoding_row_by_row_is_attention_of_the_whole(heads: int) -> None:
    mask = create_block_mask(window, None, None, 300, 300, "cpu")
    mask = mask & BlockMask.from_lengths([100, 0, 200], causal=True)
    query, key, value = torch.randn(3, 2, heads, 300, 16).unbind(0)
    whole = quire.flex_attention(query, key, value, block_mask=mask)
    for t in (0, 1, 99, 100, 127, 128, 200, 299):
        step = mask.for_queries(t, t + 1)
        row = quire.flex_attention(query[:, :, t : t + 1], key, value, block_mask=step)
        torch.testing.assert_close(row, whole[:, :, t : t + 1], rtol=1e-4, atol=1e-5)
    part = quire.flex_attention(
        query[:, :, 90:250], key, value, block_mask=mask.for_queries(90, 250)
    )
    torch.testing.assert_close(part, whole[:, :, 90:250], rtol=1e-4, atol=1e-5)


def test_a_part_of_a_mask_that_no_graph_describes() -> None:
    mask = create_block_mask(untraceable, None, None, *LENGTHS, "cpu", 4)
    assert torch.equal(allowed(mask.for_queries(3, 12)), allowed(mask)[:, :, 3:12])


def test_a_part_of_the_mask_of_every_length_is_one() -> None:
    part = noop().for_queries(1000, 1001)
    assert part.BLOCK_SIZE == noop().BLOCK_SIZE
    query, key = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 50, 8)
    out = quire.flex_attention(query, key, key, block_mask=part)
    torch.testing.assert_close(out, quire.flex_attention(query, key, key))


@pytest.mark.parametrize("bounds", [(0, 14), (5, 4), (14, 14)])
def test_queries_that_are_not_there(bounds: tuple[int, int]) -> None:
    mask = create_block_mask(causal, None, None, *LENGTHS, "cpu", 4)
    with pytest.raises(BlockIndexError, match=r"0 <= start <= stop <= 13, .*Count tokens"):
        mask.for_queries(*bounds)


def test_for_queries_refuses_negative_numbers_and_slices() -> None:
    mask = create_block_mask(causal, None, None, *LENGTHS, "cpu", 4)
    with pytest.raises(
        ArgumentError, match="start must be a whole number of at least 0, but is -1"
    ):
        mask.for_queries(-1, 3)
    with pytest.raises(SlicedMaskError):
        mask[:, :, :1].for_queries(0, 1)
