"""What is to be computed: the value that the checks produce and every backend consumes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.block_mask import BlockMask
from quire.dropout import Dropout
from quire.ir.trace import Kind, Mod, Traced
from quire.vectorise import captures_of


@dataclass(frozen=True, eq=False)
class Problem:
    """Attention without its query, keys and values. Mods are traced where they can be.

    `mask_mod` holds everywhere. `block_mask` says which blocks exist, and `partial_mod`, its
    mask_mod, holds in those that it does not call full. Queries and keys sit at absolute positions
    that begin at `q_start` and `kv_start`.
    """

    scale: float
    score_mod: Mod | None = None
    mask_mod: Mod | None = None
    block_mask: BlockMask | None = None
    partial_mod: Mod | None = None
    dropout: Dropout | None = None
    q_start: int = 0
    kv_start: int = 0

    def masks(self, full: bool) -> tuple[Mod, ...]:
        """The masks that hold in a block."""
        candidates = (self.mask_mod, None if full else self.partial_mod)
        return tuple(mod for mod in candidates if mod is not None)

    def captures(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Every tensor that the mods capture, mod by mod."""
        return tuple(
            tensor for _, kind, mod in self._mods() for tensor in captures_of(mod, kind, dtype)
        )

    @property
    def num_replaceable(self) -> int:
        """How many of `captures`, counted from the first, belong to traced mods."""
        traced = (mod for _, _, mod in self._mods() if isinstance(mod, Traced))
        return sum(len(mod.captures) for mod in traced)

    def with_captures(self, captures: tuple[Tensor, ...]) -> Problem:
        """The same problem on other tensors, given in the order of `captures`.

        What an untraced mod captures is its own affair: its tensors stay as they are.
        """
        changed, rest = self, captures
        for name, _, mod in self._mods():
            if isinstance(mod, Traced):
                mine, rest = rest[: len(mod.captures)], rest[len(mod.captures) :]
                changed = replace(changed, **{name: replace(mod, captures=mine)})  # type: ignore[arg-type]
        return changed

    def _mods(self) -> Iterator[tuple[str, Kind, Mod]]:
        """The mods by field name: traced ones first, so that their captures come first."""
        fields: list[tuple[str, Kind, Mod | None]] = [
            ("score_mod", "score", self.score_mod),
            ("mask_mod", "mask", self.mask_mod),
            ("partial_mod", "mask", self.partial_mod),
        ]
        fields.sort(key=lambda field: not isinstance(field[2], Traced))
        for name, kind, mod in fields:
            if mod is not None:
                yield name, kind, mod


@dataclass(frozen=True, eq=False)
class Call:
    """A problem with its operands, and the mods as the user wrote them."""

    problem: Problem
    query: Tensor
    key: Tensor
    value: Tensor
    sink: Tensor | None = None
    score_mod: Mod | None = None
    mask_mod: Mod | None = None
