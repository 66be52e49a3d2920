"""The table of ops: everything a mod can be made of.

One row per op: its name, how many operands it takes and its typing rule. Operands of an op always
have one dtype; where PyTorch would promote, the tracer writes a `cast`. `interpret` says what an op
means; every other table over ops has exactly these keys, and a test holds them to it.

What users write that is not here is spelled out of these by the tracer: `a > b` is `b < a`,
`isnan(x)` is `not (x == x)`, `clamp` is `max` and `min`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Typing(Enum):
    """How an op's operand and result dtypes follow from the dtypes it is given."""

    LEAF = auto()  # the node says its own dtype
    SAME = auto()  # promoted operands, result of the same dtype
    FLOAT = auto()  # as SAME, integers become the default float dtype first
    COMPARE = auto()  # promoted operands, bool result
    BITS = auto()  # promoted operands that are integers or bool, result of the same dtype
    WHERE = auto()  # bool, then two promoted operands; result of their dtype


@dataclass(frozen=True, slots=True)
class Op:
    """One row of the table."""

    name: str
    arity: int | None
    typing: Typing


def _rows() -> tuple[Op, ...]:
    leaf, same, float_, compare, bits, where = Typing
    return (
        Op("input", 0, leaf),  # score, b, h, q_idx, kv_idx
        Op("const", 0, leaf),  # a Python number
        Op("load", None, leaf),  # captured[i, j, ...]; negative indices wrap
        Op("cast", 1, leaf),
        Op("add", 2, same),
        Op("sub", 2, same),
        Op("mul", 2, same),
        Op("div", 2, float_),
        Op("floordiv", 2, same),  # rounds down, as Python
        Op("mod", 2, same),  # has the divisor's sign, as Python
        Op("pow", 2, same),
        Op("min", 2, same),  # NaN wins, as torch.minimum
        Op("max", 2, same),
        Op("neg", 1, same),
        Op("abs", 1, same),
        Op("sign", 1, same),
        Op("floor", 1, same),
        Op("ceil", 1, same),
        Op("round", 1, same),  # half to even
        Op("trunc", 1, same),
        Op("lt", 2, compare),
        Op("le", 2, compare),
        Op("eq", 2, compare),
        Op("and", 2, bits),
        Op("or", 2, bits),
        Op("xor", 2, bits),
        Op("not", 1, bits),
        Op("shl", 2, bits),
        Op("shr", 2, bits),  # keeps the sign
        Op("where", 3, where),
        Op("exp", 1, float_),
        Op("exp2", 1, float_),
        Op("log", 1, float_),
        Op("log2", 1, float_),
        Op("sqrt", 1, float_),
        Op("tanh", 1, float_),
        Op("sigmoid", 1, float_),
        Op("erf", 1, float_),
        Op("sin", 1, float_),
        Op("cos", 1, float_),
    )


OPS: dict[str, Op] = {op.name: op for op in _rows()}
