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

import ctypes
import functools
import hashlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch

from quire.ir.ops import OPS
from quire.locks import lock

Number: TypeAlias = bool | int | float
Payload: TypeAlias = str | Number | None
"""What a leaf carries: an input's name, a constant's value, a load's capture slot."""

Row: TypeAlias = tuple[str, tuple[int, ...], torch.dtype, Payload]
"""A node written down: its op, the positions of its operands, its dtype and its payload."""

_interned: weakref.WeakValueDictionary[tuple[object, ...], Node] = weakref.WeakValueDictionary()
_interning = lock()
_set = object.__setattr__


class Node:
    """One op applied to nodes. Make nodes with `Node(...)`; equal content gives the same node."""

    __slots__ = ("__weakref__", "args", "dtype", "op", "payload")

    op: str
    args: tuple[Node, ...]
    dtype: torch.dtype
    payload: Payload

    def __new__(
        cls, op: str, args: tuple[Node, ...], dtype: torch.dtype, payload: Payload = None
    ) -> Node:
        """The one node with this content."""
        # hex() tells 0.0 from -0.0 and makes NaN equal to itself.
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


_CONVERSIONS: dict[torch.dtype, Callable[[Number], Number]] = {  # a tensor takes far longer
    torch.bool: bool,
    torch.int64: int,
    torch.float32: lambda value: ctypes.c_float(value).value,
    torch.float64: float,
}


def cast(node: Node, dtype: torch.dtype) -> Node:
    """`node` as `dtype`: itself where it has that dtype, a new constant where it is one."""
    if node.dtype == dtype:
        return node
    if node.op == "const":
        value = node.payload
        assert isinstance(value, int | float)
        if dtype.is_floating_point or isinstance(value, int):
            return const(value, dtype)
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


def inputs(*roots: Node) -> set[str]:
    """The names of the inputs that `roots` depend on."""
    return {str(node.payload) for node in walk(*roots) if node.op == "input"}


def constants(*roots: Node) -> tuple[Node, ...]:
    """The constants below `roots`, in the order in which `key` numbers them."""
    return tuple(node for node in walk(*roots) if node.op == "const")


def text(*roots: Node, values: bool = True) -> str:
    """The graph as text, one node a line. With `values=False` constants are numbered slots."""
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
    """A hash of the graph's content in which constants are slots, whatever their values."""
    return hashlib.sha256(text(*roots, values=False).encode()).hexdigest()


# --- a graph written down ------------------------------------------------------------------------


def rows(*roots: Node) -> tuple[Row, ...]:
    """The nodes below `roots` in the order of `walk`, each naming its operands by position."""
    position: dict[Node, int] = {}
    written: list[Row] = []
    for node in walk(*roots):
        position[node] = len(position)
        args = tuple(position[arg] for arg in node.args)
        written.append((node.op, args, node.dtype, node.payload))
    return tuple(written)


def read(written: Sequence[Row]) -> list[Node]:
    """The nodes that `rows` wrote, in its order: a single root comes last."""
    nodes: list[Node] = []
    for op, args, dtype, payload in written:
        nodes.append(Node(op, tuple(nodes[arg] for arg in args), dtype, payload))
    return nodes


def _last(written: Sequence[Row]) -> Node:
    """A pickled node. Rows, and not nodes within nodes, keep a deep graph off Python's stack."""
    return read(written)[-1]
