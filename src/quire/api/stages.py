"""kernel(): the code that quire makes of a mod, as text.

    >>> kernel = quire.kernel(mask_mod=quire.mods.causal)
    >>> print(kernel.stages["graph"])
    mask:
      %0 = input kv_idx : int32
      %1 = input q_idx : int32
      %2 = le %0, %1 : bool

The stages are the steps of `runtime/mods.py`: trace, shift, bound and narrow give graphs, `lower`
the functions that the kernel calls, `compile` the instructions of the processor. `graph`, `llvm`
and `asm` are the last stage in each of these languages. For a named target, stages are the same on
every machine.
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
from quire.results import working_dtype
from quire.runtime.mods import COLUMN, ModGraphs, capture_shapes, graph_stages, lower

LAST_OF_LANGUAGE = {language: step for step, language in COLUMN.items()}
"""The last step in each language: "graph" is the result of "narrow"."""

NAMES = (*LAST_OF_LANGUAGE, *COLUMN)
"""Every name that a stage can be read by."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """The code of some mods, step by step."""

    graphs: Mapping[str, ModGraphs]
    arguments: ModArguments
    tile: TileShape

    @property
    def stages(self) -> Mapping[str, str]:
        """The text after each step by name. A text is written when it is first read."""
        return _Stages(self)

    @property
    def final(self) -> ModGraphs:
        """The graphs after the last of their steps."""
        *_, graphs = self.graphs.values()
        return graphs

    @cached_property
    def llvm(self) -> str:
        """The functions that the forward kernel calls, in LLVM's language."""
        return lower("panel", self.tile, self.final, self.arguments).text

    @cached_property
    def asm(self) -> str:
        """The same functions in the assembly language of the processor."""
        return jit.assembly(self.llvm, self.tile.target)


class _Stages(Mapping[str, str]):
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __getitem__(self, name: str) -> str:
        step = LAST_OF_LANGUAGE.get(name, name)
        if step not in COLUMN:
            raise KeyError(f"{name!r} is none of the stages {', '.join(NAMES)}")
        graphs = self._kernel.graphs.get(step)
        return str(getattr(self._kernel, COLUMN[step])) if graphs is None else _graph_text(graphs)

    def __iter__(self) -> Iterator[str]:
        return iter(COLUMN)

    def __len__(self) -> int:
        return len(COLUMN)


def _graph_text(graphs: ModGraphs) -> str:
    """The ops of each mod, and of the bounds of a mask: whether it can and must hold in a tile."""
    titles = {"score": graphs.score, "mask": graphs.always}
    if graphs.bounds is not None:
        titles |= {"can": graphs.bounds.can, "must": graphs.bounds.must}
    return "\n".join(
        f"{title}:\n{textwrap.indent(text(root), '  ')}"
        for title, root in titles.items()
        if root is not None
    )


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
    score = None if score_mod is None else trace(score_mod, "score", score_dtype=wide)
    mask = None if mask_mod is None else trace(mask_mod, "mask")
    graphs, captures = graph_stages((score, mask, None, None), end=0)
    *_, final = graphs.values()
    shapes = capture_shapes(captures, final.pyramids)
    processor = Target.host() if target is None else Target.named(target)
    tile = TileShape(processor, F64 if wide == torch.float64 else F32)
    return Kernel(graphs, ModArguments.of(final.all, shapes), tile)
