"""Hypothesis strategies for mods and graphs.

    @given(random_mods("score"))
    def test(mod: RandomMod) -> None:
        trace(mod, "score")

A `RandomMod` is a Python function made from source text, as a user would write it, so a failing
example prints as something to paste. `random_graphs` draws nodes straight from the table of ops.

Everything drawn is exact: each op rounds in one way only, so that two ways to compute a mod agree
bit for bit. `smooth=True` adds functions that different code rounds differently, in places where
no floor or comparison can blow the difference up.
"""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from quire.ir.graph import Node, cast, const
from quire.ir.ops import COMPARE, LEAF, OPS
from quire.ir.trace import INPUTS, Kind

# --- mods ----------------------------------------------------------------------------------------


def captured_tensors() -> dict[str, Tensor]:
    """What random mods capture, by name: several dtypes, ranks and layouts."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-9, 10, shape, generator=generator)

    return {
        "row": normal(11),
        "table": normal(5, 3).T,
        "wide": normal(2, 7, 3)[:, ::2],
        "half": normal(6).half(),
        "brain": normal(6).bfloat16(),
        "double": normal(4).double(),
        "ids": integers(13),
        "small": integers(3, 4).int(),
        "flags": integers(8) > 0,
        "points": normal(6, 3),
        "codes": integers(3, 5, 4)[..., 1:],
        "scale": torch.tensor(0.75),
        "offset": torch.tensor(3),
    }


CAPTURED = captured_tensors()
FLOAT_TENSORS = ("row", "table", "wide", "half", "brain", "double")
INT_TENSORS = ("ids", "small")


@dataclass(frozen=True)
class RandomMod:
    """A mod as source text; calling it runs the text."""

    kind: Kind
    source: str
    function: Any = field(repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        text = f"lambda {', '.join(INPUTS[self.kind])}: {self.source}"
        object.__setattr__(self, "function", eval(text, {"torch": torch, **CAPTURED}))

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.function)


def random_mods(kind: Kind, *, smooth: bool = False) -> SearchStrategy[RandomMod]:
    """Mods of a kind."""
    if kind == "mask":
        return truths(3).map(lambda source: RandomMod("mask", source.replace("score", "row[b]")))
    source = smooth_floats(2) if smooth else floats(3)
    return source.map(lambda source: RandomMod("score", source))


def _one_of(*templates: str, **operands: SearchStrategy[str]) -> SearchStrategy[str]:
    """One of the templates, each `{name}` in it drawn anew from its strategy."""

    @st.composite
    def fill(draw: DrawFn) -> str:
        template = draw(st.sampled_from(templates))
        used = {name: draw(each) for name, each in operands.items() if "{" + name in template}
        return template.format(**used)

    return fill()


def integers(depth: int) -> SearchStrategy[str]:
    """Expressions of an integer dtype."""
    leaves = st.sampled_from(["b", "h", "q_idx", "kv_idx", "q_idx - kv_idx"])
    if depth == 0:
        return leaves
    return leaves | _one_of(
        "({a} + {b})",
        "({a} - {b})",
        "({a} * {n})",
        "({n} - {a})",
        "({a} + offset)",
        "{a} // {d}",
        "{a} % {d}",
        "torch.div({a}, {d}, rounding_mode='trunc')",
        "(-({a}))",
        "abs({a})",
        "({a} & {n})",
        "({a} | {b})",
        "({a} ^ {b})",
        "(~({a}))",
        "({a} << {s})",
        "({a} >> {s})",
        "torch.minimum({a}, {b})",
        "torch.maximum({a}, {b})",
        "({a}).clamp({n}, 5)",
        "torch.where({c}, {a}, {n})",
        "({a}) ** 2",
        "({c}).long()",
        "({a}).int()",
        "{load}",
        "({u} * {w}).sum()",
        "({u} - {w}).amax(-1)",
        "({u}).argmax()",
        "(({u}) @ ({u} + {a}))",
        "torch.where({c}, {u}, {w}).sum(-1)",
        "torch.stack([{a}, {b}]).amin()",
        u=int_vectors(depth - 1),
        w=int_vectors(depth - 1),
        a=integers(depth - 1),
        b=integers(depth - 1),
        c=truths(depth - 1),
        n=st.integers(-5, 9).map(str),
        d=st.sampled_from(["2", "3", "7", "16", "-3"]),
        s=st.integers(0, 5).map(str),
        load=loads(INT_TENSORS, depth - 1),
    )


def floats(depth: int) -> SearchStrategy[str]:
    """Expressions of a floating-point dtype, in arithmetic that is the same everywhere."""
    leaves = st.just("score") | loads(FLOAT_TENSORS, 0)
    if depth == 0:
        return leaves
    return leaves | _one_of(
        "({x} + {y})",
        "({x} - {y})",
        "{x} * {v}",
        "{v} * {x}",
        "({v} - {x})",
        "{x} / {v}",
        "({x} + {i})",
        "scale * {x}",
        "{i} * {v}",
        "torch.minimum({x}, {y})",
        "torch.maximum({x}, {y})",
        "({x}).clamp(min={v})",
        "(-({x}))",
        "({x}).abs()",
        "torch.floor({x})",
        "({x}).round()",
        "torch.where({c}, {x}, {y})",
        "torch.where({c}, {x}, {v})",
        "({x}).masked_fill({c}, float('-inf'))",
        "({i}).float()",
        "({x}).to(torch.float64)",
        "({x}).bfloat16()",
        "torch.relu({x})",
        "({x}) ** 2",
        "{load}",
        "({u} - {w}).amax()",
        "({u} * {x})[1]",
        "({u}).max(-1).values",
        "torch.cat([{u}, {w}])[4]",
        u=vectors(depth - 1),
        w=vectors(depth - 1),
        x=floats(depth - 1),
        y=floats(depth - 1),
        i=integers(depth - 1),
        c=truths(depth - 1),
        v=st.sampled_from(["0.5", "-1.25", "3", "0.1", "1.0"]),
        load=loads(FLOAT_TENSORS, depth - 1),
    )


def smooth_floats(depth: int) -> SearchStrategy[str]:
    """Expressions whose value changes little where their parts change little.

    Without narrow floats, in which a difference in the last bit of a float32 becomes a large one.
    """
    exact = floats(1).map(_widened)
    if depth == 0:
        return exact
    return _one_of(
        "torch.tanh({x} / 4) * 4",
        "torch.sigmoid({x})",
        "({x}).clamp(-4, 4).exp()",
        "abs({x}).sqrt()",
        "torch.erf({x})",
        "torch.nn.functional.gelu({x})",
        "torch.log1p(({x}).abs())",
        "({x} + {y})",
        "torch.where({c}, {x}, {y})",
        "{x} - 0.5 * ({i}).float()",
        "({u} - {w}).norm()",
        "({u} * {w}).sum(-1)",
        "(({u}).double() @ ({w}).double())",
        "(({u} - {w}) * torch.tanh({x})).pow(2).mean()",
        "torch.linalg.cross(({u}).double(), ({w}).double()).amin()",
        u=vectors(1).map(_widened),
        w=vectors(1).map(_widened),
        x=smooth_floats(depth - 1),
        y=exact,
        i=integers(1),
        c=truths(1),
    )


def _widened(source: str) -> str:
    return re.sub("half|brain", "row", source).replace("bfloat16", "double")


def truths(depth: int) -> SearchStrategy[str]:
    """Expressions of dtype bool."""
    leaves = st.sampled_from(["q_idx >= kv_idx", "b == h", "q_idx - kv_idx < 3"])
    leaves = leaves.map("({})".format)
    if depth == 0:
        return leaves
    return leaves | _one_of(
        "({a} < {b})",
        "({a} <= {n})",
        "({n} > {a})",
        "({a} != {b})",
        "({x} < {y})",
        "({x} >= 0.5)",
        "torch.isnan({x})",
        "({p} & {q})",
        "({p} | {q})",
        "({p} ^ {q})",
        "~{p}",
        "torch.logical_and({p}, {a})",
        "torch.logical_not({p})",
        "torch.where({p}, {q}, True)",
        "{load}",
        "({u} < {w}).any()",
        "({v} <= {x}).all(-1)",
        u=int_vectors(depth - 1),
        w=int_vectors(depth - 1),
        v=vectors(depth - 1),
        a=integers(depth - 1),
        b=integers(depth - 1),
        x=floats(depth - 1),
        y=floats(depth - 1),
        p=truths(depth - 1),
        q=truths(depth - 1),
        n=st.integers(-3, 6).map(str),
        load=loads(("flags",), depth - 1),
    )


def vectors(depth: int) -> SearchStrategy[str]:
    """Expressions of three floats: rows of captured tensors, and what is computed from them."""
    rows = _one_of("points[({i}) % 6]", "points[({i}) % 6 - 6]", i=integers(0))
    if depth == 0:
        return rows
    return rows | _one_of(
        "({u} + {w})",
        "({u} * {v})",
        "({u} - {x})",
        "({x} * {u})",
        "torch.maximum({u}, {w})",
        "({u}).abs()",
        "torch.where({c}, {u}, {w})",
        "torch.where({u} < {w}, {u}, {w} * 2)",
        "torch.stack([{x}, score, {x}])",
        u=vectors(depth - 1),
        w=vectors(depth - 1),
        x=floats(depth - 1),
        c=truths(depth - 1),
        v=st.sampled_from(["0.5", "-1.25", "3"]),
    )


def int_vectors(depth: int) -> SearchStrategy[str]:
    """Expressions of three integers."""
    rows = _one_of("codes[({i}) % 3, ({i}) % 5]", "codes[b % 3, ({i}) % 5]", i=integers(0))
    if depth == 0:
        return rows
    return rows | _one_of(
        "({u} + {a})",
        "({u} * {w})",
        "{u} // 3",
        "({a} - {u})",
        "torch.minimum({u}, {w})",
        "({u} == {w}).long()",
        u=int_vectors(depth - 1),
        w=int_vectors(depth - 1),
        a=integers(depth - 1),
    )


@st.composite
def loads(draw: DrawFn, names: tuple[str, ...], depth: int) -> str:
    """A captured tensor at indices that are in range, some counted from the end."""
    name = draw(st.sampled_from(names))
    items = []
    for size in CAPTURED[name].shape:
        index = draw(integers(depth))
        forms = (f"({index}) % {size}", f"({index}) % {size} - {size}")
        clamped = f"({index}).clamp({-size}, {size - 1})"
        items.append(draw(st.sampled_from([*forms, clamped, str(size - 1)])))
    if all(item.isdigit() for item in items):
        items[0] = f"b % {CAPTURED[name].shape[0]}"
    joints = st.sampled_from([", ", "]["])
    return f"{name}[{draw(joints).join(items)}]"


# --- graphs --------------------------------------------------------------------------------------

GRAPH_DTYPES = (torch.bool, torch.int32, torch.int64, torch.float32, torch.float64)
ROUNDED_DIFFERENTLY = frozenset(
    {"pow", "exp", "exp2", "log", "log2", "sqrt", "tanh", "sigmoid", "erf", "sin", "cos"}
)
SPECIAL_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, -2.5, math.inf, -math.inf, math.nan, 3e38)
SPECIAL_INTS = (0, 1, -1, 2, 3, -7, 31, 2**31 - 1, -(2**31))


def environment() -> dict[str, Tensor]:
    """Tensors for every input of a random graph, along different axes."""
    small = torch.tensor([0, 1, 2, 7, -3, 2**31 - 1])
    return {
        "score": torch.tensor(SPECIAL_FLOATS, dtype=torch.float64).view(-1, 1, 1),
        "q_idx": small.view(1, -1, 1),
        "kv_idx": small.view(1, 1, -1),
    }


@st.composite
def random_graphs(draw: DrawFn, dtype: torch.dtype | None = None, depth: int = 4) -> Node:
    """A node of the given or any dtype. Integers are never divided by 0 nor made from floats."""
    dtype = draw(st.sampled_from(GRAPH_DTYPES)) if dtype is None else dtype
    if depth == 0 or draw(st.integers(0, 5)) == 0:
        return draw(_leaves(dtype))
    name = draw(st.sampled_from(_ops_of(dtype)))

    def below(of: torch.dtype) -> Node:
        return draw(random_graphs(of, depth - 1))

    match name:
        case "cast":
            return cast(below(draw(st.sampled_from(_castable(dtype)))), dtype)
        case "where":
            return Node(name, (below(torch.bool), below(dtype), below(dtype)), dtype)
        case "floordiv" | "mod" if not dtype.is_floating_point:
            divisor = const(draw(st.sampled_from([1, 2, 3, -3, 16])), dtype)
            return Node(name, (below(dtype), divisor), dtype)
        case "shl" | "shr":
            return Node(name, (below(dtype), const(draw(st.integers(0, 8)), dtype)), dtype)
    of = draw(st.sampled_from(GRAPH_DTYPES)) if OPS[name].typing is COMPARE else dtype
    arity = OPS[name].arity
    assert arity is not None
    return Node(name, tuple(below(of) for _ in range(arity)), dtype)


def _ops_of(dtype: torch.dtype) -> list[str]:
    """The exact ops that give this dtype."""
    return ["cast"] + [
        op.name
        for op in OPS.values()
        if op.typing is not LEAF
        and op.name not in ROUNDED_DIFFERENTLY
        and (dtype == torch.bool if op.typing is COMPARE else dtype in op.typing.operands)
    ]


def _castable(dtype: torch.dtype) -> list[torch.dtype]:
    exact = [each for each in GRAPH_DTYPES if not each.is_floating_point]
    return exact if dtype in (torch.int32, torch.int64) else list(GRAPH_DTYPES)


def _leaves(dtype: torch.dtype) -> SearchStrategy[Node]:
    if dtype == torch.bool:
        return st.booleans().map(lambda value: const(value, dtype))
    if dtype.is_floating_point:
        values = st.sampled_from(SPECIAL_FLOATS).map(lambda value: const(value, dtype))
        return values | st.just(Node("input", (), dtype, "score"))
    names = st.sampled_from(["q_idx", "kv_idx"])
    indices = names.map(lambda name: cast(Node("input", (), torch.int64, name), dtype))
    return indices | st.sampled_from(SPECIAL_INTS).map(lambda value: const(value, dtype))
