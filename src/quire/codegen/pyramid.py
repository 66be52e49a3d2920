"""Pyramids of minima and maxima (`ir/pyramid.py`), built as fast as a tensor can be read."""

from __future__ import annotations

import torch

from quire.codegen.builder import Function, Module, Value
from quire.codegen.rules import MEMORY, RULES
from quire.codegen.types import I64, PTR, Type
from quire.ir.graph import Node

NAMES = ("min", "max")
DTYPES = (
    *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float32, torch.float64),
)
"""What pyramids are built of here."""

PARAMETERS: dict[str, Type] = {
    "source": PTR,
    "count": I64,
    "stride": I64,
    "leaves": I64,
    "missing": PTR,
    "into": PTR,
}


def write_pyramid(dtype: torch.dtype) -> Module:
    """Functions min and max(source, count, stride, leaves, missing, into), see `Pyramid`."""
    module, element = Module(), MEMORY[dtype]
    for name in NAMES:
        with module.function(name, PARAMETERS) as f:
            source, count, stride, leaves, missing, into = f.parameters
            with f.range(0, count) as i:
                f.store(f.load(element, source, i * stride), into, leaves + i)
            with f.range(count, leaves) as i:
                f.store(f.load(element, missing, 0), into, leaves + i)
            with f.range(1, leaves) as i:
                place = leaves - i
                pair = [f.load(element, into, place * 2 + k) for k in (0, 1)]
                f.store(_combined(f, name, dtype, pair), into, place)
    return module


def _combined(f: Function, name: str, dtype: torch.dtype, pair: list[Value]) -> Value:
    if not dtype.is_floating_point:
        return f.minimum(*pair) if name == "min" else f.maximum(*pair)
    unused = Node("const", (), dtype, 0.0)
    return RULES[name](f, Node(name, (unused, unused), dtype), *pair)
