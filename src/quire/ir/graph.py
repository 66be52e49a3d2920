"""Graphs of ops: one frozen, interned node.

Two nodes with the same content are the same object, so equality is identity, a common
subexpression is found by being written, and passes can memoise on the node itself. A graph is
named by its roots; `text` prints it in a stable form and `key` is the hash of its content.

    >>> print(text(trace(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, "mask").output))
    %0 = input kv_idx : int64
    %1 = input q_idx : int64
    %2 = le %0, %1 : bool
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeAlias

import numpy as np
import torch

from quire.ir.ops import OPS

Number: TypeAlias = bool | int | float
Payload: TypeAlias = str | Number | None
"""What a leaf carries: an input's name, a constant's value, a load's capture slot."""

_interned: weakref.WeakValueDictionary[tuple[object, ...], Node] = weakref.WeakValueDictionary()
_interning = threading.Lock()
_set = object.__setattr__


class Node:
    """One op applied to nodes. Make nodes with `Node(...)`; equal content gives the same node."""

    __slots__ = ("__weakref__", "args", "dtype", "op", "payload")

    op: Final[str]
    args: Final[tuple[Node, ...]]
    dtype: Final[torch.dtype]
    payload: Final[Payload]

    def __new__(
        cls, op: str, args: tuple[Node, ...], dtype: torch.dtype, payload: Payload = None
    ) -> Node:
        # hex() tells 0.0 from -0.0 and makes NaN equal to itself.
        content = payload.hex() if isinstance(payload, float) else payload
        key = (op, args, dtype, content)
        node = _interned.get(key)
        if node is not None:
            return node
        with _interning:
            node = _interned.get(key)
            if node is None:
                arity = OPS[op].arity
                assert arity is None or arity == len(args), f"{op} takes {arity} operands"
                node = object.__new__(cls)
                _set(node, "op", op)
                _set(node, "args", args)
                _set(node, "dtype", dtype)
                _set(node, "payload", payload)
                _interned[key] = node
        return node

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Node is frozen")

    def __copy__(self) -> Node:
        return self

    def __deepcopy__(self, memo: object) -> Node:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return (Node, (self.op, self.args, self.dtype, self.payload))

    def __repr__(self) -> str:
        return f"<Node {text(self).splitlines()[-1].partition(' = ')[2]}>"


def const(value: Number, dtype: torch.dtype) -> Node:
    """The constant `value`, converted to `dtype` as PyTorch converts it."""
    if dtype is torch.float32:
        return Node("const", (), dtype, float(np.float32(value)))
    if dtype in _WIDE:
        return Node("const", (), dtype, _WIDE[dtype](value))
    return Node("const", (), dtype, torch.tensor(value).to(dtype).item())


_WIDE: dict[torch.dtype, type[bool] | type[int] | type[float]] = {
    torch.bool: bool,
    torch.int64: int,
    torch.float64: float,
}


def cast(node: Node, dtype: torch.dtype) -> Node:
    """`node` as `dtype`: itself where it has that dtype, a new constant where it is one."""
    if node.dtype == dtype:
        return node
    if node.op == "const":
        assert not isinstance(node.payload, str) and node.payload is not None
        if dtype.is_floating_point or not isinstance(node.payload, float):
            return const(node.payload, dtype)
    return Node("cast", (node,), dtype)


def walk(*roots: Node) -> Iterator[Node]:
    """Every node below `roots`, operands before users, each once."""
    seen: set[Node] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((arg, False) for arg in reversed(node.args) if arg not in seen)


def rewrite(root: Node, visit: Callable[[Node, tuple[Node, ...]], Node]) -> Node:
    """Rebuild `root` from its leaves up; `visit(node, new_args)` gives each new node."""
    new: dict[Node, Node] = {}
    for node in walk(root):
        new[node] = visit(node, tuple(new[arg] for arg in node.args))
    return new[root]


def rebuild(node: Node, args: tuple[Node, ...]) -> Node:
    """`node` with other operands."""
    return node if args == node.args else Node(node.op, args, node.dtype, node.payload)


def renumber_captures(root: Node, slots: Mapping[int, int]) -> Node:
    """`root` with every load's capture slot replaced by `slots[slot]`."""

    def visit(node: Node, args: tuple[Node, ...]) -> Node:
        if node.op != "load":
            return rebuild(node, args)
        assert isinstance(node.payload, int)
        return Node("load", args, node.dtype, slots[node.payload])

    return rewrite(root, visit)


def inputs(*roots: Node) -> set[str]:
    """The names of the inputs that `roots` depend on."""
    return {str(node.payload) for node in walk(*roots) if node.op == "input"}


def constants(*roots: Node) -> tuple[Node, ...]:
    """The constants below `roots`, in the order in which `key` numbers them."""
    return tuple(node for node in walk(*roots) if node.op == "const")


def text(*roots: Node, values: bool = True) -> str:
    """The graph as text, one node a line. With `values=False` constants are numbered slots."""
    names: dict[Node, str] = {}
    lines, slot = [], 0
    for node in walk(*roots):
        names[node] = f"%{len(names)}"
        operands = ", ".join(names[arg] for arg in node.args)
        payload = node.payload
        if node.op == "const":
            operands, slot = (repr(payload) if values else f"${slot}"), slot + 1
        elif node.op == "load":
            operands = f"captured{payload}[{operands}]"
        elif node.op == "input":
            operands = str(payload)
        dtype = str(node.dtype).removeprefix("torch.")
        lines.append(f"{names[node]} = {node.op} {operands} : {dtype}")
    if len(roots) > 1 or (roots and names[roots[0]] != f"%{len(names) - 1}"):
        lines.append("return " + ", ".join(names[root] for root in roots))
    return "\n".join(lines)


def key(*roots: Node) -> str:
    """A hash of the graph's content in which constants are slots, whatever their values."""
    return hashlib.sha256(text(*roots, values=False).encode()).hexdigest()
