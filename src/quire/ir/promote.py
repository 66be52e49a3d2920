"""Applies one op to operands of any kind, promoted as PyTorch promotes scalars.

What goes in: the name of an op, and symbols, numbers and tensors. What comes out: a symbol. Where
PyTorch would convert an operand, a `cast` is written, so the operands of a node have one dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from quire.ir.graph import Node, Number, cast, const
from quire.ir.ops import COMPARE, DTYPES, FLOAT, OPS, WHERE
from quire.ir.simplify import simplest
from quire.ir.symbol import Symbol, as_node, find_recorder, unsupported


def apply(op: str, *operands: object) -> Symbol:
    """The op on operands of any kind, promoted as PyTorch promotes scalars."""
    recorder = find_recorder(operands)
    assert recorder is not None, "an op without a symbol"
    values: list[Node | Number | str] = []
    for operand in operands:
        if type(operand) is Symbol and operand.recorder is recorder:  # nearly always
            values.append(operand.node)
            continue
        value = recorder.lift(operand)
        if isinstance(value, Symbol):
            values.append(value.node)
        else:  # the cache must not confuse 0.0 with -0.0, which is equal
            values.append(value.hex() if type(value) is float and value == 0.0 else value)
    return recorder.record(_node(op, torch.get_default_dtype(), *values))


@functools.lru_cache(maxsize=4096, typed=True)
def _node(op: str, default: torch.dtype, *values: Node | Number | str) -> Node:
    """The op on nodes and numbers; cached, since the same mods are traced again and again."""
    operands = [float.fromhex(value) if isinstance(value, str) else value for value in values]
    typing = OPS[op].typing
    condition = (_condition(operands.pop(0)),) if typing is WHERE else ()
    dtype = promote(operands)
    if typing is FLOAT and not dtype.is_floating_point:
        dtype = default
    if dtype not in typing.operands:
        raise unsupported(f"{op} of {dtype}")
    if dtype in WORKING:
        result = _node(op, default, *condition, *_widened(op, operands, dtype))
        return result if typing is COMPARE else simplest(cast(result, dtype))
    args = tuple([as_node(value, dtype) for value in operands])
    return simplest(Node(op, condition + args, torch.bool if typing is COMPARE else dtype))


def _widened(op: str, operands: list[Node | Number], dtype: torch.dtype) -> list[Node]:
    """Operands of a narrow float dtype in the one that they are computed in."""
    exact = EXACT_NUMBERS.get(op, ())
    return [
        const(value, WORKING[dtype])
        if place in exact and not isinstance(value, Node)
        else simplest(cast(as_node(value, dtype), WORKING[dtype]))
        for place, value in enumerate(operands)
    ]


EXACT_NUMBERS = {"mul": (0, 1), "div": (0, 1), "floordiv": (1,)}
"""The operands that are not rounded to a narrow dtype first, if they are Python numbers.

PyTorch rounds all others, but computes with these in float32: `x * 0.1` is rounded once.
"""


def _condition(value: Node | Number) -> Node:
    if isinstance(value, Node) and value.dtype is not torch.bool:
        raise unsupported(f"where with a condition of {value.dtype}")
    return as_node(value, torch.bool)


WORKING = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""The dtype in which narrow floats are computed."""


def promote(values: Sequence[Symbol | Node | Number]) -> torch.dtype:
    """The common dtype; a Python number only counts if its category is higher, as in PyTorch."""
    result = torch.bool
    for value in values:
        if isinstance(value, Symbol | Node) and value.dtype is not result:
            dtype = value.dtype
            result = dtype if result is torch.bool else _common_dtype(result, dtype)
    for value in values:
        if isinstance(value, float) and not result.is_floating_point:
            result = torch.get_default_dtype()
        elif isinstance(value, int) and not isinstance(value, bool) and result is torch.bool:
            result = torch.int64
    return result


@functools.cache  # calling torch's own function goes through TraceMode, which is slow
def _common_dtype(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    return torch.promote_types(a, b)


def converted(x: Symbol, dtype: torch.dtype) -> Symbol:
    """`x` as another dtype."""
    if dtype not in DTYPES:
        raise unsupported(f"a value of {dtype}")
    return Symbol(x.recorder.node(x, dtype), x.recorder)
