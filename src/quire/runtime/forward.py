"""The forward pass of a problem: plan it, launch it."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.aux_outputs import AuxRequest
from quire.codegen.convention import Form
from quire.codegen.llvm.target import Target
from quire.problem import Problem
from quire.runtime.addressing import Addressing
from quire.runtime.gather import gather
from quire.runtime.plan import (
    Plan,
    Rows,
    heads_of_item,
    make_plan,
    queries_of_item,
    wide_dtype,
)
from quire.runtime.roots import mod_roots
from quire.runtime.tile_lists import NO_LISTS, TileLists, read_lists
from quire.sequences import Sequences


def forward(
    problem: Problem,
    memory: Addressing,
    sink: Tensor | None,
    out: Tensor,
    wanted: AuxRequest,
) -> tuple[Rows, bool]:
    """Attention into `out`, and whether some index into a captured tensor was out of range.

    Of the other results those exist that are `wanted`.
    """
    # The argmax of a row is a place in the cache, so that nothing is moved where it is wanted.
    gathered = None if wanted.argmax else gather(problem, memory)
    problem, memory = gathered or (problem, memory)
    results = Rows(out)
    if any(wanted):
        shape, wide = memory.query.shape[:3], wide_dtype(memory.query)
        numbers = {
            name: out.new_empty(shape, dtype=torch.int64 if name == "argmax" else wide)
            for name, asked in wanted._asdict().items()
            if asked
        }
        results = Rows(out, **numbers)
    wrong = False
    for form, sequences in memory.by_form():
        plan, captures, lists = plan_for(problem, memory, form, sequences, results)
        wrong |= plan.launch(memory, sequences, captures, sink, lists, results)
    return results, wrong


def plan_for(
    problem: Problem,
    memory: Addressing,
    form: Form,
    sequences: Sequences,
    results: Rows,
) -> tuple[Plan, tuple[Tensor, ...], TileLists]:
    """The plan of some sequences, the tensors its mods load from, and the tiles to visit."""
    mask, lists = problem.block_mask, NO_LISTS
    block_q = queries_of_item(form, memory, sequences, mask)
    if mask is not None:
        lists = read_lists(mask, memory.lengths, block_q, Target.host().block_kv)
    roots, captures = mod_roots(problem, wide_dtype(memory.query), memory.longest, lists.mixed)
    heads = heads_of_item(form, memory, sequences, block_q)
    plan = make_plan(
        *(form, memory, roots, captures, lists, block_q, problem.scale, results, heads)
    )
    return plan, captures, lists
