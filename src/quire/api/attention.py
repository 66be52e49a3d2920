"""attention(): put the arguments into a request, find its plan, run the plan."""

from __future__ import annotations

from typing import TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from quire.api.weighting import WeightOptions, computed
from quire.api.weights import weights_of
from quire.aux_outputs import NO_AUX, AuxOutput, AuxRequest, checked_request
from quire.config import Backend as BackendName
from quire.ir.trace import Mod
from quire.memory import Integers, Memory, Queries
from quire.plans import compute
from quire.request import Mask, Request
from quire.results import Result
from quire.support.dynamo import entered_by_callers


class AttentionOptions(TypedDict, total=False):
    """The keyword arguments of `attention` that do not change the type of its result."""

    score_mod: Mod | None
    mask: Mask | None
    scale: float | None
    dropout_p: float
    generator: torch.Generator | None
    sink: Tensor | None
    weight: Mod | None
    normalise: bool
    prob_mod: Mod | None
    q_start: int | Integers | None
    q_offsets: Integers | None
    q_lengths: Integers | None
    backend: BackendName


@overload
def attention(
    query: Tensor, memory: Memory, *, return_aux: None = ..., **options: Unpack[AttentionOptions]
) -> Tensor: ...


@overload
def attention(
    query: Tensor, memory: Memory, *, return_aux: AuxRequest, **options: Unpack[AttentionOptions]
) -> tuple[Tensor, AuxOutput]: ...


@overload
def attention(
    query: Tensor,
    memory: Memory,
    *,
    return_aux: torch_flex.AuxRequest,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, torch_flex.AuxOutput]: ...


@entered_by_callers
def attention(
    query: Tensor,
    memory: Memory,
    *,
    score_mod: Mod | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    return_aux: AuxRequest | torch_flex.AuxRequest | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    sink: Tensor | None = None,
    weight: Mod | None = None,
    normalise: bool = True,
    prob_mod: Mod | None = None,
    q_start: int | Integers | None = None,
    q_offsets: Integers | None = None,
    q_lengths: Integers | None = None,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, AuxOutput | torch_flex.AuxOutput]:
    """Return the softmax attention of `query` over the keys and values in `memory`.

        attention(query, Dense(key, value), mask=causal)              # query [B, Hq, L, D]
        attention(query, Ragged(key, value, offsets), mask=causal)    # query [total, Hq, D]
        attention(query, Paged(key, value, page_table, lengths), mask=causal)    # either

    `score_mod(score, b, h, q_idx, kv_idx)` returns the new value of a scaled score, and `mask(b, h,
    q_idx, kv_idx)` returns whether a query reads a key. Both are plain Python functions of absolute
    positions. The last query has the position of the last key, unless `q_start` gives the position
    of the first query. `mask` may also be a `BlockMask`; it counts from its own first row and
    column. `scale` multiplies the scores, by default 1 / sqrt(D). `sink` [Hq] is a logit per head
    that joins the softmax and has no value. `dropout_p` drops weights; `generator` draws the seed
    of dropout. `backend` is "auto", "jit", "eager" or "inductor". A query that reads no key gets 0.

    `weight(score, b, h, q_idx, kv_idx)` returns the weight of a key from its score, in place of the
    softmax: `quire.weights` has some. The weights are divided by their sum, unless `normalise` is
    False. `lse` is then the logarithm of their sum, and `max_scores` the largest weight.
    `prob_mod(prob, b, h, q_idx, kv_idx)` returns what a value is multiplied by in place of its
    probability; unless it is a multiple of that, it takes a second pass over the keys.

    In `Ragged` memory, `b` is the number of a sequence, and positions count from its first token.
    Queries have the offsets of the keys, unless `q_offsets` [B + 1] and `q_lengths` [B] are given.
    `q_start` may be a tensor [B]. A row of the query that belongs to no sequence gets 0.

    `Paged` memory is the same. Query [B, Hq, L, D] holds the newest L positions of B sequences;
    query [total, Hq, D] comes with `q_offsets`. The columns of a `BlockMask` are positions.

    The output has the shape of `query`, with Dv in place of D. With `return_aux`, the function
    returns the output and an `AuxOutput`.
    """
    request = Request(
        query,
        memory,
        Queries(q_start, q_offsets, q_lengths),
        score_mod=score_mod,
        masks=() if mask is None else (mask,),
        scale=scale,
        dropout_p=dropout_p,
        sink=sink,
        aux=NO_AUX if return_aux is None else checked_request(return_aux),
        backend=backend,
        generator=generator,
    )
    if weight is None and normalise is True and prob_mod is None:
        result = compute(request)
    else:
        request, result = computed(request, WeightOptions(weight, normalise, prob_mod))
    if return_aux is None:
        return result.out
    return result.out, aux_output(result, return_aux, request)


def aux_output(
    result: Result, wanted: AuxRequest | torch_flex.AuxRequest, request: Request
) -> AuxOutput | torch_flex.AuxOutput:
    """Return the auxiliary outputs that are wanted of a request, and None for the others."""
    if not isinstance(wanted, AuxRequest):
        asked = wanted._asdict().items()
        return torch_flex.AuxOutput(**{name: getattr(result, name) for name, on in asked if on})
    weights = None if wanted.weights is None else weights_of(request, wanted.weights)
    asked = checked_request(wanted)._asdict().items()
    return AuxOutput(**{name: getattr(result, name) for name, on in asked if on}, weights=weights)
