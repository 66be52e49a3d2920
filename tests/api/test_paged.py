"""PagedAttention: as PyTorch's where that is right, and no slot reads the page of another."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.experimental._paged_attention import PagedAttention as TorchPagedAttention

import quire
from quire import BlockMask, PagedAttention, create_block_mask, flex_attention
from quire.errors import (
    ArgumentError,
    BlockMaskShapeError,
    DtypeError,
    KVCacheError,
    OutOfPages,
    PageError,
    ShapeError,
    SlicedMaskError,
    SlotError,
    UnreservedError,
)

H, D = 2, 8
BOTH = pytest.mark.parametrize("library", [TorchPagedAttention, PagedAttention])


@pytest.fixture(autouse=True)
def _eager_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def everything(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= 0


def nearer(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score - 0.1 * (h + 1) * kv_idx


def poisoned(paged: Any, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Caches in which whatever was never written is NaN."""
    cache = torch.full((1, H, paged.n_pages * paged.page_size, D), math.nan, dtype=dtype)
    return cache, cache.clone()


def tables(paged: Any) -> tuple[Any, ...]:
    """Return the whole state of a PagedAttention as a value that can be compared."""
    both = paged.page_table.tolist(), paged.physical_to_logical.tolist()
    return (*both, paged.capacity.tolist(), list(paged.empty_pages))


def scatter(paged: Any, lengths: list[int]) -> None:
    """Reserve page by page, slot after slot, so that no slot has two pages side by side."""
    for length in range(1, max(lengths, default=0) + paged.page_size, paged.page_size):
        for slot, most in enumerate(lengths):
            paged.reserve(tensor([slot]), tensor([min(length, most)]))


def fill(
    paged: Any, lengths: list[int], caches: tuple[Tensor, Tensor], slots: list[int] | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Assign random keys and values to every slot, and give them back."""
    sequences = []
    for slot, length in zip(slots or range(len(lengths)), lengths, strict=True):
        key, value = torch.randn(2, 1, H, length, D).to(caches[0].dtype).unbind(0)
        paged.assign(tensor([slot]), torch.arange(length)[None], key, value, *caches)
        sequences.append((key, value))
    return sequences


def dense(query: Tensor, pair: tuple[Tensor, Tensor], **options: Any) -> Tensor:
    """Attention of one sequence, in the plainest memory."""
    return flex_attention(query, *pair, enable_gqa=True, **options)


# --- as PyTorch's ---------------------------------------------------------------------------------

METHODS = [name for name in vars(TorchPagedAttention) if not name.startswith("__")]


@pytest.mark.parametrize("name", ["__init__", *METHODS])
def test_parameters_are_pytorchs_and_then_ours(name: str) -> None:
    theirs, ours = (
        list(inspect.signature(getattr(kind, name)).parameters.values())
        for kind in (TorchPagedAttention, PagedAttention)
    )
    for their, our in zip(theirs, ours, strict=False):
        assert (their.name, their.kind) == (our.name, our.kind)
        assert their.default == our.default or their.name == "device"
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])


def test_attributes_are_pytorchs() -> None:
    theirs, ours = (kind(5, 4, 3, device="cpu") for kind in (TorchPagedAttention, PagedAttention))
    assert vars(theirs).keys() == vars(ours).keys()
    assert tables(theirs) == tables(ours)
    for name, value in vars(theirs).items():
        assert type(getattr(ours, name)) is type(value)
        assert getattr(getattr(ours, name), "dtype", None) == getattr(value, "dtype", None)


def test_without_a_device_the_cpu_serves_where_there_is_no_other() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is another")
    assert PagedAttention(2, 4, 1).page_table.device.type == "cpu"


@settings(deadline=None, max_examples=60)
@given(steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=12))
def test_pages_are_handed_out_in_pytorchs_order(steps: list[tuple[int, int]]) -> None:
    theirs, ours = (kind(9, 4, 4, device="cpu") for kind in (TorchPagedAttention, PagedAttention))
    for slot, length in steps:
        errors = []
        for paged in (theirs, ours):
            try:
                if length == 0:
                    paged.erase(tensor([slot]))
                else:
                    paged.reserve(tensor([slot]), tensor([length]))
            except AssertionError as error:
                errors.append(error)
        assert len(errors) in (0, 2)
        assert torch.equal(theirs.page_table, ours.page_table)
        assert torch.equal(theirs.capacity, ours.capacity)
        assert theirs.empty_pages == ours.empty_pages
        ours.check_integrity()


@BOTH
@pytest.mark.parametrize("attend", [torch_flex.flex_attention, flex_attention])
@pytest.mark.parametrize("make", [torch_flex.create_block_mask, create_block_mask])
def test_a_program_written_for_pytorch(library: Any, attend: Any, make: Any) -> None:
    """Prefill of a batch in full pages, where PyTorch's class is right too."""
    torch.manual_seed(0)
    paged = library(n_pages=12, page_size=16, max_batch_size=3, device="cpu")
    scatter(paged, [64, 64, 64])
    caches = poisoned(paged)
    sequences = fill(paged, [64, 64, 64], caches)
    query = torch.randn(3, H, 64, D)
    logical = make(causal, 3, 1, 64, 64, device="cpu", BLOCK_SIZE=16)
    physical = paged.convert_logical_block_mask(logical)
    assert physical.kv_indices.shape == physical.full_kv_indices.shape == (3, 1, 4, 12)
    assert physical.seq_lengths == (64, 192)
    out = attend(query, *caches, paged.get_score_mod(nearer), physical)
    for b, pair in enumerate(sequences):
        expected = dense(query[b : b + 1], pair, score_mod=nearer, mask_mod=causal)
        torch.testing.assert_close(out[b : b + 1], expected)


def test_a_converted_mask_lists_pytorchs_blocks() -> None:
    theirs, ours = (kind(12, 4, 3, device="cpu") for kind in (TorchPagedAttention, PagedAttention))
    logical = create_block_mask(causal, 3, 2, 16, 16, "cpu", BLOCK_SIZE=(8, 4))
    masks = []
    for paged in (theirs, ours):
        scatter(paged, [16, 16, 16])
        masks.append(paged.convert_logical_block_mask(logical))
    for kind in ("kv", "full_kv"):
        counts, mine = (getattr(mask, f"{kind}_num_blocks") for mask in masks)
        assert torch.equal(counts, mine)
        listed = torch.arange(12) < counts.unsqueeze(-1)
        lists = [getattr(mask, f"{kind}_indices") for mask in masks]
        assert torch.equal(lists[0][listed], lists[1][listed])
        assert lists[0].dtype == lists[1].dtype
    assert torch.equal(masks[0].to_dense(), masks[1].to_dense())


# --- the errors of PyTorch's, by their kinds ------------------------------------------------------


def new_rows(**changed: Any) -> dict[str, Any]:
    """Arguments of `assign` for 2 slots and 3 positions, of which some are changed."""
    arguments: dict[str, Any] = {
        "batch_idx": tensor([0, 1]),
        "input_pos": torch.arange(3).expand(2, 3),
        "k_val": torch.ones(2, H, 3, D),
        "v_val": torch.ones(2, H, 3, D),
        "k_cache": torch.zeros(1, H, 32, D),
        "v_cache": torch.zeros(1, H, 32, D),
    }
    return arguments | changed


BAD_ROWS = {
    "requires grad": {"k_val": torch.ones(2, H, 3, D, requires_grad=True)},
    "batch": {"batch_idx": tensor([0])},
    "heads": {"k_val": torch.ones(2, H + 1, 3, D)},
    "length": {"input_pos": torch.arange(4).expand(2, 4)},
    "key dim": {"k_val": torch.ones(2, H, 3, D + 1)},
    "value dim": {"v_val": torch.ones(2, H, 3, D + 1)},
    "value heads": {"v_val": torch.ones(2, H + 1, 3, D)},
    "value batch": {"v_val": torch.ones(1, H, 3, D)},
    "key dtype": {"k_val": torch.ones(2, H, 3, D, dtype=torch.float16)},
    "value dtype": {"v_val": torch.ones(2, H, 3, D, dtype=torch.float16)},
    "beyond all pages": {"input_pos": tensor([[0, 1, 2], [0, 1, 99]])},
    "before the first": {"input_pos": tensor([[0, 1, 2], [0, 1, -1]])},
}


@BOTH
@pytest.mark.parametrize("changed", BAD_ROWS.values(), ids=BAD_ROWS)
def test_runtime_errors_of_assign(library: Any, changed: dict[str, Any]) -> None:
    paged = library(8, 4, 2, device="cpu")
    for slot in (0, 1):
        paged.reserve(tensor([slot]), tensor([3]))
    arguments = new_rows(**changed)
    with pytest.raises(RuntimeError) as caught:
        paged.assign(**arguments)
    if library is PagedAttention:
        assert isinstance(caught.value, quire.QuireError)
        assert not arguments["k_cache"].any() and not arguments["v_cache"].any()
        paged.assign(**new_rows())


@BOTH
def test_other_errors(library: Any) -> None:
    paged = library(4, 8, 2, device="cpu")
    with pytest.raises(RuntimeError, match="same column block size as page_size"):
        paged.convert_logical_block_mask(create_block_mask(causal, 1, 1, 16, 16, "cpu", 16))
    with pytest.raises(AssertionError, match="requested 5 pages but there are only 4 empty pages"):
        paged.reserve(tensor([0]), tensor([33]))
    with pytest.raises(IndexError):
        paged.reserve(tensor([2]), tensor([8]))
    assert tables(paged) == tables(library(4, 8, 2, device="cpu"))


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda p: p.reserve(-1, 4), SlotError, "batch_idx must be between 0 and 1, .* but is -1"),
        (lambda p: p.erase([0, 7]), SlotError, "2 slots, but is 7"),
        (lambda p: p.reserve([0, 1], [4, 4, 4]), ShapeError, "each of 2 slots, but has 3"),
        (lambda p: p.reserve(0, -4), ArgumentError, "seq_len must be at least 0, but one is -4"),
        (lambda p: p.reserve(0, 1.5), DtypeError, "seq_len must hold integers"),
        (lambda p: p.reserve([0, 1], [20, 16]), OutOfPages, "requested 7 pages .* only 6"),
        (lambda p: p.assign(**new_rows(batch_idx=tensor([0, -1]))), SlotError, "but is -1"),
        (
            lambda p: p.assign(**new_rows(input_pos=torch.zeros(2, 3))),
            DtypeError,
            "input_pos must hold integers",
        ),
        (
            lambda p: p.assign(**new_rows(v_val=torch.ones(2, H, 3, D, requires_grad=True))),
            KVCacheError,
            r"v_val must not require gradient.*v_val\.detach\(\)",
        ),
        (
            lambda p: p.assign(**new_rows(k_cache=torch.zeros(1, H, 31, D))),
            ShapeError,
            "8 pages of 4, but have .*31",
        ),
        (
            lambda p: p.assign(**new_rows(k_val=torch.ones(2, H, 3, D).half())),
            KVCacheError,
            "k_val must be float32 on cpu, as its cache, but is float16",
        ),
        (
            lambda p: p.assign(**new_rows(k_val=torch.ones(2, 3, 3, D))),
            ShapeError,
            "k_val and k_cache must have the same number of heads H, but have 3 and 2",
        ),
        (
            lambda p: p.assign(**new_rows()),
            UnreservedError,
            "below 0, the number of positions that slot 1 has reserved, but is 0",
        ),
        (
            lambda p: p.convert_logical_block_mask(logical(4, 16, B=2), tensor([0])),
            ShapeError,
            r"batch_idx must have shape \[2\], .* but has \[1\]",
        ),
        (
            lambda p: p.convert_logical_block_mask(logical(4, 16, B=2), kv_len=tensor([3])),
            ShapeError,
            r"kv_len must have shape \[2\], but has \[1\]",
        ),
        (
            lambda p: p.convert_logical_block_mask(logical(4, 16, B=3)),
            SlotError,
            "2 slots, but is 2",
        ),
        (
            lambda p: p.convert_logical_block_mask(logical(8, 16, size=8)),
            BlockMaskShapeError,
            "size=8 and size=4",
        ),
        (lambda p: p.get_mask_mod(None, batch_idx=tensor([2])), SlotError, "but is 2"),
        (lambda p: PagedAttention(4, 0, 1), ArgumentError, "page_size must be .* at least 1"),
        (lambda p: PagedAttention(-4, 1, 1), ArgumentError, "n_pages must be .* at least 0"),
    ],
)
def test_what_is_refused_changes_nothing(
    act: Callable[[PagedAttention], None], error: type[Exception], message: str
) -> None:
    paged = PagedAttention(8, 4, 2, "cpu")
    paged.reserve(0, 5)
    before = tables(paged)
    with pytest.raises(error, match=f"(?s){message}"):
        act(paged)
    assert tables(paged) == before
    paged.check_integrity()


def logical(q_len: int, kv_len: int, B: int | None = 1, size: int = 4) -> BlockMask:
    return create_block_mask(causal, B, 1, q_len, kv_len, "cpu", BLOCK_SIZE=size)


# --- wrong in PyTorch 2.13, right here ------------------------------------------------------------


def test_a_position_that_was_never_reserved() -> None:
    """PyTorch writes it into the last page, whoever owns that."""
    for library in (TorchPagedAttention, PagedAttention):
        paged = library(2, 4, 2, device="cpu")
        paged.reserve(tensor([0]), tensor([4]))
        paged.reserve(tensor([1]), tensor([4]))  # in page 1, the last one
        caches = poisoned(paged)
        fill(paged, [4, 4], caches)
        before = caches[0].clone()
        stray = (tensor([[4]]), *torch.ones(2, 1, H, 1, D), *caches)
        if library is TorchPagedAttention:
            paged.assign(tensor([0]), *stray)
            assert not torch.equal(caches[0][:, :, 4:], before[:, :, 4:])
        else:
            with pytest.raises(UnreservedError):
                paged.assign(tensor([0]), *stray)
            assert torch.equal(caches[0], before)


def test_an_erased_slot_forgets() -> None:
    """PyTorch's slot goes on reading the pages that it had."""
    for library in (TorchPagedAttention, PagedAttention):
        paged = library(4, 4, 2, device="cpu")
        paged.reserve(tensor([0]), tensor([8]))
        paged.erase(tensor([0]))
        paged.reserve(tensor([1]), tensor([8]))  # has the pages now
        seen = quire.create_mask(paged.get_mask_mod(None), 2, 1, 1, 16, "cpu")
        assert seen[1].sum() == 8
        assert seen[0].sum() == (8 if library is TorchPagedAttention else 0)


def test_erasing_one_slot_by_a_number() -> None:
    """PyTorch raises when the pages are back in the list, and puts them there again and again."""
    theirs, ours = (kind(4, 4, 2, device="cpu") for kind in (TorchPagedAttention, PagedAttention))
    for paged in (theirs, ours):
        paged.reserve(tensor(0), tensor(8))
    for _ in range(2):
        with pytest.raises(IndexError):
            theirs.erase(tensor(0))
        ours.erase(tensor(0))
    assert sorted(theirs.empty_pages) == [0, 0, 1, 1, 2, 3]
    assert sorted(ours.empty_pages) == [0, 1, 2, 3]
    ours.check_integrity()


def test_a_batch_of_some_slots() -> None:
    """PyTorch's mods look into rows 0 and 1, whichever slots the batch is made of."""
    torch.manual_seed(0)
    lengths, picked = [8, 8, 8], [2, 0]
    query = torch.randn(2, H, 8, D)
    blocks = create_block_mask(everything, 2, 1, 8, 8, "cpu", 4, separate_full_blocks=False)
    right = []
    for library in (TorchPagedAttention, PagedAttention):
        paged = library(8, 4, 3, device="cpu")
        scatter(paged, lengths)
        caches = poisoned(paged)
        sequences = fill(paged, lengths, caches)
        mask = paged.convert_logical_block_mask(blocks, tensor(picked))
        out = flex_attention(query, *caches, block_mask=mask)
        expected = [dense(query[b : b + 1], sequences[slot]) for b, slot in enumerate(picked)]
        right.append(torch.allclose(out, torch.cat(expected), atol=1e-5))
    assert right == [False, True]

    score_mod = paged.get_score_mod(nearer, batch_idx=tensor(picked))
    out = flex_attention(query, *caches, score_mod=score_mod)
    for b, slot in enumerate(picked):
        each = dense(query[b : b + 1], sequences[slot], score_mod=nearer)
        torch.testing.assert_close(out[b : b + 1], each)
    seen = quire.create_mask(paged.get_mask_mod(None, batch_idx=tensor(picked)), 2, 1, 1, 32, "cpu")
    assert torch.equal(seen[0, 0, 0].view(8, 4).all(-1), paged.physical_to_logical[2] >= 0)


def test_a_length_ends_full_blocks_too() -> None:
    """PyTorch applies kv_len where the mask_mod is asked, and it is not in a full block."""
    torch.manual_seed(0)
    query, kv_len = torch.randn(1, H, 1, D), tensor([6])
    blocks = create_block_mask(everything, 1, 1, 1, 8, "cpu", (1, 4))
    assert blocks.full_kv_num_blocks.tolist() == [[[2]]]
    for library in (TorchPagedAttention, PagedAttention):
        paged = library(4, 4, 1, device="cpu")
        paged.reserve(tensor([0]), tensor([6]))
        caches = poisoned(paged)
        (pair,) = fill(paged, [6], caches)
        mask = paged.convert_logical_block_mask(blocks, kv_len=kv_len)
        out = flex_attention(query, *caches, block_mask=mask)
        if library is TorchPagedAttention:
            assert out.isnan().all()  # it reads what was never written
        else:
            assert mask.full_kv_num_blocks.tolist() == [[[1]]]
            torch.testing.assert_close(out, dense(query, pair))


def test_blocks_without_a_page_do_not_exist() -> None:
    """PyTorch lists page -1 for them."""
    torch.manual_seed(0)
    query = torch.randn(2, H, 4, D)
    longest = create_block_mask(everything, 2, 1, 4, 16, "cpu", 4)
    for library in (TorchPagedAttention, PagedAttention):
        paged = library(5, 4, 2, device="cpu")
        scatter(paged, [8, 4])
        caches = poisoned(paged)
        sequences = fill(paged, [8, 4], caches)
        if library is TorchPagedAttention:
            theirs = paged.convert_logical_block_mask(longest)
            assert (theirs.full_kv_indices[0, 0, 0, :4] == -1).sum() == 2
            with pytest.raises(quire.QuireError, match="full_kv_indices must be between 0 and 4"):
                flex_attention(query, *caches, block_mask=theirs)
        else:
            mask = paged.convert_logical_block_mask(longest)
            assert mask.full_kv_num_blocks.flatten().tolist() == [2, 1]
            out = flex_attention(query, *caches, block_mask=mask)
            for b, pair in enumerate(sequences):
                torch.testing.assert_close(out[b : b + 1], dense(query[b : b + 1], pair))


def test_many_slots_at_once_all_or_nothing() -> None:
    slots, lengths = tensor([2, 0, 1]), tensor([9, 4, 1])
    with pytest.raises(RuntimeError, match="ambiguous"):
        TorchPagedAttention(8, 4, 3, device="cpu").reserve(slots, lengths)
    ours, one_by_one = PagedAttention(8, 4, 3, "cpu"), PagedAttention(8, 4, 3, "cpu")
    ours.reserve(slots, lengths)
    for slot, length in zip(slots, lengths, strict=True):
        one_by_one.reserve(slot, length)
    assert tables(ours) == tables(one_by_one)
    before = tables(ours)
    with pytest.raises(AssertionError, match="requested 4 pages but there are only 3"):
        ours.reserve(slots, tensor([13, 8, 12]))  # one, one and two more
    assert tables(ours) == before
    ours.reserve(slots, 8)
    assert ours.capacity.tolist() == [8, 8, 12]
    ours.reserve([0, 0], [12, 9])  # the same slot twice: as one after the other
    assert ours.capacity.tolist() == [12, 8, 12]
    ours.erase(tensor([2, 0, 2]))
    assert ours.capacity.tolist() == [0, 8, 0]
    ours.check_integrity()


def test_a_negative_slot() -> None:
    theirs, ours = (kind(4, 4, 2, device="cpu") for kind in (TorchPagedAttention, PagedAttention))
    theirs.reserve(tensor([-1]), tensor([4]))
    assert theirs.capacity.tolist() == [0, 4]
    for act in (ours.erase, lambda slot: ours.reserve(slot, tensor([4]))):
        with pytest.raises(SlotError):
            act(tensor([-1]))


def test_positions_that_a_mod_is_asked_about_exist() -> None:
    """PyTorch asks for logical position -1 and the like, which a captured tensor does not have."""
    weight = torch.rand(3)
    for library in (TorchPagedAttention, PagedAttention):
        paged = library(4, 4, 1, device="cpu")
        paged.reserve(tensor([0]), tensor([3]))
        mod = paged.get_mask_mod(lambda b, h, q, kv: weight[kv] >= 0, tensor([3]))
        if library is TorchPagedAttention:
            with pytest.raises(IndexError):
                torch_flex.create_mask(mod, 1, 1, 1, 16, "cpu")
        else:
            assert torch_flex.create_mask(mod, 1, 1, 1, 16, "cpu").sum() == 3
            assert quire.create_mask(mod, 1, 1, 1, 16, "cpu").sum() == 3


# --- masks that are converted ---------------------------------------------------------------------


def test_tables_and_lengths_are_read_at_every_call() -> None:
    torch.manual_seed(0)
    paged = PagedAttention(8, 4, 2, "cpu")
    paged.reserve([0, 1], [16, 8])
    caches = poisoned(paged)
    kv_len = tensor([5, 3])
    sequences = fill(paged, [16, 8], caches)
    blocks = create_block_mask(everything, 2, 1, 1, 16, "cpu", (1, 4))
    mask = paged.convert_logical_block_mask(blocks, kv_len=kv_len)
    query = torch.randn(2, H, 1, D)
    for _ in range(3):
        out = flex_attention(query, *caches, block_mask=mask)
        for b, pair in enumerate(sequences):
            end = int(kv_len[b])
            expected = dense(query[b : b + 1], tuple(x[:, :, :end] for x in pair))
            torch.testing.assert_close(out[b : b + 1], expected)
        kv_len += tensor([4, 2])
    mod = paged.get_mask_mod(None)
    assert quire.create_mask(mod, 2, 1, 1, 32, "cpu")[:, 0, 0].sum(-1).tolist() == [16, 8]
    paged.erase(0)
    paged.reserve(1, 20)
    assert quire.create_mask(mod, 2, 1, 1, 32, "cpu")[:, 0, 0].sum(-1).tolist() == [0, 20]


@pytest.mark.parametrize("separate", [True, False])
def test_a_mask_listed_by_hand_stays_what_it_says(separate: bool) -> None:
    """Its mask_mod knows nothing of the full blocks, of which one is cut short."""
    torch.manual_seed(0)
    partial = (tensor([[[1]]]), tensor([[[[1, 0, 0]]]]))
    full = (tensor([[[2]]]), tensor([[[[2, 0, 0]]]])) if separate else (None, None)
    blocks = BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=(4, 4), mask_mod=lambda b, h, q, kv: kv % 4 == 1
    )
    paged = PagedAttention(6, 4, 2, "cpu")
    scatter(paged, [12, 12])
    caches = poisoned(paged)
    sequences = fill(paged, [12, 10], caches)
    mask = paged.convert_logical_block_mask(blocks, tensor([1, 0]), tensor([10, 12]))
    out = flex_attention(torch.ones(2, H, 4, D), *caches, block_mask=mask)
    for b, (slot, length) in enumerate(((1, 10), (0, 12))):
        allowed = [0, 1, 2, 3, 5, 8, 9, 10, 11] if separate else [5]
        keys = [kv for kv in allowed if kv < length]
        expected = dense(torch.ones(1, H, 4, D), tuple(x[:, :, keys] for x in sequences[slot]))
        torch.testing.assert_close(out[b : b + 1], expected)


def test_one_mask_for_every_slot_of_a_batch() -> None:
    torch.manual_seed(0)
    paged = PagedAttention(12, 4, 4, "cpu")
    scatter(paged, [8, 8, 8, 8])
    caches = poisoned(paged)
    sequences = fill(paged, [8, 8, 8, 8], caches)
    mask = paged.convert_logical_block_mask(logical(8, 8), tensor([3, 1, 2]))
    assert mask.shape == (3, 1, 8, 48)
    query = torch.randn(3, H, 8, D)
    out = flex_attention(query, *caches, block_mask=mask)
    for b, slot in enumerate((3, 1, 2)):
        expected = dense(query[b : b + 1], sequences[slot], mask_mod=causal)
        torch.testing.assert_close(out[b : b + 1], expected)


def test_a_mask_longer_than_all_pages() -> None:
    paged = PagedAttention(3, 4, 1, "cpu")
    paged.reserve(0, 12)
    mask = paged.convert_logical_block_mask(logical(20, 20), kv_len=tensor([7]))
    assert mask.shape == (1, 1, 20, 12)
    assert mask.kv_indices.shape == (1, 1, 5, 3)
    element = quire.create_mask(paged.get_mask_mod(causal, tensor([7])), 1, 1, 20, 12, "cpu")
    assert element.sum(-1).flatten().tolist() == [min(q + 1, 7) for q in range(20)]


def test_a_slice_converts_and_refuses_to_be_used() -> None:
    paged = PagedAttention(4, 4, 1, "cpu")
    paged.reserve(0, 16)
    mask = paged.convert_logical_block_mask(logical(16, 16)[:, :, 2])
    assert mask.to_dense().sum() == 3
    cache = torch.zeros(1, H, 16, D)
    with pytest.raises(SlicedMaskError):
        flex_attention(torch.zeros(1, H, 4, D), cache, cache, block_mask=mask)


# --- whole sequences ------------------------------------------------------------------------------


def decoding_mask(kv_len: Tensor, q_len: int) -> Callable[..., Tensor]:
    """Causal, for queries that are the last ones of their sequence."""
    return lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + kv_len[b] - q_len


@pytest.mark.parametrize("page_size", [8, 16, 40, 64, 128, 256])
@pytest.mark.parametrize("q_len", [1, 3, 150])
@pytest.mark.parametrize("scattered", [False, True])
def test_decoding_and_prefill(page_size: int, q_len: int, scattered: bool) -> None:
    torch.manual_seed(0)
    lengths = [300, 151, 257]
    paged = PagedAttention(1024 // page_size + 4, page_size, 4, "cpu")
    paged.reserve(3, page_size)  # somebody else's
    if scattered:
        scatter(paged, lengths)
    else:
        paged.reserve([0, 1, 2], lengths)
    caches = poisoned(paged)
    sequences = fill(paged, lengths, caches)
    kv_len, query = tensor(lengths), torch.randn(3, 2 * H, q_len, D)
    blocks = create_block_mask(
        decoding_mask(kv_len, q_len),
        3,
        1,
        q_len,
        300,
        "cpu",
        BLOCK_SIZE=(min(q_len, 64), page_size),
    )
    mask = paged.convert_logical_block_mask(blocks, kv_len=kv_len)
    score_mod = paged.get_score_mod(nearer, kv_len)
    out = flex_attention(query, *caches, score_mod, mask, enable_gqa=True)
    for b, pair in enumerate(sequences):
        end = lengths[b] - q_len
        expected = dense(
            query[b : b + 1],
            pair,
            score_mod=nearer,
            mask_mod=lambda b, h, q_idx, kv_idx, end=end: kv_idx <= q_idx + end,
        )
        torch.testing.assert_close(out[b : b + 1], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    paged = PagedAttention(8, 16, 2, "cpu")
    scatter(paged, [50, 33])
    caches = poisoned(paged, dtype)
    sequences = fill(paged, [50, 33], caches)
    query, kv_len = torch.randn(2, H, 1, D).to(dtype), tensor([50, 33])
    blocks = create_block_mask(everything, 2, 1, 1, 64, "cpu", (1, 16))
    mask = paged.convert_logical_block_mask(blocks, kv_len=kv_len)
    out = flex_attention(query, *caches, block_mask=mask)
    for b, pair in enumerate(sequences):
        torch.testing.assert_close(out[b : b + 1], dense(query[b : b + 1], pair))


def test_a_conversation_token_by_token() -> None:
    """Prefill, then one token at a time, in pages that are reserved as they are needed."""
    torch.manual_seed(0)
    paged = PagedAttention(8, 4, 2, "cpu")
    caches = poisoned(paged)
    query, key, value = torch.randn(3, 2, H, 11, D).unbind(0)
    batch, kv_len, first = tensor([0, 1]), torch.zeros(2, dtype=torch.int64), 3
    expected = flex_attention(query, key, value, mask_mod=causal)
    blocks = create_block_mask(causal, None, None, 11, 11, "cpu", 4)
    for start, stop in [(0, first), *((t, t + 1) for t in range(first, 11))]:
        kv_len.fill_(stop)
        paged.reserve(batch, kv_len)
        new = torch.arange(start, stop).expand(2, -1)
        paged.assign(batch, new, key[:, :, start:stop], value[:, :, start:stop], *caches)
        step = paged.convert_logical_block_mask(blocks.for_queries(start, stop), batch, kv_len)
        out = flex_attention(query[:, :, start:stop], *caches, block_mask=step)
        torch.testing.assert_close(out, expected[:, :, start:stop])
    paged.check_integrity()


# --- at random ------------------------------------------------------------------------------------

N_PAGES, PAGE_SIZE, SLOTS = 7, 3, 3

_slots = st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=3)
_steps = st.one_of(
    st.tuples(st.just("reserve"), _slots, st.lists(st.integers(0, 12), min_size=3, max_size=3)),
    st.tuples(st.just("erase"), _slots, st.just([])),
    st.tuples(
        st.just("assign"),
        st.integers(0, SLOTS - 1).map(lambda slot: [slot]),
        st.lists(st.integers(0, 13), min_size=1, max_size=4, unique=True),
    ),
)


class Plain:
    """What a paged cache should be: for each slot a number of pages, and rows by position."""

    def __init__(self) -> None:
        self.pages = [0] * SLOTS
        self.rows: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in range(SLOTS)]

    def reserve(self, slots: list[int], lengths: list[int]) -> bool:
        grown = list(self.pages)
        for slot, length in zip(slots, lengths, strict=False):
            grown[slot] = max(grown[slot], -(-length // PAGE_SIZE))
        if sum(grown) <= N_PAGES:
            self.pages = grown
        return sum(grown) <= N_PAGES

    def erase(self, slots: list[int]) -> None:
        for slot in slots:
            self.pages[slot], self.rows[slot] = 0, {}

    def assign(self, slot: int, positions: list[int], key: Tensor, value: Tensor) -> bool:
        if any(position >= self.pages[slot] * PAGE_SIZE for position in positions):
            return False
        for s, position in enumerate(positions):
            self.rows[slot][position] = key[0, :, s], value[0, :, s]
        return True


def walk(steps: list[Any], paged: PagedAttention, caches: tuple[Tensor, Tensor]) -> Iterator[Plain]:
    """Take steps in both worlds; what the plain one refuses must be refused."""
    plain = Plain()
    for step, slots, numbers in steps:
        if step == "reserve":
            act = functools.partial(paged.reserve, tensor(slots), tensor(numbers[: len(slots)]))
            possible, refusal = plain.reserve(slots, numbers), OutOfPages
        elif step == "erase":
            plain.erase(slots)
            act = functools.partial(paged.erase, tensor(slots))
            possible, refusal = True, AssertionError
        else:
            new = torch.randn(2, 1, H, len(numbers), D)
            act = functools.partial(paged.assign, tensor(slots), tensor([numbers]), *new, *caches)
            possible, refusal = plain.assign(slots[0], numbers, *new), UnreservedError
        before = tables(paged), *(cache.nan_to_num(9.0) for cache in caches)
        if possible:
            act()
        else:
            with pytest.raises(refusal):
                act()
            assert before[0] == tables(paged)
            assert all(map(torch.equal, before[1:], (c.nan_to_num(9.0) for c in caches)))
        yield plain


@settings(deadline=None, max_examples=60)
@given(steps=st.lists(_steps, max_size=14))
def test_any_steps_lead_where_a_dictionary_leads(steps: list[Any]) -> None:
    paged = PagedAttention(N_PAGES, PAGE_SIZE, SLOTS, "cpu")
    caches, plain = poisoned(paged), Plain()
    for plain in walk(steps, paged, caches):
        paged.check_integrity()
        assert (paged.capacity // PAGE_SIZE).tolist() == plain.pages
    # Each slot reads exactly what it wrote; what it did not write is NaN, or somebody else's.
    written = torch.zeros(SLOTS, N_PAGES * PAGE_SIZE, dtype=torch.bool)
    for slot, rows in enumerate(plain.rows):
        written[slot, list(rows)] = True
    query = torch.randn(SLOTS, H, 2, D)
    mask = paged.get_mask_mod(lambda b, h, q_idx, kv_idx: written[b, kv_idx])
    out = flex_attention(query, *caches, mask_mod=mask)
    blocks = create_block_mask(
        lambda b, h, q_idx, kv_idx: written[b, kv_idx], SLOTS, 1, 2, 21, "cpu", (2, PAGE_SIZE)
    )
    by_blocks = flex_attention(query, *caches, block_mask=paged.convert_logical_block_mask(blocks))
    torch.testing.assert_close(by_blocks, out)
    for slot, rows in enumerate(plain.rows):
        if rows:
            pair = tuple(torch.stack(x, 1)[None] for x in zip(*rows.values(), strict=True))
            torch.testing.assert_close(out[slot : slot + 1], dense(query[slot : slot + 1], pair))
        else:
            assert not out[slot].any()


# --- integrity ------------------------------------------------------------------------------------


def _break(change: str) -> PagedAttention:
    paged = PagedAttention(4, 4, 2, "cpu")
    paged.reserve([0, 1], [8, 4])
    exec(change, {"paged": paged})
    return paged


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("paged.page_table[1, 0] = 0", "page 0 is in block 0 of slot 1 and is also in block 1"),
        ("paged.page_table[0, 2] = 3", "slot 0 has pages beyond its capacity of 8"),
        ("paged.page_table[0, 0] = -1", "page -1 is in block 0 of slot 0 and is not a page"),
        ("paged.page_table[0, 0] = 4", "page 4 is in block 0 of slot 0 and is not a page"),
        (
            "paged.physical_to_logical[0, 3] = 0",
            r"physical_to_logical\[0\] is not the inverse of page_table",
        ),
        ("paged.capacity[0] = 7", r"capacity\[0\] is 7, which is not that of whole pages"),
        ("paged.capacity[0] = -4", r"capacity\[0\] is -4, which is not that of whole pages"),
        ("paged.empty_pages.append(3)", "page 3 is in empty_pages and is also in empty_pages"),
        ("paged.empty_pages.append(0)", "page 0 is in block 1 of slot 0 .* also in empty_pages"),
        ("paged.empty_pages.clear()", r"pages \[3\] are neither empty nor in a slot"),
    ],
)
def test_a_contradiction_is_found(change: str, message: str) -> None:
    with pytest.raises(PageError, match=message):
        _break(change).check_integrity()
    _break("").check_integrity()


# --- torch.compile --------------------------------------------------------------------------------


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.filterwarnings("ignore::quire.OneGraphWarning")
def test_inside_of_a_compiled_model(fullgraph: bool) -> None:
    torch._dynamo.reset()
    paged = PagedAttention(4, 4, 2, "cpu")
    paged.reserve([0, 1], [3, 3])

    def step(batch_idx: Tensor, input_pos: Tensor, *rows: Tensor) -> Tensor:
        paged.assign(batch_idx, input_pos, rows[0] * 2, rows[1] * 2, *rows[2:])
        return rows[2] + 1

    arguments = new_rows(k_cache=torch.zeros(1, H, 16, D), v_cache=torch.zeros(1, H, 16, D))
    out = torch.compile(step, backend="eager", fullgraph=fullgraph)(*arguments.values())
    assert (out != 1).sum() == 6 * H * D
    assert arguments["v_cache"].sum() == 2 * 6 * H * D
    torch._dynamo.reset()
