"""`explain`: which backend would compute a call, what that takes, and why the others would not.

The call is checked as `attention` and `flex_attention` check it, but it is not run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Unpack, overload

from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from quire.api.attention import AttentionOptions, attention
from quire.api.flex import FlexOptions, aux_request, check_gqa, checked_masks, flex_attention
from quire.api.kernel_options import FlexKernelOptions, check_kernel_options
from quire.api.weighting import WeightOptions, passes
from quire.aux_outputs import NO_AUX, AuxRequest, checked_request
from quire.backends import jit
from quire.codegen.llvm.target import Target
from quire.ir.trace import Mod
from quire.memory import TOP_LEFT, Dense, Memory, Queries
from quire.plans import OBSTACLES, candidates
from quire.request import Call, Request, checked_call
from quire.runtime.work import flops_of


@overload
def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = ...,
    block_mask: torch_flex.BlockMask | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: bool = ...,
    kernel_options: FlexKernelOptions | None = ...,
    *,
    return_aux: AuxRequest | torch_flex.AuxRequest | None = ...,
    **options: Unpack[FlexOptions],
) -> str: ...


@overload
def explain(
    query: Tensor,
    memory: Memory,
    *,
    return_aux: AuxRequest | torch_flex.AuxRequest | None = ...,
    **options: Unpack[AttentionOptions],
) -> str: ...


def explain(query: Tensor, *operands: Any, **options: Any) -> str:
    """Return text that says which backend would compute a call, and why the others would not.

    The parameters are those of `flex_attention`, with `query` [B, Hq, L, D], or of `attention`.

        explain(query, key, value, mask_mod=causal)                   # flex_attention's arguments
        explain(query, Ragged(key, value, offsets), mask=causal)      # attention's

    >>> print(explain(query, key, value, dropout_p=0.1, backend="eager"))
    backend='eager' uses eager.
    jit not used because eager was asked for; it could run this call.
    inductor not used because PyTorch's flex_attention has no dropout, and dropout_p is not 0.

    If compiled kernels run the call, the text has its floating-point operations. Only scores that
    the mask leaves count, each as in PyTorch's FlopCounterMode:

        jit takes forward 69.8 GFLOP (50.8 % of all scores), backward 174 GFLOP.

    If quire cannot bound a mask, the text names the operation and the cost: tiles that no query
    reads are computed.
    """
    of_memory = "memory" in options or isinstance(next(iter(operands), None), Memory)
    function: Callable[..., object] = attention if of_memory else flex_attention
    bound = inspect.signature(function).bind(query, *operands, **options)
    bound.apply_defaults()
    asked = SimpleNamespace(**bound.arguments)
    request = _of_attention(asked) if of_memory else _of_flex_attention(asked)
    weighting = WeightOptions(asked.weight, asked.normalise, asked.prob_mod)
    first, *second = passes(request, weighting)
    explained = explain_call(checked_call(first))
    if asked.prob_mod is None:
        return explained
    return f"{explained}\n{TWO_PASSES if second else ONE_PASS}"


ONE_PASS = "prob_mod multiplies the probability, so it takes no second pass."
TWO_PASSES = "prob_mod takes a second pass over the keys, with the log-sum-exp of this one."


def _of_flex_attention(asked: SimpleNamespace) -> Request:
    if asked.kernel_options is not None:
        check_kernel_options(asked.kernel_options)
    check_gqa(asked.query, asked.key, asked.enable_gqa)
    return Request(
        asked.query,
        Dense(asked.key, asked.value),
        TOP_LEFT,
        masks=checked_masks(asked.mask_mod, asked.block_mask),
        aux=aux_request(asked.return_lse, asked.return_aux),
        kernel_options=asked.kernel_options,
        **_common(asked),
    )


def _of_attention(asked: SimpleNamespace) -> Request:
    return Request(
        asked.query,
        asked.memory,
        Queries(asked.q_start, asked.q_offsets, asked.q_lengths),
        masks=() if asked.mask is None else (asked.mask,),
        aux=NO_AUX if asked.return_aux is None else checked_request(asked.return_aux),
        **_common(asked),
    )


def _common(asked: SimpleNamespace) -> dict[str, Any]:
    names = ("score_mod", "scale", "dropout_p", "sink", "backend", "generator")
    return {name: getattr(asked, name) for name in names}


def explain_call(call: Call) -> str:
    """Return which backend would run `call`, what it costs, and why not the others, as text."""
    chosen = candidates(call.request.backend)
    obstacles = {name: obstacle(call) for name, obstacle in OBSTACLES.items()}
    able = [name for name in chosen.names if obstacles[name] is None]
    used = able[0] if able else None
    lines = [f"{chosen.words} uses {used or 'nothing: it raises a BackendError'}."]
    if used == "jit":
        lines += [f"jit generates code for {Target.host()}.", f"jit takes {flops_of(call)}."]
        unread = jit.computed_unread(call)
        if unread is not None:
            lines.append(f"jit computes {unread}.")
    for name, reason in obstacles.items():
        if reason is None:
            first = "comes first" if name in able else "was asked for"
            reason = f"{used or chosen.names[0]} {first}; it could run this call"
        if name != used:
            lines.append(f"{name} not used because {reason}.")
    return "\n".join(lines)
