"""`explain`: who would compute a call, why not the others, and what of a mask cannot be skipped.

A call is checked as `attention` and `flex_attention` check it, in the same place; in place of being
launched it is told.
"""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from quire.attention import Mask, prepare
from quire.aux_outputs import AuxRequest, checked_request
from quire.backends import explain_call
from quire.checks import check_generator
from quire.config import Backend as BackendName
from quire.ir.trace import Mod
from quire.kernel_options import FlexKernelOptions, check_kernel_options
from quire.memory import TOP_LEFT, Dense, Integers, Memory, Queries
from quire.torch_api import aux_request, check_gqa, checked_masks


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
    mask_mod: Mod | None = ...,
    dropout_p: float = ...,
    generator: torch.Generator | None = ...,
    sink: Tensor | None = ...,
    backend: BackendName = ...,
) -> str: ...


@overload
def explain(
    query: Tensor,
    memory: Memory,
    *,
    score_mod: Mod | None = ...,
    mask: Mask | None = ...,
    scale: float | None = ...,
    return_aux: AuxRequest | torch_flex.AuxRequest | None = ...,
    dropout_p: float = ...,
    generator: torch.Generator | None = ...,
    sink: Tensor | None = ...,
    q_start: int | Integers | None = ...,
    q_offsets: Integers | None = ...,
    q_lengths: Integers | None = ...,
    backend: BackendName = ...,
) -> str: ...


def explain(query: Tensor, *operands: Any, **options: Any) -> str:
    """Which backend would compute a call with the same arguments, and why not the others.

        explain(query, key, value, mask_mod=causal)                   # flex_attention's arguments
        explain(query, Ragged(key, value, offsets), mask=causal)      # attention's

    >>> print(explain(query, key, value, dropout_p=0.1, backend="eager"))
    backend='eager' uses eager.
    jit not used because eager was asked for; it could run this call.
    inductor not used because PyTorch's flex_attention has no dropout, and dropout_p is not 0.

    Where a mask could not be bounded it says at which operation, and what that costs: tiles that no
    query reads are computed then.
    """
    if "memory" in options or isinstance(next(iter(operands), None), Memory):
        return _of_attention(query, *operands, **options)
    return _of_flex_attention(query, *operands, **options)


def _of_flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    block_mask: torch_flex.BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: FlexKernelOptions | None = None,
    *,
    return_aux: AuxRequest | torch_flex.AuxRequest | None = None,
    mask_mod: Mod | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    sink: Tensor | None = None,
    backend: BackendName = "auto",
) -> str:
    aux = aux_request(return_lse, return_aux)
    check_kernel_options(kernel_options)
    check_gqa(query, key, enable_gqa)
    check_generator(generator)
    masks = checked_masks(mask_mod, block_mask)
    call = prepare(
        *(query, Dense(key, value), score_mod, masks, scale, dropout_p, sink),
        *(TOP_LEFT, aux, kernel_options),
    )
    return explain_call(call, backend)


def _of_attention(
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
) -> str:
    aux = checked_request(return_aux)
    check_generator(generator)
    masks = () if mask is None else (mask,)
    call = prepare(
        *(query, memory, score_mod, masks, scale, dropout_p, sink),
        *(Queries(q_start, q_offsets, q_lengths), aux),
    )
    return explain_call(call, backend)
