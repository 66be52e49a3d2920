"""Builds pyramids of captured tensors, at each call, since the tensors may change."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.codegen.kernels.pyramid import NAMES, PYRAMID_DTYPES, write_pyramid
from quire.codegen.llvm import jit
from quire.codegen.llvm.target import Target
from quire.ir.pyramid import Axis, Pyramid, anything, heap, missing_leaf
from quire.runtime.cache import cache_key, code_of

WORTH = 64
"""Read a table if attention does at least this many multiplications per byte of it."""

MOST_MATRICES = 256
"""A tensor of more matrices is read by torch ops, all of them at once."""


def build(captures: Sequence[Tensor], pyramids: Sequence[Pyramid], work: int) -> list[Tensor]:
    """Return the pyramids of captured tensors.

    A table may be far larger than the call, for example if the call has few queries. Then it is not
    read: its pyramid allows any value, and all tiles are computed.
    """
    return [
        (_built if is_worth(captures[pyramid.slot], pyramid, work) else anything)(
            captures[pyramid.slot], pyramid
        )
        for pyramid in pyramids
    ]


def is_worth(tensor: Tensor, pyramid: Pyramid, work: int) -> bool:
    """Return whether to read a tensor for a call of `work` multiplications."""
    return len(pyramid.axes) == 1 or tensor.nbytes * WORTH <= work


def _built(tensor: Tensor, pyramid: Pyramid) -> Tensor:
    dtype = tensor.dtype
    if len(pyramid.axes) > 2 or dtype not in PYRAMID_DTYPES or tensor.numel() == 0:
        return heap(tensor, pyramid)
    layout = _layout(tensor.shape, tensor.stride(), pyramid.axes)
    if len(layout.matrices) > MOST_MATRICES:
        return heap(tensor, pyramid)
    entries = torch.empty(layout.size, dtype=dtype, device="cpu")
    build, missing = _builder(Target.host(), dtype, pyramid.largest)
    source, into, size = tensor.data_ptr(), entries.data_ptr(), dtype.itemsize
    leaf, spare = missing.data_ptr(), into + layout.spare * size
    for start, place in layout.matrices:
        build(source + start * size, *layout.numbers, leaf, into + place * size, spare)
    if tensor.dim() == 1 and layout.spare == layout.size:
        return entries
    return entries.as_strided(layout.shape, layout.strides)


class _Layout(NamedTuple):
    """Where the matrices of a tensor and of its pyramid are, in elements."""

    numbers: tuple[int, ...]  # sizes, strides, leaves and grains of rows and of columns
    matrices: list[tuple[int, int]]  # where each begins, in the tensor and in the pyramid
    size: int  # of the pyramid and a spare row
    spare: int  # where the spare row begins, in which several rows are combined
    shape: list[int]
    strides: list[int]


@functools.lru_cache(maxsize=1024)
def _layout(sizes: tuple[int, ...], strides: tuple[int, ...], axes: tuple[Axis, ...]) -> _Layout:
    single = len(axes) == 1
    row, column = (Axis(-1, 1), axes[0]) if single else axes
    one_row = 2 * column.leaves
    # A single row has only entry 1, and entry 0 is never written: it would be before the memory.
    first, each = (-one_row, one_row) if single else (0, 2 * row.leaves * one_row)
    steps, starts, count = {row.dim: one_row, column.dim: 1}, [0], 1
    others = [dim for dim in range(len(sizes)) if dim not in steps]
    for dim in others:
        starts = [start + strides[dim] * i for start in starts for i in range(sizes[dim])]
    for dim in reversed(others):
        steps[dim], count = count * each, count * sizes[dim]
    rows = (1, 0) if single else (sizes[row.dim], strides[row.dim])
    columns = sizes[column.dim], strides[column.dim]
    shapes = row.leaves, column.leaves, row.grain, column.grain
    return _Layout(
        numbers=(rows[0], columns[0], rows[1], columns[1], *shapes),
        matrices=[(start, first + each * place) for place, start in enumerate(starts)],
        size=each * count + (column.leaves << column.grain if column.grain else 0),
        spare=each * count,
        shape=Pyramid(0, axes, False).shape(sizes),
        strides=[steps[dim] for dim in range(len(sizes))],
    )


@functools.cache
def _builder(
    target: Target, dtype: torch.dtype, largest: bool
) -> tuple[Callable[..., None], Tensor]:
    """Return the function that builds a pyramid, and the value [1] of missing leaves."""
    address = _code(target, dtype).address(NAMES[largest])
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    parameters = [pointer, *[number] * 8, pointer, pointer, pointer]
    function = ctypes.CFUNCTYPE(None, *parameters)(address)
    return function, torch.full((1,), missing_leaf(dtype, largest), dtype=dtype, device="cpu")


@functools.cache
def _code(target: Target, dtype: torch.dtype) -> jit.Code:
    key = cache_key("pyramid", f"{target!r} {dtype}")
    return code_of(key, target, lambda: write_pyramid(dtype), NAMES)
