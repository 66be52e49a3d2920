"""Counted operations are those that kernels do: the kernels themselves count here, too.

Kernels are compiled anew, with code that adds up the scores of each product while they compute.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import flop_counter

import quire
from quire import Dense, Paged, Ragged, mods, request
from quire.codegen.convention import CALL_PART, ENTRY, Form, KernelSpec
from quire.codegen.kernels.backward import _BackwardNest
from quire.codegen.kernels.items import Piece, QueryBlock, Share
from quire.codegen.kernels.panel_nest import PanelNest, PanelTile
from quire.codegen.kernels.pieces import Pieces
from quire.codegen.kernels.row_nest import RowNest
from quire.codegen.kernels.sections import KeyBlocks
from quire.codegen.kernels.visits import KeyBlock
from quire.codegen.llvm import jit
from quire.codegen.llvm.builder import Value
from quire.codegen.llvm.types import I64
from quire.codegen.phases.gradient_tiles import key_strips
from quire.memory import Memory, Queries
from quire.request import Call, Request, checked_call
from quire.results import Above, Wanted
from quire.runtime import launch as launcher
from quire.runtime import prepare, read_keys
from quire.runtime.backward import BackwardPlans
from quire.runtime.forward import ForwardPlan
from quire.runtime.launch import LoadedKernel
from quire.runtime.work import Flops, flops_of
from quire.support.torch_private import is_fake

COUNTER = 9  # of the 16 that a launch has; kernels use 0 and 8


class Counted(NamedTuple):
    """Scores that kernels computed: in the forward pass, and for each product of the backward."""

    forward: int
    backward: tuple[int, int, int, int, int]


# --- kernels that count


def add(nest: Any, place: int, amount: Value) -> None:
    """Add to a counter of the launch."""
    pointer = nest.f.offset(nest.arg["counters"], COUNTER + place, I64)
    nest.f.emit(
        f"atomicrmw add ptr {pointer.text}, i64 {amount.text} monotonic", I64, pointer, amount
    )


def attend_panel(self: PanelNest, at: PanelTile, careful: Value) -> None:
    queries = self.f.minimum(at.queries.q_count - at.q, self.tile.width)
    add(self, 0, (at.range.end - at.range.first) * queries)
    _ATTEND_PANEL(self, at, careful)


def attend_blocks(self: RowNest, piece: Piece, blocks: KeyBlocks, pieces: Pieces) -> None:
    add(self, 0, (blocks.end - blocks.begin) * self.count(piece))
    _ATTEND_BLOCKS(self, piece, blocks, pieces)


def compute_panels(self: Any, share: Share, queries: QueryBlock, block: KeyBlock) -> None:
    self.q_count = queries.q_count
    _COMPUTE_PANELS(self, share, queries, block)


def multiply(self: Any, name: str, first: Value, count: Value, q: Value, into: Value) -> None:
    add(self, 0 if name == "key" else 1, count * self.f.minimum(self.q_count - q, self.tile.width))
    _MULTIPLY(self, name, first, count, q, into)


def add_to_queries(self: Any, first: Value, count: Value, q: Value, slopes: Value) -> None:
    add(self, 2, count * self.f.minimum(self.q_count - q, self.tile.width))
    _ADD_TO_QUERIES(self, first, count, q, slopes)


def add_to_keys(self: Any, share: Share, queries: QueryBlock, block: KeyBlock) -> None:
    _ADD_TO_KEYS(self, share, queries, block)
    f, ranges = self.f, self.scratch["query_ranges"]
    for key, strip in key_strips(f, self.tile, block.begin, block.end):
        first, end = (f.load(I64, ranges, key * 2 + side) for side in (0, 1))
        keys = f.minimum(block.end - key, len(strip))
        add(self, 3, f.maximum(f.minimum(end, queries.q_count) - first, 0) * keys)


_ATTEND_PANEL, _ATTEND_BLOCKS = PanelNest.attend_panel, RowNest.attend_blocks
_MULTIPLY, _ADD_TO_QUERIES = _BackwardNest._multiply, _BackwardNest._add_to_queries
_COMPUTE_PANELS, _ADD_TO_KEYS = _BackwardNest._compute_panels, _BackwardNest._add_to_keys


@functools.cache
def counting_kernel(form: Form, spec: KernelSpec) -> LoadedKernel:
    text = prepare._WRITERS[form](spec).text
    code = jit.load(jit.compile_object(text, spec.target), [ENTRY])
    return LoadedKernel(form, spec, spec.tile, code, code.address(ENTRY))


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the kernels of all launches so far have counted."""
    monkeypatch.setattr(PanelNest, "attend_panel", attend_panel)
    monkeypatch.setattr(RowNest, "attend_blocks", attend_blocks)
    monkeypatch.setattr(_BackwardNest, "_compute_panels", compute_panels)
    monkeypatch.setattr(_BackwardNest, "_multiply", multiply)
    monkeypatch.setattr(_BackwardNest, "_add_to_queries", add_to_queries)
    monkeypatch.setattr(_BackwardNest, "_add_to_keys", add_to_keys)
    monkeypatch.setattr(prepare, "kernel_of", counting_kernel)
    totals = [0] * 4

    def counting(run: Callable[..., None]) -> Callable[..., None]:
        def launch(address: int, record: int, threads: int, *others: Any) -> None:
            run(address, record, threads, *others)
            field = record + 8 * CALL_PART.index("counters")
            start = ctypes.c_int64.from_address(field).value + 8 * COUNTER
            for place, found in enumerate((ctypes.c_int64 * 4).from_address(start)):
                totals[place] += found

        return launch

    for name in ("launch", "launch_stoppable"):
        monkeypatch.setattr(launcher, name, counting(getattr(launcher, name)))
    return totals


def counted(call: Call, counters: list[int]) -> Counted:
    """Compute a call forward and backward, and return what the kernels multiplied."""
    counters[:] = [0] * 4
    result = ForwardPlan.of(call, True).run(call)
    assert result is not None and result.lse is not None
    forward = counters[0]
    counters[:] = [0] * 4
    mask = call.problem.block_mask
    blocks = None if mask is None else mask.rows(*call.placed.lengths)
    wanted = Wanted.of(True, True, True, call.captures)
    above = Above(result.out, result.lse, torch.randn_like(result.out), None)
    with torch.no_grad():
        assert BackwardPlans().run(call.problem, call.placed, blocks, wanted, above) is not None
    scores, slopes, queries, keys = counters
    return Counted(forward, (scores, slopes, queries, keys, keys))


def in_flops(call: Call, found: Counted) -> Flops:
    dims = call.placed.query.shape[3], call.placed.value.shape[3]
    widths = (dims[0], dims[1], dims[0], dims[0], dims[1])
    backward = sum(2 * count * width for count, width in zip(found.backward, widths, strict=True))
    return Flops(2 * found.forward * sum(dims), backward, 0)


# --- what is counted is what is computed

OWNER = torch.arange(5000) // 230
WINDOWS = torch.tensor([10, 200, 500, 50])
MASKS: dict[str, Callable[..., Any]] = {
    "causal": mods.causal,
    "window": mods.sliding_window(100),
    "documents": lambda b, h, i, j: (OWNER[i] == OWNER[j]) & (i >= j),
    "windows of heads": lambda b, h, i, j: (i - j).abs() < WINDOWS[h],
    "lengths of batches": lambda b, h, i, j: j < WINDOWS[b],
    "far": lambda b, h, i, j: (i - j).abs() > 300,
    "not bounded": lambda b, h, i, j: torch.pow(i, j) % 5 == 0,
    "nothing": lambda b, h, i, j: j < 0,
}


def call_of(query: Tensor, memory: Memory, *masks: Any, q_start: int | None = None) -> Call:
    return checked_call(Request(query, memory, Queries(q_start), masks=masks))


def dense(q_len: int, kv_len: int) -> tuple[Tensor, Dense]:
    memory = Dense(torch.randn(3, 2, kv_len, 32), torch.randn(3, 2, kv_len, 16))
    return torch.randn(3, 4, q_len, 32), memory


def ragged(*lengths: int) -> tuple[Tensor, Ragged]:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    rows = int(offsets[-1])
    return torch.randn(rows, 4, 32), Ragged(*torch.randn(2, rows, 2, 32), offsets)


def paged(q_len: int, lengths: tuple[int, ...] = (3000, 2100, 1500, 1100)) -> tuple[Tensor, Paged]:
    """Sequences over pages of 16 keys; the first 1024 or 2048 keys are in the same pages."""
    own = 128 + torch.arange(4 * 60).view(4, 60)
    table = torch.cat([torch.arange(128).expand(4, 128), own], 1).int()
    pages = torch.randn(2, 128 + own.numel(), 2, 16, 32)
    return torch.randn(4, 4, q_len, 32), Paged(*pages, table, lengths)


def check(call: Call, counters: list[int], within: float = 0.1) -> None:
    """The forward pass is counted exactly; the backward pass fills up strips of keys."""
    said, done = flops_of(call), in_flops(call, counted(call, counters))
    assert said.forward == done.forward
    assert abs(said.backward - done.backward) <= within * done.backward


SHAPES = [(700, 700), (130, 700), (37, 900), (64, 64), (3, 2500), (1, 3000)]


@pytest.mark.every_width
@pytest.mark.parametrize("name", MASKS)
def test_dense(name: str, counters: list[int]) -> None:
    for shape in SHAPES:
        check(call_of(*dense(*shape), MASKS[name]), counters, within=0.15)


def test_dense_without_a_mask(counters: list[int]) -> None:
    for shape in SHAPES:
        call = call_of(*dense(*shape))
        check(call, counters, within=0.0)
        assert flops_of(call).forward == flops_of(call).unmasked


@pytest.mark.parametrize("name", [name for name in MASKS if name != "lengths of batches"])
def test_ragged(name: str, counters: list[int]) -> None:
    check(call_of(*ragged(5, 0, 395, 3, 697), MASKS[name]), counters)


@pytest.mark.parametrize("q_len", [1, 3, 70])
@pytest.mark.parametrize("name", MASKS)
def test_pages_that_sequences_share(name: str, q_len: int, counters: list[int]) -> None:
    check(call_of(*paged(q_len), MASKS[name]), counters)


@pytest.mark.parametrize("size", [128, (64, 128), (48, 80), (256, 32)])
@pytest.mark.parametrize("name", MASKS)
def test_block_masks(name: str, size: int | tuple[int, int], counters: list[int]) -> None:
    """A tile of the kernel may touch several blocks, and there may be another mask."""
    batches, heads = 3 if "batches" in name else None, 4 if "heads" in name else None
    for q_len, kv_len in ((700, 700), (130, 300)):
        query, memory = dense(q_len, kv_len)
        mask = quire.create_block_mask(MASKS[name], batches, heads, q_len, kv_len, "cpu", size)
        check(call_of(query, memory, mask, q_start=0), counters)
        check(call_of(query, memory, mods.sliding_window(150), mask, q_start=0), counters)


@pytest.mark.parametrize("start", [1, 128, 999])
@pytest.mark.parametrize("size", [128, (64, 48)])
def test_block_masks_over_keys_that_begin_later(
    start: int, size: int | tuple[int, int], counters: list[int]
) -> None:
    query, memory = dense(300, 700)
    mask = quire.create_block_mask(MASKS["window"], None, None, 300, 700, "cpu", size)
    check(call_of(query, Dense(memory.key, memory.value, start=start), mask), counters)


@pytest.mark.parametrize("size", [128, (48, 80)])
@pytest.mark.parametrize("name", ["window", "windows of heads"])
def test_block_masks_over_sequences(
    name: str, size: int | tuple[int, int], counters: list[int]
) -> None:
    heads = 4 if "heads" in name else None
    mask = quire.create_block_mask(MASKS[name], None, heads, 700, 3000, "cpu", size)
    check(call_of(*ragged(5, 0, 395, 697), mask), counters)
    check(call_of(*paged(70), mask), counters)
    check(call_of(*paged(1), mask), counters, within=1.0)  # few keys, which fill up strips


@pytest.mark.parametrize("q_block", [1, 8, 16, 64, 128])
def test_what_is_listed_is_all_that_is_computed(q_block: int, counters: list[int]) -> None:
    """Each block of queries chooses 3 of 128 blocks of 16 keys for each sequence and key head."""
    for q_len in (1, 130):
        rows, (query, memory) = -(-q_len // q_block), paged(q_len, (2048,) * 4)
        chosen = torch.rand(4, 2, rows, 128).argsort(-1)[..., :3].sort(-1).values.int()
        lists = (x.repeat_interleave(2, 1) for x in (torch.full_like(chosen[..., 0], 3), chosen))
        nothing = torch.zeros(4, 4, rows, dtype=torch.int32), torch.empty(4, 4, rows, 0).int()
        mask = quire.BlockMask.from_kv_blocks(
            *nothing, *lists, BLOCK_SIZE=(q_block, 16), seq_lengths=(q_len, 2048)
        )
        call = call_of(query, memory, mask)
        counters[:] = [0] * 4
        assert ForwardPlan.of(call, False).run(call) is not None
        assert counters[0] == 4 * 4 * q_len * 3 * 16


def test_a_block_mask_and_few_queries(counters: list[int]) -> None:
    query, memory = dense(3, 1000)
    mask = quire.create_block_mask(MASKS["documents"], None, None, 1000, 1000, "cpu")
    check(call_of(query, memory, mask.for_queries(900, 903), q_start=0), counters)


def test_lists_of_one_head_and_a_mask_that_tells_heads_apart(counters: list[int]) -> None:
    query, memory = dense(700, 700)
    mask = quire.create_block_mask(mods.causal, None, None, 700, 700, "cpu")
    mask.mask_mod = lambda b, h, i, j: (i >= j) & (i - j < WINDOWS[h] + b)
    check(call_of(query, memory, mask), counters)


def test_scattered_blocks_that_are_gathered(counters: list[int]) -> None:
    cells = torch.zeros(2, 1, 4, 64, dtype=torch.int32)
    for b in range(2):
        cells[b, ..., b::4] = 1
    num = cells.sum(-1, dtype=torch.int32)
    order = cells.sort(dim=-1, descending=True, stable=True).indices.int()
    mask = quire.BlockMask.from_kv_blocks(num, order, BLOCK_SIZE=(64, 16))
    query, memory = torch.randn(2, 4, 256, 32), Dense(*torch.randn(2, 1, 2, 1024, 32))
    call = call_of(query, memory, mask, q_start=0)
    check(call, counters)
    assert flops_of(call).backward > 4 * flops_of(call).forward  # which is not gathered


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_and_positions(dtype: torch.dtype, counters: list[int]) -> None:
    query, memory = dense(300, 700)
    key, value = memory.key.to(dtype), memory.value.to(dtype)
    check(call_of(query.to(dtype), Dense(key, value, start=999), MASKS["window"]), counters)


# --- what stands for more


@pytest.mark.parametrize("name", [name for name in MASKS if name != "nothing"])
def test_some_tiles_stand_for_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.randn(4, 4, 2048, 8)
    mask = quire.create_block_mask(MASKS[name], 4, 4, 2048, 2048, "cpu", 64)
    calls = (
        call_of(query, Dense(query, query), MASKS[name]),
        call_of(query, Dense(query, query), mask),
    )
    exact = [flops_of(call) for call in calls]
    monkeypatch.setattr(read_keys, "MOST_SPANS", 200)
    monkeypatch.setattr(read_keys, "MOST_SPLIT", 150)
    monkeypatch.setattr(read_keys, "MOST_ELEMENTS", 300 * 64 * 128)
    for call, expected in zip(calls, exact, strict=True):
        assert flops_of(call).forward == pytest.approx(expected.forward, rel=0.1)


def test_a_million_tokens() -> None:
    length = 2**20
    query = torch.zeros(1).expand(1, 8, length, 64)
    said = flops_of(call_of(query, Dense(query, query), mods.causal))
    pairs = length * (length + 1) // 2
    assert said.forward == pytest.approx(2 * 128 * 8 * pairs, rel=1e-3)
    assert said.backward * 2 == said.forward * 5


# --- as PyTorch counts


def test_without_a_mask_it_counts_as_pytorch() -> None:
    query, memory = dense(70, 90)
    key, value = memory.key, memory.value
    said = flops_of(call_of(query, memory))
    shapes = query.shape, key.shape, value.shape
    assert said.forward == flop_counter.sdpa_flop_count(*shapes)
    out = (*query.shape[:3], value.shape[3])
    assert said.backward == flop_counter.sdpa_backward_flop_count(out, *shapes)


def test_without_values_what_cannot_be_known_counts() -> None:
    known, unknown = mods.sliding_window(100), MASKS["documents"]
    expected = flops_of(call_of(*dense(700, 700), known))
    with FakeTensorMode() as mode:
        query, memory = dense(700, 700)
        assert is_fake(query)
        owner = mode.from_tensor(OWNER)
        masks = known, lambda b, h, i, j: owner[i] == owner[j]
        calls = [request.call_of(Request(query, memory, masks=(mask,))) for mask in masks]
        assert flops_of(calls[0]) == expected
        assert flops_of(calls[1]).forward == expected.unmasked
    real = flops_of(call_of(*dense(700, 700), unknown))
    assert real.forward < real.unmasked / 3


def test_a_mask_that_cannot_be_traced_counts_in_full() -> None:
    with pytest.warns(quire.EagerModWarning):
        call = call_of(*dense(70, 70), lambda b, h, i, j: torch.atan((i - j).float()) >= 0)
    assert flops_of(call).forward == flops_of(call).unmasked


def test_its_own_operations_are_not_seen() -> None:
    call = call_of(*dense(700, 700), MASKS["documents"])
    with flop_counter.FlopCounterMode(display=False) as seen:
        flops_of(call)
    assert seen.get_total_flops() == 0


@pytest.mark.parametrize(
    ("flops", "forward", "backward"),
    [
        (Flops(0, 0, 0), "0 FLOP", "0 FLOP"),
        (Flops(512, 1280, 1024), "512 FLOP (50.0 % of all scores)", "1.28 kFLOP"),
        (Flops(10**9, 25 * 10**8, 10**9), "1.00 GFLOP (100.0 % of all scores)", "2.50 GFLOP"),
        (Flops(999_999, 123_400, 10**9), "1.00 MFLOP (0.1 % of all scores)", "123 kFLOP"),
    ],
)
def test_words(flops: Flops, forward: str, backward: str) -> None:
    assert str(flops) == f"forward {forward}, backward {backward}"


def test_nothing_to_compute() -> None:
    assert flops_of(call_of(*dense(0, 20), mods.causal)) == (0, 0, 0)
    assert flops_of(call_of(*ragged(0, 0), mods.causal)) == (0, 0, 0)


def test_the_name_of_a_call() -> None:
    query, memory = dense(128, 128)
    mask = quire.create_block_mask(mods.causal, None, None, 128, 128, "cpu")

    def bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + h

    assert Request(query, memory).name == "attention"
    assert Request(query, memory, score_mod=bias, masks=(mask,)).name == "attention(bias, causal)"
    assert call_of(query, memory, mods.causal, mask).request.name == "attention(causal)"
