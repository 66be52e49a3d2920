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

from quire import compiled
from quire.attention import Mask, prepare
from quire.dynamo import never_traced
from quire.eager import Above, Operands, Wanted, working_dtype
from quire.eager.tiling import Sizes, block_rows
from quire.errors import DtypeError, ShapeError
from quire.ir.trace import Mod
from quire.memory import Integers, Memory, Queries


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
    masks = () if mask is None else (mask,)
    queries = Queries(q_start, q_offsets, q_lengths)
    call = prepare(query, memory, score_mod, masks, scale, 0.0, None, queries)
    for name, tensor in (("key", call.key), ("value", call.value)):
        if not tensor.is_floating_point():
            raise DtypeError(
                f"{name} must hold numbers that have a gradient, but is {tensor.dtype}. Give float "
                f"pages, or let autograd find the gradient of the query."
            )
    problem, captures = call.problem, call.problem.captures
    shape = (*call.query.shape[:3], call.value.shape[3])
    dtype = working_dtype(call.query.dtype)

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
    operands, blocks = Operands(call.query, call.key, call.value), None
    if problem.block_mask is not None:
        blocks = block_rows(problem, Sizes.of(call.query, call.key))
    run = compiled.run_backward if compiled.obstacle(call) is None else compiled.run_eagerly
    wanted = Wanted(True, True, True, captures)
    with torch.no_grad():
        found = run(call.packed, problem, operands, blocks, wanted, above)

    def as_given(tensor: Tensor, grad: Tensor | None) -> Tensor:
        assert grad is not None, "all three are wanted"
        return memory.keys_as_given(grad.to(tensor.dtype))

    assert found.query is not None, "all three are wanted"
    pairs = zip(captures, found.captures, strict=True)
    return AttentionGradients(
        memory.as_given(query, found.query.to(call.query.dtype)),
        as_given(call.key, found.key),
        as_given(call.value, found.value),
        tuple((x, grad.to(x.dtype)) for x, grad in pairs if grad is not None),
    )
