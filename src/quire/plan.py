"""A plan: attention with its mods traced and its code looked up, for those who count microseconds.

    step = quire.plan(query, Dense(keys[:, :, :1], values[:, :, :1]), mask=causal)
    for position in range(1, 4096):
        out = step(query, Dense(keys[:, :, :position], values[:, :, :position]))

What a plan was given stays as it was: it does not see that a mod, a closure or a number has changed
since. What captured tensors hold is read at every call.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from quire import compiled
from quire.attention import Mask, prepare
from quire.block_mask import BlockMask
from quire.eager import working_dtype
from quire.errors import ArgumentError, BackendError, DtypeError
from quire.ir.trace import Kind, Mod, Traced, trace
from quire.memory import Dense, Paged, Queries, Ragged
from quire.problem import Call
from quire.recall import Recalled, Signature, layout
from quire.runtime.known import Known


def plan(
    query: Tensor,
    memory: Dense,
    *,
    score_mod: Mod | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    q_start: int | None = None,
) -> Plan:
    """Attention as `attention(query, memory, ...)` would compute it, ready to be repeated.

    The plan takes other queries and memories: of any length, unless a block mask fixes them.
    It computes no gradients.
    """
    return Plan(query, memory, score_mod, mask, scale, q_start)


class Plan:
    """What `plan` returns: a function of a query and a memory."""

    def __init__(
        self,
        query: Tensor,
        memory: Dense,
        score_mod: Mod | None,
        mask: Mask | None,
        scale: float | None,
        q_start: int | None,
    ) -> None:
        _check_dense(memory)
        masks = () if mask is None else (mask,)
        call = prepare(query, memory, score_mod, masks, scale, 0.0, None, Queries(q_start))
        _check_compiled(call)
        self._dtype, self._scale, self._q_start = query.dtype, scale, q_start
        self._score_mod = None if score_mod is None else _traced(score_mod, "score", query)
        self._masks = () if mask is None else (_kept(mask, query),)
        self._fixed = call.problem.block_mask is not None  # for some lengths and positions alone
        self._captures = call.problem.captures
        self._kinds = tuple(map(_kind, self._captures))
        self._known: Known[Signature, Recalled] = Known(64)

    def __call__(self, query: Tensor, memory: Dense) -> Tensor:
        """The attention of `query` over `memory`."""
        if type(memory) is not Dense:
            self._checked(query, memory)
        key, value = memory.key, memory.value
        signature = layout(query, key, value)
        held = all(tensor.untyped_storage().nbytes() for tensor in self._captures)
        if signature is not None and held and memory.start == 0 and type(memory.start) is int:
            first = memory.first_position(query, self._q_start)
            for tensor in self._captures:
                signature += (tensor.dtype, tensor.device, tensor.shape, tensor.stride())
            if self._fixed:
                signature += (first, key.shape[2])
            known = self._known.get(signature) or self._learn(signature, query, memory)
            rows = None if known is None else known.run(query, key, value, first, self._captures)
            if rows is not None:
                return rows.out
        with torch.no_grad():
            return compiled.attention(self._checked(query, memory)).out

    def _learn(self, signature: Signature, query: Tensor, memory: Dense) -> Recalled | None:
        recalled = Recalled.of(self._checked(query, memory))
        return None if recalled is None else self._known.keep(signature, recalled)

    def _checked(self, query: Tensor, memory: Dense) -> Call:
        """The call that this would be, checked."""
        _check_dense(memory)
        self._check_captures()
        if isinstance(query, Tensor) and query.dtype != self._dtype:
            raise DtypeError(
                f"this plan was made for queries of {self._dtype}, but got {query.dtype}. Make a "
                f"plan for each dtype."
            )
        call = prepare(
            *(query, memory, self._score_mod, self._masks),
            *(self._scale, 0.0, None, Queries(self._q_start)),
        )
        _check_compiled(call)
        return call

    def _check_captures(self) -> None:
        for tensor, made_for in zip(self._captures, self._kinds, strict=True):
            if _kind(tensor) != made_for:
                raise ArgumentError(
                    f"this plan was made for a captured tensor of dtype, dimensions and device "
                    f"{made_for}, which now has {_kind(tensor)}. Make a new plan."
                )


def _kind(tensor: Tensor) -> tuple[object, ...]:
    """What must not change of a captured tensor. Its sizes and strides may."""
    return tensor.dtype, tensor.dim(), tensor.device


def _check_dense(memory: object) -> None:
    if isinstance(memory, Ragged | Paged):
        raise ArgumentError(
            f"a plan takes Dense memory, but got a {type(memory).__name__}. Call quire.attention, "
            f"which takes all."
        )


def _check_compiled(call: Call) -> None:
    reason = compiled.obstacle(call)
    if reason is not None:
        raise BackendError(
            f"a plan runs compiled code, but {reason}. Call quire.attention, which finds "
            f"another way."
        )


def _traced(mod: Mod, kind: Kind, query: Tensor) -> Traced:
    return trace(mod, kind, score_dtype=working_dtype(query.dtype), device=query.device)


def _kept(mask: Mask, query: Tensor) -> Mask:
    """A mask that its owner's changes do not reach."""
    if not isinstance(mask, torch_flex.BlockMask):
        return _traced(mask, "mask", query)
    kept = copy.deepcopy(BlockMask.from_torch(mask))
    kept.mask_mod = _traced(mask.mask_mod, "mask", query)
    return kept
