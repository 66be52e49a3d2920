"""Pyramids of captured tensors, built anew at each call, since what tensors hold may change."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.codegen import jit
from quire.codegen.arguments import CaptureShape
from quire.codegen.pyramid import DTYPES, NAMES, write_pyramid
from quire.codegen.target import Target
from quire.ir.pyramid import Pyramid, heap, missing_leaf
from quire.runtime.cache import cache_key
from quire.runtime.kernels import code_of


def capture_shapes(
    captures: Sequence[Tensor], pyramids: Sequence[Pyramid]
) -> tuple[CaptureShape, ...]:
    """What generated code knows of captured tensors and of pyramids of them."""
    ranks = [captures[pyramid.slot].dim() for pyramid in pyramids]
    return (*map(CaptureShape.of, captures), *(CaptureShape(rank, rank - 1) for rank in ranks))


def build(captures: Sequence[Tensor], pyramids: Sequence[Pyramid]) -> list[Tensor]:
    """The pyramids of some tensors."""
    return [_built(captures[pyramid.slot], pyramid) for pyramid in pyramids]


def _built(tensor: Tensor, pyramid: Pyramid) -> Tensor:
    if tensor.dim() != 1 or tensor.dtype not in DTYPES or tensor.numel() == 0:
        return heap(tensor, pyramid).contiguous()
    entries = torch.empty(2 * pyramid.leaves, dtype=tensor.dtype)
    build = _builder(Target.host(), tensor.dtype, pyramid.largest)
    missing = _missing(tensor.dtype, pyramid.largest)
    build(
        tensor.data_ptr(),
        tensor.shape[0],
        tensor.stride(0),
        pyramid.leaves,
        missing.data_ptr(),
        entries.data_ptr(),
    )
    return entries


@functools.cache
def _missing(dtype: torch.dtype, largest: bool) -> Tensor:
    return torch.full((1,), missing_leaf(dtype, largest), dtype=dtype)


@functools.cache
def _builder(target: Target, dtype: torch.dtype, largest: bool) -> Callable[..., None]:
    address = _code(target, dtype).address(NAMES[largest])
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    signature = ctypes.CFUNCTYPE(None, pointer, number, number, number, pointer, pointer)
    return signature(address)


@functools.cache
def _code(target: Target, dtype: torch.dtype) -> jit.Code:
    key = cache_key("pyramid", f"{target!r} {dtype}")
    return code_of(key, target, lambda: write_pyramid(dtype), NAMES)
