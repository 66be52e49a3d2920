"""From graphs to vector code: which nodes are computed where, and how captured tensors are read.

Lanes run over queries. A node's value is a `Lanes`: one scalar for all lanes (`b`, `h`, `kv_idx`
and what follows from them), a scalar that grows by a fixed step from lane to lane (`q_idx` and its
sums), or a vector. Nodes stay scalar as long as they can, so `slopes[h]` and `doc[kv_idx]` are
scalar loads, `doc[q_idx]` and `table[q_idx - kv_idx]` contiguous ones, and only an index that is
irregular is loaded lane by lane.

The graph splits by rate, and since no LLVM pass hoists for us this split is what does:

    UNIFORM   depends on b and h        once per call of the generated function
    ROW       also on q_idx             once per vector of queries
    KEY       also on kv_idx            once per key
    ELEMENT   on both, or on the score  once per vector and key
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from quire.codegen.builder import Function, Value
from quire.codegen.rules import MEMORY, REGISTER, RULES
from quire.codegen.staging import storage
from quire.codegen.types import F16, F32, I1, I16, I32, I64, Type
from quire.errors import UnsupportedOpError
from quire.ir.graph import Node, inputs, walk

RATES = UNIFORM, ROW, KEY, ELEMENT = 0, 1, 2, 3
_INPUT_RATE = {"q_idx": ROW, "kv_idx": KEY, "score": ELEMENT}  # all others are UNIFORM


def rate(node: Node, known: dict[Node, int]) -> int:
    """How often a node has to be computed. `known` remembers."""
    if node not in known:
        if node.op == "input":
            known[node] = _INPUT_RATE.get(str(node.payload), UNIFORM)
        else:
            known[node] = 0
            for arg in node.args:
                known[node] |= rate(arg, known)
    return known[node]


FASTEST = 2**16  # what moves no faster from key to key, or lane to lane, does not wrap around


class Lanes(NamedTuple):
    """One number per lane: a scalar, a scalar plus `step` for each lane, or a vector."""

    scalar: Value | None = None
    step: int = 0
    vector: Value | None = None

    @property
    def is_uniform(self) -> bool:
        """True if every lane has the same number, held as a scalar."""
        return self.scalar is not None and self.step == 0


class Captured(NamedTuple):
    """A captured tensor as generated code sees it: where it is, and each dimension's extent.

    `unit` is the dimension whose elements lie side by side, known when the code is generated.
    """

    pointer: Value
    sizes: Sequence[Value]
    strides: Sequence[Value]
    unit: int | None

    def only(self, dims: Sequence[int]) -> Captured:
        """The same tensor with some of its dimensions; the others are at index 0."""
        sizes, strides = ([values[dim] for dim in dims] for values in (self.sizes, self.strides))
        return Captured(self.pointer, sizes, strides, None)


@dataclass
class Scope:
    """What the nodes of one piece of code can refer to, and what has been computed already.

    `mistakes` are the conditions under which an index into a captured tensor is out of range or an
    integer is divided by 0, by the rate of the node: an i1 for all lanes, or one per lane. Loads
    go on with index 0, divisions with divisor 1. Proven loads are in range, and
    proven clamps do nothing.
    """

    f: Function
    lanes: int
    inputs: Mapping[str, Lanes]
    parameter: Callable[[Node], Value | None]
    captures: Sequence[Captured]
    rates: dict[Node, int] = field(default_factory=dict)
    values: dict[int, dict[Node, Lanes]] = field(
        default_factory=lambda: {rate: {} for rate in RATES}
    )
    mistakes: dict[int, list[Value]] = field(default_factory=lambda: {rate: [] for rate in RATES})
    proven: frozenset[Node] = frozenset()

    def rate(self, node: Node) -> int:
        """How often a node has to be computed."""
        return rate(node, self.rates)

    def inside(self, inputs: Mapping[str, Lanes], *anew: int) -> Scope:
        """A scope with more inputs known, in which the values of some rates are computed anew."""
        return replace(
            self,
            inputs={**self.inputs, **inputs},
            values={r: ({} if r in anew else known) for r, known in self.values.items()},
            mistakes={r: ([] if r in anew else known) for r, known in self.mistakes.items()},
        )

    # --- shapes

    def vector_type(self, scalar: Type) -> Type:
        """A full vector of a scalar type."""
        return scalar.vector(self.lanes)

    def as_vector(self, lanes: Lanes) -> Value:
        """The value of every lane, as a vector."""
        if lanes.vector is not None:
            return lanes.vector
        assert lanes.scalar is not None, "lanes without a value"
        type = self.vector_type(lanes.scalar.type)
        vector = self.f.splat(lanes.scalar, type)
        if lanes.step:
            vector = vector + self.f.lanes(type, [lanes.step * i for i in range(self.lanes)])
        return vector

    def as_scalar(self, lanes: Lanes) -> Value:
        """The value of lane 0 of something uniform."""
        assert lanes.is_uniform and lanes.scalar is not None, "only uniform lanes are a scalar"
        return lanes.scalar

    # --- nodes

    def lower(self, node: Node) -> Lanes:
        """The lanes of a node; computed once in each scope of its rate."""
        values = self.values[self.rate(node)]
        if node not in values:
            values[node] = self._lower(node)
        return values[node]

    def lower_all(self, roots: Sequence[Node], rates: Sequence[int]) -> None:
        """Compute every node below `roots` that has one of `rates`, here and now."""
        for node in walk(*roots):
            if self.rate(node) in rates:
                self.lower(node)

    def _lower(self, node: Node) -> Lanes:
        match node.op:
            case "input":
                return self._converted(self.inputs[str(node.payload)], REGISTER[node.dtype])
            case "const":
                return Lanes(self._constant(node))
            case "load":
                return load(self, node)
            case "min" | "max" if node in self.proven:
                return self.lower(_clamped(node)[0])
        args = [self.lower(arg) for arg in node.args]
        if node.op in ("floordiv", "mod"):
            self._note_zero_divisor(node, args[1])
        stepped = self._stepped(node, args)
        if stepped is not None:
            return stepped
        if all(arg.is_uniform for arg in args):
            return Lanes(self._apply(node, [self.as_scalar(arg) for arg in args]))
        return Lanes(vector=self._apply(node, [self.as_vector(arg) for arg in args]))

    def _note_zero_divisor(self, node: Node, divisor: Lanes) -> None:
        """Dividing an integer by 0 is a mistake like an index out of range."""
        constant = node.args[1].op == "const" and node.args[1].payload != 0
        if not constant and not node.dtype.is_floating_point:
            value = self.as_scalar(divisor) if divisor.is_uniform else self.as_vector(divisor)
            self.mistakes[self.rate(node)].append(value.equals(0))

    def _constant(self, node: Node) -> Value:
        known = self.parameter(node)
        if known is not None:
            return known
        assert not isinstance(node.payload, str) and node.payload is not None
        return self.f.value(node.payload, REGISTER[node.dtype])

    def _converted(self, lanes: Lanes, type: Type) -> Lanes:
        """An index in another integer type."""
        value = lanes.scalar if lanes.scalar is not None else lanes.vector
        assert value is not None, "lanes without a value"
        if value.type.is_float:
            return lanes
        changed = self.f.convert(value, type)
        return Lanes(vector=changed) if lanes.scalar is None else Lanes(changed, lanes.step)

    def _stepped(self, node: Node, args: list[Lanes]) -> Lanes | None:
        """Sums of integers that grow by a fixed step grow by a fixed step."""
        if node.op not in ("add", "sub", "neg", "cast") or all(arg.is_uniform for arg in args):
            return None
        if any(arg.scalar is None for arg in args) or not REGISTER[node.dtype].is_int:
            return None
        types = {REGISTER[arg.dtype] for arg in node.args}
        if not types <= {I32, I64} or REGISTER[node.dtype] not in (I32, I64):
            return None
        scalars = [arg.scalar for arg in args if arg.scalar is not None]
        steps = [arg.step for arg in args]
        sums = {"add": sum(steps), "sub": steps[0] - sum(steps[1:]), "neg": -steps[0]}
        step = sums.get(node.op, steps[0])
        return Lanes(self._apply(node, scalars), step) if abs(step) <= FASTEST else None

    def _apply(self, node: Node, values: list[Value]) -> Value:
        result = RULES[node.op](self.f, node, *values)
        return rounded(self.f, result, node.dtype)


def rounded(f: Function, value: Value, dtype: torch.dtype) -> Value:
    """A result as its dtype holds it, where registers hold more."""
    if dtype == torch.uint8:
        return value & 0xFF
    if dtype == torch.float16:
        return f.convert(f.convert(value, F16), F32)
    if dtype == torch.bfloat16:
        stored = storage("bfloat16")
        return stored.read(f, stored.write(f, value), F32)
    return value


# --- loads ---------------------------------------------------------------------------------------


def load(scope: Scope, node: Node) -> Lanes:
    """captured[i, j, ...], each lane at its own index."""
    assert isinstance(node.payload, int)
    captured = scope.captures[node.payload]
    indices = [scope.lower(arg) for arg in node.args]
    memory = MEMORY[node.dtype]
    moving = [dim for dim, index in enumerate(indices) if not index.is_uniform]
    if node in scope.proven:
        value, wrong = _proven(scope, captured, indices, memory), None
    elif not moving:
        offset, wrong = _uniform_offset(scope, captured, indices)
        value = scope.f.load(memory, captured.pointer, offset)
    elif moving == [captured.unit] and indices[moving[0]].step in (1, -1):
        value, wrong = _contiguous(scope, captured, indices, moving[0], memory)
    else:
        value, wrong = _gather(scope, captured, indices, memory)
    if node.args and wrong is not None:
        scope.mistakes[scope.rate(node)].append(wrong)
    number = widened(scope.f, value, node.dtype)
    return Lanes(vector=number) if moving else Lanes(number)


def widened(f: Function, value: Value, dtype: torch.dtype) -> Value:
    """What was loaded, as registers hold it."""
    if dtype == torch.bool:
        return value.differs(0)
    if dtype == torch.uint8:
        return f.zero_extend(value, I16)
    if dtype in (torch.float16, torch.bfloat16):
        return storage(str(dtype).removeprefix("torch.")).read(f, value, F32)
    return value


def _uniform_offset(
    scope: Scope, captured: Captured, indices: Sequence[Lanes]
) -> tuple[Value, Value]:
    """Where an element lies, and whether an index was out of range."""
    f = scope.f
    offset, wrong = f.value(0, I64), f.value(False, I1)
    for index, size, stride in zip(indices, captured.sizes, captured.strides, strict=True):
        position, outside = wrapped(f, f.convert(scope.as_scalar(index), I64), size)
        offset, wrong = offset + position * stride, wrong | outside
    return offset, wrong


def wrapped(f: Function, index: Value, size: Value) -> tuple[Value, Value]:
    """An index counted from the start of a dimension, and whether it is out of range (then 0)."""
    from_start = f.select(index < 0, index + size, index)
    outside = (from_start < 0) | (from_start >= size)
    return f.select(outside, 0, from_start), outside


def _contiguous(
    scope: Scope, captured: Captured, indices: Sequence[Lanes], dim: int, memory: Type
) -> tuple[Value, Value]:
    """Lanes that lie side by side: one vector load, or lane by lane at a tensor's edges."""
    f, lanes = scope.f, scope.lanes
    index = indices[dim]
    assert index.scalar is not None, "a contiguous index has a first lane"
    first = f.convert(index.scalar, I64)
    low = first if index.step == 1 else first - (lanes - 1)
    inside = (low >= 0) & (low + lanes <= captured.sizes[dim])
    rest = [other for other in range(len(indices)) if other != dim]
    base, wrong = _uniform_offset(scope, captured.only(rest), [indices[i] for i in rest])
    condition = scope.vector_type(I1)

    def at_once() -> list[Value]:
        vector = f.load(memory.vector(lanes), captured.pointer, base + low)
        if index.step == -1:
            vector = f.shuffle(vector, vector, list(reversed(range(lanes))))
        return [vector, f.splat(wrong, condition)]

    vector, mistaken = f.choose(inside, at_once, lambda: _gather(scope, captured, indices, memory))
    return vector, mistaken


def _proven(scope: Scope, captured: Captured, indices: Sequence[Lanes], memory: Type) -> Value:
    """Lanes whose indices are known to be in range, none of them counted from the end."""
    f = scope.f
    offset, steps = f.value(0, I64), []
    for dim, index in enumerate(indices):
        assert index.scalar is not None, "an irregular index is never proven"
        offset = offset + f.convert(index.scalar, I64) * captured.strides[dim]
        if index.step:
            steps.append((dim, index.step))
    if not steps:
        return f.load(memory, captured.pointer, offset)
    if len(steps) == 1 and steps[0][0] == captured.unit and abs(steps[0][1]) == 1:
        backward = steps[0][1] == -1
        low = offset - (scope.lanes - 1) if backward else offset
        vector = f.load(memory.vector(scope.lanes), captured.pointer, low)
        order = list(reversed(range(scope.lanes)))
        return f.shuffle(vector, vector, order) if backward else vector
    stride = f.value(0, I64)
    for dim, step in steps:
        stride = stride + captured.strides[dim] * step
    result = f.value(0, memory.vector(scope.lanes))
    for lane in range(scope.lanes):
        element = f.load(memory, captured.pointer, offset + stride * lane)
        result = f.insert(result, element, lane)
    return result


def provable(roots: Sequence[Node]) -> list[Node]:
    """The loads at every key whose indices are in range for all keys if they are at both ends.

    With them the clamps within their indices, which do nothing at any key if they do nothing at
    both ends.
    """
    known: dict[Node, int] = {}
    paces: dict[Node, float] = {}
    found: dict[Node, None] = {}
    for node in walk(*roots):
        if (
            node.op == "load"
            and rate(node, known) & KEY
            and all(_pace(arg, paces) <= FASTEST for arg in node.args)
        ):
            clamps = (below for below in walk(*node.args) if below.op in ("min", "max"))
            found.update(dict.fromkeys(below for below in clamps if _depends_on_key(below)))
            found[node] = None
    return list(found)


def _pace(node: Node, known: dict[Node, float]) -> float:
    """How much an index moves from key to key, at most; infinite unless it moves evenly.

    It does where it is a sum of inputs, perhaps clamped, and of what does not depend on the key.
    """
    if node not in known:
        known[node] = math.inf
        if node.dtype in (torch.int32, torch.int64):
            known[node] = _integer_pace(node, known)
    return known[node]


def _integer_pace(node: Node, known: dict[Node, float]) -> float:
    if not _depends_on_key(node):
        return 0
    if node.op == "input":
        return 1
    if node.op in ("min", "max"):
        both = all(map(_depends_on_key, node.args))
        return math.inf if both else _pace(_clamped(node)[0], known)
    if node.op in ("add", "sub", "neg", "cast"):
        return sum(_pace(arg, known) for arg in node.args)
    return math.inf


def _depends_on_key(node: Node) -> bool:
    return "kv_idx" in inputs(node)


def _clamped(node: Node) -> tuple[Node, Node]:
    """What a min or max clamps, and the limit."""
    first, second = node.args
    return (first, second) if _depends_on_key(first) else (second, first)


def proof(scope: Scope, node: Node) -> Value | None:
    """Whether a load is in range, or a clamp does nothing, in all lanes; None if none can say."""
    f, result = scope.f, scope.f.value(True, I1)
    if node.op != "load":
        inner, limit = map(scope.lower, _clamped(node))
        if inner.scalar is None or limit.scalar is None or limit.step:
            return None
        low, high = _ends(scope, inner)
        bound = f.convert(limit.scalar, I64)
        return high <= bound if node.op == "min" else low >= bound
    assert isinstance(node.payload, int)
    for size, arg in zip(scope.captures[node.payload].sizes, node.args, strict=True):
        index = scope.lower(arg)
        if index.scalar is None:
            return None
        low, high = _ends(scope, index)
        result = result & (low >= 0) & (high < size)
    return result


def _ends(scope: Scope, lanes: Lanes) -> tuple[Value, Value]:
    """The lowest and the highest of numbers that grow, or fall, by a step."""
    assert lanes.scalar is not None, "irregular lanes have no ends"
    first = scope.f.convert(lanes.scalar, I64)
    last = first + lanes.step * (scope.lanes - 1)
    return (first, last) if lanes.step >= 0 else (last, first)


def _gather(
    scope: Scope, captured: Captured, indices: Sequence[Lanes], memory: Type
) -> tuple[Value, Value]:
    """Each lane from its own place."""
    f, wide = scope.f, scope.vector_type(I64)
    offsets, wrong = f.value(0, wide), f.value(False, scope.vector_type(I1))
    for index, size, stride in zip(indices, captured.sizes, captured.strides, strict=True):
        position = f.convert(scope.as_vector(index), I64)
        position, outside = wrapped(f, position, f.splat(size, wide))
        offsets, wrong = offsets + position * f.splat(stride, wide), wrong | outside
    result = f.value(0, memory.vector(scope.lanes))
    for lane in range(scope.lanes):
        element = f.load(memory, captured.pointer, f.extract(offsets, lane))
        result = f.insert(result, element, lane)
    return result, wrong


def check_lowerable(root: Node) -> None:
    """Raise UnsupportedOpError for a dtype that no register holds."""
    for node in walk(root):
        if node.dtype not in REGISTER:
            raise UnsupportedOpError(
                f"a value of {node.dtype} has no place in a vector register. Convert it with "
                f".to(torch.int64) or .to(torch.float32)."
            )
