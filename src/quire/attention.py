"""attention(): make a request, find its plan, run it. The one page."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from quire.aux_outputs import NO_AUX, AuxOutput, AuxRequest, checked_request
from quire.config import Backend as BackendName
from quire.ir.trace import Mod
from quire.memory import Integers, Memory, Queries
from quire.plans import compute
from quire.request import Mask, Request
from quire.results import Result
from quire.support.dynamo import never_traced


@overload
def attention(
    query: Tensor,
    memory: Memory,
    *,
    score_mod: Mod | None = ...,
    mask: Mask | None = ...,
    scale: float | None = ...,
    return_aux: None = ...,
    dropout_p: float = ...,
    generator: torch.Generator | None = ...,
    sink: Tensor | None = ...,
    q_start: int | Integers | None = ...,
    q_offsets: Integers | None = ...,
    q_lengths: Integers | None = ...,
    backend: BackendName = ...,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    memory: Memory,
    *,
    score_mod: Mod | None = ...,
    mask: Mask | None = ...,
    scale: float | None = ...,
    return_aux: AuxRequest,
    dropout_p: float = ...,
    generator: torch.Generator | None = ...,
    sink: Tensor | None = ...,
    q_start: int | Integers | None = ...,
    q_offsets: Integers | None = ...,
    q_lengths: Integers | None = ...,
    backend: BackendName = ...,
) -> tuple[Tensor, AuxOutput]: ...


@overload
def attention(
    query: Tensor,
    memory: Memory,
    *,
    score_mod: Mod | None = ...,
    mask: Mask | None = ...,
    scale: float | None = ...,
    return_aux: torch_flex.AuxRequest,
    dropout_p: float = ...,
    generator: torch.Generator | None = ...,
    sink: Tensor | None = ...,
    q_start: int | Integers | None = ...,
    q_offsets: Integers | None = ...,
    q_lengths: Integers | None = ...,
    backend: BackendName = ...,
) -> tuple[Tensor, torch_flex.AuxOutput]: ...


@never_traced
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
    q_start: int | Integers | None = None,
    q_offsets: Integers | None = None,
    q_lengths: Integers | None = None,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, AuxOutput | torch_flex.AuxOutput]:
    """Softmax attention of `query` over the keys and values in `memory`.

        attention(query, Dense(key, value), mask=causal)              # query [B, Hq, L, D]
        attention(query, Ragged(key, value, offsets), mask=causal)    # query [total, Hq, D]
        attention(query, Paged(key, value, page_table, lengths), mask=causal)    # either

    `score_mod(score, b, h, q_idx, kv_idx)` rewrites each scaled score and `mask(b, h, q_idx,
    kv_idx)` says which are used; both are plain Python, and positions are absolute. The last query
    sits at the last key, unless `q_start` gives the position of the first. A `BlockMask` counts
    from its own first row and column. `sink` [Hq] is a logit per head that takes part in the
    softmax without a value. A row that may attend nowhere is 0.

    In `Ragged` memory `b` is the sequence and positions are within it. The queries lie in the
    sequences of the keys, or in those that `q_offsets` and `q_lengths` give; `q_start` may be one
    number for each. A row that belongs to no sequence is 0.

    In `Paged` memory it is the same: query [B, Hq, L, D] are the newest L positions of B sequences,
    and query [total, Hq, D] with `q_offsets` as many of each as there are. Columns of a `BlockMask`
    are positions.

    Returns what the query is with Dv in place of D, and an `AuxOutput` as well where `return_aux`
    asks for one.
    """
    result = compute(
        Request(
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
    )
    return result.out if return_aux is None else (result.out, aux_output(result, return_aux))


def aux_output(
    result: Result, request: AuxRequest | torch_flex.AuxRequest
) -> AuxOutput | torch_flex.AuxOutput:
    """What was asked for; None for the rest."""
    kind = AuxOutput if isinstance(request, AuxRequest) else torch_flex.AuxOutput
    wanted = request._asdict().items()
    return kind(**{name: getattr(result, name) for name, asked in wanted if asked})
