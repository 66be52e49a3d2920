"""Pyramids of captured tensors, built anew at each call, since what tensors hold may change."""

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
"""Multiplications of attention for which a byte of a table is read."""


def build(captures: Sequence[Tensor], pyramids: Sequence[Pyramid], work: int) -> list[Tensor]:
    """The pyramids of some tensors, where they are worth their time.

    A table may have far more elements than a call has scores, as one of all queries has for a
    few of them; then what it holds may be anything, and all of its tiles are computed.
    """
    return [
        (_built if is_worth(captures[pyramid.slot], pyramid, work) else anything)(
            captures[pyramid.slot], pyramid
        )
        for pyramid in pyramids
    ]


def is_worth(tensor: Tensor, pyramid: Pyramid, work: int) -> bool:
    """Whether a tensor is read for a call of so many multiplications."""
    return len(pyramid.axes) == 1 or tensor.nbytes * WORTH <= work


def _built(tensor: Tensor, pyramid: Pyramid) -> Tensor:
    dtype = tensor.dtype
    if len(pyramid.axes) > 2 or dtype not in PYRAMID_DTYPES or tensor.numel() == 0:
        return heap(tensor, pyramid)
    layout = _layout(tensor.shape, tensor.stride(), pyramid.axes)
    entries = torch.empty(layout.room, dtype=dtype, device="cpu")
    build, missing = _builder(Target.host(), dtype, pyramid.largest)
    source, into, size = tensor.data_ptr(), entries.data_ptr(), dtype.itemsize
    leaf, spare = missing.data_ptr(), into + layout.spare * size
    for start, place in layout.matrices:
        build(source + start * size, *layout.numbers, leaf, into + place * size, spare)
    if tensor.dim() == 1 and layout.spare == layout.room:
        return entries
    return entries.as_strided(layout.shape, layout.strides)


class _Layout(NamedTuple):
    """How the matrices of a tensor, along the axes of a pyramid, become those of its entries.

    Everything is counted in elements.
    """

    numbers: tuple[int, ...]  # sizes, strides, leaves and grains of rows and of columns
    matrices: list[tuple[int, int]]  # where each begins, in the tensor and among the entries
    room: int
    spare: int  # where a row begins that is put together from several
    shape: list[int]
    strides: list[int]


@functools.lru_cache(maxsize=1024)
def _layout(sizes: tuple[int, ...], strides: tuple[int, ...], axes: tuple[Axis, ...]) -> _Layout:
    single = len(axes) == 1
    row, column = (Axis(-1, 1), axes[0]) if single else axes
    one_row = 2 * column.leaves
    # Of one row there is entry 1 alone: nobody writes entry 0, which would begin before it.
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
        room=each * count + (column.leaves << column.grain if column.grain else 0),
        spare=each * count,
        shape=Pyramid(0, axes, False).shape(sizes),
        strides=[steps[dim] for dim in range(len(sizes))],
    )


@functools.cache
def _builder(
    target: Target, dtype: torch.dtype, largest: bool
) -> tuple[Callable[..., None], Tensor]:
    """The function that builds a pyramid, and what it takes for missing leaves."""
    address = _code(target, dtype).address(NAMES[largest])
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    signature = ctypes.CFUNCTYPE(None, pointer, *[number] * 8, pointer, pointer, pointer)
    return signature(address), torch.full((1,), missing_leaf(dtype, largest), dtype=dtype)


@functools.cache
def _code(target: Target, dtype: torch.dtype) -> jit.Code:
    key = cache_key("pyramid", f"{target!r} {dtype}")
    return code_of(key, target, lambda: write_pyramid(dtype), NAMES)
