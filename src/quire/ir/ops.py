"""The table of ops: everything a mod can be made of.

One row for each op: name, number of operands and typing rule. All operands of an op have one dtype;
where PyTorch would promote, the tracer writes a `cast`. `interpret` defines what an op
means. Every other table of ops has exactly these keys; a test checks that.

float16 and bfloat16 are only stored: the tracer converts them to float32, computes, and rounds
after each operation, as PyTorch does. Which Python numbers it rounds before is in `promote`.

The tracer writes other operations in terms of these: `a > b` is `b < a`,
`isnan(x)` is `not (x == x)`, `clamp` is `max` and `min`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
BOOL = frozenset({torch.bool})
DTYPES = BOOL | INTEGERS | FLOATS
"""The dtypes of a graph."""


class Typing(Enum):
    """How the dtypes of operands and result are chosen, and which dtypes operands may have."""

    LEAF = "the node says its own dtype", DTYPES
    SAME = "promoted operands, result of the same dtype", DTYPES
    NUMBER = "as SAME", INTEGERS | FLOATS
    FLOAT = "as SAME, but integers and bools become the default float dtype first", FLOATS
    BITS = "as SAME", INTEGERS | BOOL
    SHIFT = "as SAME", INTEGERS
    COMPARE = "promoted operands, bool result", DTYPES
    WHERE = "bool, then two promoted operands, result of their dtype", DTYPES

    def __init__(self, rule: str, operands: frozenset[torch.dtype]) -> None:
        self.rule = rule
        self.operands = operands


LEAF, SAME, NUMBER, FLOAT, BITS, SHIFT, COMPARE, WHERE = Typing


@dataclass(frozen=True, slots=True)
class Op:
    """One row of the table."""

    name: str
    arity: int | None
    typing: Typing


_ROWS = (
    Op("input", 0, LEAF),  # score, b, h, q_idx, kv_idx
    Op("const", 0, LEAF),  # a Python number
    Op("load", None, LEAF),  # captured[i, j, ...]; negative indices wrap
    Op("cast", 1, LEAF),
    Op("add", 2, SAME),
    Op("sub", 2, NUMBER),
    Op("mul", 2, SAME),
    Op("div", 2, FLOAT),
    Op("floordiv", 2, NUMBER),  # rounds down, as Python
    Op("mod", 2, NUMBER),  # has the divisor's sign, as Python
    Op("pow", 2, NUMBER),
    Op("min", 2, SAME),  # NaN wins, as torch.minimum
    Op("max", 2, SAME),
    Op("neg", 1, NUMBER),
    Op("abs", 1, NUMBER),
    Op("sign", 1, SAME),  # of NaN it is 0
    Op("floor", 1, NUMBER),
    Op("ceil", 1, NUMBER),
    Op("round", 1, NUMBER),  # half to even
    Op("trunc", 1, NUMBER),
    Op("lt", 2, COMPARE),
    Op("le", 2, COMPARE),
    Op("eq", 2, COMPARE),
    Op("and", 2, BITS),
    Op("or", 2, BITS),
    Op("xor", 2, BITS),
    Op("not", 1, BITS),
    Op("shl", 2, SHIFT),
    Op("shr", 2, SHIFT),  # keeps the sign
    Op("bits", 1, SHIFT),  # x.bit_length(), 0 if x < 1; only bounds use it
    Op("where", 3, WHERE),
    Op("exp", 1, FLOAT),
    Op("exp2", 1, FLOAT),
    Op("log", 1, FLOAT),
    Op("log2", 1, FLOAT),
    Op("sqrt", 1, FLOAT),
    Op("tanh", 1, FLOAT),
    Op("sigmoid", 1, FLOAT),
    Op("erf", 1, FLOAT),
    Op("sin", 1, FLOAT),
    Op("cos", 1, FLOAT),
)
OPS: dict[str, Op] = {op.name: op for op in _ROWS}
