"""why(): the value of every step of a mod at one point.

    >>> def own_document(b, h, q_idx, kv_idx):
    ...     return (kv_idx <= q_idx) & (doc[q_idx] == doc[kv_idx])
    >>> print(quire.why(own_document, b=0, h=0, q_idx=17, kv_idx=3))
    own_document at b = 0, h = 0, q_idx = 17, kv_idx = 3

    mods.py:2: return (kv_idx <= q_idx) & (doc[q_idx] == doc[kv_idx])
        kv_idx <= q_idx                                  3 <= 17 = True
        doc[q_idx]                                       doc[17] = 3
        doc[kv_idx]                                      doc[3] = 0
        doc[q_idx] == doc[kv_idx]                        3 == 0 = False
        (kv_idx <= q_idx) & (doc[q_idx] == doc[kv_idx])  True & False = False

    own_document = False

The mod must be one that can be traced. Steps come in the order in which they were written.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.block_mask.checks import as_count
from quire.checks import check_score
from quire.ir.graph import Node, Number, rebuild, walk
from quire.ir.interpret import interpret
from quire.ir.source import Location
from quire.ir.trace import INPUTS, Mod, Traced, mod_kind, mod_name, trace
from quire.ir.variables import variable_names

LONGEST, WIDE = 28, 48  # characters: of an operand that is not shortened, and of a column

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "lt": "<", "le": "<=", "eq": "==", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>",
}  # fmt: skip
_PREFIX = {"neg": "-", "not": "~"}
_SILENT = ("input", "const", "cast")  # ops that are not shown as steps


class ModStep(NamedTuple):
    """One operation: its source, the same with the values of its operands, and its result."""

    location: Location | None
    expression: str
    worked_out: str
    value: Number


@dataclass(frozen=True)
class Explanation:
    """The steps of a mod at one point. `print` shows them."""

    name: str
    inputs: dict[str, Number]
    steps: tuple[ModStep, ...]
    value: Number

    def __str__(self) -> str:
        point = ", ".join(f"{name} = {_written(value)}" for name, value in self.inputs.items())
        parts = [f"{self.name} at {point}"]
        for location, steps in itertools.groupby(self.steps, key=lambda step: step.location):
            parts.append("\n".join([_line(location), *_table(list(steps))]))
        return "\n\n".join([*parts, f"{self.name} = {_written(self.value)}"])

    __repr__ = __str__


def why(mod: Mod, b: int, h: int, q_idx: int, kv_idx: int, score: float = 0.0) -> Explanation:
    """Return the value of every step of a score_mod or a mask_mod at one point.

    >>> print(quire.why(quire.mods.sliding_window(256), 0, 0, q_idx=300, kv_idx=3))
    sliding_window_256 at b = 0, h = 0, q_idx = 300, kv_idx = 3

    masks.py:54: return (kv_idx <= q_idx) & (q_idx - kv_idx <= window_size)
        kv_idx <= q_idx                                3 <= 300 = True
        q_idx - kv_idx                                 300 - 3 = 297
        (q_idx - kv_idx) <= 256                        297 <= 256 = False
        (kv_idx <= q_idx) & ((q_idx - kv_idx) <= 256)  True & False = False

    sliding_window_256 = False

    `score` is ignored for a mask_mod.
    """
    kind = mod_kind(mod)
    point: dict[str, Number] = {
        name: as_count(name, value)
        for name, value in zip(INPUTS["mask"], (b, h, q_idx, kv_idx), strict=True)
    }
    if kind == "score":
        point = {"score": check_score(score), **point}
    traced = trace(mod, kind)
    values = _values(traced, point)
    names = variable_names(mod, traced.captures)
    written: dict[Node, str] = {}
    for node in walk(traced.output):
        written[node] = _spelled(
            node, [_operand(node, arg, written[arg]) for arg in node.args], names
        )
    steps = tuple(
        ModStep(
            location,
            written[node],
            _spelled(node, [_written(values[arg]) for arg in node.args], names),
            values[node],
        )
        for node, location in _in_order(traced)
        if node.op not in _SILENT
    )
    return Explanation(mod_name(mod), point, steps, values[traced.output])


def _values(traced: Traced, point: dict[str, Number]) -> dict[Node, Number]:
    """Return the value of each node, computed from the values of its operands."""
    env = {name: torch.tensor(value, device="cpu") for name, value in point.items()}
    tensors: dict[Node, Tensor] = {}
    for node in walk(traced.output):
        operands = {str(n): tensors[arg] for n, arg in enumerate(node.args)}
        inputs = (Node("input", (), arg.dtype, str(n)) for n, arg in enumerate(node.args))
        alone, where = rebuild(node, tuple(inputs)), functools.partial(_where, traced, node)
        tensors[node] = interpret(alone, env | operands, traced.captures, where=where)
    return {node: tensor.item() for node, tensor in tensors.items()}


def _where(traced: Traced, node: Node, alone: Node) -> str:
    return traced.where(node)


def _in_order(traced: Traced) -> Iterator[tuple[Node, Location | None]]:
    """Yield nodes in the order of the source. A node without a line has that of its first user."""
    alive, seen = set(walk(traced.output)), set[Node]()
    for node in (*traced.lines, traced.output):
        if node in alive:
            for below in walk(node):
                if below not in seen:
                    seen.add(below)
                    yield below, traced.lines.get(below, traced.lines.get(node))


# --- as text


def _spelled(node: Node, operands: Sequence[str], captures: Sequence[str]) -> str:
    """Return the source of an operation, given that of its operands."""
    match node.op:
        case "input":
            return str(node.payload)
        case "const":
            assert isinstance(node.payload, int | float)
            return _written(node.payload)
        case "cast":
            return operands[0]
        case "load":
            assert isinstance(node.payload, int)
            name = captures[node.payload]
            return f"{name}[{', '.join(operands)}]" if operands else name
        case op if op in _INFIX:
            return f" {_INFIX[op]} ".join(operands)
        case op if op in _PREFIX:
            return f"{_PREFIX[op]}{operands[0]}"
        case op:
            return f"{op}({', '.join(operands)})"


def _operand(user: Node, node: Node, text: str) -> str:
    """Return `text` of `node` as an operand of `user`: in brackets if needed, "..." if too long."""
    if len(text) > LONGEST and user.op != "cast":
        return "..."
    while node.op == "cast":
        (node,) = node.args
    nested = user.op in _INFIX or user.op in _PREFIX
    return f"({text})" if nested and node.op in _INFIX else text


def _written(value: Number) -> str:
    if not isinstance(value, float):
        return str(value)
    text = f"{value:.6g}"
    return text if set(text) & set(".en") else f"{text}.0"


def _line(location: Location | None) -> str:
    if location is None:
        return "(no line is known)"
    file, number = location
    place = f"{os.path.basename(file)}:{number}"
    source = linecache.getline(file, number).strip()
    return f"{place}: {source}" if source else place


def _table(steps: list[ModStep]) -> list[str]:
    """Return one line for each step. Wide steps do not widen the column of the others."""
    lengths = [len(step.expression) for step in steps]
    width = max((length for length in lengths if length <= WIDE), default=0)
    return [
        f"    {step.expression:{width}}  {step.worked_out} = {_written(step.value)}"
        for step in steps
    ]
