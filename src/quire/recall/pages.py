"""Calls over pages like an earlier one: the layers of a step share what the first of them found.

A plan is found again by its signature, as in dense memory. What page table and lengths come to is
kept beside it, under all the numbers that they hold: one that was changed in place is another one.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from quire.codegen.convention import MOST_ROWS
from quire.eager import output_layout
from quire.ir.trace import Mod
from quire.memory import Paged, Queries
from quire.problem import Call
from quire.recall.signature import MOST_BYTES, MOST_KEYS, Signature, Signed, is_ordinary, signed
from quire.runtime.addressing import Addressing, Records
from quire.runtime.forward import plan_for
from quire.runtime.known import Known
from quire.runtime.plan import Plan, Rows, address_of
from quire.runtime.tile_lists import NO_LISTS
from quire.sequences import Packed

Tables: TypeAlias = tuple[object, ...]
"""Page table, lengths and first pages: their shapes, dtypes and all that they hold."""

STEPS = 4  # that a plan keeps: one is read by all layers, or by those of a group


class Step(NamedTuple):
    """Sequences that were checked, as a launch is told of them."""

    records: Records
    num_sequences: int
    work: int


class Recalled(NamedTuple):
    """A call over pages that was planned, and the tables that it met lately."""

    plan: Plan
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    steps: Known[Tables, Step]

    @staticmethod
    def of(query: Tensor, memory: Paged, call: Call) -> Recalled | None:
        """What a call is planned to be; None where there is nothing to do."""
        assert call.packed is not None, "a call over pages"
        shape, strides = output_layout(call.query, call.value.shape[3])
        out = torch.empty_strided(shape, strides, dtype=query.dtype, device="cpu")
        if out.numel() == 0:
            return None
        operands = _addressing(call.query, memory, call.packed)
        ((form, sequences),) = operands.by_form()
        plan, _, _ = plan_for(call.problem, operands, form, sequences, Rows(out))
        given = memory.as_given(query, out)
        return Recalled(plan, given.shape, given.stride(), Known(STEPS))

    def step(self, query: Tensor, memory: Paged, tables: Tables) -> Step:
        """The sequences of a call, checked unless their tables are known."""
        known = self.steps.get(tables)
        if known is not None:
            return known
        placed, plan = memory.place(query, Queries()), self.plan
        assert placed.packed is not None, "a call over pages"
        operands, sequences = _addressing(placed.query, memory, placed.packed), placed.packed[0]
        records = operands.records(sequences, plan.heads, plan.block_q, plan.kernel.form)
        step = Step(records, sequences.num, operands.work(sequences))
        if read_tables(memory) == tables:  # nobody has changed them meanwhile
            self.steps.keep(tables, step)
        return step

    def run(
        self, query: Tensor, memory: Paged, step: Step, captures: tuple[Tensor, ...]
    ) -> Tensor | None:
        """The output; None where the long way says what is wrong."""
        out = torch.empty_strided(self.out_shape, self.out_strides, dtype=query.dtype, device="cpu")
        if type(out) is not Tensor:  # a mode is active that makes others
            return None
        tensors = memory.as_placed(query, query), memory.key, memory.value, out, memory.page_table
        *operands, table = (tensor.data_ptr() for tensor in tensors)
        if 0 in operands or table == 0:  # a tensor that is empty, or has no memory
            return None
        scales = address_of(memory.key_scale), address_of(memory.value_scale)
        addresses = (*operands, 0, 0, 0, 0, 0)
        wrong = self.plan.launch_at(addresses, *step, captures, NO_LISTS, table, scales)
        return None if wrong else out


def _addressing(query: Tensor, memory: Paged, packed: Packed) -> Addressing:
    return Addressing(query, memory.key, memory.value, packed.sequences, None, *packed[1:])


_known: Known[Signature, Recalled] = Known(64)


class Familiar(NamedTuple):
    """A call over pages that may be like an earlier one."""

    query: Tensor
    memory: Paged
    call: Signed
    signature: Signature
    tables: Tables

    def again(self) -> Tensor | None:
        """The output; None where nothing is known, or the long way has to say what is wrong."""
        known = _known.get(self.signature)
        if known is None:
            return None
        step = known.step(self.query, self.memory, self.tables)
        return known.run(self.query, self.memory, step, self.call.captures)

    def remember(self, call: Call) -> None:
        """Keep what a call that went well was planned to be."""
        recalled = Recalled.of(self.query, self.memory, call)
        if recalled is not None and self.call.describes(call.problem):
            _known.keep(self.signature, recalled)


def familiar(
    query: Tensor,
    memory: Paged,
    score_mod: Mod | None,
    masks: tuple[Mod, ...],
    scale: float | None,
) -> Familiar | None:
    """A call with a few queries for each sequence and its signature; None where it has none."""
    key, value, table = memory.key, memory.value, memory.page_table
    call = signed(query, key, value, score_mod, masks, scale)
    tables = None if call is None else read_tables(memory)
    if (
        call is None
        or tables is None
        or call.learns
        or query.shape[2] > MOST_ROWS
        or table is None
        or table.dtype != torch.int32
        or table.dim() != 2
        or not table.is_contiguous()
        or table.shape[1] * key.shape[2] > MOST_KEYS
    ):
        return None
    signature: list[object] = [call.signature, key.shape[2], table.shape]
    for factors in (memory.key_scale, memory.value_scale):
        if factors is not None and not is_ordinary(factors):
            return None
        laid_out = None if factors is None else (factors.shape, factors.stride(), factors.dtype)
        signature.append(laid_out)
    return Familiar(query, memory, call, tuple(signature), tables)


def read_tables(memory: Paged) -> Tables | None:
    """What the tables hold now; None where one is not an ordinary tensor, or is large."""
    tables: list[object] = []
    for numbers in (memory.page_table, memory.lengths, memory.first_page):
        if numbers is None:
            tables.append(None)
        elif isinstance(numbers, Tensor) and is_ordinary(numbers) and numbers.nbytes <= MOST_BYTES:
            tables += (numbers.shape, numbers.dtype, numbers.numpy().tobytes())
        else:
            return None
    return tuple(tables)
