"""attention() over ranks: agree, send keys to the ranks that read them, compute the own queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict, Unpack, overload

import torch
from torch import Tensor

from quire.api.attention import aux_output
from quire.autograd import recorded
from quire.autograd.steps import Passes
from quire.aux_outputs import NO_AUX, AuxOutput, AuxRequest, checked_request
from quire.config import Backend as BackendName
from quire.distributed.context_plan import ContextPlan, MethodName, digest_of, digest_of_tensors
from quire.distributed.exchange import Sending
from quire.distributed.heads import check_heads, compute_by_heads
from quire.distributed.heads import obstacle as heads_obstacle
from quire.distributed.local import compute_in_blocks, compute_in_pages, computes_in_blocks
from quire.distributed.passes import PagePasses
from quire.distributed.ring import RingPasses, check_merged
from quire.distributed.sharded import Shards
from quire.errors import ArgumentError, OptionError, ShapeError
from quire.ir.trace import Mod, Traced
from quire.memory import Dense, Queries, Ragged
from quire.mods.dropout import drawn_seed
from quire.plans import candidates
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
    memory: Dense | Ragged,
    *,
    plan: ContextPlan,
    return_aux: None = ...,
    **options: Unpack[SpreadOptions],
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    memory: Dense | Ragged,
    *,
    plan: ContextPlan,
    return_aux: AuxRequest,
    **options: Unpack[SpreadOptions],
) -> tuple[Tensor, AuxOutput]: ...


@never_traced
def attention(
    query: Tensor,
    memory: Dense | Ragged,
    *,
    plan: ContextPlan,
    return_aux: AuxRequest | None = None,
    **options: Unpack[SpreadOptions],
) -> Tensor | tuple[Tensor, object]:
    """Return this rank's part of the attention over a sequence that is cut over ranks.

        out = quire.distributed.attention(q, Dense(k, v), plan=plan, score_mod=bias)

    `query` [B, Hq, tokens, D], keys and values [B, Hkv, tokens, D] are the shards of this rank, in
    the order of `plan.positions`; out is [B, Hq, tokens, Dv]. The mask is the plan's. Mods take
    positions in the whole sequence. All ranks of the plan call this together. Other options are
    `score_mod`, `scale`, `sink`, `dropout_p`, `generator` and `backend`, as for `quire.attention`.
    Rank 0 draws the seed of dropout. If the plan was made of `lengths`, query and out are
    [tokens, Hq, D], and the memory is `Ragged(k, v, plan.offsets)`.

    The gradient of a key or a value is the sum over all ranks. The gradient of a tensor that is the
    same on all ranks, as a sink or what a score_mod captured, is this rank's part of it: add it up
    over ranks, as the gradients of all other parameters of a model.
    """

    def asked() -> Request:
        aux = NO_AUX if return_aux is None else checked_request(return_aux)
        if return_aux is not None and return_aux.weights is not None:
            raise OptionError(
                "AuxRequest.weights must be None over ranks, each of which has a part of the keys, "
                "but rows are given. Gather the keys, and call quire.attention for these rows."
            )
        return Request(query, memory, Queries(start=0), aux=aux, **options)

    request, result = compute(asked, plan)
    if return_aux is None:
        return result.out
    return result.out, aux_output(result, return_aux, request)


def compute(asked: Callable[[], Request], plan: ContextPlan) -> tuple[Request, Result]:
    """Compute a request over the ranks of a plan; its mask is that of the plan.

    An error in `asked`, which returns the request, is one of all ranks. If operands are DTensors
    that are sharded along the sequence, so are the results.
    """
    facts: dict[str, object] = {}
    with plan.group.agreeing(facts) as notes:
        request = asked()
        shards = Shards.of(request, plan)
        call = call_of(_prepared(shards, plan))
        method = chosen(plan, call)
        facts |= _facts(call, method, plan)
        sending = None
        if method == "pages" and not computes_in_blocks(call.request):
            lent = not call.learns and len(plan.rows) > 0
            sending = Sending(plan, *call.placed[1:3], lent=lent)
    with plan.group.telling():
        seed = notes[0]
        drawn = None if seed is None else tuple(seed)
        call = call._replace(request=call.request._replace(seed=drawn, generator=None))
        return request, shards.wrapped(_by(method, plan, call, sending))


def _by(method: MethodName, plan: ContextPlan, call: Call, sending: Sending | None) -> Result:
    """Return the results of this rank's queries by a method; some send pages."""
    request = call.request
    if method == "heads":
        return compute_by_heads(plan, request, call)
    if method == "ring":
        passes: Passes = RingPasses(plan, request, call.problem)
    elif sending is None:
        return compute_in_blocks(plan, request, call)
    elif call.learns or not len(plan.rows):
        passes = PagePasses(plan, request, call.problem, sending)
    else:
        result = compute_in_pages(plan, request, call.placed.query, sending.begin())
        sending.give_back()
        return result
    result = recorded(passes, call) if call.learns else passes.forward(call)
    return result._replace(out=result.out.to(call.placed.query.dtype))


def chosen(plan: ContextPlan, call: Call) -> MethodName:
    """Return the method of a call: the plan's, or for 'auto' the one by which least arrives.

    Only methods with the bits of one process are chosen. With `heads`, gradients of captured
    tensors do not have them. Raise if the plan's cannot compute the call.
    """
    if plan.method == "heads":
        check_heads(plan, call)
    if plan.method == "ring":
        check_merged(call)
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


def _prepared(shards: Shards, plan: ContextPlan) -> Request:
    """Check a request, and return it with the mask of the plan and traced mods."""
    request = shards.request
    query, memory = request.query, request.memory
    is_plain = isinstance(memory, Dense) and memory.start == 0
    if not is_plain or shards.is_packed != plan.is_ragged:
        kind = "Ragged(key, value, plan.offsets)" if plan.is_ragged else "Dense(key, value)"
        raise ArgumentError(
            f"memory must be {kind} without a start, but is a {shards.given} that is not. Give "
            f"this rank's shards; the plan knows their positions."
        )
    assert isinstance(memory, Dense)
    if request.aux.key_mass:
        raise OptionError(
            "key_mass must not be asked for over ranks, but is: it is a sum over the queries of "
            "all ranks. Ask for it in one process."
        )
    check(request)
    if request.scale is not None:  # it may be a tensor, which can change
        request = request._replace(scale=float(request.scale))
    for name, tensor in (("query", query), ("key", memory.key), ("value", memory.value)):
        _, heads, _, width = tensor.shape
        wanted = [query.shape[0], heads, len(plan.rows), width]
        if list(tensor.shape) != wanted:
            raise ShapeError(
                f"{name} must be the shard of rank {plan.rank}, {wanted}, but has shape "
                f"{list(tensor.shape)}. Cut it with plan.shard."
            )
    for name, given, planned in zip(("batch", "heads"), shards.sizes, plan.sizes, strict=True):
        if planned not in (1, given):
            raise ShapeError(
                f"query must have {name} {planned}, as the plan has, but has {given}. Make the "
                f"plan with {name}={given}."
            )
    score_mod = request.score_mod
    if score_mod is not None:
        traced = ready(score_mod, "score", query)
        score_mod = traced if isinstance(traced, Traced) else score_mod
    return request._replace(masks=(shards.masked(plan),), score_mod=score_mod)


def _facts(call: Call, method: MethodName, plan: ContextPlan) -> dict[str, object]:
    """Return what must be the same on all ranks, and as a note the seed of dropout."""
    request = call.request
    query, memory, sink = request.query, request.memory, request.sink
    assert isinstance(memory, Dense), "it was checked"
    _, key_heads, _, width = memory.value.shape
    learning = [call.learns, *(x.requires_grad for x in call.captures)]
    return {
        "plan": plan.title,
        "score_mod": digest_of(request.score_mod),
        "kind of weights": request.weighting,
        "sink": None if sink is None else [digest_of_tensors([sink]), sink.requires_grad],
        "size of the query": [*query.shape[:2], query.shape[3]],
        "size of the values": [key_heads, width],
        "dtype": [str(x.dtype) for x in (query, memory.key, memory.value)],
        "scale": request.scale,
        "dropout_p": request.dropout_p,
        "return_aux": [name for name, wanted in request.aux._asdict().items() if wanted],
        "backend": [query.device.type, *candidates(request.backend).names],
        "choice of tensors that learn": "".join(map(str, map(int, learning))),
        "method": method,
        "note": drawn_seed(request.generator) if request.dropout_p else None,
    }
