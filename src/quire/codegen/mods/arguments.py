"""The record that mods read their constants and captured tensors from."""

from __future__ import annotations

import ctypes
import functools
import math
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.codegen.llvm.builder import Function, Value
from quire.codegen.llvm.types import F64, I64, PTR
from quire.codegen.mods.loads import Captured, fixed_index
from quire.codegen.mods.rules import REGISTER
from quire.errors import CapturedIndexError
from quire.ir.graph import Node, constants, walk
from quire.ir.vector import LONGEST


class CaptureShape(NamedTuple):
    """What code depends on: the rank of a captured tensor, and its dimension with stride 1."""

    rank: int
    unit: int | None

    @staticmethod
    def of(tensor: Tensor) -> CaptureShape:
        """The shape of a tensor."""
        return _shape_of(tensor.stride())


@functools.lru_cache(maxsize=1024)
def _shape_of(strides: tuple[int, ...]) -> CaptureShape:
    units = [dim for dim, stride in enumerate(strides) if stride == 1]
    return CaptureShape(len(strides), units[-1] if units else None)


@dataclass(frozen=True)
class ModArguments:
    """The record that a mod function reads its constants and captured tensors from.

    Each entry takes eight bytes: the address of the mistake flag, the constants (integers as they
    are, floats as doubles), then for each captured tensor its address, sizes and strides.

    `least` has the least size of the last dimension of captured tensors, for those of which code
    reads elements at fixed places.
    """

    constants: tuple[Node, ...]
    captures: tuple[CaptureShape, ...]
    least: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(roots: Sequence[Node], captures: Sequence[CaptureShape]) -> ModArguments:
        """The record for some graphs over one list of captured tensors."""
        written = set(literals(*roots))
        variable = tuple(node for node in constants(*roots) if node not in written)
        least: dict[int, int] = {}
        for node in _loads(*roots):
            fixed = fixed_index(node)
            if fixed is not None:
                assert isinstance(node.payload, int)
                least[node.payload] = max(fixed + 1, least.get(node.payload, 0))
        return ModArguments(variable, tuple(captures), tuple(least.items()))

    @functools.cached_property
    def size(self) -> int:
        """The bytes of the record."""
        return 8 + len(self._numbers) + sum(8 + 16 * shape.rank for shape in self.captures)

    @functools.cached_property
    def _numbers(self) -> bytes:
        """The packed constants."""
        format = "".join("d" if node.dtype.is_floating_point else "q" for node in self.constants)
        return struct.pack(f"={format}", *(node.payload for node in self.constants))

    def pack(self, captures: Sequence[Tensor], flag: int) -> bytes:
        """The record as bytes: the flag's address, the constants, and these tensors."""
        head = flag.to_bytes(8, sys.byteorder) + self._numbers
        if not captures:
            return head
        for slot, size in self.least:
            if captures[slot].shape[-1] < size:
                raise CapturedIndexError(
                    f"index {size - 1} is outside of the last dimension of a captured tensor of "
                    f"shape {list(captures[slot].shape)}. Give a tensor that has this element."
                )
        tensors = [number for tensor in captures for number in _describe(tensor)]
        return head + struct.pack(f"={len(tensors)}q", *tensors)

    def read(self, f: Function, record: Value) -> tuple[dict[Node, Value], list[Captured], Value]:
        """Load the record in generated code: constants, captured tensors, the flag's address."""
        flag, at = f.load(PTR, record, 0), 1
        parameters = {}
        for node in self.constants:
            held = F64 if node.dtype.is_floating_point else I64
            parameters[node] = f.convert(f.load(held, record, at), REGISTER[node.dtype])
            at += 1
        captured = []
        for shape in self.captures:
            pointer = f.load(PTR, record, at)
            numbers = [f.load(I64, record, at + 1 + i) for i in range(2 * shape.rank)]
            sizes, strides = numbers[: shape.rank], numbers[shape.rank :]
            captured.append(Captured(pointer, sizes, strides, shape.unit))
            at += 1 + 2 * shape.rank
        return parameters, captured, flag


def _describe(tensor: Tensor) -> tuple[int, ...]:
    """The address, sizes and strides of a tensor; every index into an empty one is wrong."""
    address = tensor.data_ptr()
    if address == 0:
        return (ctypes.addressof(_NOWHERE), *(0,) * (2 * tensor.dim()))
    return (address, *tensor.shape, *tensor.stride())


_NOWHERE = ctypes.create_string_buffer(8 * LONGEST)
"""A load with a wrong index from an empty tensor reads this, at a fixed place or at 0."""


def literals(*roots: Node) -> list[Node]:
    """The constants that are written into the code.

    These are truth values, 0, 1, -1 and infinities, and the fixed indices of loads.
    """
    fixed = {node.args[-1] for node in _loads(*roots) if fixed_index(node) is not None}
    return [node for node in constants(*roots) if node in fixed or _is_common(node)]


def _loads(*roots: Node) -> list[Node]:
    return [node for node in walk(*roots) if node.op == "load"]


def _is_common(node: Node) -> bool:
    return node.dtype == torch.bool or node.payload in (0, 1, -1, math.inf, -math.inf)
