"""attention() over ranks: agree, send keys to the ranks that read them, compute the own queries."""

from __future__ import annotations

from typing import TypedDict, Unpack, overload

import torch
from torch import Tensor

from quire.api.attention import aux_output
from quire.autograd import recorded
from quire.aux_outputs import NO_AUX, AuxOutput, AuxRequest, checked_request
from quire.config import Backend as BackendName
from quire.distributed.context_plan import ContextPlan, MethodName, digest_of
from quire.distributed.exchange import send
from quire.distributed.heads import compute_by_heads
from quire.distributed.heads import obstacle as heads_obstacle
from quire.distributed.local import compute_in_pages
from quire.distributed.passes import PagePasses
from quire.distributed.ring import RingPasses
from quire.distributed.sharded import Shards
from quire.errors import ArgumentError, OptionError, ShapeError
from quire.ir.trace import Mod, Traced
from quire.memory import Dense, Queries
from quire.mods.dropout import drawn_seed
from quire.request import Call, Request, call_of, check, ready
from quire.results import Result
from quire.support.dynamo import never_traced


class SpreadOptions(TypedDict, total=False):
    """The keyword arguments of `attention` that are those of `quire.attention`."""

    score_mod: Mod | None
    scale: float | None
    dropout_p: float
    generator: torch.Generator | None
    sink: Tensor | None
    backend: BackendName


@overload
def attention(
    query: Tensor,
    memory: Dense,
    *,
    plan: ContextPlan,
    return_aux: None = ...,
    **options: Unpack[SpreadOptions],
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    memory: Dense,
    *,
    plan: ContextPlan,
    return_aux: AuxRequest,
    **options: Unpack[SpreadOptions],
) -> tuple[Tensor, AuxOutput]: ...


@never_traced
def attention(
    query: Tensor,
    memory: Dense,
    *,
    plan: ContextPlan,
    return_aux: AuxRequest | None = None,
    **options: Unpack[SpreadOptions],
) -> Tensor | tuple[Tensor, object]:
    """Return this rank's part of the attention over a sequence that is cut over ranks.

        out = quire.distributed.attention(q, Dense(k, v), plan=plan, score_mod=bias)

    Query [B, Hq, tokens, D], keys and values [B, Hkv, tokens, D] are the shards of this rank, in
    the order of `plan.positions`; out is [B, Hq, tokens, Dv]. The mask is the plan's. Mods take
    positions in the whole sequence. All ranks of the plan call this together. Other options are
    `score_mod`, `scale`, `sink`, `dropout_p`, `generator` and `backend`, as for `quire.attention`.
    Rank 0 draws the seed of dropout.

    The gradient of a key or a value is the sum over all ranks. The gradient of a tensor that is the
    same on all ranks, as a sink or what a score_mod captured, is this rank's part of it: add it up
    over ranks, as the gradients of all other parameters of a model.
    """
    aux = NO_AUX if return_aux is None else checked_request(return_aux)
    if return_aux is not None and return_aux.weights is not None:
        raise OptionError(
            "AuxRequest.weights must be None over ranks, each of which has a part of the keys, but "
            "rows are given. Gather the keys, and call quire.attention for these rows."
        )
    request = Request(query, memory, Queries(start=0), aux=aux, **options)
    result = compute(request, plan)
    if return_aux is None:
        return result.out
    return result.out, aux_output(result, return_aux, request)


def compute(request: Request, plan: ContextPlan) -> Result:
    """Compute a request over the ranks of a plan; its mask is that of the plan.

    If operands are DTensors that are sharded along the sequence, so are the results.
    """
    shards = Shards.of(request, plan)
    return shards.wrapped(_compute(shards.request, plan, shards.error))


def _compute(request: Request, plan: ContextPlan, error: Exception | None) -> Result:
    facts: dict[str, object] = {}
    try:
        if error is not None:
            raise error
        request = _prepared(request, plan)
        facts = _facts(request, plan)
    except Exception as raised:  # whatever it is, the other ranks must not wait for this one
        error = raised
    seed, *_ = plan.group.agree(facts, error)
    request = request._replace(seed=None if seed is None else tuple(seed), generator=None)
    call = call_of(request)
    method = chosen(plan, call)
    if method == "heads":
        return compute_by_heads(plan, request, call)
    if method == "pages" and not call.learns and len(plan.positions):
        query, key, value = call.placed[:3]
        return compute_in_pages(plan, request, query, *send(plan, key, value))
    passes = (RingPasses if method == "ring" else PagePasses)(plan, request, call.problem)
    result = recorded(passes, call) if call.learns else passes.forward(call)
    return result._replace(out=result.out.to(call.placed.query.dtype))


def chosen(plan: ContextPlan, call: Call) -> MethodName:
    """Return the method of a call: the plan's, or for 'auto' the one by which least arrives.

    Only methods with the bits of one process are chosen. With `heads`, gradients of captured
    tensors do not have them.
    """
    if plan.method != "auto":
        return plan.method
    learned = any(x.requires_grad for x in call.captures) and call.learns
    if plan.num_ranks == 1 or heads_obstacle(plan, call) or (learned and plan.same_bits):
        return "pages"
    (_, heads, _, width), (_, key_heads, _, _) = call.placed.query.shape, call.placed.key.shape
    value_width = call.placed.value.shape[3]
    both = key_heads * (width + value_width)
    pages = int(plan.received.max()) * both
    most = int(plan.num_tokens.max())
    away = 1 - 1 / plan.num_ranks
    there = (plan.length - most) * (heads * width + both) / plan.num_ranks
    return "heads" if there + most * heads * value_width * away < pages else "pages"


def _prepared(request: Request, plan: ContextPlan) -> Request:
    """Check a request, and return it with the mask of the plan and traced mods."""
    query, memory = request.query, request.memory
    if not isinstance(memory, Dense) or memory.start != 0:
        raise ArgumentError(
            f"memory must be Dense(key, value) without a start, but is a {type(memory).__name__} "
            f"that is not. Give this rank's shards; the plan knows their positions."
        )
    if request.aux.key_mass:
        raise OptionError(
            "key_mass must not be asked for over ranks, but is: it is a sum over the queries of "
            "all ranks. Ask for it in one process."
        )
    check(request)
    for name, tensor in (("query", query), ("key", memory.key), ("value", memory.value)):
        _, heads, _, width = tensor.shape
        wanted = [query.shape[0], heads, len(plan.positions), width]
        if list(tensor.shape) != wanted:
            raise ShapeError(
                f"{name} must be the shard of rank {plan.rank}, {wanted}, but has shape "
                f"{list(tensor.shape)}. Cut it with plan.shard."
            )
    for name, given, planned in zip(("batch", "heads"), query.shape, plan.sizes, strict=False):
        if planned not in (1, given):
            raise ShapeError(
                f"query must have {name} {planned}, as the plan has, but has {given}. Make the "
                f"plan with {name}={given}."
            )
    score_mod = request.score_mod
    if score_mod is not None:
        traced = ready(score_mod, "score", query)
        score_mod = traced if isinstance(traced, Traced) else score_mod
    return request._replace(masks=(plan.mask,), score_mod=score_mod)


def _facts(request: Request, plan: ContextPlan) -> dict[str, object]:
    """Return what must be the same on all ranks, and as a note the seed of dropout."""
    query, memory, score_mod = request.query, request.memory, request.score_mod
    _, key_heads, _, width = memory.value.shape
    return {
        "plan": f"{plan.digest} of {plan.length} tokens, {plan.layout}, for {plan.num_ranks} ranks",
        "score_mod": digest_of(score_mod),
        "size of the query": [*query.shape[:2], query.shape[3]],
        "size of the values": [key_heads, width],
        "dtype": [str(x.dtype) for x in (query, memory.key, memory.value)],
        "scale": request.scale,
        "dropout_p": request.dropout_p,
        "note": drawn_seed(request.generator) if request.dropout_p else None,
    }
