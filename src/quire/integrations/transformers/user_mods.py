"""The user's own mods for the layers of a model."""

from __future__ import annotations

from typing import NamedTuple

from quire.mods.compose import MaskMod, ScoreMod

ATTRIBUTE = "quire_mods"
"""The attribute of a module in which `enable` stores the mods."""


class Mods(NamedTuple):
    """The user's mods for all layers of a model. Positions count from a row's first token.

    `mask` hides keys in addition to those that the model hides. If `causal` is False, it takes the
    place of the model's own mask.
    """

    mask: MaskMod | None = None
    score_mod: ScoreMod | None = None
    causal: bool = True


NO_MODS = Mods()
