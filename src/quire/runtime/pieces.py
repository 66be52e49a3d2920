"""Pieces of attention: computed open, so that they can be merged with the bits of one call."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.codegen.kernels.merge import MERGE, write_merge_pieces
from quire.codegen.llvm import jit
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import F32, F64
from quire.codegen.phases.softmax import LN_4
from quire.codegen.phases.tiles import TileShape
from quire.request import Call
from quire.results import Result
from quire.runtime.cache import cache_key, code_of, processor_obstacle
from quire.runtime.forward import ForwardPlan


def compute_open(call: Call) -> Result | None:
    """Return `out` not divided, its sums as `lse` and the maxima as `max_scores`.

    All have the working dtype. Maxima are those of scores times log4(e). None is returned if a mod
    used an index out of range.
    """
    found = ForwardPlan.of(call, learns=True, stays_open=True).run(call)
    if found is not None and found.lse is not None:
        found.lse.masked_fill_(found.lse == -math.inf, 0.0)  # rows of no sequence
    return found


def merge(
    outs: Sequence[Tensor], sums: Sequence[Tensor], maxima: Sequence[Tensor], sink: Tensor
) -> tuple[Tensor, Tensor]:
    """Return out [..., Dv] and lse [...] of all pieces, in the order in which they are given.

    The operands are open rows, contiguous; `sink` has a number for each row.
    """
    if outs[0].device.type != "cpu" or processor_obstacle() is not None:
        return _merged_in_torch(outs, sums, maxima, sink)
    out, lse = torch.empty_like(outs[0]), torch.empty_like(sink)
    places = [x.data_ptr() for piece in zip(outs, sums, maxima, strict=True) for x in piece]
    parts = (ctypes.c_void_p * len(places))(*places)
    sizes = len(outs), lse.numel(), out.shape[-1]
    results = sink.data_ptr(), out.data_ptr(), lse.data_ptr()
    _merger(Target.host(), out.dtype)(parts, *sizes, *results)
    return out, lse


def _merged_in_torch(
    outs: Sequence[Tensor], sums: Sequence[Tensor], maxima: Sequence[Tensor], sink: Tensor
) -> tuple[Tensor, Tensor]:
    best = functools.reduce(torch.maximum, [*maxima, sink / LN_4])
    shift = torch.where(best.isinf(), 0.0, best)
    factors = [((each - shift) * LN_4).exp() for each in maxima]
    total = sum((s * x for s, x in zip(sums, factors, strict=True)), (sink - shift * LN_4).exp())
    parts = [part * x.unsqueeze(-1) for part, x in zip(outs, factors, strict=True)]
    share = torch.where(total == 0, 0.0, 1.0 / total).unsqueeze(-1)
    return torch.stack(parts).sum(0) * share, shift * LN_4 + total.log()


@functools.cache
def _merger(target: Target, dtype: torch.dtype) -> Callable[..., None]:
    address = _code(target, dtype).address(MERGE)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    parameters = (pointer, number, number, number, pointer, pointer, pointer)
    return ctypes.CFUNCTYPE(None, *parameters)(address)


@functools.cache
def _code(target: Target, dtype: torch.dtype) -> jit.Code:
    tile = TileShape(target, F64 if dtype == torch.float64 else F32)
    key = cache_key(MERGE, repr(tile))
    return code_of(key, target, lambda: write_merge_pieces(tile), [MERGE])
