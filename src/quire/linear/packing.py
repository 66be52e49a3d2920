"""Weights [N, K] to packed weights, and back.

    packed = pack_weights(weight, "int8")
    unpack_weights(packed)               # float32 [N, K]: what the kernel multiplies by

Integers have one scale for 32 weights of a row, in float16. The scale of int8 is the largest magnitude
/ 127. That of int4 is the number with the largest magnitude / -8, so that this one is stored exactly
(the rule of GGUF's Q8_0 and Q4_0).
"""

from __future__ import annotations

import mmap
from typing import NamedTuple

import torch
from torch import Tensor

from quire.codegen.phases.weights import BLOCK, FORMATS, GROUP, PANEL, WeightFormat
from quire.runtime.linear import PackedWeights

_HUGE_PAGE = 2 << 20
_NARROW = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Quantised(NamedTuple):
    """Weights as integers [N, K], and their float16 scales [N, K / 32]; K in whole groups."""

    numbers: Tensor
    scales: Tensor


def quantise(weight: Tensor, format: WeightFormat) -> Quantised:
    """Return weights [N, K] as integers; K is a multiple of 32."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    if format.bits == 8:
        scales = groups.abs().amax(2) / 127
    else:
        largest = groups.abs().nan_to_num(nan=torch.inf).argmax(2, keepdim=True)
        scales = groups.gather(2, largest).squeeze(2) / -format.zero
    scales = scales.half()
    wide = scales.float()[..., None]
    limit = format.zero - 1
    ratio = torch.where((wide != 0) & wide.isfinite(), groups / wide, 0)
    lowest = -limit if format.bits == 8 else -format.zero
    numbers = ratio.nan_to_num().round().clamp(lowest, limit)
    return Quantised(numbers.to(torch.int8).flatten(1), scales)


def pack_weights(weight: Tensor, name: str, *, integers: bool = False) -> PackedWeights:
    """Return weights [N, K] in a format."""
    format = FORMATS[name]
    width, depth = weight.shape
    columns = plain_columns(width)
    data = empty_panels(len(columns), format.panel_bytes(depth))
    for first in range(0, len(columns), _PANELS_AT_ONCE):  # so that little more memory is needed
        last = min(first + _PANELS_AT_ONCE, len(columns))
        rows = _padded(weight[first * PANEL : last * PANEL].detach(), last - first)
        data[first:last] = _panels(rows, format)
    return PackedWeights(data.flatten(), columns, format, depth, integers)


_PANELS_AT_ONCE = 256


def _padded(weight: Tensor, panels: int) -> Tensor:
    rows = torch.zeros(panels * PANEL, -(-weight.shape[1] // BLOCK) * BLOCK)
    rows[: weight.shape[0], : weight.shape[1]] = weight
    return rows


def plain_columns(width: int) -> Tensor:
    """Return the table of columns of panels in order."""
    first = torch.arange(0, width, PANEL)
    return torch.stack((first, (width - first).clamp(max=PANEL)), 1)


def _panels(weight: Tensor, format: WeightFormat) -> Tensor:
    """Return weights of whole panels and blocks as bytes [panels, bytes]."""
    if format.scaled:
        return pack_integers(quantise(weight, format), format)
    numbers = weight.to(_NARROW[format.name]).view(-1, PANEL, weight.shape[1])
    if format.step == 1:
        return _bytes(numbers.transpose(1, 2))
    return _bytes(numbers.unflatten(2, (-1, format.step)).transpose(1, 2))


def pack_integers(quantised: Quantised, format: WeightFormat) -> Tensor:
    """Return integers of whole panels and blocks as bytes [panels, bytes]."""
    numbers, scales = quantised
    panels, blocks = numbers.shape[0] // PANEL, numbers.shape[1] // BLOCK
    # [panel, block, word, column, k of the word]
    words = (numbers + format.zero).to(torch.uint8) if format.bits == 4 else _unsigned(numbers)
    words = words.view(panels, PANEL, blocks, -1, format.step).permute(0, 2, 3, 1, 4)
    if format.bits == 4:
        words = words[..., :4] | words[..., 4:] << 4
    header = scales.view(panels, PANEL, blocks, -1).permute(0, 2, 3, 1)
    parts = [_bytes(part.flatten(0, 1)) for part in (header, words)]
    return torch.cat(parts, 1).view(panels, -1)


def _unsigned(numbers: Tensor) -> Tensor:
    """Return int8 numbers + 128, as uint8: the highest bit is exchanged."""
    return numbers.view(torch.uint8) ^ 0x80


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, one row for each entry of its first dimension."""
    return tensor.contiguous().view(torch.uint8).flatten(1)


def empty_panels(panels: int, size: int) -> Tensor:
    """Return memory for panels, [panels, size]: in large pages where the system has them."""
    count = panels * size
    if not count:
        return torch.empty(panels, size, dtype=torch.uint8)
    block = mmap.mmap(-1, count + _HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(block, dtype=torch.uint8)
    return whole[-whole.data_ptr() % _HUGE_PAGE :][:count].view(panels, size)


def unpack_weights(packed: PackedWeights) -> Tensor:
    """Return the float32 weights [N, K] that the kernel multiplies by."""
    format, blocks = packed.format, -(-packed.depth // BLOCK)
    panels = len(packed.columns)
    data = packed.data.view(panels * blocks, format.block_bytes)
    if not format.scaled:
        numbers = data.view(_NARROW[format.name]).view(panels, blocks * BLOCK // format.step, PANEL, -1)
        rows = numbers.permute(0, 2, 1, 3).reshape(panels * PANEL, -1).float()
    else:
        scales = data[:, : format.header_bytes].contiguous().view(torch.float16)
        scales = scales.view(panels, blocks, -1, PANEL).permute(0, 3, 1, 2).reshape(panels * PANEL, -1)
        words = data[:, format.header_bytes :]
        if format.bits == 4:
            words = words.reshape(-1, 4)
            words = torch.stack((words & 15, words >> 4), 1)
        words = words.reshape(panels, -1, PANEL, format.step).permute(0, 2, 1, 3)
        numbers = words.reshape(panels * PANEL, -1).float() - format.zero
        rows = (numbers.unflatten(1, (-1, GROUP)) * scales.float()[..., None]).flatten(1)
    return _in_order(rows, packed)


def _in_order(rows: Tensor, packed: PackedWeights) -> Tensor:
    """Return the rows that exist, in the order of columns of the result."""
    first, count = packed.columns[:, :1], packed.columns[:, 1:]
    lanes = torch.arange(PANEL)
    exists = (lanes < count).flatten()
    width = int(count.sum())
    weight = rows.new_empty(width, packed.depth)
    weight[(first + lanes).flatten()[exists]] = rows[exists, : packed.depth]
    return weight
