"""The derivative in a direction on compiled kernels: results and their tangents from one launch.

The tangent kernel is the forward kernel with more sums (`codegen/kernels/tangent.py`), and its
results have the same bits. So a call in forward mode needs no forward pass, unless the decode
kernel computes some of its sequences, or its blocks are gathered.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from quire.block_mask import BlockRows
from quire.codegen.convention import TANGENTS, TANGENTS_PART
from quire.codegen.llvm.target import Target
from quire.config import config
from quire.ir.differentiate import score_tangent
from quire.ir.graph import Node
from quire.memory import One, Placed
from quire.memory.tables import Sequences
from quire.request import Call, Problem
from quire.results import Above, Moved, Result, Tangents
from quire.runtime.blocks import NO_LISTS, TileLists, tile_lists
from quire.runtime.forward import ResultLayout, fill_holes, heads_of_item, queries_of_item
from quire.runtime.gather import gather
from quire.runtime.launch import Launcher
from quire.runtime.mods import ModGraphs, graphs_of
from quire.runtime.prepare import make_launcher, memory_strides, records_of, row_strides
from quire.support.torch_private import has_memory, is_zero_tensor


def can(problem: Problem) -> bool:
    """Return whether the kernel computes tangents: those of a softmax without a prob_mod."""
    return problem.weighting == "softmax" and problem.prob_mod is None


def moved(call: Call, blocks: BlockRows | None, along: Tangents) -> Moved | None:
    """Return the results of a call and their tangents; None if one launch cannot give both."""
    request, placed, problem = call.request, call.placed, call.problem
    if request.aux.key_mass or config().check_rows or not can(problem):
        return None
    if blocks is not None and not request.aux.argmax and gather(problem, placed)[1] is not placed:
        return None
    moving = _Moving.of(problem, placed, request.sink, along)
    return moving and moving.launched(blocks, ResultLayout.of(call, learns=True).make())


def tangent(
    problem: Problem, placed: Placed, blocks: BlockRows | None, above: Above, along: Tangents
) -> Result | None:
    """Return the tangents of out and lse; None if the eager backend has to compute them.

    That is so for numbers of 8 bits, numbers that are not finite, and an index out of range.
    """
    moving = _Moving.of(problem, placed, above.sink, along)
    results = Result(torch.empty_like(above.out), torch.empty_like(above.lse))
    found = moving and moving.launched(blocks, results)
    return found and found.tangents


class _Moving(NamedTuple):
    """A problem on operands that move: `tangents` has those of query, key, value and sink.

    The score_mod also captures the tangents of what it captures; `captured` says which have one.
    """

    problem: Problem
    placed: Placed
    sink: Tensor | None
    tangents: dict[str, Tensor]
    captured: tuple[bool, ...]

    @staticmethod
    def of(
        problem: Problem, placed: Placed, sink: Tensor | None, along: Tangents
    ) -> _Moving | None:
        """Return all that moves; None if something is not in memory as the kernel reads it."""
        placed = placed.on(*(x.resolve_neg() for x in placed.operands))
        if sink is not None:
            sink = sink.to(placed.dtype).contiguous()
        names, operands = ("query", "key", "value", "sink"), (*placed.operands, sink)
        pairs = map(_like, operands, along[:4])
        tangents = {name: x for name, x in zip(names, pairs, strict=True) if x is not None}
        mod = problem.score_mod
        captured: tuple[bool, ...] = ()
        if mod is not None:
            own = list(map(_like, mod.captures, along.captures))  # those of masks follow
            captured = tuple(x is not None for x in own)
            loaded = (*mod.captures, *(x for x in own if x is not None))
            problem = problem._replace(score_mod=replace(mod, captures=loaded))
        tensors = (*placed.operands, *tangents.values(), *problem.captures)
        wide = all(x.dtype.itemsize > 1 for x in placed.operands)
        readable = wide and all(map(has_memory, tensors))
        return _Moving(problem, placed, sink, tangents, captured) if readable else None

    def launched(self, blocks: BlockRows | None, results: Result) -> Moved | None:
        """Fill in the results, and return them with their tangents; None for a wrong index."""
        placed, tangents = self.placed, _new_tangents(results, self.placed)
        if tangents.out.shape[:3].numel() == 0:
            return Moved(results, tangents)
        plan = _Plan.of(self, blocks, results)
        odd = torch.zeros(1, dtype=torch.int64, device="cpu")
        fields = self._record(plan, tangents) | {"odd": odd.data_ptr()}
        plan.launcher.terms.check_tangents(fields)
        wrong = plan.launcher.launch(
            placed,
            records_of(plan.launcher, placed, placed.rows),
            results,
            plan.captures,
            sink=self.sink,
            lists=plan.lists,
            more=TANGENTS_PART.pack(fields),
        )
        if wrong:
            return None
        if isinstance(placed.rows, Sequences) and placed.content is None:
            fill_holes(results, placed.rows, "softmax")
        return Moved(results, None if odd.item() else tangents)

    def score_tangent(self, graphs: ModGraphs) -> Node | None:
        """Return the tangent of a score after the score_mod, as a graph; None for 0."""
        moves = not self.tangents.keys().isdisjoint(("query", "key"))
        if graphs.score is None:
            return Node("input", (), self.placed.dtype, "tangent") if moves else None
        return score_tangent(graphs.score, moves, self.captured)

    def _record(self, plan: _Plan, results: Result) -> dict[str, int | float]:
        """Return the part of the kernel's record that is about tangents."""
        unused = () if plan.moves else ("query", "key")  # a score_mod need not read the score
        every = {name: x for name, x in self.tangents.items() if name not in unused}
        fields: dict[str, int | float] = dict.fromkeys(TANGENTS, 0)
        fields["moves"] = int(plan.moves)
        for name, tensor in (every | results.by_query).items():
            field = f"{name}_tangent"
            fields[field] = tensor.data_ptr()
            if name in ("key", "value"):
                paged = self.placed.page_table is not None
                fields |= memory_strides(field, tensor, paged=paged)
            elif name in ("query", "out"):
                fields |= row_strides(field, tensor)
        return fields


def _like(tensor: Tensor | None, tangent: Tensor | None) -> Tensor | None:
    """Return a tangent in the dtype of its tensor; None if it is 0.

    An empty tensor has no address, and torch has tensors without memory that stand for zeros.
    """
    if tensor is None or tangent is None or tangent.numel() == 0 or is_zero_tensor(tangent):
        return None
    tangent = tangent.to(tensor.dtype).resolve_neg()
    return tangent.contiguous() if tangent.dim() == 1 else tangent


class _Plan(NamedTuple):
    """What a launch needs, except operands and results."""

    launcher: Launcher
    lists: TileLists
    captures: tuple[Tensor, ...]
    moves: bool  # whether scores have a tangent

    @staticmethod
    def of(moving: _Moving, blocks: BlockRows | None, results: Result) -> _Plan:
        """Return the plan for results with the layout of these."""
        problem, placed, lists = moving.problem, moving.placed, NO_LISTS
        rows = placed.rows
        block_q = queries_of_item("tangent", placed, rows, problem.block_mask)
        if blocks is not None:
            lists = tile_lists(blocks, block_q, Target.host().block_kv, placed.rows.kv_origin)
        graphs, loaded = graphs_of(problem, placed.dtype, placed.end, lists.mixed, rows)
        graphs = graphs._replace(tangent=moving.score_tangent(graphs))
        launcher = make_launcher(
            "tangent",
            placed,
            results,
            graphs,
            loaded,
            scale=problem.scale,
            block_q=block_q,
            lists=lists,
            item_heads=heads_of_item("tangent", placed, rows, block_q),
        )
        return _Plan(launcher, lists, loaded, graphs.tangent is not None)


def _new_tangents(results: Result, placed: Placed) -> Result:
    """Return new tensors like out and lse; rows of no sequence have the tangent 0."""
    new = torch.empty_like if isinstance(placed.rows, One) else torch.zeros_like
    assert results.lse is not None, "tangents come with lse"
    return Result(new(results.out), new(results.lse))
