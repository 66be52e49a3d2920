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

from quire.codegen.builder import Function, Value
from quire.codegen.loads import Captured
from quire.codegen.rules import REGISTER
from quire.codegen.types import F64, I64, PTR
from quire.ir.graph import Node, constants


class CaptureShape(NamedTuple):
    """What generated code knows of a captured tensor: its rank, and which stride is 1."""

    rank: int
    unit: int | None

    @staticmethod
    def of(tensor: Tensor) -> CaptureShape:
        """Read off a tensor."""
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
    """

    constants: tuple[Node, ...]
    captures: tuple[CaptureShape, ...]

    @staticmethod
    def of(roots: Sequence[Node], captures: Sequence[CaptureShape]) -> ModArguments:
        """The record for some graphs that share their captured tensors."""
        variable = tuple(node for node in constants(*roots) if not is_literal(node))
        return ModArguments(variable, tuple(captures))

    @functools.cached_property
    def size(self) -> int:
        """The bytes of the record."""
        return 8 + len(self._numbers) + sum(8 + 16 * shape.rank for shape in self.captures)

    @functools.cached_property
    def _numbers(self) -> bytes:
        """The constants, which are the same in every record of these graphs."""
        format = "".join("d" if node.dtype.is_floating_point else "q" for node in self.constants)
        return struct.pack(f"={format}", *(node.payload for node in self.constants))

    def pack(self, captures: Sequence[Tensor], flag: int) -> bytes:
        """The bytes of the record: these constants, and tensors of these shapes."""
        head = flag.to_bytes(8, sys.byteorder) + self._numbers
        if not captures:
            return head
        tensors = [number for tensor in captures for number in _describe(tensor)]
        return head + struct.pack(f"={len(tensors)}q", *tensors)

    def read(self, f: Function, record: Value) -> tuple[dict[Node, Value], list[Captured], Value]:
        """The constants, captured tensors and the flag's address, in a function's first lines."""
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
    """Where a captured tensor is, its sizes and its strides. Any index of an empty one is wrong."""
    address = tensor.data_ptr()
    if address == 0:
        return (ctypes.addressof(_NOWHERE), *(0,) * (2 * tensor.dim()))
    return (address, *tensor.shape, *tensor.stride())


_NOWHERE = ctypes.create_string_buffer(8)
"""What a load with a wrong index reads where there is nothing to read."""


def is_literal(node: Node) -> bool:
    """Whether a constant is part of the code: truth values, 0, 1, -1 and infinities are."""
    return node.dtype == torch.bool or node.payload in (0, 1, -1, math.inf, -math.inf)
