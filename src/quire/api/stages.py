"""kernel(): the code that quire makes of a mod, as text.

    >>> kernel = quire.kernel(mask_mod=quire.mods.causal)
    >>> print(kernel.stages["graph"])
    mask:
      %0 = input kv_idx : int32
      %1 = input q_idx : int32
      %2 = le %0, %1 : bool

There are three stages: `graph`, the ops; `llvm`, the functions that the kernel calls; `asm`, the
instructions of the processor. For a named target they are the same on every machine.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from quire.codegen.llvm import jit
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import F32, F64
from quire.codegen.mods.arguments import ModArguments
from quire.codegen.phases.tiles import TileShape
from quire.errors import ArgumentError
from quire.ir.graph import text
from quire.ir.trace import Mod, trace
from quire.request import Problem
from quire.results import working_dtype
from quire.runtime.mods import ModGraphs, capture_shapes, graphs_of, write_mods

NAMES = ("graph", "llvm", "asm")


@dataclass(frozen=True, eq=False)
class Kernel:
    """The code of some mods, stage by stage."""

    graphs: ModGraphs
    arguments: ModArguments
    tile: TileShape

    @property
    def stages(self) -> Mapping[str, str]:
        """The text of each stage by name. A stage is computed when it is first read."""
        return _Stages(self)

    @cached_property
    def graph(self) -> str:
        """The ops of each mod, and of the bounds of a mask: if it can, and must, hold in a tile."""
        titles = {"score": self.graphs.score, "mask": self.graphs.always}
        if self.graphs.bounds is not None:
            titles |= {"can": self.graphs.bounds.can, "must": self.graphs.bounds.must}
        parts = [
            f"{title}:\n{textwrap.indent(text(root), '  ')}"
            for title, root in titles.items()
            if root is not None
        ]
        return "\n".join(parts)

    @cached_property
    def llvm(self) -> str:
        """The functions that the forward kernel calls, in LLVM's language."""
        return write_mods("panel", self.tile, self.graphs, self.arguments).text

    @cached_property
    def asm(self) -> str:
        """The same functions in the assembly language of the processor."""
        return jit.assembly(self.llvm, self.tile.target)


class _Stages(Mapping[str, str]):
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __getitem__(self, name: str) -> str:
        if name not in NAMES:
            raise KeyError(f"{name!r} is none of the stages {', '.join(NAMES)}")
        return str(getattr(self._kernel, name))

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


def kernel(
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    target: str | None = None,
) -> Kernel:
    """Return the code for a score_mod, a mask_mod or both, for queries of `dtype`.

    `target` names a processor: x86-64-v3, x86-64-v4 or aarch64. By default it is this machine's.
    """
    if score_mod is None and mask_mod is None:
        raise ArgumentError("a score_mod or a mask_mod must be given, but both are None. Pass one.")
    wide = working_dtype(dtype)
    problem = Problem(
        scale=1.0,
        score_mod=None if score_mod is None else trace(score_mod, "score", score_dtype=wide),
        mask_mod=None if mask_mod is None else trace(mask_mod, "mask"),
    )
    graphs, captures = graphs_of(problem, wide, end=0)
    shapes = capture_shapes(captures, graphs.pyramids)
    processor = Target.host() if target is None else Target.named(target)
    tile = TileShape(processor, F64 if wide == torch.float64 else F32)
    return Kernel(graphs, ModArguments.of(graphs.all, shapes), tile)
