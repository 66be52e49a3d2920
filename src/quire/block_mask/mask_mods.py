"""The mask_mod of a block mask: traced, compared, moved to a device, refused by a slice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from quire.errors import (
    ModError,
    ModValueError,
    RandomModError,
    SlicedMaskError,
    TracedBranchError,
    UnsupportedOpError,
)
from quire.ir.trace import Kind, Mod, Traced, trace

REFUSED = (TracedBranchError, RandomModError, ModValueError)
"""Errors of a trace after which no other way to run the mod is tried."""

MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Device: TypeAlias = torch.device | str | int


def sliced_mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Stand in for the mask_mod of a slice, whose positions have moved: always raises."""
    raise SlicedMaskError(
        "Cannot use mask_mod from a sliced BlockMask: expected one that counts positions from the "
        "slice's first query, got none, since slicing moves them. Take the queries by "
        "mask.for_queries(start, stop), or set it from the whole mask: part = mask[:, :, row]; "
        "part.mask_mod = lambda b, h, q, kv: mask.mask_mod(b, h, q + row * mask.BLOCK_SIZE[0], kv)."
    )


def try_trace(mod: Mod, kind: Kind, device: torch.device) -> Traced | ModError:
    """`mod` as a graph, or the reason why it has none."""
    try:
        return mod if isinstance(mod, Traced) else trace(mod, kind, device=device)
    except ModError as error:
        return error
    except Exception as error:  # whatever the user's function raises when it runs on symbols
        reason = UnsupportedOpError(f"{type(error).__name__}: {error}")
        reason.__cause__ = error
        return reason


def same_tensor(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors agree in dtype, device, shape and values."""
    if one is other:
        return True
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)


def same_mod(one: MaskMod, other: MaskMod, device: torch.device) -> bool:
    """Whether two mask_mods are one, or have one graph over tensors with the same values."""
    if one is other:
        return True
    left, right = try_trace(one, "mask", device), try_trace(other, "mask", device)
    if isinstance(left, ModError) or isinstance(right, ModError):
        return False
    return (
        left.output is right.output
        and len(left.captures) == len(right.captures)
        and all(map(same_tensor, left.captures, right.captures))
    )


def move_mod(mask_mod: MaskMod, rebuilt: MaskMod, source: torch.device, target: Device) -> MaskMod:
    """`mask_mod` with everything that it captured on `target`.

    Itself if it all is there, else its trace over moved tensors. `rebuilt` is what serves for a
    mask_mod that has no trace.
    """
    traced = try_trace(mask_mod, "mask", source)
    if isinstance(traced, ModError):
        return rebuilt
    captures = tuple(tensor.to(target) for tensor in traced.captures)
    if all(new is old for new, old in zip(captures, traced.captures, strict=True)):
        return mask_mod
    return dataclasses.replace(traced, captures=captures)
