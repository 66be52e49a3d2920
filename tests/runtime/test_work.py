"""Counted operations are those that kernels do: the kernels themselves count here, too.

Kernels are compiled anew, with code that adds up the scores of each product while they compute.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import flop_counter

import quire
from quire import Dense, Paged, Ragged, mods
from quire.codegen.convention import CALL_PART, ENTRY, Form, KernelSpec
from quire.codegen.kernels.backward import _BackwardNest
from quire.codegen.kernels.items import Piece, QueryBlock, Share
from quire.codegen.kernels.panel_nest import PanelNest, PanelTile
from quire.codegen.kernels.row_nest import RowNest
from quire.codegen.kernels.visits import KeyBlock
from quire.codegen.llvm import jit
from quire.codegen.llvm.builder import Value
from quire.codegen.llvm.types import I64
from quire.codegen.phases.gradient_tiles import key_strips
from quire.memory import Memory, Queries
from quire.request import Call, Request, checked_call
from quire.results import Above, Wanted
from quire.runtime import launcher, prepare, read_keys
from quire.runtime.backward import BackwardPlans
from quire.runtime.forward import ForwardPlan
from quire.runtime.launcher import Kernel
from quire.runtime.work import Flops, flops_of

COUNTER = 9  # of the 16 that a launch has; kernels use 0 and 8


class Counted(NamedTuple):
    """Scores that kernels multiplied: keys by queries, and in the backward pass for each product."""

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


def attend_block(self: RowNest, piece: Piece, block: KeyBlock) -> None:
    add(self, 0, (block.end - block.begin) * self.count(piece))
    _ATTEND_BLOCK(self, piece, block)


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


_ATTEND_PANEL, _ATTEND_BLOCK = PanelNest.attend_panel, RowNest.attend_block
_MULTIPLY, _ADD_TO_QUERIES = _BackwardNest._multiply, _BackwardNest._add_to_queries
_COMPUTE_PANELS, _ADD_TO_KEYS = _BackwardNest._compute_panels, _BackwardNest._add_to_keys


@functools.cache
def counting_kernel(form: Form, spec: KernelSpec) -> Kernel:
    text = prepare._WRITERS[form](spec).text
    code = jit.load(jit.compile_object(text, spec.target), [ENTRY])
    return Kernel(form, spec, spec.tile, code, code.address(ENTRY))


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What the kernels of all launches so far have counted."""
    monkeypatch.setattr(PanelNest, "attend_panel", attend_panel)
    monkeypatch.setattr(RowNest, "attend_block", attend_block)
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
    yield totals


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
