"""Mods made of mods: and, or, not, one after the other, and a query that stands further on.

    a & b    and_masks(a, b)        ~a        not_mask(a)
    a | b    or_masks(a, b)         f >> g    in_turn(f, g)

What is composed is called, never looked into, so a user's function is as good a part as ours.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

from torch import Tensor, nn

from quire.arguments import tensor_of, whole_number
from quire.ir.trace import mod_kind, mod_name
from quire.mods.objects import Bound, check_callables

MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""`(b, h, q_idx, kv_idx)` to the truth: may this query see this key?"""

ScoreMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""`(score, b, h, q_idx, kv_idx)` to the score that takes its place."""

_Mod = TypeVar("_Mod", bound=Callable[..., Tensor])


def named(name: str) -> Callable[[_Mod], _Mod]:
    """Name a function that serves as a mod for one call, and that nobody keeps."""

    def rename(mod: _Mod) -> _Mod:
        mod.__name__ = mod.__qualname__ = name
        return mod

    return rename


class Mask(Bound):
    """A mask_mod as a value: `function(b, h, q_idx, kv_idx, **fields)`.

    It decorates a function of four arguments, or binds one of more: `Mask(within, size=64)`.
    """

    kind = "mask"

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Whether query `q_idx` sees key `kv_idx`."""
        shown: Tensor = self.function(b, h, q_idx, kv_idx, **self.fields)
        return shown

    def __and__(self, other: MaskMod) -> Mask:
        return and_masks(self, other) if _is_mask(other) else NotImplemented

    def __rand__(self, other: MaskMod) -> Mask:
        return and_masks(other, self) if _is_mask(other) else NotImplemented

    def __or__(self, other: MaskMod) -> Mask:
        return or_masks(self, other) if _is_mask(other) else NotImplemented

    def __ror__(self, other: MaskMod) -> Mask:
        return or_masks(other, self) if _is_mask(other) else NotImplemented

    def __invert__(self) -> Mask:
        return not_mask(self)


class _Chained:
    """What every score_mod of this package has: `f >> g` is f, and then g of what f gave."""

    def __rshift__(self, other: ScoreMod) -> ScoreChange | ScoreModule:
        return in_turn(cast(ScoreMod, self), other) if _is_score(other) else NotImplemented

    def __rrshift__(self, other: ScoreMod) -> ScoreChange | ScoreModule:
        return in_turn(other, cast(ScoreMod, self)) if _is_score(other) else NotImplemented


class ScoreChange(_Chained, Bound):
    """A score_mod as a value: `function(score, b, h, q_idx, kv_idx, **fields)`.

    It decorates a function of five arguments, or binds one of more:
    `ScoreChange(lowered, slope=0.5)`.
    """

    kind = "score"

    def __call__(
        self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        """The score that takes the place of `score`."""
        changed: Tensor = self.function(score, b, h, q_idx, kv_idx, **self.fields)
        return changed


class ScoreModule(_Chained, nn.Module):
    """A score_mod that is a module: `forward` reads the module's parameters whenever it runs."""


class InTurn(ScoreModule):
    """Score_mods one after the other of which some are modules, owned as in `nn.Sequential`."""

    def __init__(self, *score_mods: ScoreMod) -> None:
        super().__init__()
        self._functions = tuple(None if isinstance(m, nn.Module) else m for m in score_mods)
        for place, mod in enumerate(score_mods):
            if isinstance(mod, nn.Module):
                self.add_module(str(place), mod)

    def _parts(self) -> list[Any]:
        """The mods in their order; a module is whichever stands under its name by now."""
        functions = enumerate(self._functions)
        return [self.get_submodule(str(at)) if part is None else part for at, part in functions]

    def forward(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """The score that the last mod gives."""
        return _in_turn(score, b, h, q_idx, kv_idx, self._parts())

    def __getitem__(self, place: int) -> Any:
        return self._parts()[place]

    def extra_repr(self) -> str:
        """Those parts that are no modules, in their places."""
        shown = ((place, part) for place, part in enumerate(self._functions) if part is not None)
        return "\n".join(f"({place}): {part!r}" for place, part in shown)

    @property
    def __name__(self) -> str:
        return "_then_".join(map(mod_name, self._parts()))


def _is_mask(other: object) -> bool:
    return callable(other) and not isinstance(other, _Chained)


def _is_score(other: object) -> bool:
    return callable(other) and not isinstance(other, Mask)


@Mask
def noop_mask(batch: Tensor, head: Tensor, token_q: Tensor, token_kv: Tensor) -> Tensor:
    """Hide nothing.

    noop_mask:

        1 1 1
        1 1 1
        1 1 1
    """
    # A comparison that always holds works alike for numbers, tensors and symbols.
    return batch >= 0


def and_masks(*mask_mods: MaskMod) -> Mask:
    """Show what every one of `mask_mods` shows; everything, if there are none.

    and_masks(causal, sliding_window(1), not_mask(document([0, 0, 0, 1, 1]))):

        0 0 0 0 0
        0 0 0 0 0
        0 0 0 0 0
        0 0 1 0 0
        0 0 0 0 0
    """
    check_callables("and_masks", *mask_mods)
    return Mask(_and_masks, f"and_masks({', '.join(map(mod_name, mask_mods))})", masks=mask_mods)


def _and_masks(
    b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, masks: tuple[MaskMod, ...]
) -> Tensor:
    shown = (mask(b, h, q_idx, kv_idx) for mask in masks)
    return _as_mask(functools.reduce(operator.and_, shown, True), b)


def or_masks(*mask_mods: MaskMod) -> Mask:
    """Show what any of `mask_mods` shows; nothing, if there are none.

    or_masks(causal, document([0, 0, 0, 1, 1])):

        1 1 1 0 0
        1 1 1 0 0
        1 1 1 0 0
        1 1 1 1 1
        1 1 1 1 1
    """
    check_callables("or_masks", *mask_mods)
    return Mask(_or_masks, f"or_masks({', '.join(map(mod_name, mask_mods))})", masks=mask_mods)


def _or_masks(
    b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, masks: tuple[MaskMod, ...]
) -> Tensor:
    shown = (mask(b, h, q_idx, kv_idx) for mask in masks)
    return _as_mask(functools.reduce(operator.or_, shown, False), b)


def not_mask(mask_mod: MaskMod) -> Mask:
    """Show what `mask_mod` hides, and hide what it shows.

    not_mask(causal):

        0 1 1 1
        0 0 1 1
        0 0 0 1
        0 0 0 0
    """
    check_callables("not_mask", mask_mod)
    return Mask(_not_mask, f"not_mask({mod_name(mask_mod)})", masks=(mask_mod,))


def _not_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, masks: tuple[MaskMod]) -> Tensor:
    (mask,) = masks
    return ~_as_mask(mask(b, h, q_idx, kv_idx), b)


def in_turn(*score_mods: ScoreMod) -> ScoreChange | ScoreModule:
    """Change scores by the first of `score_mods`, then what it gave by the next, and so on.

    in_turn(distance_bias(torch.tensor([9.0, 1.0, 0.0, 3.0, 4.0])), softcap(2)):

         0.0  0.9  2.0  2.0
         1.8  0.0  0.9  2.0
         1.9  1.8  0.0  0.9
         1.9  1.9  1.8  0.0

    If one of them is a module so is the result, and it owns that module.
    """
    check_callables("in_turn", *score_mods)
    if any(isinstance(mod, nn.Module) for mod in score_mods):
        return InTurn(*score_mods)
    name = "_then_".join(map(mod_name, score_mods)) or "in_turn()"
    return ScoreChange(_in_turn, name, score_mods=score_mods)


def _in_turn(
    score: Tensor,
    b: Tensor,
    h: Tensor,
    q_idx: Tensor,
    kv_idx: Tensor,
    score_mods: Sequence[ScoreMod],
) -> Tensor:
    for mod in score_mods:
        score = mod(score, b, h, q_idx, kv_idx)
    return score


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
    kind = Mask if mod_kind(mod) == "mask" else ScoreChange
    return cast(_Mod, kind(_offset, name, mod=mod, q_offset=q_offset))


def _offset(*args: Tensor, mod: Callable[..., Tensor], q_offset: int | Tensor) -> Tensor:
    *others, b, h, q_idx, kv_idx = args
    if isinstance(q_offset, Tensor) and q_offset.ndim == 1:
        q_offset = q_offset[b]
    return mod(*others, b, h, q_idx + q_offset, kv_idx)


def _as_mask(shown: Tensor | bool, b: Tensor) -> Tensor:
    """`shown` as a value of the kind that `b` is, also where it is Python's True or False."""
    if isinstance(shown, bool):
        return b >= 0 if shown else b < 0
    return shown
