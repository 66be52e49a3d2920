"""plan(): attention that is prepared once and called many times, with less time spent per call.

    step = quire.plan(query, Dense(keys[:, :, :1], values[:, :, :1]), mask=causal)
    for position in range(1, 4096):
        out = step(query, Dense(keys[:, :, :position], values[:, :, :position]))

A plan keeps the mods, closures and numbers that it was made with, even if they change later. The
content of captured tensors is read at every call.
"""

from __future__ import annotations

import copy

from torch import Tensor

from quire.backends import jit
from quire.block_mask import BlockMask
from quire.errors import ArgumentError, BackendError, DtypeError
from quire.ir.trace import Mod, trace
from quire.memory import Dense, Paged, Queries, Ragged
from quire.plans import CallPlan, Key, make, operand_layout
from quire.request import Call, Mask, Problem, Request, call_of, check
from quire.results import working_dtype
from quire.support.bounded import BoundedDict
from quire.support.torch_private import is_jit_tracing, is_transformed


def plan(
    query: Tensor,
    memory: Dense,
    *,
    score_mod: Mod | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    q_start: int | None = None,
) -> Plan:
    """Return a function of a query and a memory that computes `attention(query, memory, ...)`.

    query [B, Hq, L, D], keys [B, Hkv, S, D], values [B, Hkv, S, Dv]. The function takes queries and
    keys of any length, unless a block mask fixes the lengths. It computes no gradients.
    """
    masks = () if mask is None else (mask,)
    queries = Queries(q_start)
    return Plan(Request(query, memory, queries, score_mod=score_mod, masks=masks, scale=scale))


class Plan:
    """The result of `plan`: a function of a query and a memory."""

    def __init__(self, request: Request) -> None:
        _check_dense(request.memory)
        check(request)
        call = call_of(request)
        self._plan_for(call)
        score_mod, mask_mod, mask = call.problem[1:4]
        self._request = request._replace(
            score_mod=score_mod,
            masks=tuple(x for x in (mask_mod, _kept(mask, request.query)) if x is not None),
        )
        call = call_of(self._request)
        self._captures = call.captures
        self._kinds = tuple(map(_kind, self._captures))
        self._fixed = call.problem.block_mask is not None  # it fixes lengths and positions
        self._known: BoundedDict[Key, tuple[CallPlan, Problem]] = BoundedDict(64)

    def __call__(self, query: Tensor, memory: Dense) -> Tensor:
        """Return the attention of `query` [B, Hq, L, D] over `memory`: [B, Hq, L, Dv]."""
        request = Request(query, memory, *self._request[2:])
        key = self._key(query, memory)
        known = None if key is None else self._known.get(key)
        if known is None:
            call = self._checked(request)
            known = self._plan_for(call), call.problem
            if key is not None:
                self._known.keep(key, known)
        else:
            placed = memory.place(query, self._request.queries)
            call = Call(request, placed, known[1], self._captures)
        return known[0].run(call).out

    def _key(self, query: Tensor, memory: Dense) -> Key | None:
        """Return all that the plan depends on besides its mods; None for operands without a key."""
        if type(memory) is not Dense or type(memory.start) is not int or memory.start != 0:
            return None
        if is_jit_tracing():
            return None
        layout = operand_layout(query, memory.key, memory.value)
        if layout is None:
            return None
        for tensor in self._captures:
            if not tensor.untyped_storage().nbytes():
                return None
            layout += (tensor.dtype, tensor.device, tensor.shape, tensor.stride())
        if self._fixed:
            first = memory.first_position(query, self._request.queries.start)
            layout += (first, memory.key.shape[2])
        return layout

    def _checked(self, request: Request) -> Call:
        if is_jit_tracing():
            raise BackendError(
                "a plan must be called outside of torch.jit.trace, which sees no kernel, but it is "
                "called inside. Call quire.attention, which is recorded as an operator."
            )
        _check_dense(request.memory)
        self._check_captures()
        query, made_for = request.query, self._request.query.dtype
        if isinstance(query, Tensor) and query.dtype != made_for:
            raise DtypeError(
                f"query must be {made_for}, as the plan was made for, but is {query.dtype}. Make a "
                f"plan for each dtype."
            )
        check(request)
        return call_of(request)

    def _plan_for(self, call: Call) -> CallPlan:
        reason = jit.obstacle(call)
        if reason is not None:
            raise BackendError(
                f"a plan must run compiled code, but {reason}. Call quire.attention, which has "
                f"other backends."
            )
        made, _ = make(call._replace(learns=is_transformed()))  # else it computes no gradients
        return made

    def _check_captures(self) -> None:
        for tensor, made_for in zip(self._captures, self._kinds, strict=True):
            if _kind(tensor) != made_for:
                raise ArgumentError(
                    f"a captured tensor must have the dtype, dimensions and device {made_for} that "
                    f"the plan was made for, but has {_kind(tensor)}. Make a new plan."
                )


def _kind(tensor: Tensor) -> tuple[object, ...]:
    """Return the properties of a captured tensor that must not change. Sizes and strides may."""
    return tensor.dtype, tensor.dim(), tensor.device


def _check_dense(memory: object) -> None:
    if isinstance(memory, Ragged | Paged):
        raise ArgumentError(
            f"the memory of a plan must be Dense, but is {type(memory).__name__}. Call "
            f"quire.attention, which takes every memory."
        )


def _kept(mask: BlockMask | None, query: Tensor) -> BlockMask | None:
    """Return a copy of a block mask, so that later changes of it do not reach the plan."""
    if mask is None:
        return None
    kept = copy.deepcopy(mask)
    dtype, device = working_dtype(query.dtype), query.device
    kept.mask_mod = trace(mask.mask_mod, "mask", score_dtype=dtype, device=device)
    return kept
