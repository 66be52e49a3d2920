"""Block masks: PyTorch's results where PyTorch is right, and ours where it is not."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch_version import MASKS_MENDED

from quire.block_mask import (
    NOOP_BLOCK_SIZE,
    BlockMask,
    Span,
    check_fits,
    classify,
    create_block_mask,
    create_mask,
    element_mod,
    tiles,
)
from quire.errors import (
    ArgumentError,
    BlockIndexError,
    BlockMaskError,
    BlockMaskShapeError,
    CapturedIndexError,
    DeviceError,
    MaskPickleError,
    ModSignatureError,
    QuireError,
    SlicedMaskError,
    TracedBranchError,
)
from quire.ir.interpret import interpret
from quire.ir.trace import Traced

CPU, META = torch.device("cpu"), torch.device("meta")


# Mods


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx).abs() < 40 + 50 * h


def prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx < 70 * (b + 1)) | (q_idx >= kv_idx)


def everything(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= 0


def nothing(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx < 0


def by_batch(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (b + h) % 2 == 0


def untraceable(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.special.bessel_j0(q_idx.float()) > torch.special.bessel_j0(kv_idx.float())


def documents(length: int = 700) -> Callable[..., Any]:
    ids = torch.arange(length) // 90

    def same_document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)

    return same_document


class Windowed:
    def __init__(self, size: int) -> None:
        self.size = size

    def mask(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx).abs() < self.size


MASKS = {
    mod.__name__: mod
    for mod in (causal, window, prefix, everything, nothing, by_batch, untraceable, documents())
}

SIZES = [
    (1, 1, 256, 256, 128),
    (2, 3, 300, 200, 128),
    (1, 2, 129, 511, (64, 128)),
    (2, 1, 7, 9, 16),
    (1, 1, 1, 640, (1, 128)),
    (1, 1, 64, 40, 64),  # one block that would be full if it did not reach beyond the keys
    (1, 1, 9, 699, (4, 1)),  # rows long enough for an unstable sort to show
]


# Oracles


def assert_same_fields(ours: BlockMask, theirs: torch_flex.BlockMask) -> None:
    """Every field, the undefined tails of the lists included."""
    for name in (*torch_flex.BlockMask._TENSOR_ATTRS, *torch_flex.BlockMask._CONTEXT_ATTRS):
        mine, its = getattr(ours, name), getattr(theirs, name)
        if isinstance(its, Tensor):
            assert mine.dtype == its.dtype, name
            assert mine.shape == its.shape, name
            assert torch.equal(mine, its), name
        elif name != "mask_mod":
            assert mine == its, name


def spelled_out(mask: BlockMask) -> Tensor:
    """bool [B, H, q_len, kv_len]: where attention may look, read off the lists entry by entry."""
    num_batches, num_heads, q_len, kv_len = mask.shape
    (q_block, kv_block) = mask.BLOCK_SIZE
    result = torch.zeros(mask.shape, dtype=torch.bool)
    inner = create_mask(mask.mask_mod, num_batches, num_heads, q_len, kv_len, device="cpu")
    for b, h, row in itertools.product(*map(range, mask.kv_num_blocks.shape)):
        queries = slice(row * q_block, (row + 1) * q_block)
        for column in mask.kv_indices[b, h, row, : mask.kv_num_blocks[b, h, row]].tolist():
            keys = slice(column * kv_block, (column + 1) * kv_block)
            result[b, h, queries, keys] |= inner[b, h, queries, keys]
        if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
            count = mask.full_kv_num_blocks[b, h, row]
            for column in mask.full_kv_indices[b, h, row, :count].tolist():
                result[b, h, queries, column * kv_block : (column + 1) * kv_block] = True
    return result


def walked(mask: BlockMask) -> Tensor:
    """The same, as attention walks it."""
    rows = mask.rows()
    num_batches, num_heads, q_len, kv_len = mask.shape
    result = torch.zeros(mask.shape, dtype=torch.bool)
    inner = create_mask(mask.mask_mod, num_batches, num_heads, q_len, kv_len, device="cpu")
    for b, h in itertools.product(range(num_batches), range(num_heads)):
        for row, start, stop in rows.queries():
            for first, last, full in rows.spans(b, h, row):
                where = (b, h, slice(start, stop), slice(first, last))
                result[where] = True if full else inner[where]
    return result


def hand_made(
    lists: list[list[int]], full: list[list[int]] | None = None, width: int = 4, **options: Any
) -> BlockMask:
    """A mask with one batch and head from plain lists; tails are filled with nonsense."""

    def tensors(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        padded = [row + [99] * (width - len(row)) for row in rows]
        counts = torch.tensor([[[len(row) for row in rows]]], dtype=torch.int32)
        return counts, torch.tensor([[padded]], dtype=torch.int32)

    pairs = (*tensors(lists), *(tensors(full) if full else (None, None)))
    return BlockMask.from_kv_blocks(*pairs, **{"BLOCK_SIZE": 4, **options})


# Creation


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_create_block_mask_gives_the_tensors_that_torch_gives(name: str, sizes: Any) -> None:
    *lengths, block_size = sizes
    for options in ({}, {"separate_full_blocks": False}):
        ours = create_block_mask(MASKS[name], *lengths, BLOCK_SIZE=block_size, **options)
        theirs = torch_flex.create_block_mask(
            MASKS[name], *lengths, BLOCK_SIZE=block_size, **options, device="cpu"
        )
        assert type(ours) is BlockMask
        assert_same_fields(ours, theirs)
        assert ours.mask_mod is MASKS[name]


@pytest.mark.parametrize("sizes", [(1, 1, 0, 100), (1, 1, 100, 0), (0, 1, 10, 10)], ids=str)
def test_empty_masks_are_masks(sizes: tuple[int, int, int, int]) -> None:
    theirs = torch_flex.create_block_mask(causal, *sizes, BLOCK_SIZE=64, device="cpu")
    for mod in MASKS.values():  # most of which torch does not evaluate on nothing
        ours = create_block_mask(mod, *sizes, BLOCK_SIZE=64)
        assert_same_fields(ours, theirs)
        assert create_mask(mod, *sizes).shape == sizes
        assert ours.sparsity() == 0
        assert ours[..., :1].shape[:2] == sizes[:2]


@pytest.mark.parametrize("tile", [3, 7, 64, 1000, 5000])
@pytest.mark.parametrize("name", ["window", "prefix", "untraceable"])
def test_tiles_of_any_size_give_the_same_mask(
    name: str, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = (2, 2, 11, 18)
    whole = create_block_mask(MASKS[name], *sizes, BLOCK_SIZE=(8, 4))
    dense = create_mask(MASKS[name], *sizes)
    seen = spy_on_tiles(monkeypatch, tile)
    assert_same_fields(create_block_mask(MASKS[name], *sizes, BLOCK_SIZE=(8, 4)), whole)
    assert torch.equal(create_mask(MASKS[name], *sizes), dense)
    assert max(seen) <= tile


def spy_on_tiles(monkeypatch: pytest.MonkeyPatch, limit: int) -> list[int]:
    seen: list[int] = []
    evaluate = tiles.evaluate

    def spy(mod: Any, kind: Any, b: Any, h: Any, *, q_idx: Any, kv_idx: Any, **more: Any) -> Any:
        seen.append(len(b) * len(h) * len(q_idx) * len(kv_idx))
        return evaluate(mod, kind, b, h, q_idx=q_idx, kv_idx=kv_idx, **more)

    monkeypatch.setattr(tiles, "evaluate", spy)
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", limit)
    return seen


@given(size=st.integers(1, 60), block=st.integers(1, 70), budget=st.integers(1, 50))
def test_pieces_cover_a_length_once_and_straddle_no_block(
    size: int, block: int, budget: int
) -> None:
    pieces = tiles._pieces(size, block, tiles._step(size, block, budget))
    assert [i for piece in pieces for i in range(piece.start, piece.stop)] == list(range(size))
    for piece in pieces:
        assert piece.stop - piece.start <= budget
        whole = piece.start % block == 0 and (piece.stop % block == 0 or piece.stop == size)
        assert whole or piece.start // block == (piece.stop - 1) // block


def test_a_mask_that_is_the_same_for_all_heads_is_evaluated_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = []

    def spy(graph: Any, *args: Any, **options: Any) -> Tensor:
        shapes.append(interpret(graph, *args, **options).shape)
        return interpret(graph, *args, **options)

    monkeypatch.setattr(classify, "interpret", spy)
    mask = create_block_mask(causal, 8, 16, 100, 100)
    assert mask.kv_num_blocks.shape == (8, 16, 1)
    assert shapes == [(1, 1), (1, 4, 4)]  # the bounds, and the elements that are tried


def test_bounds_spare_most_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []

    def spy(graph: Any, *args: Any, **options: Any) -> Tensor:
        found = interpret(graph, *args, **options)
        looked_at.append(found.numel())
        return found

    monkeypatch.setattr(classify, "interpret", spy)
    create_block_mask(causal, None, None, 4096, 4096)
    assert sum(looked_at) == 32 * 32 + 32 * 4 * 4  # the bounds, and some of the diagonal


@pytest.mark.parametrize("order", [True, False])
@pytest.mark.parametrize("name", ["causal", "window", "prefix"])
def test_the_write_order_of_dq_is_torchs(name: str, order: bool) -> None:
    sizes = (2, 2, 300, 420)
    options = {"BLOCK_SIZE": 32, "compute_dq_write_order": True, "dq_kv_order": order}
    ours = create_block_mask(MASKS[name], *sizes, **options)
    theirs = torch_flex.create_block_mask(MASKS[name], *sizes, **options, device="cpu")
    assert theirs.dq_write_order is not None and theirs.dq_write_order_full is not None
    assert_same_fields(ours, theirs)
    assert_same_fields(ours[0, 1:, 2:5], with_lengths(theirs[0, 1:, 2:5], (96, 420)))


def with_lengths(mask: torch_flex.BlockMask, lengths: tuple[int, int]) -> torch_flex.BlockMask:
    mask.seq_lengths = lengths
    return mask


def test_an_explicit_order_of_dq_survives_slicing_and_cropping() -> None:
    lists = [[0, 1, 2], [2, 0], [1, 3]]
    order = torch.tensor([[[2, 0, 3, 1]]])
    mask = hand_made(lists, seq_lengths=(12, 16), dq_kv_order=order)
    mask._add_write_order()
    # Row 0 reads 0, 1, 2: block 2 is first, 0 second, 1 third.
    assert write_ranks(mask, 0) == {2: 0, 0: 1, 1: 2}
    assert write_ranks(mask, 2) == {3: 0, 1: 1}
    part = mask[:, :, 1:]
    assert part.dq_kv_order is not None
    assert write_ranks(part, 0) == {2: 0, 0: 1}
    cropped = mask._adjust(12, 12)
    assert cropped.dq_kv_order is not None
    assert cropped.dq_kv_order.tolist() == [[[2, 0, 1]]]
    assert write_ranks(cropped, 2) == {1: 0}


def test_each_head_keeps_its_own_order_of_dq() -> None:
    orders = torch.tensor([[[0, 1, 2], [2, 1, 0]]])
    counts, indices = torch.full((1, 2, 1), 3), torch.arange(3).expand(1, 2, 1, 3)
    for order, ranks in ((orders, {0: 2, 1: 1, 2: 0}), (orders[:, :1], {0: 0, 1: 1, 2: 2})):
        mask = BlockMask.from_kv_blocks(counts, indices, dq_kv_order=order)
        mask._add_write_order()
        assert write_ranks(mask, 0) == {0: 0, 1: 1, 2: 2}
        assert write_ranks(mask[:, 1], 0) == ranks


def write_ranks(mask: BlockMask, row: int) -> dict[int, int]:
    """The rank of each key block in the sum for one row of query blocks."""
    assert mask.q_indices is not None and mask.q_num_blocks is not None
    assert mask.dq_write_order is not None
    return {
        column: int(mask.dq_write_order[0, 0, column, place])
        for column in range(mask.q_indices.shape[-2])
        for place in range(int(mask.q_num_blocks[0, 0, column]))
        if mask.q_indices[0, 0, column, place] == row
    }


@pytest.mark.parametrize(
    "mod",
    [
        lambda b, h, q_idx, kv_idx: True,
        lambda b, h, q_idx, kv_idx: False,
        Windowed(30).mask,
        functools.partial(lambda size, b, h, q_idx, kv_idx: q_idx - kv_idx < size, 20),
        lambda b, h, q_idx, kv_idx, size=12: q_idx < size,
        torch_flex.noop_mask,
        torch_flex.and_masks(causal, window),
    ],
)
def test_every_way_to_write_a_mask_is_taken(mod: Callable[..., Any]) -> None:
    mask = create_block_mask(mod, 1, 1, 70, 50, BLOCK_SIZE=16)
    b = h = torch.tensor(0)
    for q_idx, kv_idx in [(0, 0), (0, 49), (69, 0), (69, 49), (33, 17)]:
        expected = bool(mod(b, h, torch.tensor(q_idx), torch.tensor(kv_idx)))
        assert bool(spelled_out(mask)[0, 0, q_idx, kv_idx]) is expected


def test_no_batch_and_no_head_mean_one() -> None:
    assert create_block_mask(causal, None, None, 10, 20).shape == (1, 1, 10, 20)
    assert create_mask(causal, None, None, 10, 20).shape == (1, 1, 10, 20)


def test_compile_is_deprecated_and_harmless() -> None:
    with pytest.warns(DeprecationWarning, match="_compile is deprecated"):
        mask = create_block_mask(causal, 1, 1, 64, 64, _compile=True)
    assert mask.shape == (1, 1, 64, 64)


def test_a_score_mod_is_no_mask() -> None:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score

    with pytest.raises(ModSignatureError, match=r"requires a mask_mod.*score_mod.*Use create_mask"):
        create_block_mask(score_mod, 1, 1, 8, 8)
    with pytest.raises(AssertionError):
        create_block_mask(score_mod, 1, 1, 8, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 1, 8, 8), "B must be a whole number of at least 0, but is -1"),
        ((True, 1, 8, 8), "B must be a whole number of at least 0, but is True"),
        ((1, 1.5, 8, 8), "H must be a whole number of at least 0, but is 1.5"),
        ((1, 1, -8, 8), "Q_LEN must be a whole number of at least 0, but is -8"),
        ((1, 1, 8, "8"), "KV_LEN must be a whole number of at least 0, but is '8'"),
        ((1, 1, 8, 8, "cpu", 0), r"BLOCK_SIZE\[0\] .* at least 1, but is 0"),
        ((1, 1, 8, 8, "cpu", (8, -1)), r"BLOCK_SIZE\[1\] .* at least 1, but is -1"),
        ((1, 1, 8, 8, "cpu", (8, 8, 8)), r"BLOCK_SIZE must be an int or a pair"),
        ((1, 1, 8, 8, "cpu", 2.0), r"BLOCK_SIZE\[0\] .* but is 2.0"),
    ],
)
def test_numbers_that_make_no_mask_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as caught:
        create_block_mask(causal, *arguments)
    assert isinstance(caught.value, ValueError)


def test_an_order_of_dq_must_be_a_bool() -> None:
    with pytest.raises(ArgumentError, match="dq_kv_order must be a bool when using"):
        create_block_mask(causal, 1, 1, 8, 8, dq_kv_order=torch.arange(1))  # type: ignore[arg-type]


def test_a_branch_in_a_mask_is_explained() -> None:
    def branching(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx > 3 if kv_idx > 3 else q_idx > 5

    with pytest.raises(TracedBranchError):
        create_block_mask(branching, 1, 1, 8, 8)


def test_an_index_outside_of_a_captured_tensor_is_an_error() -> None:
    with pytest.raises(CapturedIndexError, match="out of bounds"):
        create_block_mask(documents(90), 1, 1, 100, 100)


@pytest.mark.parametrize("name", MASKS)
def test_create_mask_gives_what_torch_gives(name: str) -> None:
    for sizes in [(1, 1, 5, 9), (2, 3, 30, 20)]:
        ours = create_mask(MASKS[name], *sizes)
        assert ours.dtype == torch.bool
        assert torch.equal(ours, torch_flex.create_mask(MASKS[name], *sizes, device="cpu"))


def test_create_mask_of_a_score_mod_is_where_it_is_not_minus_infinity() -> None:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(q_idx - kv_idx < h + 2, score + b, -float("inf"))

    ours = create_mask(score_mod, 2, 3, 8, 9)
    assert torch.equal(ours, torch_flex.create_mask(score_mod, 2, 3, 8, 9, device="cpu"))
    assert not ours.all() and ours.any()


# The constructor


def test_the_constructor_takes_torchs_arguments() -> None:
    theirs = torch_flex.create_block_mask(causal, 1, 2, 300, 300, device="cpu")
    lengths, *tensors, block_size, mask_mod = theirs.as_tuple(flatten=False)
    lists, (write, write_full, order, spt) = tensors[:8], tensors[8:]
    ours = BlockMask(
        lengths,
        *lists,
        block_size,
        mask_mod,
        dq_write_order=write,
        dq_write_order_full=write_full,
        dq_kv_order=order,
        dq_kv_order_spt=spt,
    )
    assert_same_fields(ours, theirs)
    assert isinstance(ours, torch_flex.BlockMask)
    for flatten in (True, False):
        assert len(ours.as_tuple(flatten)) == len(theirs.as_tuple(flatten))
        for mine, its in zip(ours.as_tuple(flatten), theirs.as_tuple(flatten), strict=True):
            assert mine is its or mine == its


def lists(counts: Any, indices: Any, dtype: torch.dtype = torch.int32) -> dict[str, Tensor]:
    return {
        "kv_num_blocks": torch.tensor(counts, dtype=dtype),
        "kv_indices": torch.tensor(indices, dtype=dtype),
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"kv_num_blocks": None, "kv_indices": None},
            "both provided or, .* but are NoneType and NoneType. Give two tensors",
        ),
        (
            {"kv_num_blocks": [[1]], "kv_indices": [[[0]]]},
            "both provided or, .* but are list and list. Give two tensors",
        ),
        (lists([1], [0]), r"at least 2 dimensions, but kv_indices has shape \[1\]"),
        (
            lists([[[1]]], [[[[0], [0]]]]),
            r"without its last dimension, \[1, 1, 2\], but has shape \[1, 1, 1\]",
        ),
        (lists([[[1]]], [[[[0.0]]]], torch.float32), "must hold integers, but is float32"),
        (lists([[[True]]], [[[[False]]]], torch.bool), "must hold integers, but is bool"),
        (lists([[[3]]], [[[[0, 1]]]]), r"between 0 and 2, the entries .* but is 3 at \[0, 0, 0\]"),
        (lists([[[-1]]], [[[[0, 1]]]]), r"between 0 and 2, the entries .* but is -1"),
        (lists([[[2]]], [[[[0, 2]]]]), r"between 0 and 1, .* but is 2 at \[0, 0, 0, 1\]"),
        (lists([[[1]]], [[[[-1, 0]]]]), r"between 0 and 1, .* but is -1"),
        (
            {**lists([[[1]]], [[[[0]]]]), "full_kv_num_blocks": torch.ones(1, 1, 1)},
            "full_kv_num_blocks and full_kv_indices must be both .* but are Tensor and NoneType",
        ),
        (
            {
                **lists([[[1]]], [[[[0]]]]),
                "full_kv_num_blocks": torch.ones(2, 1, 1, dtype=torch.int32),
                "full_kv_indices": torch.zeros(2, 1, 1, 1, dtype=torch.int32),
            },
            r"full_kv_num_blocks must begin with the dimensions \[1, 1, 1\] .* shape \[2, 1, 1\]",
        ),
        (
            {**lists([[[1]]], [[[[0]]]]), "seq_lengths": (129, 128)},
            "at least 2 rows of blocks for 129 queries in blocks of 128, but has 1",
        ),
        (
            {**lists([[[1]]], [[[[0]]]]), "dq_write_order_full": torch.zeros(1, 1, 1, 1)},
            "dq_write_order_full requires dq_write_order",
        ),
    ],
)
def test_tensors_that_list_no_blocks_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(BlockMaskError, match=message) as caught:
        BlockMask.from_kv_blocks(**arguments)
    assert isinstance(caught.value, (RuntimeError, AssertionError, ValueError))


def test_lengths_block_sizes_and_orders_are_checked() -> None:
    one = lists([[[1]]], [[[[0]]]])
    with pytest.raises(ArgumentError, match="seq_lengths must be a whole number"):
        BlockMask.from_kv_blocks(**one, seq_lengths=(1.0, 1))  # type: ignore[arg-type]
    with pytest.raises(
        ArgumentError, match=r"BLOCK_SIZE\[0\] must be a whole number of at least 1, but is 0"
    ):
        BlockMask.from_kv_blocks(**one, BLOCK_SIZE=0)
    with pytest.raises(ArgumentError, match="dq_kv_order must be a bool, Tensor, or None"):
        BlockMask.from_kv_blocks(**one, dq_kv_order=3)  # type: ignore[arg-type]


def test_lists_on_two_devices_are_refused() -> None:
    one = lists([[[1]]], [[[[0]]]])
    with pytest.raises(DeviceError, match="on one device, but are on cpu and meta"):
        BlockMask.from_kv_blocks(one["kv_num_blocks"], one["kv_indices"].to("meta"))
    with pytest.raises(DeviceError, match="on one device, but are on cpu and meta"):
        BlockMask.from_kv_blocks(**one, dq_kv_order=torch.zeros(1, 1, 1, device="meta"))


def test_values_after_the_count_may_be_anything() -> None:
    mask = hand_made([[1], []], seq_lengths=(8, 8))
    assert mask.to_dense().tolist() == [[[[0, 1], [0, 0]]]]


@pytest.mark.parametrize("with_full", [True, False])
def test_from_kv_blocks_gives_the_tensors_that_torch_gives(with_full: bool) -> None:
    torch.manual_seed(1)
    indices = torch.stack([torch.randperm(5) for _ in range(2 * 3 * 4)]).view(2, 3, 4, 5).int()
    counts = torch.randint(0, 6, (2, 3, 4)).int()
    full = (5 - counts, indices.flip(-1)) if with_full else ()
    for options in ({}, {"BLOCK_SIZE": 32}, {"BLOCK_SIZE": (16, 8), "compute_q_blocks": False}):
        ours = BlockMask.from_kv_blocks(counts, indices, *full, **options)
        theirs = torch_flex.BlockMask.from_kv_blocks(counts, indices, *full, **options)
        assert_same_fields(ours, theirs)
        assert torch.equal(ours.to_dense(), theirs.to_dense())
        assert ours.to_dense().dtype == theirs.to_dense().dtype


def test_lists_may_be_narrower_than_the_keys() -> None:
    mask = hand_made([[7, 0], [3]], width=2, seq_lengths=(8, 32))
    assert mask.to_dense().shape == (1, 1, 2, 8)
    assert mask.to_dense().nonzero()[:, 2:].tolist() == [[0, 0], [0, 7], [1, 3]]
    assert mask.q_num_blocks is not None
    assert mask.q_num_blocks.tolist() == [[[1, 0, 0, 1, 0, 0, 0, 1]]]


# What a mask says about itself


def test_sparsity_counts_only_elements_inside_the_lengths() -> None:
    mask = create_block_mask(causal, 1, 1, 300, 200)  # blocks of 128: all but one are computed
    theirs = torch_flex.create_block_mask(causal, 1, 1, 300, 200, device="cpu").sparsity()
    assert theirs == pytest.approx(100 / 6) if MASKS_MENDED else theirs < 0
    assert mask.sparsity() == pytest.approx(100 * 128 * 72 / (300 * 200))
    assert create_block_mask(causal, 1, 1, 1024, 1024).sparsity() == 43.75
    assert create_block_mask(everything, 2, 2, 37, 91, BLOCK_SIZE=16).sparsity() == 0
    assert create_block_mask(nothing, 1, 1, 37, 91).sparsity() == 100
    assert create_block_mask(causal, 1, 1, 0, 10).sparsity() == 0


def test_sparsity_is_torchs_where_blocks_divide_the_lengths() -> None:
    for name in MASKS:
        ours = create_block_mask(MASKS[name], 2, 2, 192, 256, BLOCK_SIZE=(32, 64))
        theirs = torch_flex.create_block_mask(
            MASKS[name], 2, 2, 192, 256, BLOCK_SIZE=(32, 64), device="cpu"
        )
        assert ours.sparsity() == pytest.approx(theirs.sparsity())


def test_text_is_torchs() -> None:
    sizes = (2, 3, 256, 512)
    ours = create_block_mask(causal, *sizes, BLOCK_SIZE=32)
    theirs = torch_flex.create_block_mask(causal, *sizes, BLOCK_SIZE=32, device="cpu")
    assert str(ours) == str(theirs)
    assert repr(ours) == repr(theirs)
    for options in ({"grid_size": 3}, {"grid_size": -1, "limit": 1}, {"grid_size": (2, 5)}):
        assert ours.to_string(**options) == theirs.to_string(**options)
    assert ours.numel() == theirs.numel() == 2 * 3 * 256 * 512
    assert ours.shape == theirs.shape == sizes
    assert "sparsity=15.36%" in str(create_block_mask(causal, 1, 1, 300, 200))


# Indexing


@pytest.mark.parametrize(
    ("index", "q_len"),
    [
        (0, 300),
        (-1, 300),
        ((1, 2), 300),
        ((slice(None), slice(0, 2), 1), 128),
        ((0, 0, 2), 44),
        ((0, 0, -1), 44),
        ((slice(None), 1, slice(1, None)), 172),
        ((slice(0, 2), slice(1, 2), torch.tensor([1], dtype=torch.int32)), 128),
        ((slice(None), slice(None), torch.tensor([0, 2])), 172),
        ((torch.tensor([1, 0]),), 300),
        ((torch.tensor([1, 0]), torch.tensor([2, 2])), 300),
        ((slice(None), slice(None), slice(0, 0)), 0),
    ],
    ids=str,
)
def test_a_slice_has_torchs_lists_and_its_own_length(index: Any, q_len: int) -> None:
    sizes = (2, 3, 300, 200)
    ours = create_block_mask(prefix, *sizes)[index]
    theirs = torch_flex.create_block_mask(prefix, *sizes, device="cpu")[index]
    if not MASKS_MENDED:
        assert theirs.seq_lengths == (300, 200)  # stale
    elif isinstance(index, tuple) and len(index) == 3 and isinstance(index[2], torch.Tensor):
        assert theirs.seq_lengths == (128 * len(index[2]), 200)  # it does not look which rows
    else:
        assert theirs.seq_lengths == (q_len, 200)
    assert type(ours) is BlockMask
    assert_same_fields(ours, with_lengths(theirs, (q_len, 200)))


@pytest.mark.parametrize(
    ("index", "same_as"),
    [
        (..., slice(None)),
        ((..., 1), (slice(None), slice(None), 1)),
        ((0, ..., slice(1, 3)), (0, slice(None), slice(1, 3))),
        ((0, 1, 2, ...), (0, 1, 2)),
        (torch.tensor(1), 1),
        ((slice(None), slice(None), [2, 0]), (slice(None), slice(None), torch.tensor([2, 0]))),
        ((slice(None), torch.tensor([True, False, True])), (slice(None), torch.tensor([0, 2]))),
        ((0, 0, torch.tensor([-1])), (0, 0, torch.tensor([2]))),
        ((0, 0, torch.tensor([1], dtype=torch.uint8)), (0, 0, 1)),
    ],
    ids=str,
)
def test_ways_to_write_the_same_index(index: Any, same_as: Any) -> None:
    mask = create_block_mask(prefix, 2, 3, 300, 200)
    assert_same_fields(mask[index], mask[same_as])


def test_rows_picked_out_of_order_are_whole_blocks() -> None:
    mask = create_block_mask(causal, 1, 1, 300, 200)
    assert mask[:, :, torch.tensor([2, 0])].seq_lengths == (256, 200)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (2, "must be from -2 to 1, but is 2"),
        ((0, -4), "must be from -3 to 2, but is -4"),
        ((0, 0, torch.tensor([0, 3])), "must be from -3 to 2, but is 3"),
        ((0, 0, 0, 0), "at most 3 parts .* but has 4 and 0"),
        ((..., 0, ...), "one `...`, but has 1 and 2"),
        ((0, "a"), "an integer, a slice, a tensor or `...`, but is 'a'"),
        (1.0, "an integer, a slice, a tensor or `...`, but is 1.0"),
        (torch.tensor([1.0]), "1-D and hold integers, .* but is float32"),
        (torch.tensor([[0]]), r"1-D and hold integers, .* but is int64 \[1, 1\]"),
        (slice(None, None, -1), "a positive step"),
        ((torch.tensor([0]), 0, torch.tensor([0])), "must be the only tensor .* Index twice"),
    ],
    ids=str,
)
def test_an_index_that_means_nothing_is_refused(index: Any, message: str) -> None:
    mask = create_block_mask(prefix, 2, 3, 300, 200)
    with pytest.raises(BlockIndexError, match=message) as caught:
        mask[index]
    assert isinstance(caught.value, IndexError)


def test_iterating_over_the_batch_ends() -> None:
    mask = create_block_mask(prefix, 2, 3, 300, 200)
    assert [part.shape for part in itertools.islice(mask, 5)] == [(1, 3, 300, 200)] * 2


def test_a_slice_refuses_its_mask_mod_until_it_has_one() -> None:
    mask = create_block_mask(causal, 1, 1, 300, 300)
    part = mask[:, :, 1]
    assert part.is_sliced and not mask.is_sliced
    zero = torch.tensor(0)
    with pytest.raises(SlicedMaskError, match="Cannot use mask_mod from a sliced BlockMask") as err:
        part.mask_mod(zero, zero, zero, zero)
    assert isinstance(err.value, RuntimeError)
    part.mask_mod = lambda b, h, q_idx, kv_idx: mask.mask_mod(b, h, q_idx + 128, kv_idx)
    assert not part.is_sliced
    check_fits(part, 1, 1, 128, 300, CPU)
    assert torch.equal(spelled_out(part), spelled_out(mask)[:, :, 128:256])


# Cropping


@given(
    name=st.sampled_from(["causal", "window", "prefix", "everything", "same_document"]),
    lengths=st.tuples(st.integers(0, 75), st.integers(0, 90)),
    separate=st.booleans(),
)
def test_cropping_keeps_the_upper_left_corner(
    name: str, lengths: tuple[int, int], separate: bool
) -> None:
    whole = create_block_mask(
        MASKS[name], 2, 2, 75, 90, BLOCK_SIZE=(16, 8), separate_full_blocks=separate
    )
    cropped = whole._adjust(*lengths)
    assert type(cropped) is BlockMask
    assert cropped.seq_lengths == lengths
    assert cropped.mask_mod is whole.mask_mod
    assert torch.equal(spelled_out(cropped), spelled_out(whole)[..., : lengths[0], : lengths[1]])
    dense = cropped.to_dense()
    assert torch.equal(dense, whole.to_dense()[..., : dense.shape[-2], : dense.shape[-1]])
    assert cropped.q_indices is not None
    assert cropped.q_indices.shape == (2, 2, dense.shape[-1], dense.shape[-2])


def test_cropping_drops_blocks_where_torch_keeps_or_crashes() -> None:
    lists_ = [[0, 5], [2, 3], [7]]
    ours = hand_made(lists_, width=8)._adjust(12, 16)
    assert ours.to_dense().tolist() == [[[[1, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]]]]
    assert ours.sparsity() == 75


def test_a_mask_cannot_grow() -> None:
    mask = create_block_mask(causal, 1, 1, 100, 100)
    with pytest.raises(BlockMaskShapeError, match=r"at most \(100, 100\).*but are \(100, 101\)"):
        mask._adjust(100, 101)
    with pytest.raises(ArgumentError, match="new_q_len"):
        mask._adjust(-1, 10)


def test_cropping_and_slicing_keep_what_was_left_out() -> None:
    lean = hand_made([[0], [1]], width=2, compute_q_blocks=False)
    for part in (lean._adjust(4, 4), lean[:, :, 0]):
        assert part.q_indices is None and part.full_kv_indices is None


# Devices


def test_moving_takes_along_what_the_mask_captured() -> None:
    mask = create_block_mask(documents(), 1, 1, 300, 300)
    moved = mask.to("meta")
    assert type(moved) is BlockMask
    assert moved.kv_indices.device == moved.full_q_indices.device == META  # type: ignore[union-attr]
    assert isinstance(moved.mask_mod, Traced)
    assert [tensor.device for tensor in moved.mask_mod.captures] == [META]
    assert mask.kv_indices.device == CPU  # the original is as it was
    assert mask.mask_mod(0, 0, torch.tensor(3), torch.tensor(2))  # type: ignore[arg-type]


def test_moving_to_where_it_is_keeps_the_mask_mod() -> None:
    for mod in (causal, documents(), untraceable):
        mask = create_block_mask(mod, 1, 1, 300, 300)
        assert mask.to("cpu").mask_mod is mod
        assert_same_fields(mask.to(CPU), mask)


def test_moving_an_untraceable_mask_takes_along_its_closure() -> None:
    table = torch.rand(300)

    def looked_up(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.special.bessel_j0(table[q_idx]) > 0

    moved = create_block_mask(looked_up, 1, 1, 300, 300).to("meta")
    assert moved.mask_mod.__name__ == "looked_up"
    assert [cell.cell_contents.device for cell in moved.mask_mod.__closure__] == [META]  # type: ignore[attr-defined]
    assert table.device == CPU


def test_a_slice_moves_and_stays_one() -> None:
    assert create_block_mask(documents(), 1, 1, 300, 300)[:, :, 0].to("meta").is_sliced


# Pytrees


def test_flattening_is_torchs_and_keeps_the_class() -> None:
    ids = documents()
    options = {"BLOCK_SIZE": 64, "compute_dq_write_order": True}
    ours = create_block_mask(ids, 1, 2, 300, 300, **options)
    theirs = torch_flex.create_block_mask(ids, 1, 2, 300, 300, **options, device="cpu")
    leaves, context = ours._flatten()
    its_leaves, its_context = theirs._flatten()
    assert len(leaves) == len(its_leaves) and context == its_context
    assert all(torch.equal(a, b) for a, b in zip(leaves, its_leaves, strict=True))
    rebuilt = BlockMask._unflatten(leaves, context)
    assert type(rebuilt) is BlockMask
    assert_same_fields(rebuilt, ours)
    assert rebuilt.equal(ours)
    keyed, keyed_context = ours._flatten_with_keys()
    assert keyed_context == context
    assert all(isinstance(key, pytree.GetAttrKey) for key, _ in keyed)
    assert [key.name for key, _ in keyed][:2] == ["kv_num_blocks", "kv_indices"]
    assert all(value is leaf for (_, value), leaf in zip(keyed, leaves, strict=True))


def test_a_mask_is_a_leaf_until_someone_registers_it() -> None:
    mask = create_block_mask(causal, 1, 1, 10, 10)
    assert pytree.tree_flatten(mask)[0] == [mask]
    assert BlockMask not in pytree.SUPPORTED_NODES


# Identity, content, copies, pickles


def test_masks_hash_by_identity_and_compare_by_content() -> None:
    one, two = (create_block_mask(documents(), 1, 1, 300, 300) for _ in range(2))
    assert len({one, two, one}) == 2
    assert one != two
    assert one.equal(two) and two.equal(one)
    theirs = torch_flex.create_block_mask(documents(), 1, 1, 300, 300, device="cpu")
    assert one.equal(theirs)
    assert not one.equal("mask")


def test_masks_that_differ_in_anything_are_not_equal() -> None:
    mask = create_block_mask(documents(), 1, 1, 300, 300)
    same_blocks = copy.copy(mask)
    same_blocks.mask_mod = documents(701)
    others = [
        create_block_mask(documents(), 1, 1, 300, 299),
        create_block_mask(documents(), 2, 1, 300, 300),
        create_block_mask(documents(), 1, 1, 300, 300, BLOCK_SIZE=64),
        create_block_mask(causal, 1, 1, 300, 300),
        same_blocks,
        mask[:, :],
    ]
    assert not any(mask.equal(other) for other in others)
    whole = create_block_mask(causal, 1, 1, 300, 300)
    assert not whole.equal(create_block_mask(causal, 1, 1, 300, 300, separate_full_blocks=False))


def test_equal_ignores_order_repeats_and_tails() -> None:
    one = hand_made([[0, 2, 1], [3]], seq_lengths=(8, 16))
    two = hand_made([[2, 1, 0, 1], [3, 3]], seq_lengths=(8, 16))
    assert one.equal(two)
    assert not one.equal(hand_made([[2, 1, 0], [2]], seq_lengths=(8, 16)))


@pytest.mark.parametrize("mod", [causal, documents(), untraceable, Windowed(9).mask])
def test_copies_are_independent_and_keep_the_mod(mod: Callable[..., Any]) -> None:
    mask = create_block_mask(mod, 1, 1, 300, 300)
    deep, shallow = copy.deepcopy(mask), copy.copy(mask)
    assert type(deep) is type(shallow) is BlockMask
    assert_same_fields(deep, mask)
    assert shallow.kv_indices is mask.kv_indices
    assert shallow.mask_mod == mod
    deep.kv_num_blocks.zero_()
    assert mask.kv_num_blocks.any()
    assert torch.equal(create_mask(deep.mask_mod, 1, 1, 9, 9), create_mask(mod, 1, 1, 9, 9))


@pytest.mark.parametrize(
    "mod",
    [
        causal,
        documents(),
        lambda b, h, q_idx, kv_idx: q_idx > 2 * kv_idx,
        functools.partial(documents()),
        Windowed(9).mask,
        torch_flex.and_masks(documents(), window),
        torch_flex.noop_mask,
    ],
)
def test_a_mask_survives_pickling(mod: Callable[..., Any]) -> None:
    mask = create_block_mask(mod, 1, 2, 300, 300)
    again = pickle.loads(pickle.dumps(mask))
    assert type(again) is BlockMask
    assert_same_fields(again, mask)
    assert again.equal(mask)
    assert torch.equal(create_mask(again.mask_mod, 1, 2, 9, 9), create_mask(mod, 1, 2, 9, 9))
    assert mask.mask_mod is mod
    assert pickle.loads(pickle.dumps(again)).equal(mask)


def test_a_pickle_stands_on_its_own() -> None:
    data = pickle.dumps(create_block_mask(documents(), 1, 1, 300, 300))
    code = (
        "import pickle, sys; mask = pickle.loads(sys.stdin.buffer.read()); "
        "from quire.block_mask import create_mask; "
        "print(mask.shape, int(create_mask(mask.mask_mod, 1, 1, 300, 300).sum()))"
    )
    run = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True)
    expected = int(create_mask(documents(), 1, 1, 300, 300).sum())
    assert run.stdout.decode().strip() == f"(1, 1, 300, 300) {expected}"


def test_a_slice_pickles_as_one() -> None:
    part = create_block_mask(documents(), 1, 1, 300, 300)[:, :, 0]
    again = pickle.loads(pickle.dumps(part))
    assert again.is_sliced
    assert_same_fields(again, part)


def test_a_mask_that_cannot_be_traced_says_so_when_pickled() -> None:
    mask = create_block_mask(untraceable, 1, 1, 30, 30)
    with pytest.raises(MaskPickleError, match=r"mask_mod that can be traced.*'untraceable'") as err:
        pickle.dumps(mask)
    assert isinstance(err.value, pickle.PicklingError)

    def broken(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return {0: True}[q_idx]

    mask.mask_mod = broken
    with pytest.raises(MaskPickleError, match="KeyError"):
        pickle.dumps(mask)


# Rows and spans


def test_spans_merge_neighbours_of_one_kind_in_ascending_order() -> None:
    mask = hand_made([[3, 0, 1], [], [4]], [[2], [4, 3], []], width=5, seq_lengths=(11, 18))
    rows = mask.rows()
    assert rows.spans(0, 0, 0) == [Span(0, 8, False), Span(8, 12, True), Span(12, 16, False)]
    assert rows.spans(0, 0, 1) == [Span(12, 18, True)]
    assert rows.spans(0, 0, 2) == [Span(16, 18, False)]
    assert list(rows.queries()) == [(0, 0, 4), (1, 4, 8), (2, 8, 11)]


def test_a_block_counts_once_and_full_wins() -> None:
    mask = hand_made([[1, 1, 0]], [[1, 1]], seq_lengths=(4, 16))
    assert mask.rows().spans(0, 0, 0) == [Span(0, 4, False), Span(4, 8, True)]
    assert mask.to_dense().tolist() == [[[[1, 1, 0, 0]]]]
    assert mask.sparsity() == 50


def test_a_mask_of_one_head_serves_all() -> None:
    rows = create_block_mask(causal, None, None, 300, 300).rows()
    assert rows.spans(b=3, h=7, row=1) == [Span(0, 128, True), Span(128, 256, False)]


def test_edits_in_place_are_seen() -> None:
    mask = hand_made([[0]], width=4, seq_lengths=(4, 16))
    assert mask.rows().spans(0, 0, 0) == [Span(0, 4, False)]
    mask.kv_indices[..., 0] = 3
    assert mask.rows().spans(0, 0, 0) == [Span(12, 16, False)]
    mask.seq_lengths = (4, 14)
    assert mask.rows().spans(0, 0, 0) == [Span(12, 14, False)]


def test_the_mask_of_any_length_spans_the_length_it_is_asked_for() -> None:
    query = torch.empty(1, 1, 50, 8)
    noop = BlockMask.from_torch(torch_flex._create_empty_block_mask(query, query))
    assert noop.BLOCK_SIZE == (NOOP_BLOCK_SIZE, NOOP_BLOCK_SIZE)
    check_fits(noop, 4, 2, 50, 70, CPU)
    rows = noop.rows(50, 70)
    assert list(rows.queries()) == [(0, 0, 50)]
    assert rows.spans(3, 1, 0) == [Span(0, 70, False)]
    assert noop.sparsity() == 0


@st.composite
def block_masks(draw: st.DrawFn) -> BlockMask:
    """Hand-made masks: unordered, repeating, overlapping lists of any width and block size."""
    num_batches, num_heads, num_rows, num_columns = (draw(st.integers(1, n)) for n in (2, 2, 3, 5))
    q_block, kv_block = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    shape = (num_batches, num_heads, num_rows)

    def tensors() -> tuple[Tensor, Tensor]:
        width = draw(st.integers(1, num_columns + 2))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
        indices = torch.randint(0, num_columns, (*shape, width), generator=generator)
        return torch.randint(0, width + 1, shape, generator=generator), indices

    q_len = draw(st.integers((num_rows - 1) * q_block + 1, num_rows * q_block))
    kv_len = draw(st.integers((num_columns - 1) * kv_block + 1, num_columns * kv_block))
    return BlockMask.from_kv_blocks(
        *tensors(),
        *(tensors() if draw(st.booleans()) else ()),
        BLOCK_SIZE=(q_block, kv_block),
        mask_mod=draw(st.sampled_from([causal, by_batch, prefix, nothing])),
        seq_lengths=(q_len, kv_len),
    )


@given(block_masks())
def test_walking_a_mask_is_spelling_it_out(mask: BlockMask) -> None:
    allowed = spelled_out(mask)
    assert torch.equal(walked(mask), allowed)
    assert 0 <= mask.sparsity() <= 100
    shape = (*mask.kv_num_blocks.shape[:2], *mask.seq_lengths)
    assert mask.shape == shape


@given(block_masks(), st.data())
def test_cropped_and_sliced_hand_made_masks_say_the_same(mask: BlockMask, data: Any) -> None:
    q_len, kv_len = (data.draw(st.integers(0, length)) for length in mask.seq_lengths)
    assert torch.equal(walked(mask._adjust(q_len, kv_len)), walked(mask)[..., :q_len, :kv_len])
    row = data.draw(st.integers(0, mask.kv_indices.shape[-2] - 1))
    start, part = row * mask.BLOCK_SIZE[0], mask[:, :, row]
    part.mask_mod = lambda b, h, q_idx, kv_idx: mask.mask_mod(b, h, q_idx + start, kv_idx)
    stop = start + part.seq_lengths[0]
    assert torch.equal(walked(part), walked(mask)[:, :, start:stop])


@given(block_masks())
def test_a_mask_seen_from_the_keys_has_the_same_blocks(mask: BlockMask) -> None:
    transposed = BlockMask.from_kv_blocks(
        mask.q_num_blocks,  # type: ignore[arg-type]
        mask.q_indices,  # type: ignore[arg-type]
        mask.full_q_num_blocks,
        mask.full_q_indices,
        BLOCK_SIZE=(mask.BLOCK_SIZE[1], mask.BLOCK_SIZE[0]),
        seq_lengths=(mask.seq_lengths[1], mask.seq_lengths[0]),
    )
    assert torch.equal(transposed.to_dense(), mask.to_dense().transpose(-2, -1))


# Masks of PyTorch's own, and whether a mask fits


def test_torchs_masks_become_ours_around_the_same_tensors() -> None:
    theirs = torch_flex.create_block_mask(
        prefix, 2, 2, 300, 200, compute_dq_write_order=True, device="cpu"
    )
    ours = BlockMask.from_torch(theirs)
    assert type(ours) is BlockMask
    assert ours.kv_indices is theirs.kv_indices
    assert ours.mask_mod is theirs.mask_mod
    assert_same_fields(ours, theirs)
    assert BlockMask.from_torch(ours) is ours


def test_torchs_slices_are_slices_here() -> None:
    whole = torch_flex.create_block_mask(prefix, 2, 2, 300, 200, device="cpu")
    part = BlockMask.from_torch(whole[:, :, 0])
    assert part.is_sliced
    assert part.seq_lengths == (128, 200)
    with pytest.raises(SlicedMaskError):
        check_fits(part, 2, 2, 128, 200, CPU)


@pytest.mark.parametrize("batch", [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_masks_of_one_or_equal_batches_and_heads_fit(batch: tuple[int, int]) -> None:
    check_fits(create_block_mask(causal, *batch, 30, 20), 2, 3, 30, 20, CPU)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3, 4, 30, 20, CPU), BlockMaskShapeError, r"B=3, as the query, or B=1, but has B=2"),
        ((1, 4, 30, 20, CPU), BlockMaskShapeError, r"B=1, .* but has B=2"),
        ((2, 8, 30, 20, CPU), BlockMaskShapeError, r"H=8, .* or H=1, but has H=4: .*B=2, H=8"),
        ((2, 4, 31, 20, CPU), BlockMaskShapeError, r"q_len=31 .*shape=\(2, 4, 30, 20\).*smaller"),
        ((2, 4, 30, 21, CPU), BlockMaskShapeError, r"kv_len=21.*smaller length: create a new"),
        ((2, 4, 29, 21, CPU), BlockMaskShapeError, r"smaller length: create a new"),
        ((2, 4, 29, 20, CPU), BlockMaskShapeError, r"larger length.*resize\(29, 20\)"),
        ((2, 4, 30, 20, META), DeviceError, r"same device but got meta and cpu.*to\('meta'\)"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(
    arguments: Any, error: type[QuireError], message: str
) -> None:
    mask = create_block_mask(causal, 2, 4, 30, 20)
    with pytest.raises(error, match=message) as caught:
        check_fits(mask, *arguments)
    assert isinstance(caught.value, ValueError)


def test_a_length_that_the_rows_do_not_reach_is_refused() -> None:
    part = create_block_mask(causal, 1, 1, 300, 300)[:, :, 0]
    part.mask_mod, part.seq_lengths = causal, (300, 300)
    with pytest.raises(
        BlockMaskShapeError, match=r"rows for q_len=300 queries, but has 1 rows of 128"
    ):
        check_fits(part, 1, 1, 300, 300, CPU)
    part.seq_lengths = (1, 300)  # one query of a row, as in decoding
    check_fits(part, 1, 1, 1, 300, CPU)


def test_a_mask_without_batch_and_head_does_not_fit() -> None:
    flat = BlockMask.from_kv_blocks(torch.tensor([1]), torch.tensor([[0]]))
    assert flat.shape == (128, 128)
    with pytest.raises(BlockMaskShapeError, match=r"\[B, H, rows, blocks\], but has \[1, 1\]"):
        check_fits(flat, 1, 1, 128, 128, CPU)


# Memory


def test_creation_never_holds_the_whole_mask() -> None:
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest = max(largest, result.untyped_storage().nbytes())
            return result

    with Watch():
        create_block_mask(documents(4000), 2, 2, 4000, 4000)
    assert 0 < largest <= 8 * tiles.TILE_ELEMENTS  # a tile of int64


def test_a_mask_for_any_lengths_keeps_its_lists() -> None:
    counts = torch.tensor([1, 0, 0]).int().view(1, 3, 1)
    nothing = torch.zeros(1, 3, 1, 1).int()
    full = torch.tensor([0, 1, 0]).int().view(1, 3, 1)
    lists = (counts, nothing, full, nothing)
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=NOOP_BLOCK_SIZE, mask_mod=causal)
    heads, rows = torch.arange(3).view(3, 1, 1), torch.arange(4)
    found = element_mod(mask)(torch.tensor(0), heads, rows.view(4, 1), rows)
    lower = torch.ones(4, 4).tril().bool()
    wanted = torch.stack([lower, torch.ones(4, 4).bool(), torch.zeros(4, 4).bool()])
    assert torch.equal(found.expand(3, 4, 4), wanted)
