"""Tiles of the kernel from blocks of a mask, against the elements themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire import create_block_mask
from quire.block_mask import BlockRows
from quire.block_mask.blocks import Runs
from quire.codegen.convention import FULL, KEYS_OF_RUN, PARTIAL
from quire.memory.tables import Holes
from quire.runtime.blocks import EVERY_RUN, hole_lists, read_lists, tile_lists


@given(st.data())
def test_tiles_say_what_the_elements_say(data: st.DataObject) -> None:
    sizes = st.integers(1, 9)
    q_len, kv_len = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    blocks, tiles = (data.draw(sizes), data.draw(sizes)), (data.draw(sizes), data.draw(sizes))
    batches, heads = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    shape = (batches, heads, -(-q_len // blocks[0]), -(-kv_len // blocks[1]))
    seed = data.draw(st.integers(0, 2**32 - 1))
    cells = np.random.default_rng(seed).integers(0, 3, shape, np.int32)
    begin = data.draw(st.integers(0, 30))
    lists = tile_lists(BlockRows(Runs.of_cells(cells), blocks, (q_len, kv_len)), *tiles, begin)

    elements = cells.repeat(blocks[0], 2).repeat(blocks[1], 3)[:, :, :q_len, :kv_len]
    mixed = False
    row = 0
    for b in range(batches):
        for h in range(heads):
            for first in range(0, q_len, tiles[0]):
                entries = lists.entries[lists.offsets[row] : lists.offsets[row + 1]].tolist()
                expected = []
                for block in range(begin // tiles[1], -(-(begin + kv_len) // tiles[1])):
                    key, stop = (max(0, n * tiles[1] - begin) for n in (block, block + 1))
                    part = elements[b, h, first : first + tiles[0], key:stop]
                    if (part == 2).all():
                        expected.append(block * 4 + FULL)
                    elif (part != 0).any():
                        expected.append(block * 4 + PARTIAL)
                        mixed |= not (part == 1).all()
                assert entries == expected
                row += 1
    assert len(lists.offsets) == row + 1
    assert (lists.mixed is not None) == mixed
    rows_per_head = -(-q_len // tiles[0])
    assert lists.batch_stride == (heads * rows_per_head if batches > 1 else 0)
    assert lists.head_stride == (rows_per_head if heads > 1 else 0)


def test_lists_are_known_by_what_a_mask_contains() -> None:
    def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> object:
        return q >= k

    mask, equal = (create_block_mask(mask_mod, None, None, 300, 300) for _ in range(2))
    lists = read_lists(mask, (300, 300), 128, 128)
    assert read_lists(equal, (300, 300), 128, 128) is lists
    assert read_lists(mask, (300, 300), 64, 128) is not lists
    assert read_lists(mask, (300, 300), 128, 128, 128) is not lists
    assert lists.entries_address == lists.entries.ctypes.data
    mask.kv_num_blocks.numpy()[:] = 0
    edited = read_lists(mask, (300, 300), 128, 128)
    assert len(edited.entries) < len(lists.entries)
    assert read_lists(equal, (300, 300), 128, 128) is lists


@pytest.mark.parametrize("page", [16, 32, 48, 64, 128, 256])
@pytest.mark.parametrize("kind", [PARTIAL, FULL])
def test_pages_that_are_there_are_listed(page: int, kind: int) -> None:
    tile = 128
    for seed in range(20):
        random = np.random.default_rng(seed)
        there = random.random((3, 1 + seed)) < random.choice([0.1, 0.5, 0.9, 1.0])
        holes = Holes(torch.from_numpy(there), np.flatnonzero(there))
        lists = hole_lists(holes, page, kind, tile)
        assert (lists.batch_stride, lists.head_stride, lists.block_stride) == (1, 0, 0)
        runs = np.zeros(len(lists.entries), np.uint16) if lists.runs is None else lists.runs
        whole = runs == 0
        assert (lists.entries & 3 == kind).all() and not (runs == kind * EVERY_RUN).any()
        runs = np.where(whole, kind * EVERY_RUN, runs)
        found = np.zeros((3, -(-there.shape[1] * page // tile) * tile), np.bool_)
        for b, (first, end) in enumerate(zip(lists.offsets, lists.offsets[1:], strict=False)):
            tiles = lists.entries[first:end] >> 2
            assert (np.diff(tiles) > 0).all()
            for place, bits in zip(tiles, runs[first:end], strict=True):
                for run in range(8):
                    assert bits >> 2 * run & 3 in (0, kind)
                    start = place * tile + run * KEYS_OF_RUN
                    found[b, start : start + KEYS_OF_RUN] = bits >> 2 * run & 3
        expected = there.repeat(page, axis=1)
        assert (found[:, : expected.shape[1]] == expected).all()
        # What is behind the last page counts as listed if that page is.
        assert (found[:, expected.shape[1] :] == there[:, -1:]).all()
