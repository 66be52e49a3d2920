"""Mods made from other mods. This is the only place that combines mods or shifts their positions.

    a & b    and_masks(a, b)        ~a        not_mask(a)
    a | b    or_masks(a, b)         f >> g    in_turn(f, g)

    offset(mod, q_offset, kv_offset)     mod, called with larger positions

These make values that a user may keep. `all_of`, `chain` and `shift` do the same for parts of a
call: a part may be None, and what changes nothing is left out.

A mod is combined by calling it, so a user's own function can be a part of any combination.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

from torch import Tensor, nn

from quire.checks.arguments import tensor_of, whole_number
from quire.ir.trace import Kind, mod_kind, mod_name
from quire.mods.objects import Bound, check_callables

MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Takes `(b, h, q_idx, kv_idx)` and returns whether the query sees the key."""

ScoreMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Takes `(score, b, h, q_idx, kv_idx)` and returns the new score."""

_Mod = TypeVar("_Mod", bound=Callable[..., Tensor])
_MaybeMod = TypeVar("_MaybeMod", bound=Callable[..., Tensor] | None)


def named(name: str) -> Callable[[_Mod], _Mod]:
    """Decorate a nested function with the name that messages and pictures show."""

    def rename(mod: _Mod) -> _Mod:
        mod.__name__ = mod.__qualname__ = name
        return mod

    return rename


class Mask(Bound):
    """A mask_mod as a value: `function(b, h, q_idx, kv_idx, **fields)`.

    Use it as a decorator of a function with four arguments, or give the arguments that follow
    these four: `Mask(within, size=64)`.
    """

    kind = "mask"

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return whether query `q_idx` sees key `kv_idx`."""
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
    """The operator of every score_mod in this package: `f >> g` applies f, then g."""

    def __rshift__(self, other: ScoreMod) -> ScoreChange | ScoreModule:
        return in_turn(cast(ScoreMod, self), other) if _is_score(other) else NotImplemented

    def __rrshift__(self, other: ScoreMod) -> ScoreChange | ScoreModule:
        return in_turn(other, cast(ScoreMod, self)) if _is_score(other) else NotImplemented


class ScoreChange(_Chained, Bound):
    """A score_mod as a value: `function(score, b, h, q_idx, kv_idx, **fields)`.

    Use it as a decorator of a function with five arguments, or give the arguments that follow
    these five: `ScoreChange(lowered, slope=0.5)`.
    """

    kind = "score"

    def __call__(
        self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        """Return the new score."""
        changed: Tensor = self.function(score, b, h, q_idx, kv_idx, **self.fields)
        return changed


_KINDS: dict[Kind, type[Bound]] = {"mask": Mask, "score": ScoreChange}


class ScoreModule(_Chained, nn.Module):
    """A score_mod that is a module: `forward` reads the module's parameters at every call."""


class InTurn(ScoreModule):
    """Several score_mods, some of them modules, which it owns as `nn.Sequential` does."""

    def __init__(self, *score_mods: ScoreMod) -> None:
        super().__init__()
        self._functions = tuple(None if isinstance(m, nn.Module) else m for m in score_mods)
        for place, mod in enumerate(score_mods):
            if isinstance(mod, nn.Module):
                self.add_module(str(place), mod)

    def _parts(self) -> list[Any]:
        """The mods in order. Modules are looked up, since a user may have replaced one."""
        functions = enumerate(self._functions)
        return [self.get_submodule(str(at)) if part is None else part for at, part in functions]

    def forward(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return the score after all mods."""
        return _in_turn(score, b, h, q_idx, kv_idx, score_mods=self._parts())

    def __getitem__(self, place: int) -> Any:
        return self._parts()[place]

    def extra_repr(self) -> str:
        """The parts that are not modules, with their places."""
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
    """Let every query see every key.

    noop_mask:

        1 1 1
        1 1 1
        1 1 1
    """
    # A comparison that always holds works alike for numbers, tensors and symbols.
    return batch >= 0


def and_masks(*mask_mods: MaskMod) -> Mask:
    """Let a query see a key if all of `mask_mods` do. Without masks it sees every key.

    and_masks(causal, sliding_window(1), not_mask(document([0, 0, 0, 1, 1]))):

        0 0 0 0 0
        0 0 0 0 0
        0 0 0 0 0
        0 0 1 0 0
        0 0 0 0 0
    """
    check_callables("and_masks", *mask_mods)
    return Mask(_and_masks, f"and_masks({', '.join(map(mod_name, mask_mods))})", masks=mask_mods)


def _and_masks(*place: Tensor, masks: tuple[MaskMod, ...]) -> Tensor:
    shown: list[Any] = [mask(*place) for mask in masks] or [True]
    return _as_mask(functools.reduce(operator.and_, shown), place[0])


def or_masks(*mask_mods: MaskMod) -> Mask:
    """Let a query see a key if any of `mask_mods` does. Without masks it sees no key.

    or_masks(causal, document([0, 0, 0, 1, 1])):

        1 1 1 0 0
        1 1 1 0 0
        1 1 1 0 0
        1 1 1 1 1
        1 1 1 1 1
    """
    check_callables("or_masks", *mask_mods)
    return Mask(_or_masks, f"or_masks({', '.join(map(mod_name, mask_mods))})", masks=mask_mods)


def _or_masks(*place: Tensor, masks: tuple[MaskMod, ...]) -> Tensor:
    shown: list[Any] = [mask(*place) for mask in masks] or [False]
    return _as_mask(functools.reduce(operator.or_, shown), place[0])


def not_mask(mask_mod: MaskMod) -> Mask:
    """Let a query see exactly the keys that `mask_mod` hides.

    not_mask(causal):

        0 1 1 1
        0 0 1 1
        0 0 0 1
        0 0 0 0
    """
    check_callables("not_mask", mask_mod)
    return Mask(_not_mask, f"not_mask({mod_name(mask_mod)})", masks=(mask_mod,))


def _not_mask(*place: Tensor, masks: tuple[MaskMod]) -> Tensor:
    (mask,) = masks
    return ~_as_mask(mask(*place), place[0])


def _as_mask(shown: Tensor | bool, b: Tensor) -> Tensor:
    """`shown` as a tensor (or symbol) like `b`: a user's mask may return Python's True or False."""
    if isinstance(shown, bool):
        return b >= 0 if shown else b < 0
    return shown


def in_turn(*score_mods: ScoreMod) -> ScoreChange | ScoreModule:
    """Apply the first of `score_mods` to the score, the next one to its result, and so on.

    in_turn(distance_bias(torch.tensor([9.0, 1.0, 0.0, 3.0, 4.0])), softcap(2)):

         0.0  0.9  2.0  2.0
         1.8  0.0  0.9  2.0
         1.9  1.8  0.0  0.9
         1.9  1.9  1.8  0.0

    If one of them is a module, the result is a module that owns it.
    """
    check_callables("in_turn", *score_mods)
    if any(isinstance(mod, nn.Module) for mod in score_mods):
        return InTurn(*score_mods)
    return ScoreChange(_in_turn, _chain_name(score_mods), score_mods=score_mods)


def _chain_name(score_mods: Sequence[ScoreMod]) -> str:
    return "_then_".join(map(mod_name, score_mods)) or "in_turn()"


def _in_turn(score: Tensor, *place: Tensor, score_mods: Sequence[ScoreMod]) -> Tensor:
    for mod in score_mods:
        score = mod(score, *place)
    return score


def offset(mod: _Mod, q_offset: int | Tensor, kv_offset: int | Tensor = 0) -> _Mod:
    """Call `mod`, a mask_mod or a score_mod, with `q_idx + q_offset` and `kv_idx + kv_offset`.

    offset(causal, 3):

        1 1 1 1 0 0
        1 1 1 1 1 0
        1 1 1 1 1 1

    Use it for decoding, where the keys of `q_offset` earlier tokens are cached. `q_offset` and
    `kv_offset` are ints, or tensors [] or [B] with an offset for each batch entry. A tensor is read
    at every call, so a step may overwrite it in place.
    """
    check_callables("offset", mod)
    fields = {"q_offset": _checked_offset("q_offset", q_offset)}
    if isinstance(kv_offset, Tensor) or kv_offset != 0:
        fields["kv_offset"] = _checked_offset("kv_offset", kv_offset)
    shown = ", ".join("tensor" if isinstance(by, Tensor) else str(by) for by in fields.values())
    name = f"offset({mod_name(mod)}, {shown})"
    return cast(_Mod, _KINDS[mod_kind(mod)](_offset, name, mod=mod, **fields))


def _checked_offset(name: str, given: int | Tensor) -> int | Tensor:
    advice = "Give the number of tokens before the first one, or a tensor [B] of them."
    if isinstance(given, Tensor):
        return tensor_of("integers", name, given, ranks=(0, 1), advice=advice)
    return whole_number(name, given, advice=advice)


def _offset(
    *args: Tensor, mod: Callable[..., Tensor], q_offset: int | Tensor, kv_offset: int | Tensor = 0
) -> Tensor:
    *others, b, h, q_idx, kv_idx = args
    return mod(*others, b, h, q_idx + _entry(q_offset, b), kv_idx + _entry(kv_offset, b))


def _entry(by: int | Tensor, b: Tensor) -> int | Tensor:
    """The offset of batch entry `b`: one of `by` [B], or `by` itself if it is a single number."""
    return by[b] if isinstance(by, Tensor) and by.ndim == 1 else by


def all_of(*masks: MaskMod | None) -> MaskMod | None:
    """Return `and_masks` of the masks that are not None, one mask itself, or None."""
    present = [mask for mask in masks if mask is not None]
    if len(present) < 2:
        return present[0] if present else None
    return and_masks(*present)


def chain(*score_mods: ScoreMod | None) -> ScoreMod | None:
    """Return `in_turn` of the mods that are not None, one mod itself, or None.

    Unlike `in_turn` it never makes a module: it is used for one call, and owns nothing.
    """
    present = [mod for mod in score_mods if mod is not None]
    if len(present) < 2:
        return present[0] if present else None
    check_callables("in_turn", *present)
    return ScoreChange(_in_turn, _chain_name(present), score_mods=tuple(present))


def shift(
    mod: _MaybeMod, kind: Kind, q_offset: int | Tensor, kv_offset: int | Tensor = 0
) -> _MaybeMod:
    """Return `offset(mod, q_offset, kv_offset)` under the name of `mod`, unchecked.

    A `mod` of None, and one that is shifted by the ints 0 and 0, is returned as it is. `kind` says
    whether `mod` is a mask_mod or a score_mod, which its signature may leave open.
    """
    unmoved = not any(isinstance(by, Tensor) or by for by in (q_offset, kv_offset))
    if mod is None or unmoved:
        return mod
    offsets = {"q_offset": q_offset, "kv_offset": kv_offset}
    return cast(_MaybeMod, _KINDS[kind](_offset, mod_name(mod), mod=mod, **offsets))


def where_there(there: Tensor, page: int) -> MaskMod:
    """Return the mask of sequences with holes: `there` [B, most] says which pages there are."""
    return Mask(_where_there, "holes", there=there, page=page)


def _where_there(
    b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, *, there: Tensor, page: int
) -> Tensor:
    return there[b, kv_idx // page]
