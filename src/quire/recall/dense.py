"""Calls over dense memory like an earlier one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from quire import compiled
from quire.block_mask import BlockRows
from quire.codegen.convention import num_items, num_pieces
from quire.eager import Above, Gradients, Operands, Wanted, output_layout
from quire.eager.function import gradients
from quire.ir.trace import Mod
from quire.memory import Dense
from quire.problem import Call, Problem
from quire.recall.signature import MOST_KEYS, Signature, Signed, is_ordinary, signed
from quire.runtime.addressing import Records, dense, record
from quire.runtime.backward import BackwardPlan, Pass, plan_backward
from quire.runtime.forward import plan_for
from quire.runtime.gather import gathers
from quire.runtime.known import Known
from quire.runtime.plan import NOTHING, Plan, Rows, wide_dtype
from quire.runtime.tile_lists import TileLists


class Recalled(NamedTuple):
    """A call that was checked and planned, ready for other tensors of its signature."""

    plan: Plan
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    items: int  # for each piece of keys
    work: int  # for each key
    lists: TileLists
    problem: Problem  # whose captures are other ones at every call
    blocks: BlockRows | None
    backward_plans: dict[Signature, tuple[BackwardPlan, tuple[Tensor, ...]]]
    """By what is learned and how tensors lie; with what a block mask adds to the captures."""

    @staticmethod
    def of(call: Call, learns: bool = False) -> Recalled | None:
        """What a call is planned to be; None where there is nothing to do, or too much."""
        query, problem, mask = call.query, call.problem, call.problem.block_mask
        shape, strides = output_layout(query, call.value.shape[3])
        results = _room(query, shape, strides, learns)
        operands = dense(query, Dense(call.key, call.value), problem.q_start)
        if gathers(problem, operands):  # what is gathered follows the content of a mask
            return None
        ((form, sequences),) = operands.by_form()
        plan, _, lists = plan_for(problem, operands, form, sequences, results)
        items = num_items(int(sequences.q_len[0]), plan.heads, plan.block_q) * operands.batches
        if items == 0 or lists.mixed is not None:
            return None
        batch, heads, q_len, head_dim = query.shape
        work = batch * heads * q_len * head_dim
        nothing = problem.with_captures((NOTHING,) * len(problem.captures))
        blocks = None if mask is None else mask.rows(*operands.lengths)
        return Recalled(plan, shape, strides, items, work, lists, nothing, blocks, {})

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        q_start: int,
        captures: tuple[Tensor, ...],
        learns: bool = False,
    ) -> Rows | None:
        """The output, and lse for a backward pass; None where the long way says what is wrong."""
        rows = _room(query, self.out_shape, self.out_strides, learns)
        if type(rows.out) is not Tensor:  # a mode is active that makes others
            return None
        keys = key.shape[2]
        pieces = max(1, num_pieces(0, keys)) if self.plan.kernel.form == "row" else 1
        sequence = record(query.shape[2], q_start, keys, pieces)
        operands = (query.data_ptr(), key.data_ptr(), value.data_ptr(), rows.out.data_ptr())
        if 0 in operands:  # a tensor that is empty, or has no memory
            return None
        addresses = (*operands, rows.lse.data_ptr(), 0, 0, 0, 0)
        work = self.work * keys
        items = self.items * pieces
        records = Records(sequence, items, items if pieces > 1 else 0)
        wrong = self.plan.launch_at(addresses, records, 1, work, captures, self.lists)
        return None if wrong else rows

    def gradients(
        self, operands: Operands, q_start: int, wanted: Wanted, above: Above
    ) -> Gradients:
        """The backward pass, planned once for what is learned."""
        problem = replace(self.problem.with_captures(wanted.captures), q_start=q_start)
        tensors = [x for x in (*operands, *above[:4], *wanted.captures) if x is not None]
        if torch.is_grad_enabled() or not all(map(is_ordinary, tensors)):
            return compiled.run_backward(None, problem, operands, self.blocks, wanted, above)
        memory = dense(operands.query, Dense(operands.key, operands.value), q_start)
        # Who keeps tensors for autograd may give them back in other strides.
        kept = (*operands, above.out, above.lse, *wanted.captures)
        layout = (wanted.learned, *(tensor.stride() for tensor in kept))
        known = self.backward_plans.get(layout)
        if known is None:
            results, learned = Rows(above.out, above.lse), wanted.learned
            plan, captures = plan_backward(problem, memory, self.blocks, learned, results)
            known = self.backward_plans[layout] = plan, captures[len(wanted.captures) :]
        plan, more = known
        found = Pass(plan, memory, (*wanted.captures, *more), wanted, above).gradients()
        if found is not None:
            return found
        return compiled.run_eagerly(None, problem, operands, self.blocks, wanted, above)


def _room(query: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], learns: bool) -> Rows:
    """Where results go. A backward pass needs all digits of `out`, and lse."""
    if not learns:
        return Rows(torch.empty_strided(shape, strides, dtype=query.dtype, device="cpu"))
    wide = wide_dtype(query)
    out = torch.empty_strided(shape, strides, dtype=wide, device="cpu")
    return Rows(out, torch.empty(shape[:3], dtype=wide, device="cpu"))


class Recorded(torch.autograd.Function):
    """Gives the results of a recalled call to autograd.

    Inputs: recalled, rows, q_start, query, key, value, *captures. Outputs: out and lse.
    """

    @staticmethod
    def forward(
        ctx: Any, recalled: Recalled, rows: Rows, q_start: int, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keep what the backward pass needs."""
        ctx.recalled, ctx.q_start = recalled, q_start
        ctx.save_for_backward(rows.out, rows.lse, *tensors)
        ctx.set_materialize_grads(False)
        return rows.out, rows.lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        """The gradients of the inputs that need one."""
        out, lse, *tensors = ctx.saved_tensors
        _, _, _, *needs = ctx.needs_input_grad
        above = Above(out, lse, grad_out, grad_lse)
        return (
            None,
            None,
            None,
            *gradients(
                lambda operands, wanted: ctx.recalled.gradients(
                    operands, ctx.q_start, wanted, above
                ),
                tensors,
                needs,
                above,
            ),
        )


_known: Known[Signature, Recalled] = Known(256)


class Familiar(NamedTuple):
    """A call over dense memory that may be like an earlier one."""

    query: Tensor
    memory: Dense
    q_start: int
    call: Signed

    def again(self) -> Tensor | None:
        """The output; None where nothing is known, or the long way has to say what is wrong."""
        signature, learns, captures = self.call
        known = _known.get(signature) if self.q_start <= MOST_KEYS else None
        if known is None:
            return None
        operands = self.query, self.memory.key, self.memory.value
        rows = known.run(*operands, self.q_start, captures, learns)
        if rows is None or not learns:
            return None if rows is None else rows.out
        apply: Any = Recorded.apply
        out, _ = apply(known, rows, self.q_start, *operands, *captures)
        return out.to(self.query.dtype)  # type: ignore[no-any-return]

    def remember(self, call: Call) -> None:
        """Keep what a call that went well was planned to be."""
        recalled = Recalled.of(call, self.call.learns)
        if recalled is not None and self.call.describes(call.problem):
            _known.keep(self.call.signature, recalled)


def familiar(
    query: Tensor,
    memory: Dense,
    q_start: object,
    score_mod: Mod | None,
    masks: tuple[Mod | torch_flex.BlockMask, ...],
    scale: float | None,
) -> Familiar | None:
    """A call with its signature; None where it has none."""
    call = signed(query, memory.key, memory.value, score_mod, masks, scale)
    if call is None:
        return None
    return Familiar(query, memory, memory.first_position(query, q_start), call)
