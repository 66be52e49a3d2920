"""From graphs to vector code: how often each node is computed, and how wide.

Lanes run over queries. A node's value is a `Lanes`: one scalar for all lanes (`b`, `h`, `kv_idx`
and what is computed from them), a scalar that grows by a fixed step from lane to lane (`q_idx` and
its sums), or a vector. Nodes stay scalar as long as they can. So `slopes[h]` and `doc[kv_idx]` are
scalar loads, `doc[q_idx]` and `table[q_idx - kv_idx]` are vector loads, and only an irregular index
is loaded lane by lane.

Every node has a rate. No LLVM pass hoists code out of loops for us; computing nodes by rate does:

    UNIFORM   depends on b and h        once per call of the generated function
    ROW       also on q_idx             once per vector of queries
    KEY       also on kv_idx            once per key
    ELEMENT   on both, or on the score  once per vector and key
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from quire.codegen.llvm.builder import Function, Value
from quire.codegen.llvm.types import F16, F32, I32, I64, Type
from quire.codegen.mods.loads import Address, Captured, Lanes, load
from quire.codegen.mods.rules import REGISTER, RULES
from quire.codegen.phases.storage import storage
from quire.errors import UnsupportedOpError
from quire.ir.graph import Node, inputs, walk

RATES = UNIFORM, ROW, KEY, ELEMENT = 0, 1, 2, 3
_INPUT_RATE = {"q_idx": ROW, "kv_idx": KEY, "score": ELEMENT, "tangent": ELEMENT}
_INPUT_RATE |= {"row": ROW, "block": KEY, "column": KEY, "value": ELEMENT, "other": ELEMENT}
"""All other inputs are UNIFORM."""

FASTEST = (
    2**16
)  # an index with at most this step from key to key, or lane to lane, cannot wrap around


def rate(node: Node, known: dict[Node, int]) -> int:
    """How often a node has to be computed; `known` caches the rates of nodes."""
    if node not in known:
        if node.op == "input":
            known[node] = _INPUT_RATE.get(str(node.payload), UNIFORM)
        else:
            known[node] = 0
            for arg in node.args:
                known[node] |= rate(arg, known)
    return known[node]


@dataclass
class Scope:
    """The inputs of some code, and the nodes that it has computed, by rate.

    `mistakes` are conditions, by rate: an index into a captured tensor is out of range, or an
    integer is divided by 0. Each is an i1 for all lanes, or one for each lane. Then the load uses
    index 0 and the division divisor 1. Loads in `proven` are in range; clamps in it do nothing.
    `places` are where loads read, by rate: all elements of a row share one.
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
    places: dict[int, dict[object, Address]] = field(
        default_factory=lambda: {rate: {} for rate in RATES}
    )
    proven: frozenset[Node] = frozenset()

    def rate(self, node: Node) -> int:
        """How often a node has to be computed."""
        return rate(node, self.rates)

    def differs_by_key(self, node: Node) -> bool:
        """Whether a node is computed in the loop over keys."""
        return bool(self.rate(node) & KEY)

    def inside(self, inputs: Mapping[str, Lanes], *anew: int) -> Scope:
        """A scope with more inputs, in which nodes of some rates are computed anew."""
        return replace(
            self,
            inputs={**self.inputs, **inputs},
            values={r: ({} if r in anew else known) for r, known in self.values.items()},
            mistakes={r: ([] if r in anew else known) for r, known in self.mistakes.items()},
            places={r: ({} if r in anew else known) for r, known in self.places.items()},
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
        """The value of a node, computed once in each scope of its rate."""
        values = self.values[self.rate(node)]
        if node not in values:
            values[node] = self._lower(node)
        return values[node]

    def lower_all(self, roots: Sequence[Node], rates: Sequence[int]) -> None:
        """Compute all nodes of `roots` that have one of `rates`, here."""
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
                return self.lower(clamped(node)[0])
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
        """Note a mistake where an integer is divided by 0."""
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
        """The sum of integers with fixed steps, which has a fixed step itself; or None."""
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
    """A result rounded to its dtype, if it is computed in a wider one."""
    if dtype == torch.uint8:
        return value & 0xFF
    if dtype == torch.float16:
        return f.convert(f.convert(value, F16), F32)
    if dtype == torch.bfloat16:
        stored = storage("bfloat16")
        return stored.read(f, stored.write(f, value), F32)
    return value


def depends_on_key(node: Node) -> bool:
    """Whether the value of a node differs from key to key."""
    return "kv_idx" in inputs(node)


def clamped(node: Node) -> tuple[Node, Node]:
    """The operands of a min or max: the one that depends on the key, and the limit."""
    first, second = node.args
    return (first, second) if depends_on_key(first) else (second, first)


@functools.lru_cache(maxsize=512)
def check_lowerable(root: Node) -> None:
    """Raise UnsupportedOpError for a dtype that no register holds."""
    for node in walk(root):
        if node.dtype not in REGISTER:
            raise UnsupportedOpError(
                f"a value of {node.dtype} has no place in a vector register. Convert it with "
                f".to(torch.int64) or .to(torch.float32)."
            )
