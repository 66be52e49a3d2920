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
from quire.ir.trace import Traced
from quire.memory import One, Placed
from quire.memory.tables import Sequences
from quire.request import Call, Problem
from quire.results import Above, Result, Tangents
from quire.runtime.blocks import NO_LISTS, TileLists, gather, tile_lists
from quire.runtime.forward import ResultLayout, fill_holes
from quire.runtime.launch import Launcher
from quire.runtime.mods import ORIGIN, ModGraphs, graphs_of
from quire.runtime.prepare import (
    by_form,
    heads_of_item,
    make_launcher,
    queries_of_item,
    memory_strides,
    records_of,
    row_strides,
)
from quire.support.torch_private import has_memory, is_zero_tensor


class Moved(NamedTuple):
    """The results of a call, and the tangents of out and lse; None if one is not finite."""

    results: Result
    tangents: Result | None


def moved(call: Call, blocks: BlockRows | None, along: Tangents) -> Moved | None:
    """Return the results of a call and their tangents; None if one launch cannot give both."""
    request, placed, problem, _ = call
    if request.aux.key_mass or config().check_rows:
        return None
    if [form for form, _ in by_form(placed.rows)] != ["panel"]:
        return None
    if blocks is not None and not request.aux.argmax and gather(problem, placed)[1] is not placed:
        return None
    results = ResultLayout.of(call, learns=True).make()
    return _launched(problem, placed, blocks, results, request.sink, along)


def tangent(
    problem: Problem, placed: Placed, blocks: BlockRows | None, above: Above, along: Tangents
) -> Result | None:
    """Return the tangents of out and lse; None if the eager backend has to compute them.

    That is so for int8 pages, numbers that are not finite, and an index out of range.
    """
    results = Result(torch.empty_like(above.out), torch.empty_like(above.lse))
    found = _launched(problem, placed, blocks, results, above.sink, along)
    return None if found is None else found.tangents


def _launched(
    problem: Problem,
    placed: Placed,
    blocks: BlockRows | None,
    results: Result,
    sink: Tensor | None,
    along: Tangents,
) -> Moved | None:
    """Fill in the results, and return them with their tangents; None if that is not possible."""
    if placed.key_scale is not None:
        return None
    placed = placed.on(*(x.resolve_neg() for x in placed.operands))
    moving = _Moving.of(problem, placed, sink, along)
    if moving is None:
        return None
    plan = _Plan.of(moving, placed, blocks, results)
    tangents, odd = _new_tangents(results, placed), torch.zeros(1, dtype=torch.int64, device="cpu")
    fields = _fields(moving.operands, tangents, paged=placed.page_table is not None)
    fields |= {"moves": int(plan.moves), "odd": odd.data_ptr()}
    if not plan.moves:
        fields |= {"query_tangent": 0, "key_tangent": 0}
    plan.launcher.terms.check_tangents(fields)
    wrong = plan.launcher.launch(
        placed,
        records_of(plan.launcher, placed, placed.rows),
        results,
        plan.captures,
        sink=None if sink is None else sink.to(placed.dtype).contiguous(),
        lists=plan.lists,
        more=TANGENTS_PART.pack(fields),
    )
    if wrong:
        return None
    if isinstance(placed.rows, Sequences):
        fill_holes(results, placed.rows)
    return Moved(results, None if odd.item() else tangents)


class _Moving(NamedTuple):
    """A problem whose score_mod also captures the tangents of what it captures.

    `operands` are the tangents of query, key, value and sink, `captured` says which of the tensors
    that the score_mod captured have one.
    """

    problem: Problem
    operands: dict[str, Tensor]
    captured: tuple[bool, ...]

    @staticmethod
    def of(
        problem: Problem, placed: Placed, sink: Tensor | None, along: Tangents
    ) -> _Moving | None:
        """Return all that moves; None if a tangent is not in memory."""
        names = ("query", "key", "value", "sink")
        given = zip(names, (*placed.operands, sink), along[:4], strict=True)
        operands = {name: _like(x, t) for name, x, t in given if x is not None and _moves(t)}
        if "sink" in operands:
            operands["sink"] = operands["sink"].to(placed.dtype).contiguous()
        mod = problem.score_mod
        if mod is None:
            captured: tuple[bool, ...] = ()
        else:
            own = list(zip(mod.captures, along.captures, strict=False))
            captured = tuple(_moves(t) for _, t in own)
            moving = tuple(_like(x, t) for x, t in own if _moves(t))
            problem = problem._replace(score_mod=replace(mod, captures=(*mod.captures, *moving)))
        tensors = (*placed.operands, *operands.values(), *problem.captures)
        in_memory = all(map(has_memory, tensors))
        return _Moving(problem, operands, captured) if in_memory else None

    def tangent(self, graphs: ModGraphs, dtype: torch.dtype) -> Node | None:
        """Return the tangent of a score after the score_mod, as a graph; None for 0."""
        moves = not self.operands.keys().isdisjoint(("query", "key"))
        if graphs.score is None:
            return Node("input", (), dtype, "tangent") if moves else None
        return score_tangent(graphs.score, moves, self.captured)


def _moves(tangent: Tensor | None) -> bool:
    """Return whether a tangent is there and not empty; torch has tensors that stand for zeros."""
    return tangent is not None and tangent.numel() > 0 and not is_zero_tensor(tangent)


def _like(tensor: Tensor, tangent: Tensor | None) -> Tensor:
    assert tangent is not None, "only tensors that move have a tangent"
    return tangent.to(tensor.dtype).resolve_neg()


class _Plan(NamedTuple):
    """What a launch needs, except operands and results."""

    launcher: Launcher
    lists: TileLists
    captures: tuple[Tensor, ...]
    moves: bool  # whether scores have a tangent

    @staticmethod
    def of(moving: _Moving, placed: Placed, blocks: BlockRows | None, results: Result) -> _Plan:
        """Return the plan for operands and results with the layout of these."""
        problem, rows, lists = moving.problem, placed.rows, NO_LISTS
        origin = rows if isinstance(rows, One) else ORIGIN
        block_q = queries_of_item("tangent", placed, rows, problem.block_mask)
        if blocks is not None:
            lists = tile_lists(blocks, block_q, Target.host().block_kv, origin.kv_begin)
        graphs, loaded = graphs_of(problem, placed.dtype, placed.end, lists.mixed, origin)
        graphs = graphs._replace(tangent=moving.tangent(graphs, placed.dtype))
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


def _fields(
    operands: dict[str, Tensor], tangents: Result, *, paged: bool
) -> dict[str, int | float]:
    """Return the part of the kernel's record that is about tangents."""
    every = {**operands, "out": tangents.out, "lse": tangents.lse}
    named = {f"{name}_tangent": x for name, x in every.items() if x is not None}
    fields: dict[str, int | float] = dict.fromkeys(TANGENTS, 0)
    fields |= {name: tensor.data_ptr() for name, tensor in named.items()}
    for name, tensor in named.items():
        if name in ("key_tangent", "value_tangent"):
            fields |= memory_strides(name, tensor, paged=paged)
        elif tensor.dim() == 4:  # lse has its strides already
            fields |= row_strides(name, tensor)
    return fields
