"""What is to be computed: the value that the checks produce and every backend consumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from quire.aux_outputs import AuxRequest
from quire.block_mask import BlockMask
from quire.dropout import Dropout
from quire.ir.trace import Mod, Traced
from quire.sequences import Packed
from quire.vectorise import Opaque

ReadyMod: TypeAlias = Traced | Opaque
"""A mod whose captured tensors are known."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Attention without its query, keys and values.

    `mask_mod` holds everywhere. `block_mask` says which blocks exist, and `partial_mod`, its
    mask_mod, holds in those that it does not call full. Queries and keys sit at absolute positions
    that begin at `q_start` and `kv_start`, and batch entries are numbered from `b_start`.
    """

    scale: float
    score_mod: ReadyMod | None = None
    mask_mod: ReadyMod | None = None
    block_mask: BlockMask | None = None
    partial_mod: ReadyMod | None = None
    dropout: Dropout | None = None
    q_start: int = 0
    kv_start: int = 0
    b_start: int = 0

    def masks(self, full: bool) -> tuple[ReadyMod, ...]:
        """The masks that hold in a block."""
        candidates = (self.mask_mod, None if full else self.partial_mod)
        return tuple(mod for mod in candidates if mod is not None)

    @property
    def captures(self) -> tuple[Tensor, ...]:
        """Every tensor that the mods capture, mod by mod."""
        return tuple(tensor for mod in self._mods().values() for tensor in mod.captures)

    def with_captures(self, captures: tuple[Tensor, ...]) -> Problem:
        """The same problem on other tensors, given in the order of `captures`."""
        if not captures:
            return self
        changed, rest = self, captures
        for name, mod in self._mods().items():
            mine, rest = rest[: len(mod.captures)], rest[len(mod.captures) :]
            changed = replace(changed, **{name: replace(mod, captures=mine)})  # type: ignore[arg-type]
        return changed

    def seeded(self, generator: torch.Generator | None) -> Problem:
        """The same problem with a seed for its dropout, if there is any."""
        if self.dropout is None:
            return self
        return replace(self, dropout=self.dropout.seeded(generator))

    def _mods(self) -> dict[str, ReadyMod]:
        """The mods that there are, by field name."""
        fields = {
            "score_mod": self.score_mod,
            "mask_mod": self.mask_mod,
            "partial_mod": self.partial_mod,
        }
        return {name: mod for name, mod in fields.items() if mod is not None}


@dataclass(frozen=True, eq=False)
class Call:
    """A problem with its operands, the mods as the user wrote them, and what else is wanted.

    With `packed` the rows of the only batch entry are those of many sequences, each of which is a
    problem of its own; keys and values may be pages.
    """

    problem: Problem
    query: Tensor
    key: Tensor
    value: Tensor
    sink: Tensor | None = None
    score_mod: Mod | None = None
    mask_mod: Mod | None = None
    aux: AuxRequest | None = None
    kernel_options: Mapping[str, object] | None = None
    packed: Packed | None = None
