"""Mods of several parts, some of which may be missing; and mods that count from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import TypeVar, cast

from torch import Tensor

from quire.ir.trace import mod_kind
from quire.mods import MaskMod, ScoreMod

_Mod = TypeVar("_Mod", bound=Callable[..., Tensor])


def all_of(*masks: MaskMod | None) -> MaskMod | None:
    """What all masks show; None if there are none."""
    present = [mask for mask in masks if mask is not None]
    return reduce(_both, present) if present else None


def _both(one: MaskMod, other: MaskMod) -> MaskMod:
    def both(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return one(b, h, q_idx, kv_idx) & other(b, h, q_idx, kv_idx)

    return both


def in_turn(*score_mods: ScoreMod | None) -> ScoreMod | None:
    """What each makes of the score that the one before it left; None if there are none."""
    present = [score_mod for score_mod in score_mods if score_mod is not None]
    return reduce(_after, present) if present else None


def _after(one: ScoreMod, other: ScoreMod) -> ScoreMod:
    def after(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return other(one(score, b, h, q_idx, kv_idx), b, h, q_idx, kv_idx)

    return after


def moved(mod: _Mod | None, by: Tensor | None) -> _Mod | None:
    """`mod` of positions to which `by` [B] is added; as it is if that is None."""
    if mod is None or by is None:
        return mod
    inner, shift = mod, by

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return inner(b, h, q_idx + shift[b], kv_idx + shift[b])

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return inner(score, b, h, q_idx + shift[b], kv_idx + shift[b])

    return cast(_Mod, mask if mod_kind(mod) == "mask" else score_mod)
