"""The backward pass as a function of results from elsewhere.

    first, *others = [
        attention(query, shard, mask=causal, q_start=0, return_aux=AuxRequest(lse=True))
        for shard in shards
    ]
    out, lse = first[0], first[1].lse
    for other, aux in others:
        out, lse = merge_attention(out, lse, other, aux.lse)
    parts = [
        attention_gradients(query, shard, out, lse, grad_out, mask=causal, q_start=0)
        for shard in shards
    ]
    grad_query = sum(part.query for part in parts)

Keys may be cut into shards, on one machine or on several: given the output and the log-sum-exp of
all keys together, each shard finds the gradients of its own, and those of the query add up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.backends import jit
from quire.errors import DtypeError, ShapeError
from quire.ir.trace import Mod
from quire.memory import Integers, Memory, Queries
from quire.plans import CallPlan
from quire.request import Mask, Request, checked_call
from quire.results import Above, Wanted
from quire.support.dynamo import never_traced


class AttentionGradients(NamedTuple):
    """The gradients of query, key and value; `captured` has those of tensors that mods load from.

    They are those that require one, in pairs of the tensor and its gradient.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    captured: tuple[tuple[Tensor, Tensor], ...]


@never_traced
def attention_gradients(
    query: Tensor,
    memory: Memory,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
    *,
    score_mod: Mod | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    q_start: int | Integers | None = None,
    q_offsets: Integers | None = None,
    q_lengths: Integers | None = None,
) -> AttentionGradients:
    """The gradients of attention over `memory`, whose keys may be some of those behind `out`.

    `out` and `lse` are results of `attention`, perhaps merged, and `grad_out` and `grad_lse` their
    gradients. The other parameters are those of `attention`. A sink is part of `lse`.
    """
    call = checked_call(
        Request(
            query,
            memory,
            Queries(q_start, q_offsets, q_lengths),
            score_mod=score_mod,
            masks=() if mask is None else (mask,),
            scale=scale,
        )
    )
    operands, captures = call.placed.operands, call.problem.captures
    for name, tensor in zip(("key", "value"), operands[1:], strict=True):
        if not tensor.is_floating_point():
            raise DtypeError(
                f"{name} must hold numbers that have a gradient, but is {tensor.dtype}. Give float "
                f"pages, or let autograd find the gradient of the query."
            )
    shape = (*operands[0].shape[:3], operands[2].shape[3])
    dtype = call.placed.dtype

    def placed(name: str, given: Tensor, shape: tuple[int, ...]) -> Tensor:
        rows = memory.as_placed(query, given.detach())
        if rows.shape != shape:
            expected = list(memory.as_given(query, rows.new_empty(shape)).shape)
            raise ShapeError(
                f"{name} must have the shape {expected} of what attention returns, but has "
                f"{list(given.shape)}. Give the results for this query."
            )
        return rows.to(dtype)

    above = Above(
        placed("out", out, shape),
        placed("lse", lse, shape[:3]),
        placed("grad_out", grad_out, shape),
        None if grad_lse is None else placed("grad_lse", grad_lse, shape[:3]),
        whole=False,
    )
    plan = CallPlan(call, "eager" if jit.obstacle(call) else "jit")
    with torch.no_grad():
        found = plan.backward(call.placed, Wanted.of(True, True, True, captures), above)
    assert found.query is not None and found.key is not None and found.value is not None
    pairs = zip(captures, found.captures, strict=True)
    return AttentionGradients(
        memory.as_given(query, found.query.to(operands[0].dtype)),
        memory.keys_as_given(found.key.to(operands[1].dtype)),
        memory.keys_as_given(found.value.to(operands[2].dtype)),
        tuple((x, grad.to(x.dtype)) for x, grad in pairs if grad is not None),
    )
