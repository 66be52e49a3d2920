"""One op written by a form: operands of any kind, promoted as PyTorch promotes scalars.

Comes in: an op's name and symbols, numbers and tensors. Goes out: a symbol. Whatever PyTorch would
convert is converted by a `cast`, so that the operands of every node have one dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from quire.ir.graph import Node, Number
from quire.ir.ops import COMPARE, DTYPES, FLOAT, OPS, WHERE
from quire.ir.symbol import Recorder, Symbol, find_recorder, unsupported


def apply(op: str, *operands: object) -> Symbol:
    """The op on operands of any kind, promoted as PyTorch promotes scalars."""
    recorder = find_recorder(operands)
    assert recorder is not None, "an op without a symbol"
    values = [recorder.lift(value) for value in operands]
    typing = OPS[op].typing
    condition = (_condition(values.pop(0), recorder),) if typing is WHERE else ()
    dtype = promote(values)
    if typing is FLOAT and not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    if dtype not in typing.operands:
        raise unsupported(f"{op} of {dtype}")
    if dtype in WORKING:
        narrow = (Symbol(recorder.node(value, dtype), recorder) for value in values)
        wide = (converted(value, WORKING[dtype]) for value in narrow)
        result = apply(op, *(Symbol(node, recorder) for node in condition), *wide)
        return result if typing is COMPARE else converted(result, dtype)
    args = tuple([recorder.node(value, dtype) for value in values])
    return recorder.symbol(op, condition + args, torch.bool if typing is COMPARE else dtype)


def _condition(value: Symbol | Number, recorder: Recorder) -> Node:
    if isinstance(value, Symbol) and value.dtype is not torch.bool:
        raise unsupported(f"where with a condition of {value.dtype}")
    return recorder.node(value, torch.bool)


WORKING = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""What narrow floats are computed in."""


def promote(values: Sequence[Symbol | Number]) -> torch.dtype:
    """The common dtype: symbols promote each other, Python numbers only lift the category."""
    result = torch.bool
    for value in values:
        if isinstance(value, Symbol) and value.node.dtype is not result:
            dtype = value.node.dtype
            result = dtype if result is torch.bool else _common_dtype(result, dtype)
    for value in values:
        if isinstance(value, float) and not result.is_floating_point:
            result = torch.get_default_dtype()
        elif isinstance(value, int) and not isinstance(value, bool) and result is torch.bool:
            result = torch.int64
    return result


@functools.cache  # torch's own function would go through TraceMode, which takes far longer
def _common_dtype(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    return torch.promote_types(a, b)


def converted(x: Symbol, dtype: torch.dtype) -> Symbol:
    """`x` as another dtype."""
    if dtype not in DTYPES:
        raise unsupported(f"a value of {dtype}")
    return Symbol(x.recorder.node(x, dtype), x.recorder)
