"""Graphs of ops, made of frozen, interned nodes.

Two nodes with the same content are the same object. So nodes are compared by identity, a common
subexpression is one node, and passes can use nodes as keys of a dict. A graph is given by its
roots; `text` prints it in a stable form and `key` is a hash of its content.

    >>> print(text(trace(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, "mask").output))
    %0 = input kv_idx : int64
    %1 = input q_idx : int64
    %2 = le %0, %1 : bool
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch

from quire.ir.ops import OPS
from quire.support.locks import lock

Number: TypeAlias = bool | int | float
Payload: TypeAlias = str | Number | None
"""The name of an input, the value of a constant, or the index of the tensor of a load."""

Row: TypeAlias = tuple[str, tuple[int, ...], torch.dtype, Payload]
"""A node as plain values: op, row numbers of its operands, dtype and payload."""

_interned: weakref.WeakValueDictionary[tuple[object, ...], Node] = weakref.WeakValueDictionary()
_interning = lock()
_set = object.__setattr__


class Node:
    """One op applied to nodes. `Node(...)` with equal content gives the same node."""

    __slots__ = ("__weakref__", "args", "dtype", "op", "payload")

    op: str
    args: tuple[Node, ...]
    dtype: torch.dtype
    payload: Payload

    def __new__(
        cls, op: str, args: tuple[Node, ...], dtype: torch.dtype, payload: Payload = None
    ) -> Node:
        """The one node with this content."""
        # hex() differs for 0.0 and -0.0, and is the same for NaN and NaN.
        content = payload.hex() if isinstance(payload, float) else payload
        return _intern(op, args, dtype, content, payload)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Node is frozen: {name} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Node is frozen: {name} cannot be deleted")

    def __copy__(self) -> Node:
        return self

    def __deepcopy__(self, memo: object) -> Node:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return _last, (rows(self),)

    def __repr__(self) -> str:
        return f"<Node {text(self).splitlines()[-1].partition(' = ')[2]}>"


@functools.lru_cache(maxsize=4096)  # the same mods are traced again and again
def _intern(
    op: str, args: tuple[Node, ...], dtype: torch.dtype, content: Payload, payload: Payload
) -> Node:
    identity = (op, args, dtype, content)
    with _interning:
        node = _interned.get(identity)
        if node is None:
            arity = OPS[op].arity
            assert arity is None or arity == len(args), f"{op} takes {arity} operands"
            node = object.__new__(Node)
            _set(node, "op", op)
            _set(node, "args", args)
            _set(node, "dtype", dtype)
            _set(node, "payload", payload)
            _interned[identity] = node
    return node


def const(value: Number, dtype: torch.dtype) -> Node:
    """The constant `value`, converted to `dtype` as PyTorch converts it."""
    exact = _CONVERSIONS.get(dtype)
    if exact is None:
        return Node("const", (), dtype, torch.tensor(value, device="cpu").to(dtype).item())
    return Node("const", (), dtype, exact(value))


_CONVERSIONS: dict[torch.dtype, Callable[[Number], Number]] = {  # far faster than a tensor
    torch.bool: bool,
    torch.int64: int,
    torch.float32: lambda value: ctypes.c_float(value).value,
    torch.float64: float,
}


def cast(node: Node, dtype: torch.dtype) -> Node:
    """`node` converted to `dtype`: itself if it has that dtype, a constant if it is one."""
    if node.dtype == dtype:
        return node
    if node.op == "const":
        value = node.payload
        assert isinstance(value, int | float)
        if dtype.is_floating_point or isinstance(value, int):
            return const(value, dtype)
    return Node("cast", (node,), dtype)


def walk(*roots: Node) -> Iterator[Node]:
    """Every node of the graph once, operands before the nodes that use them."""
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
    """Rebuild a graph from its leaves up; `visit(node, new_args)` gives each new node."""
    new: dict[Node, Node] = {}
    for node in walk(root):
        new[node] = visit(node, tuple(new[arg] for arg in node.args))
    return new[root]


def rebuild(node: Node, args: tuple[Node, ...]) -> Node:
    """`node` with other operands."""
    return node if args == node.args else Node(node.op, args, node.dtype, node.payload)


def inputs(*roots: Node) -> set[str]:
    """The names of the inputs that `roots` depend on."""
    return {str(node.payload) for node in walk(*roots) if node.op == "input"}


def constants(*roots: Node) -> tuple[Node, ...]:
    """The constants of a graph, in the order in which `text` numbers them."""
    return tuple(node for node in walk(*roots) if node.op == "const")


def text(*roots: Node, values: bool = True) -> str:
    """The graph as text, one node a line. With `values=False` constants are numbered: $0, $1."""
    names: dict[Node, str] = {}
    slots = itertools.count()
    lines = []
    for node in walk(*roots):
        operands = ", ".join(names[arg] for arg in node.args)
        match node.op:
            case "const":
                operands = repr(node.payload) if values else f"${next(slots)}"
            case "load":
                operands = f"captured{node.payload}[{operands}]"
            case "input":
                operands = str(node.payload)
        names[node] = f"%{len(names)}"
        dtype = str(node.dtype).removeprefix("torch.")
        lines.append(f"{names[node]} = {node.op} {operands} : {dtype}")
    if len(roots) > 1:
        lines.append("return " + ", ".join(names[root] for root in roots))
    return "\n".join(lines)


def key(*roots: Node) -> str:
    """A hash of the graph that does not depend on the values of constants."""
    return hashlib.sha256(text(*roots, values=False).encode()).hexdigest()


# --- graphs as plain values ----------------------------------------------------------------------


def rows(*roots: Node) -> tuple[Row, ...]:
    """The nodes of a graph in the order of `walk`; operands are given by row number."""
    position: dict[Node, int] = {}
    written: list[Row] = []
    for node in walk(*roots):
        position[node] = len(position)
        args = tuple(position[arg] for arg in node.args)
        written.append((node.op, args, node.dtype, node.payload))
    return tuple(written)


def read(written: Sequence[Row]) -> list[Node]:
    """The nodes of `rows`, in the same order; a single root comes last."""
    nodes: list[Node] = []
    for op, args, dtype, payload in written:
        nodes.append(Node(op, tuple(nodes[arg] for arg in args), dtype, payload))
    return nodes


def _last(written: Sequence[Row]) -> Node:
    """A pickled node. Pickling nodes within nodes would exceed the stack for a deep graph."""
    return read(written)[-1]
