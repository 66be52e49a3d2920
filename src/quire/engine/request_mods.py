"""A user's mods: of an engine, and of one request. They are checked before anything is taken."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from torch import Tensor

from quire.block_mask.create import create_block_mask
from quire.errors import UnsupportedOpError
from quire.integrations.transformers.user_mods import NO_MODS, Mods
from quire.ir.trace import Kind, Mod, trace
from quire.mods.compose import MaskMod, ScoreMod, and_masks


class RequestMods(NamedTuple):
    """The mods of a request, and whether its prompt must be read `whole`.

    A prompt in which a token sees later ones cannot be read in chunks, and its pages are of no use
    to a longer prompt.
    """

    mods: Mods
    whole: bool = False


def checked(mask: MaskMod | None, score_mod: ScoreMod | None, *, causal: bool) -> Mods:
    """Return mods. Raise ModError if one is wrong.

    If `causal` is False, `mask` takes the place of the model's mask.
    """
    if mask is None and score_mod is None and causal:
        return NO_MODS
    _check(mask, "mask")
    _check(score_mod, "score")
    return Mods(mask, score_mod, causal)


def mods_of(own: Mods, common: Mods, *, heads: int, length: int) -> RequestMods:
    """Return the mods of a request of up to `length` tokens, beside those of all requests."""
    masks = [each for each in (common.mask, own.mask) if each is not None]
    causal = own.causal and common.causal
    whole = not causal and not (masks and hides_later_keys(and_masks(*masks), heads, length))
    return RequestMods(own, whole)


def _check(mod: Mod | None, kind: Kind) -> None:
    if mod is not None:
        with contextlib.suppress(UnsupportedOpError):  # it runs on the slower eager path
            trace(mod, kind)


def hides_later_keys(mask: MaskMod, heads: int, length: int) -> bool:
    """Return whether no query sees a key after it, among `length` positions.

    Bounds decide nearly all blocks of positions; elements are evaluated in the others.
    """
    ahead = create_block_mask(and_masks(mask, _is_later), 1, heads, length, length, device="cpu")
    return ahead.sparsity() == 100


def _is_later(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx > q_idx
