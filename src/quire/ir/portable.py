"""The graph of a mod as plain values for JSON, and back, with every row checked.

    >>> portable(trace(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, "mask").output)
    [['input', [], 'int64', 'kv_idx'],
     ['input', [], 'int64', 'q_idx'],
     ['le', [0, 1], 'bool', None]]

`restore` takes data from anywhere. It returns a graph that the tracer could have made, or raises a
ValueError that names the row. It never imports or runs anything that the data names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from quire.ir.graph import Node, Payload, rows
from quire.ir.ops import COMPARE, DTYPES, INTEGERS, LEAF, OPS, WHERE
from quire.ir.promote import WORKING
from quire.ir.trace import MASK_INPUTS

DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
"""Every dtype that a graph can have, by its name."""

SCORE_DTYPES = (torch.float32, torch.float64)


def portable(root: Node) -> list[list[object]]:
    """The rows of a graph: op, operands, dtype, payload. Floats are written in hexadecimal."""
    return [
        [op, list(args), dtype_name(dtype), payload.hex() if type(payload) is float else payload]
        for op, args, dtype, payload in rows(root)
    ]


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.int64` is `int64`."""
    return str(dtype).removeprefix("torch.")


class CaptureLike(Protocol):
    """A captured tensor, or what a graph relies on in one."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its elements."""

    def dim(self) -> int:
        """The number of its dimensions."""


def restore(
    written: object, captures: Sequence[CaptureLike], inputs: tuple[str, ...] = MASK_INPUTS
) -> Node:
    """The root of the graph that `portable` wrote, over these captured tensors.

    A graph of the inputs of a score_mod gives a score; any other gives truth values.
    """
    _expect(isinstance(written, list) and len(written) > 0, "the graph has no rows")
    assert isinstance(written, list)
    nodes: list[Node] = []
    for place, row in enumerate(written):
        try:
            nodes.append(_node(row, nodes, captures, inputs))
        except ValueError as error:
            raise ValueError(f"row {place} of the graph is wrong: {error}") from error
    given = nodes[-1].dtype
    if "score" in inputs:
        _expect(given in SCORE_DTYPES, f"the graph gives {given}, no score")
        scores = {node.dtype for node in nodes if node.payload == "score" and node.op == "input"}
        _expect(scores <= {given}, f"the graph gives {given}, and takes other scores")
    else:
        _expect(given == torch.bool, f"the graph gives {given}, no truth values")
    return nodes[-1]


def _node(
    row: object, nodes: list[Node], captures: Sequence[CaptureLike], inputs: tuple[str, ...]
) -> Node:
    _expect(isinstance(row, list) and len(row) == 4, "it is no list of four")
    assert isinstance(row, list)
    op, places, name, payload = row
    _expect(isinstance(op, str) and op in OPS, "there is no such op")
    _expect(isinstance(name, str) and name in DTYPE_NAMES, "there is no such dtype")
    _expect(isinstance(places, list), "its operands are no list")
    _expect(
        all(type(place) is int and 0 <= place < len(nodes) for place in places),
        "its operands are no earlier rows",
    )
    args, dtype = [nodes[place] for place in places], DTYPE_NAMES[name]
    arity = OPS[op].arity
    _expect(arity is None or arity == len(args), f"{op} takes {arity} operands")
    if OPS[op].typing is LEAF:
        if op == "input":
            payload = _checked_input(dtype, payload, inputs)
        else:
            payload = _checked_leaf(op, args, dtype, payload, captures)
    else:
        _expect(payload is None, f"{op} carries nothing")
        _check_typing(op, [arg.dtype for arg in args], dtype)
    return Node(op, tuple(args), dtype, payload)


def _check_typing(op: str, operands: list[torch.dtype], dtype: torch.dtype) -> None:
    typing = OPS[op].typing
    if typing is WHERE:
        _expect(operands.pop(0) == torch.bool, "where needs a truth value")
    _expect(len(set(operands)) == 1, f"the operands of {op} have several dtypes")
    of = operands[0]
    _expect(of in typing.operands and of not in WORKING, f"{op} does not compute with {of}")
    _expect(dtype == (torch.bool if typing is COMPARE else of), f"{op} of {of} gives no {dtype}")


def _checked_input(dtype: torch.dtype, payload: object, inputs: tuple[str, ...]) -> str:
    _expect(isinstance(payload, str) and payload in inputs, "there is no such input")
    if payload == "score":
        _expect(dtype in SCORE_DTYPES, f"a score is float32 or float64, not {dtype}")
    else:
        _expect(dtype == torch.int64, f"an input is int64, not {dtype}")
    return str(payload)


def _checked_leaf(
    op: str,
    args: list[Node],
    dtype: torch.dtype,
    payload: object,
    captures: Sequence[CaptureLike],
) -> Payload:
    if op == "const":
        return _checked_constant(dtype, payload)
    if op == "cast":
        _expect(payload is None, "a cast carries nothing")
        return None
    _expect(type(payload) is int and 0 <= payload < len(captures), "there is no such tensor")
    assert op == "load" and type(payload) is int
    tensor = captures[payload]
    _expect(tensor.dtype == dtype, f"its tensor holds {tensor.dtype}, not {dtype}")
    _expect(len(args) == tensor.dim(), f"its tensor has {tensor.dim()} dimensions")
    _expect(all(arg.dtype == torch.int64 for arg in args), "an index is no int64")
    return payload


def _checked_constant(dtype: torch.dtype, value: object) -> Payload:
    if dtype == torch.bool:
        _expect(type(value) is bool, "the constant is no truth value")
        return bool(value)
    if dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        _expect(
            type(value) is int and limits.min <= value <= limits.max, f"the constant is no {dtype}"
        )
        assert type(value) is int
        return value
    _expect(isinstance(value, str), "the constant is not written in hexadecimal")
    try:
        number = float.fromhex(str(value))
    except OverflowError:
        raise ValueError(f"the constant is no {dtype}") from None
    kept = torch.tensor(number, dtype=torch.float64, device="cpu").to(dtype).item()
    _expect(kept == number or number != number, f"the constant is no {dtype}")
    return number


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
