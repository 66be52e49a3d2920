"""Calls like an earlier one: what was checked and planned once is only looked up.

A signature says all that checks and plans depend on: how tensors are laid out, the graphs of the
mods, traced anew for every call, and what a block mask contains. It leaves out the number of keys,
so a cache of keys that grows in place has one signature. Whatever is out of the ordinary has none,
and takes the long way.
"""

from __future__ import annotations

import operator
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.nn.attention import flex_attention as torch_flex

from quire.block_mask import BlockMask
from quire.codegen.arguments import CaptureShape
from quire.config import config
from quire.eager import output_layout, working_dtype
from quire.ir.trace import Mod, Traced, trace
from quire.memory import Dense
from quire.problem import Call, Problem
from quire.runtime.addressing import dense, record
from quire.runtime.forward import plan_for
from quire.runtime.known import Known
from quire.runtime.plan import Plan, Rows
from quire.runtime.tile_lists import TileLists

Signature: TypeAlias = tuple[object, ...]

MOST_KEYS = 2**19  # farther positions have other graphs, and microseconds do not matter there
MOST_BYTES = 2**16  # of a block mask


def layout(query: Tensor, key: Tensor, value: Tensor, grad: bool) -> Signature | None:
    """How ordinary tensors are laid out; None where one is not ordinary, or something watches.

    With `grad` their gradients count.
    """
    for tensor in (query, key, value):
        if (
            type(tensor) is not Tensor
            or not tensor.is_cpu
            or tensor.is_nested
            or tensor.layout is not torch.strided
            or tensor.is_neg()
            or (grad and tensor.requires_grad)
        ):
            return None
    q_shape, k_shape, v_shape = query.shape, key.shape, value.shape
    if (
        not len(q_shape) == len(k_shape) == len(v_shape) == 4
        or k_shape[:3] != v_shape[:3]
        or k_shape[2] > MOST_KEYS
        or q_shape[2] > MOST_KEYS
        or torch.is_autocast_enabled("cpu")
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or config().check
    ):
        return None
    return (
        q_shape,
        query.stride(),
        query.dtype,
        k_shape[:2],
        k_shape[3],
        key.stride(),
        key.dtype,
        v_shape[3],
        value.stride(),
        value.dtype,
        torch.get_num_threads(),
    )


def familiar(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None,
    masks: tuple[Mod | torch_flex.BlockMask, ...],
    scale: float | None,
) -> Familiar | None:
    """A call with its signature; None where it has none."""
    grad = torch.is_grad_enabled()
    tensors = layout(query, key, value, grad)
    if tensors is None or not (scale is None or type(scale) is float):
        return None
    if score_mod is None and not masks:
        return Familiar((*tensors, scale))
    signature: list[object] = [*tensors, scale]
    captures: list[Tensor] = []

    def add(mod: Traced) -> None:
        signature.append(mod.output)
        for tensor in mod.captures:
            signature.extend((CaptureShape.of(tensor), tensor.shape))
        captures.extend(mod.captures)

    try:
        if score_mod is not None:
            add(trace(score_mod, "score", score_dtype=working_dtype(query.dtype)))
        for mask in masks:
            signature.append("mask")
            if not isinstance(mask, torch_flex.BlockMask):
                add(trace(mask, "mask"))
            elif (
                isinstance(mask, BlockMask)
                and mask.device == query.device
                and mask.nbytes <= MOST_BYTES
            ):
                signature += (mask.content(), key.shape[2])
                add(trace(mask.mask_mod, "mask"))
            else:
                return None
    except Exception:  # the long way says what is wrong
        return None
    for tensor in captures:
        if (
            type(tensor) not in (Tensor, Parameter)
            or not tensor.is_cpu
            or tensor.is_neg()
            or (grad and tensor.requires_grad)
        ):
            return None
    return Familiar(tuple(signature), tuple(captures))


class Recalled(NamedTuple):
    """A call that was checked and planned, ready for other tensors of its signature."""

    plan: Plan
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    items: int
    work: int  # for each key
    lists: TileLists

    @staticmethod
    def of(call: Call) -> Recalled | None:
        """What a call is planned to be; None where there is nothing to do, or too much."""
        query, problem = call.query, call.problem
        shape, strides = output_layout(query, call.value.shape[3])
        results = Rows(torch.empty_strided(shape, strides, dtype=query.dtype, device="cpu"))
        operands = dense(query, Dense(call.key, call.value), problem.q_start)
        ((form, sequences),) = operands.by_form()
        plan, _, lists = plan_for(problem, operands, form, sequences, results)
        _, items = operands.records(sequences, plan.heads, plan.block_q)
        if items == 0 or lists.mixed is not None:
            return None
        batch, heads, q_len, head_dim = query.shape
        return Recalled(plan, shape, strides, items, batch * heads * q_len * head_dim, lists)

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, q_start: int, captures: tuple[Tensor, ...]
    ) -> Tensor | None:
        """The output; None where the long way has to say what is wrong."""
        out = torch.empty_strided(self.out_shape, self.out_strides, dtype=query.dtype, device="cpu")
        if type(out) is not Tensor:  # a mode is active that makes others
            return None
        keys = key.shape[2]
        sequence = record(query.shape[2], q_start, keys)
        operands = (query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr())
        if 0 in operands:  # a tensor that is empty, or has no memory
            return None
        addresses = (*operands, 0, 0, 0, 0, 0)
        work = self.work * keys
        wrong = self.plan.launch_at(addresses, sequence, 1, self.items, work, captures, self.lists)
        return None if wrong else out


_known: Known[Signature, Recalled] = Known(256)


class Familiar(NamedTuple):
    """A call that may be like an earlier one: its signature, and what its mods load from."""

    signature: Signature
    captures: tuple[Tensor, ...] = ()

    def again(self, query: Tensor, key: Tensor, value: Tensor, q_start: int) -> Tensor | None:
        """The output; None where nothing is known, or the long way has to say what is wrong."""
        known = _known.get(self.signature) if q_start <= MOST_KEYS else None
        return None if known is None else known.run(query, key, value, q_start, self.captures)

    def remember(self, call: Call) -> None:
        """Keep what a call that went well was planned to be."""
        recalled = Recalled.of(call)
        if recalled is not None and self._describes(call.problem):
            _known.keep(self.signature, recalled)

    def _describes(self, problem: Problem) -> bool:
        """Whether mods and block mask were the same when the signature was read."""
        mods = problem.score_mod, problem.mask_mod, problem.partial_mod
        parts: list[object] = [mod.output for mod in mods if isinstance(mod, Traced)]
        if problem.block_mask is not None:
            parts.append(problem.block_mask.content())
        return all(part in self.signature for part in parts) and all(
            map(operator.is_, self.captures, problem.captures)
        )
