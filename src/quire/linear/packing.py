"""Weights [N, K] to packed weights, and back.

    packed = pack_weights(weight, "int8")
    unpack_weights(packed)               # float32 [N, K]: what the kernel multiplies by

Integers have one scale for 32 weights of a row, in float16. The scale of int8 is the largest
magnitude / 127; int4 has 16 steps from the smallest weight, its offset, to the largest. These are
the rules of GGUF's Q8_0 and Q4_1, so weights that were stored like that are packed unchanged. A
scale that float16 has no near number for is rounded up.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.codegen.phases.weights import BLOCK, FORMATS, GROUP, GROUPS, PANEL, WeightFormat
from quire.linear.large_pages import empty_panels
from quire.runtime.linear import PackedWeights
from quire.support.memory import give_back

_NARROW = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class IntegerWeight(NamedTuple):
    """Weights as integers [N, K] from 0 on, and float16 scales and offsets [N, K / 32, 1 or 2]."""

    format: WeightFormat
    numbers: Tensor  # uint8
    header: Tensor
    dtype: torch.dtype = torch.float32  # of the weights that it stands for

    @property
    def shape(self) -> torch.Size:
        """Return N and K."""
        return self.numbers.shape

    @staticmethod
    def joined(parts: Sequence[IntegerWeight]) -> IntegerWeight:
        """Return the rows of several weights of one format."""
        return IntegerWeight(
            parts[0].format,
            torch.cat([part.numbers for part in parts]),
            torch.cat([part.header for part in parts]),
            parts[0].dtype,
        )

    def chosen(self, rows: Tensor) -> IntegerWeight:
        """Return some rows in whole blocks; a row of zeros for -1."""
        groups = -(-self.shape[1] // BLOCK) * GROUPS
        numbers = self.numbers.new_full((len(rows), groups * GROUP), self.format.zero)
        header = self.header.new_zeros(len(rows), groups, self.format.header)
        exists = rows >= 0
        numbers[exists, : self.shape[1]] = self.numbers[rows[exists]]
        header[exists, : self.header.shape[1]] = self.header[rows[exists]]
        return IntegerWeight(self.format, numbers, header)


def quantised_weight(weight: IntegerWeight) -> Tensor:
    """Return the float32 weights [N, K] that integers stand for."""
    floats, header = weight.numbers.float(), weight.header.float()
    groups = floats.view(*header.shape[:2], GROUP)
    if weight.format.zero:
        groups -= weight.format.zero
    groups *= header[..., :1]  # exact, so that adding an offset rounds once
    if weight.format.shifted:
        groups += header[..., 1:]
    return floats


def quantise(weight: Tensor, format: WeightFormat) -> IntegerWeight:
    """Return weights [N, K] as integers; K is a multiple of 32."""
    groups = weight.unflatten(1, (-1, GROUP))
    if format.shifted:
        least, most = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        offset = least.half()
        header = torch.cat((_scale(most - least, 15), offset), 2)
        groups = groups - offset.float()
    else:
        header = _scale(groups.abs().amax(2, keepdim=True), 127)
    wide = header[..., :1].float()
    ratio = torch.where((wide != 0) & wide.isfinite(), groups / wide, 0).nan_to_num()
    low, high = (0, 15) if format.shifted else (-127, 127)
    numbers = ratio.round().clamp(low, high) + format.zero
    return IntegerWeight(format, numbers.to(torch.uint8).flatten(1), header)


def _scale(reach: Tensor, steps: int) -> Tensor:
    """Return scales in float16 by which so many steps reach as far as the weights do.

    Below 2**-14, all float16 are 2**-24 apart, and the nearest may be far too small, or 0.
    """
    scale = (reach / steps).half()
    return torch.where(scale.float() * (steps + 0.5) < reach, scale + 2**-24, scale)


class PanelRows(NamedTuple):
    """Which rows of the weights are in which panel, [panels, 16], -1 for none; and COLUMNS."""

    rows: Tensor
    columns: Tensor


def count_panels(width: int, half: int = 0) -> int:
    """Return how many panels `width` columns have, plain or in pairs."""
    size = half or width  # of columns that lie side by side
    return -(-size // PANEL) * (width // size) if size else 0


@functools.lru_cache(maxsize=256)  # layers of one size share the table
def panels_of(width: int, half: int = 0, *, merges: bool = False) -> PanelRows:
    """Return the panels of `width` columns, plain or in pairs (`codegen/kernels/epilogue.py`)."""
    with torch.device("cpu"):
        return _panels_of(width, half, merges=merges)


def _panels_of(width: int, half: int, *, merges: bool) -> PanelRows:
    size = half or width  # of columns that lie side by side
    inner = torch.arange(0, size, PANEL)
    count = (size - inner).clamp(max=PANEL)
    block = torch.arange(width // size // (2 if half else 1) if size else 0)
    part = torch.arange(2 if half else 1)
    grid = torch.meshgrid(block, torch.arange(len(inner)), part, indexing="ij")
    block, place, part = (each.flatten() for each in grid)
    inner, count = inner[place], count[place]
    column = part * size + inner
    first = (block * len(grid[2].unique()) * size if half else 0) + column
    into = block * size + inner if merges else first
    lanes = torch.arange(PANEL)
    rows = torch.where(lanes < count[:, None], first[:, None] + lanes, -1)
    return PanelRows(rows, torch.stack((into, count, block, column), 1))


def pack_weights(
    weight: Tensor | IntegerWeight,
    name: str,
    *,
    integers: bool = False,
    half: int = 0,
    merges: bool = False,
) -> PackedWeights:
    """Return weights [N, K] in a format; if they are integers, in the format that they have."""
    format = FORMATS[name]
    width, depth = weight.shape
    panels = panels_of(width, half, merges=merges)
    give_back()  # what the layer before was made of, so that one layer at most is in both forms
    data = empty_panels(len(panels.rows), format.panel_bytes(depth))
    at_once = max(1, _NUMBERS_AT_ONCE // (PANEL * max(depth, BLOCK)))
    copies = None
    if not isinstance(weight, IntegerWeight) and len(panels.rows):
        copies = _Copies(weight, at_once * PANEL, format)
    for first in range(0, len(panels.rows), at_once):
        rows = panels.rows[first : first + at_once].flatten()
        into = data[first : first + at_once]
        if isinstance(weight, IntegerWeight):
            into[:] = _pack_integers(weight.chosen(rows))
        elif copies is not None:
            _pack_floats(into, copies.of(rows), format)
    return PackedWeights(
        data.flatten(), panels.columns, format, depth, width, half=half, integers=integers
    )


_NUMBERS_AT_ONCE = 1 << 18  # that are copied while they are packed


class _Copies:
    """Copies of rows of weights as floats, in whole blocks, each in the memory of the last one.

    New memory for each would take longer than to copy: the system clears it, page by page.
    """

    def __init__(self, weight: Tensor, most: int, format: WeightFormat) -> None:
        self._weight, self._repeats = weight.detach(), format.scaled
        self._depth = depth = weight.shape[1]
        whole = -(-depth // BLOCK) * BLOCK
        rows = empty_panels(most, depth * weight.itemsize, for_a_while=True)
        self._rows = self._floats = rows.view(weight.dtype)
        if whole != depth or weight.dtype != torch.float32:
            floats = empty_panels(most, whole * 4, for_a_while=True)
            self._floats = floats.view(torch.float32)

    def of(self, rows: Tensor) -> Tensor:
        """Return some rows; a row of zeros for -1.

        x is 0 where a block goes beyond the weights. There, either the last weight is repeated, so
        that the scale of its group is that of real weights, or weights are 0.
        """
        found, floats = self._rows[: len(rows)], self._floats[: len(rows)]
        torch.index_select(self._weight, 0, rows.clamp(min=0), out=found)
        if self._floats is not self._rows:
            floats[:, : self._depth] = found
        if rows.min() < 0:  # few panels are not full
            floats[rows < 0] = 0
        if self._repeats and self._depth:
            floats[:, self._depth :] = floats[:, self._depth - 1 : self._depth]
        return floats


def _pack_floats(into: Tensor, weight: Tensor, format: WeightFormat) -> None:
    """Write weights of whole panels and blocks as bytes [panels, bytes]."""
    if format.scaled:
        into[:] = _pack_integers(quantise(weight, format))
        return
    # [panel, word, column, k of the word]
    words = weight.view(len(into), PANEL, -1, format.step).transpose(1, 2)
    into.view(_NARROW[format.name]).view(words.shape).copy_(words)


def _pack_integers(weight: IntegerWeight) -> Tensor:
    """Return integers of whole panels and blocks as bytes [panels, bytes]."""
    format, numbers, header, _ = weight
    panels, blocks = numbers.shape[0] // PANEL, numbers.shape[1] // BLOCK
    # [panel, block, word, column, k of the word]
    words = numbers.view(panels, PANEL, blocks, -1, format.step).permute(0, 2, 3, 1, 4)
    if format.bits == 4:
        words = words[..., :4] | words[..., 4:] << 4
    header = header.view(panels, PANEL, blocks, GROUPS, -1).permute(0, 2, 3, 4, 1)
    parts = [_bytes(part.flatten(0, 1)) for part in (header, words)]
    return torch.cat(parts, 1).view(panels, -1)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, one row for each entry of its first dimension."""
    return tensor.contiguous().view(torch.uint8).flatten(1)


def unpack_weights(packed: PackedWeights, rows: Tensor | None = None) -> Tensor:
    """Return the float32 weights [N, K] that the kernel multiplies by, or some rows of them."""
    places = torch.arange(packed.width, device="cpu") if rows is None else rows  # of plain columns
    if packed.half:
        known = panels_of(packed.width, packed.half).rows.flatten()
        there = (known >= 0).nonzero().flatten()
        place = torch.empty(packed.width, dtype=torch.int64, device="cpu")
        place[known[there]] = there
        places = place[places]
    return _rows_at(packed, places)[:, : packed.depth]


def _rows_at(packed: PackedWeights, places: Tensor) -> Tensor:
    """Return rows of weights by panel * 16 + lane, in whole blocks."""
    format, blocks = packed.format, -(-packed.depth // BLOCK)
    if not format.scaled:
        loads = blocks * BLOCK // format.step
        floats = packed.data.view(_NARROW[format.name]).view(-1, loads, PANEL, format.step)
        return floats[places // PANEL, :, places % PANEL].float().flatten(1)
    # An embedding reads a few rows in each step, so the few microseconds of a call matter.
    at, of = np.divmod(places.numpy(), PANEL)
    data = packed.data.numpy().reshape(-1, blocks, format.block_bytes)
    header, body = data[..., : format.header_bytes], data[..., format.header_bytes :]
    parts = header.view(np.float16).reshape(-1, blocks, GROUPS, format.header, PANEL)
    scales = parts[at, ..., of]  # [row, block, group, scale or offset]
    each = body.shape[2] // (4 * PANEL)
    words = body.view(np.uint32).reshape(len(data), blocks, each, PANEL)[at, :, :, of]
    numbers = words[..., None].view(np.uint8)  # [row, block, word, byte]
    if format.bits == 4:
        numbers = np.concatenate((numbers & 15, numbers >> 4), 3)
    return quantised_weight(
        IntegerWeight(
            format,
            torch.from_numpy(numbers.reshape(len(at), blocks * BLOCK)),
            torch.from_numpy(scales.reshape(len(at), blocks * GROUPS, format.header)),
        )
    )
