"""The mask_mod of a block mask: how it is traced, compared and moved to a device."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import torch
from torch import Tensor

from quire.errors import (
    MaskPickleError,
    ModError,
    ModValueError,
    RandomModError,
    SlicedMaskError,
    TracedBranchError,
    UnsupportedOpError,
)
from quire.ir.trace import Kind, Mod, Traced, mod_name, trace
from quire.mods.compose import MaskMod
from quire.mods.objects import same_tensor

REFUSED = (TracedBranchError, RandomModError, ModValueError)
"""If a trace raises one of these, the mod is wrong, and torch.vmap could not run it either."""

Device: TypeAlias = torch.device | str | int


def sliced_mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Raise an error: the mask_mod of a slice, until the user sets another one."""
    raise SlicedMaskError(
        "Cannot use mask_mod from a sliced BlockMask: it must count queries from the first one of "
        "the slice, but the mask_mod of the whole mask does not. Use mask.for_queries(start, stop) "
        "instead of a slice, or set the mask_mod of the slice: part = mask[:, :, row]; "
        "part.mask_mod = lambda b, h, q, kv: mask.mask_mod(b, h, q + row * mask.BLOCK_SIZE[0], kv)."
    )


def try_trace(mod: Mod, kind: Kind, device: torch.device) -> Traced | ModError:
    """Return the trace of `mod`, or the error that says why it cannot be traced."""
    try:
        return mod if isinstance(mod, Traced) else trace(mod, kind, device=device)
    except ModError as error:
        return error
    except Exception as error:  # a user's function may raise anything when it runs on symbols
        reason = UnsupportedOpError(f"{type(error).__name__}: {error}")
        reason.__cause__ = error
        return reason


def traced_mod(mask_mod: MaskMod, device: torch.device, verb: str) -> Traced:
    """Return the trace of a mask_mod that is written somewhere; `verb` is "Save" or "Pickle"."""
    traced = try_trace(mask_mod, "mask", device)
    if isinstance(traced, ModError):
        raise MaskPickleError(
            f"a mask that is written must have a mask_mod that can be traced, since its graph is "
            f"what is written, but {mod_name(mask_mod)!r} cannot: {traced} {verb} the arguments of "
            f"create_block_mask and create the mask again."
        ) from traced
    return traced


def same_mod(one: MaskMod, other: MaskMod, device: torch.device) -> bool:
    """Whether two mask_mods are one function, or have one graph and captures of equal values."""
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
    """Return `mask_mod` with all its captured tensors on `target`.

    That is `mask_mod` itself if they are there already, else its trace with the moved tensors. A
    mask_mod that cannot be traced is replaced by `rebuilt`.
    """
    traced = try_trace(mask_mod, "mask", source)
    if isinstance(traced, ModError):
        return rebuilt
    captures = tuple(tensor.to(target) for tensor in traced.captures)
    if all(new is old for new, old in zip(captures, traced.captures, strict=True)):
        return mask_mod
    return dataclasses.replace(traced, captures=captures)
