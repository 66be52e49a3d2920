"""Runs generated mod functions on one panel, to compare them with the interpreter."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.codegen.llvm import jit
from quire.codegen.llvm.builder import Module
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import F32, F64
from quire.codegen.mods.arguments import CaptureShape, ModArguments
from quire.codegen.mods.functions import write_rewrite
from quire.codegen.phases.tiles import TileShape
from quire.ir.graph import Node

_Rewrite = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 6)


def host_with(vector_bits: int) -> Target:
    """This machine, with vectors of another width."""
    return Target.host().widened(vector_bits)


def aligned(count: int, dtype: torch.dtype) -> Tensor:
    """A vector of zeros at a multiple of 64 bytes."""
    memory = torch.zeros(count + 16, dtype=dtype)
    skip = -memory.data_ptr() % 64 // memory.element_size()
    return memory[skip : skip + count]


class PanelRun:
    """A function compiled from graphs; call it with scores [keys, queries]."""

    def __init__(
        self,
        score: Node | None,
        masks: Sequence[Node],
        captures: Sequence[Tensor],
        dtype=torch.float32,
        target: Target | None = None,
    ) -> None:
        self.dtype = dtype
        target = target or Target.host()
        self.captures = list(captures)
        self.tile = TileShape(target, F64 if dtype == torch.float64 else F32)
        roots = [*masks, *([] if score is None else [score])]
        self.arguments = ModArguments.of(roots, tuple(map(CaptureShape.of, captures)))
        module = Module()
        write_rewrite(module, "rewrite", self.tile, self.arguments, score, masks, unit=1.0)
        self.code = jit.load(jit.compile_object(module.text, target), ["rewrite"])

    def __call__(self, scores: Tensor, *, b=0, h=0, q_idx=0, kv_idx=0) -> tuple[Tensor, bool]:
        """The rewritten scores, and whether an index was out of range."""
        keys, queries = scores.shape
        width = self.tile.width
        assert queries <= width
        panel = aligned(keys * width, self.dtype).view(keys, width)
        panel[:, :queries] = scores
        maxima = aligned(width, self.dtype)
        flag = ctypes.c_int64(0)
        packed = self.arguments.pack(self.captures, ctypes.addressof(flag))
        record = ctypes.create_string_buffer(packed)
        _Rewrite(self.code.address("rewrite"))(
            panel.data_ptr(), maxima.data_ptr(), ctypes.addressof(record),
            b, h, q_idx, queries, kv_idx, keys,
        )  # fmt: skip
        result = panel[:, :queries].clone()
        known = ~result.isnan().any(0)  # the sums of a column say whether it has a NaN
        assert torch.equal(maxima[:queries][known], result.amax(0)[known])
        return result, bool(flag.value)
