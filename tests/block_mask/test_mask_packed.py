"""Masks of packed documents, from lengths and from offsets."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import quire
from quire import mods
from quire.block_mask import BlockMask, create_block_mask
from quire.errors import ArgumentError, DtypeError, ShapeError

LENGTHS = [[300], [5, 0, 130, 1, 0], [0], [], [128, 128], [7] * 40]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_each_document_sees_itself(lengths: list[int], causal: bool) -> None:
    mod = mods.document(lengths=lengths)
    mod = mods.and_masks(mod, mods.causal) if causal else mod
    expected = create_block_mask(mod, None, None, sum(lengths), sum(lengths), "cpu", BLOCK_SIZE=64)
    offsets = [0, *itertools.accumulate(lengths)]
    for mask in (
        BlockMask.from_lengths(lengths, causal, BLOCK_SIZE=64),
        BlockMask.from_lengths(torch.tensor(lengths, dtype=torch.int32), causal, 64),
        BlockMask.from_offsets(offsets, causal=causal, BLOCK_SIZE=64),
        BlockMask.from_offsets(torch.tensor(offsets), causal, (64, 64)),
    ):
        assert type(mask) is BlockMask
        assert mask.equal(expected)


def test_one_length_is_one_document() -> None:
    assert BlockMask.from_lengths(200).equal(BlockMask.from_lengths([200]))
    assert BlockMask.from_lengths(200).sparsity() == 0
    assert BlockMask.from_lengths(200).BLOCK_SIZE == (128, 128)


def test_attention_keeps_documents_apart() -> None:
    query, key, value = torch.randn(3, 1, 2, 30, 8).unbind(0)
    out = quire.flex_attention(
        query, key, value, block_mask=BlockMask.from_lengths([10, 0, 20], causal=True)
    )
    for start, stop in ((0, 10), (10, 30)):
        own = (tensor[:, :, start:stop] for tensor in (query, key, value))
        alone = torch.nn.functional.scaled_dot_product_attention(*own, is_causal=True)
        torch.testing.assert_close(out[:, :, start:stop], alone, rtol=1e-4, atol=1e-5)


def test_a_device_can_be_asked_for() -> None:
    assert BlockMask.from_lengths([3, 4], device="cpu").kv_indices.device.type == "cpu"


@pytest.mark.parametrize(
    ("make", "value", "error", "message"),
    [
        (
            BlockMask.from_lengths,
            [3, -1],
            ArgumentError,
            "lengths must be at least 0, but one is -1",
        ),
        (BlockMask.from_lengths, [1.5], DtypeError, "lengths must hold integers, but is float32"),
        (BlockMask.from_lengths, [[1, 2]], ShapeError, "lengths must be 1-D"),
        (BlockMask.from_lengths, "ab", ArgumentError, "Give the number of tokens of each document"),
        (BlockMask.from_offsets, [1, 2], ArgumentError, "offsets must start at 0, but are"),
        (
            BlockMask.from_offsets,
            [0, 3, 2],
            ArgumentError,
            "offsets must not fall, but 3 is followed by",
        ),
        (BlockMask.from_offsets, [], ArgumentError, "where the last one ends"),
        (BlockMask.from_offsets, 5, ShapeError, "offsets must be 1-D"),
    ],
)
def test_what_describes_no_documents(make: Any, value: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make(value)
