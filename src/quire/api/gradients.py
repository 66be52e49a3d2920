"""attention_gradients(): the backward pass for results that were computed in parts.

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

Keys may be cut into shards, on one machine or on several. A call for each shard takes the output
and the log-sum-exp over all keys, and returns the gradients of the keys and values of that shard.
The gradients of the query add up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.backends import jit
from quire.checks import check_unmapped
from quire.errors import DtypeError, ShapeError
from quire.ir.trace import Mod
from quire.memory import Integers, Memory, Queries
from quire.plans import CallPlan
from quire.request import Call, Mask, Request, checked_call
from quire.results import Above, Wanted
from quire.support.dynamo import never_traced


class AttentionGradients(NamedTuple):
    """The gradients of query, key and value, with their shapes.

    `captured` has a pair (tensor, gradient) for each tensor that a mod reads and that requires a
    gradient.
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
    """Compute the gradients of attention over `memory`, which may be one shard of all keys.

    `query` [B, Hq, L, D] or [total, Hq, D] is that of `attention`. `out` [B, Hq, L, Dv] and `lse`
    [B, Hq, L] are its results, perhaps merged from several shards; for packed queries they are
    [total, Hq, Dv] and [total, Hq]. `grad_out` [B, Hq, L, Dv] and `grad_lse` [B, Hq, L] are their
    gradients and have the same shapes. `q_start`, `q_offsets` and `q_lengths` have the same shapes
    as in `attention`, and all other parameters the same meaning. A sink is not a parameter, as
    `lse` includes it.
    """
    call = checked_call(
        Request(
            query,
            memory,
            Queries(q_start, q_offsets, q_lengths),
            score_mod=score_mod,
            masks=() if mask is None else (mask,),
            scale=scale,
            learns=True,
        )
    )
    operands, captures = call.placed.operands, call.problem.captures
    for name, tensor in zip(("query", "key", "value"), operands, strict=True):
        check_unmapped(name, tensor)
    for name, tensor in zip(("key", "value"), operands[1:], strict=True):
        if not tensor.is_floating_point():
            raise DtypeError(
                f"{name} must hold floats, which have a gradient, but is {tensor.dtype}. Give "
                f"float pages, or let autograd compute the gradient of the query."
            )
    above = Above(
        _placed(call, "out", out),
        _placed(call, "lse", lse),
        _placed(call, "grad_out", grad_out),
        None if grad_lse is None else _placed(call, "grad_lse", grad_lse),
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


def _placed(call: Call, name: str, given: Tensor) -> Tensor:
    """Return a result of the forward pass, or its gradient, in the layout of kernels."""
    query, memory, (q, _, value) = call.request.query, call.request.memory, call.placed.operands
    shape = (*q.shape[:3], value.shape[3])[: 3 if name.endswith("lse") else 4]
    rows = memory.as_placed(query, given.detach())
    if rows.shape != shape:
        wanted = list(memory.as_given(query, rows.new_empty(shape)).shape)
        raise ShapeError(
            f"{name} must have the shape {wanted} of what attention returns, but has "
            f"{list(given.shape)}. Give the results for this query."
        )
    return rows.to(call.placed.dtype)
