"""Mods made of mods: and, or, not, and a query that stands further on.

What is composed is called, never looked into, so a user's function is as good a part as ours.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import TypeAlias, TypeVar, cast

from torch import Tensor

from quire.arguments import tensor_of, whole_number
from quire.errors import NotCallableError
from quire.ir.trace import mod_kind, mod_name

MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""`(b, h, q_idx, kv_idx)` to the truth: may this query see this key?"""

ScoreMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""`(score, b, h, q_idx, kv_idx)` to the score that takes its place."""

_Mod = TypeVar("_Mod", bound=Callable[..., Tensor])


def named(name: str) -> Callable[[_Mod], _Mod]:
    """Name the mod that a factory returns after its parameters."""

    def rename(mod: _Mod) -> _Mod:
        mod.__name__ = mod.__qualname__ = name
        return mod

    return rename


def check_callables(composer: str, *mods: object) -> None:
    """Raise unless every one of `mods` can be called."""
    for position, mod in enumerate(mods):
        if not callable(mod):
            raise NotCallableError(
                f"{composer} takes mods, that is functions such as causal or sliding_window(256), "
                f"got {mod!r} as number {position + 1}. Give each mod as an argument of its own."
            )


def noop_mask(batch: Tensor, head: Tensor, token_q: Tensor, token_kv: Tensor) -> Tensor:
    """Hide nothing.

    noop_mask:

        1 1 1
        1 1 1
        1 1 1
    """
    # A comparison that always holds works alike for numbers, tensors and symbols.
    return batch >= 0


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """Show what every one of `mask_mods` shows; everything, if there are none.

    and_masks(causal, sliding_window(1), not_mask(document([0, 0, 0, 1, 1]))):

        0 0 0 0 0
        0 0 0 0 0
        0 0 0 0 0
        0 0 1 0 0
        0 0 0 0 0
    """
    check_callables("and_masks", *mask_mods)

    @named(f"and_masks({', '.join(map(mod_name, mask_mods))})")
    def and_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        shown = (mask(b, h, q_idx, kv_idx) for mask in mask_mods)
        return _as_mask(functools.reduce(operator.and_, shown, True), b)

    return and_mask


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """Show what any of `mask_mods` shows; nothing, if there are none.

    or_masks(causal, document([0, 0, 0, 1, 1])):

        1 1 1 0 0
        1 1 1 0 0
        1 1 1 0 0
        1 1 1 1 1
        1 1 1 1 1
    """
    check_callables("or_masks", *mask_mods)

    @named(f"or_masks({', '.join(map(mod_name, mask_mods))})")
    def or_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        shown = (mask(b, h, q_idx, kv_idx) for mask in mask_mods)
        return _as_mask(functools.reduce(operator.or_, shown, False), b)

    return or_mask


def not_mask(mask_mod: MaskMod) -> MaskMod:
    """Show what `mask_mod` hides, and hide what it shows.

    not_mask(causal):

        0 1 1 1
        0 0 1 1
        0 0 0 1
        0 0 0 0
    """
    check_callables("not_mask", mask_mod)

    @named(f"not_mask({mod_name(mask_mod)})")
    def inverse_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ~_as_mask(mask_mod(b, h, q_idx, kv_idx), b)

    return inverse_mask


def offset(mod: _Mod, q_offset: int | Tensor) -> _Mod:
    """Count queries from `q_offset` on: for decoding, where keys of earlier tokens are cached.

    offset(causal, 3):

        1 1 1 1 0 0
        1 1 1 1 1 0
        1 1 1 1 1 1

    `mod` is a mask_mod or a score_mod. `q_offset` is a number, a tensor of one number that each
    step may overwrite, or a tensor [B] with the length of each sequence's cache.
    """
    check_callables("offset", mod)
    advice = "Give the number of tokens before the first query, or a tensor [B] of them."
    if isinstance(q_offset, Tensor):
        tensor_of("integers", "q_offset", q_offset, ranks=(0, 1), advice=advice)
        name = f"offset({mod_name(mod)}, tensor)"
    else:
        q_offset = whole_number("q_offset", q_offset, advice=advice)
        name = f"offset({mod_name(mod)}, {q_offset})"

    def moved(b: Tensor, q_idx: Tensor) -> Tensor:
        if isinstance(q_offset, Tensor) and q_offset.ndim == 1:
            return q_idx + q_offset[b]
        return q_idx + q_offset

    @named(name)
    def moved_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mod(b, h, moved(b, q_idx), kv_idx)

    @named(name)
    def moved_score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mod(score, b, h, moved(b, q_idx), kv_idx)

    return cast(_Mod, moved_mask if mod_kind(mod) == "mask" else moved_score)


def _as_mask(shown: Tensor | bool, b: Tensor) -> Tensor:
    """`shown` as a value of the kind that `b` is, also where it is Python's True or False."""
    if isinstance(shown, bool):
        return b >= 0 if shown else b < 0
    return shown
