"""The signature of a call: all that checks and plans depend on.

How tensors are laid out, the graphs of the mods, traced anew for every call, and what a block mask
contains. It leaves out the number of keys, so a cache of keys that grows in place has one
signature. Whatever is out of the ordinary has none.
"""

from __future__ import annotations

import operator
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.attention import flex_attention as torch_flex

from quire.block_mask import BlockMask
from quire.codegen.mods.arguments import CaptureShape
from quire.config import config
from quire.eager import working_dtype
from quire.ir.trace import Mod, Traced, trace
from quire.problem import Problem
from quire.torch_private import is_transformed, is_wrapped

Signature: TypeAlias = tuple[object, ...]

MOST_KEYS = 2**19  # farther positions have other graphs, and microseconds do not matter there
MOST_BYTES = 2**16  # of a block mask, or of a table


def layout(query: Tensor, key: Tensor, value: Tensor) -> Signature | None:
    """How ordinary tensors are laid out; None where one is not ordinary, or something watches."""
    for tensor in (query, key, value):
        if (
            type(tensor) is not Tensor
            or not tensor.is_cpu
            or tensor.is_nested
            or tensor.layout is not torch.strided
            or tensor.is_neg()
        ):
            return None
    q_shape, k_shape, v_shape = query.shape, key.shape, value.shape
    if (
        not len(q_shape) == len(k_shape) == len(v_shape) == 4
        or k_shape[:3] != v_shape[:3]
        or k_shape[2] > MOST_KEYS
        or q_shape[2] > MOST_KEYS
        or torch.is_autocast_enabled("cpu")
        or is_transformed()
        or config().check
        or not all(tensor.untyped_storage().nbytes() for tensor in (query, key, value))
    ):
        return None
    return (
        q_shape,
        query.stride(),
        query.dtype,
        k_shape[:2],
        k_shape[3],
        key.stride(),
        key.dtype,
        v_shape[3],
        value.stride(),
        value.dtype,
        torch.get_num_threads(),
    )


class Signed(NamedTuple):
    """The signature of a call, and what its mods load from."""

    signature: Signature
    learns: bool
    captures: tuple[Tensor, ...] = ()

    def describes(self, problem: Problem) -> bool:
        """Whether mods and block mask were the same when the signature was read."""
        mods = problem.score_mod, problem.mask_mod, problem.partial_mod
        parts: list[object] = [mod.output for mod in mods if isinstance(mod, Traced)]
        if problem.block_mask is not None:
            parts.append(problem.block_mask.content())
        return all(part in self.signature for part in parts) and all(
            map(operator.is_, self.captures, problem.captures)
        )


def signed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None,
    masks: tuple[Mod | torch_flex.BlockMask, ...],
    scale: float | None,
) -> Signed | None:
    """The signature of a call; None where it has none."""
    tensors = layout(query, key, value)
    if tensors is None or not (scale is None or type(scale) is float):
        return None
    grad = torch.is_grad_enabled()
    learns = grad and (query.requires_grad or key.requires_grad or value.requires_grad)
    if score_mod is None and not masks:
        return Signed((*tensors, scale, learns), learns)
    signature: list[object] = [*tensors, scale]
    captures: list[Tensor] = []

    def add(mod: Traced) -> None:
        signature.append(mod.output)
        for tensor in mod.captures:
            signature.extend((CaptureShape.of(tensor), tensor.shape))
        captures.extend(mod.captures)

    try:
        if score_mod is not None:
            add(trace(score_mod, "score", score_dtype=working_dtype(query.dtype)))
        for mask in masks:
            signature.append("mask")
            if not isinstance(mask, torch_flex.BlockMask):
                add(trace(mask, "mask"))
            elif (
                isinstance(mask, BlockMask)
                and mask.device == query.device
                and mask.nbytes <= MOST_BYTES
            ):
                signature += (mask.content(), key.shape[2])
                add(trace(mask.mask_mod, "mask"))
            else:
                return None
    except Exception:  # the long way says what is wrong
        return None
    for tensor in captures:
        if not is_ordinary(tensor):
            return None
        learns = learns or (grad and tensor.requires_grad)
    signature.append(learns)
    return Signed(tuple(signature), learns, tuple(captures))


def is_ordinary(tensor: Tensor) -> bool:
    """Whether a tensor is no more than its memory."""
    return (
        type(tensor) in (Tensor, Parameter)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_neg()
        and not is_wrapped(tensor)
        and tensor.untyped_storage().nbytes() > 0
    )
