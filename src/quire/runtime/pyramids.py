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
from quire.ir.pyramid import Axis, Pyramid, anything, heap, missing_leaf
from quire.runtime.cache import cache_key
from quire.runtime.kernels import compiled_object

WORTH = 64
"""Multiplications of attention for which a byte of a table is read."""


def capture_shapes(
    captures: Sequence[Tensor], pyramids: Sequence[Pyramid]
) -> tuple[CaptureShape, ...]:
    """What generated code knows of captured tensors and of pyramids of them."""
    ranks = [captures[pyramid.slot].dim() for pyramid in pyramids]
    return (*map(CaptureShape.of, captures), *(CaptureShape(rank, None) for rank in ranks))


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
    if len(pyramid.axes) > 2 or tensor.dtype not in DTYPES or tensor.numel() == 0:
        return heap(tensor, pyramid)
    dims = [axis.dim for axis in pyramid.axes]
    row, column = ([Axis(-1, 1), *pyramid.axes])[-2:]
    # [other dimensions, rows, columns]; a single row of leaves is entry 1 of two.
    source = tensor.movedim(dims, list(range(-len(dims), 0)))
    if len(dims) == 1:
        source = source.unsqueeze(-2)
    others = source.shape[:-2]
    entries = tensor.new_empty((*others, 2 * row.leaves, 2 * column.leaves))
    spare = tensor.new_empty(column.leaves << column.grain if column.grain else 0)
    build = _builder(tensor.dtype, pyramid.largest)
    shape = (
        *(source.shape[-2:] + source.stride()[-2:]),
        *(row.leaves, column.leaves, row.grain, column.grain),
    )
    missing = _missing(tensor.dtype, pyramid.largest).data_ptr()
    for start, into in zip(_addresses(source), _addresses(entries), strict=True):
        build(start, *shape, missing, into, spare.data_ptr())
    found = entries[..., 1, :] if len(dims) == 1 else entries
    return found.movedim(list(range(-len(dims), 0)), dims)


def _addresses(tensor: Tensor) -> list[int]:
    """Where each of its matrices begins."""
    addresses = [tensor.data_ptr()]
    for size, stride in zip(tensor.shape[:-2], tensor.stride()[:-2], strict=True):
        step = stride * tensor.itemsize
        addresses = [start + step * place for start in addresses for place in range(size)]
    return addresses


@functools.cache
def _missing(dtype: torch.dtype, largest: bool) -> Tensor:
    return torch.full((1,), missing_leaf(dtype, largest), dtype=dtype)


@functools.cache
def _builder(dtype: torch.dtype, largest: bool) -> Callable[..., None]:
    address = _code(dtype).address(NAMES[largest])
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    signature = ctypes.CFUNCTYPE(None, pointer, *[number] * 8, pointer, pointer, pointer)
    return signature(address)


@functools.cache
def _code(dtype: torch.dtype) -> jit.Code:
    target = Target.host()
    key = cache_key("pyramid", f"{target!r} {dtype}")
    return jit.load(compiled_object(key, target, lambda: write_pyramid(dtype).text), NAMES)
