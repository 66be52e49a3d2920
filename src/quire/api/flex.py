"""flex_attention() with PyTorch's signature.

    from quire import flex_attention    # in place of that of torch.nn.attention.flex_attention

PyTorch's parameters come first, in its order and with its meaning. Ours follow.
"""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from quire.api.attention import aux_output
from quire.api.kernel_options import FlexKernelOptions, check_kernel_options
from quire.api.weighting import WeightOptions, computed
from quire.aux_outputs import NO_AUX, AuxOutput, AuxRequest, checked_request
from quire.config import Backend as BackendName
from quire.errors import BlockMaskError, HeadsError, NotCallableError, OptionError
from quire.ir.trace import Mod
from quire.memory import TOP_LEFT, Dense
from quire.plans import compute
from quire.request import Mask, Request
from quire.support.dynamo import entered_by_callers
from quire.support.warn import warn


class FlexOptions(TypedDict, total=False):
    """The parameters that PyTorch's flex_attention does not have."""

    mask_mod: Mod | None
    dropout_p: float
    generator: torch.Generator | None
    sink: Tensor | None
    weight: Mod | None
    normalise: bool
    prob_mod: Mod | None
    backend: BackendName


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = ...,
    block_mask: torch_flex.BlockMask | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: Literal[False] = ...,
    kernel_options: FlexKernelOptions | None = ...,
    *,
    return_aux: None = ...,
    **options: Unpack[FlexOptions],
) -> Tensor: ...


@overload
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = ...,
    block_mask: torch_flex.BlockMask | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: Literal[True] = ...,
    kernel_options: FlexKernelOptions | None = ...,
    *,
    return_aux: None = ...,
    **options: Unpack[FlexOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def flex_attention(
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
    return_aux: AuxRequest,
    **options: Unpack[FlexOptions],
) -> tuple[Tensor, AuxOutput]: ...


@overload
def flex_attention(
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
    return_aux: torch_flex.AuxRequest,
    **options: Unpack[FlexOptions],
) -> tuple[Tensor, torch_flex.AuxOutput]: ...


@entered_by_callers
def flex_attention(
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
    weight: Mod | None = None,
    normalise: bool = True,
    prob_mod: Mod | None = None,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput | torch_flex.AuxOutput]:
    """Compute attention as `torch.nn.attention.flex_attention.flex_attention` does.

        flex_attention(query, key, value, score_mod=alibi, mask_mod=causal)

    query [B, Hq, L, D], key [B, Hkv, S, D], value [B, Hkv, S, Dv]; Hq = Hkv unless `enable_gqa`.
    The first query and the first key are both at position 0. PyTorch does not have these
    parameters: `mask_mod` is a mask without blocks, `dropout_p` and `generator` are for dropout,
    `sink` [Hq] is a logit that takes part in the softmax without a value, `weight`, `normalise` and
    `prob_mod` are those of `attention`, and `backend` names what computes. Returns [B, Hq, L, Dv].
    With `return_aux` it returns a pair of that and an `AuxOutput`; with the deprecated
    `return_lse`, of that and the log-sum-exp [B, Hq, L].

    A graph of torch.compile or torch.export holds it as one operator, `quire::attention`.
    """
    aux = aux_request(return_lse, return_aux)
    if kernel_options is not None:
        check_kernel_options(kernel_options)
    check_gqa(query, key, enable_gqa)
    request = Request(
        query,
        Dense(key, value),
        TOP_LEFT,
        score_mod=score_mod,
        masks=checked_masks(mask_mod, block_mask),
        scale=scale,
        dropout_p=dropout_p,
        sink=sink,
        aux=aux,
        kernel_options=kernel_options,
        backend=backend,
        generator=generator,
    )
    if weight is None and normalise is True and prob_mod is None:
        result = compute(request)
    else:
        request, result = computed(request, WeightOptions(weight, normalise, prob_mod))
    if return_aux is not None:
        return result.out, aux_output(result, return_aux, request)
    if return_lse:
        assert result.lse is not None, "it was asked for"
        return result.out, result.lse
    return result.out


def aux_request(return_lse: bool, return_aux: object) -> AuxRequest:
    """Return which additional results `return_lse` or `return_aux` asks for."""
    if not return_lse and return_aux is None:
        return NO_AUX
    if return_lse and return_aux is not None:
        raise OptionError(
            "only one of return_lse and return_aux must be given, but both are. Use "
            "return_aux=AuxRequest(lse=True) alone."
        )
    if return_lse:
        warn("return_lse is deprecated. Use return_aux=AuxRequest(lse=True).", FutureWarning)
        return AuxRequest(lse=True)
    return checked_request(return_aux)


def checked_masks(
    mask_mod: Mod | None, block_mask: torch_flex.BlockMask | None
) -> tuple[Mask, ...]:
    """Return the masks that are given. Raise if one is given under the name of the other."""
    if mask_mod is None and block_mask is None:
        return ()
    if isinstance(mask_mod, torch_flex.BlockMask):
        raise NotCallableError(
            "mask_mod must be a function of (b, h, q_idx, kv_idx), but is a BlockMask. Give it as "
            "block_mask=."
        )
    if block_mask is not None and not isinstance(block_mask, torch_flex.BlockMask):
        raise BlockMaskError(
            f"block_mask must be a BlockMask, but is a {type(block_mask).__name__}. Give a "
            f"function as mask_mod=, or make a mask of it with create_block_mask."
        )
    return tuple(mask for mask in (mask_mod, block_mask) if mask is not None)


def check_gqa(query: object, key: object, enable_gqa: bool) -> None:
    """Raise if query and key have different numbers of heads, unless `enable_gqa` allows it."""
    if enable_gqa or not isinstance(query, Tensor) or not isinstance(key, Tensor):
        return
    if query.is_nested or key.is_nested:  # have no shape; a later check raises
        return
    if query.dim() == key.dim() == 4 and query.size(1) != key.size(1):
        raise HeadsError(
            f"query and key must have the same number of heads, but Hq={query.shape[1]} and "
            f"Hkv={key.shape[1]}. Set enable_gqa=True for grouped-query attention."
        )
