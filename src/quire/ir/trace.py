"""From a Python function to a graph, by running it once on symbols.

    traced = trace(lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx - kv_idx], "score")
    traced.output      # the root node
    traced.captures    # (bias,)

A `Traced` is a mod, too: it can be called, composed, traced again and pickled.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from quire.errors import (
    ModResultError,
    ModSignatureError,
    ModValueError,
    NotCallableError,
    QuireError,
    UnsupportedOpError,
)
from quire.ir import forms as forms  # fills the table of what can be written
from quire.ir.graph import Node, Row, read, rows, text
from quire.ir.interpret import interpret
from quire.ir.promote import promote
from quire.ir.source import Location, describe, raising_location
from quire.ir.symbol import Recorded, Recorder, Symbol, TraceMode

Kind: TypeAlias = Literal["score", "mask", "epilogue", "pair"]
Mod: TypeAlias = Callable[..., Any]

MASK_INPUTS = ("b", "h", "q_idx", "kv_idx")
SCORE_INPUTS = ("score", *MASK_INPUTS)
INPUTS: dict[Kind, tuple[str, ...]] = {
    "score": SCORE_INPUTS,
    "mask": MASK_INPUTS,
    "epilogue": ("value", "row", "column"),  # of a linear layer
    "pair": ("value", "other", "row", "block", "column"),  # whose columns come in pairs
}
_FLOATS = ("score", "value", "other")  # inputs that are no indices


@dataclass(frozen=True, eq=False)
class Traced:
    """A mod as a graph, with the tensors it captured and the source line of each node."""

    output: Node
    captures: tuple[Tensor, ...]
    kind: Kind
    name: str
    lines: dict[Node, Location] = field(default_factory=dict, repr=False)

    def __call__(self, *args: Any) -> Any:
        """Run the mod on tensors that broadcast, under vmap, or on symbols."""
        names = INPUTS[self.kind]
        if len(args) != len(names):
            raise ModSignatureError(
                f"{self.kind}_mod {self.name!r} must be called with ({', '.join(names)}), but is "
                f"called with {len(args)} arguments. Pass {len(names)}."
            )
        env = dict(zip(names, args, strict=True))
        for value in args:
            if isinstance(value, Symbol):
                return value.recorder.splice(self.output, self.captures, self.lines, env)
        tensors = {
            name: value if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
            for name, value in env.items()
        }
        return interpret(self.output, tensors, self.captures, where=self.where)

    @property
    def __name__(self) -> str:
        return self.name

    @property
    def __signature__(self) -> inspect.Signature:
        return _SIGNATURES[self.kind]

    def where(self, node: Node) -> str:
        """' at file.py:3: `the line`' for a node of this graph."""
        return describe(self.lines.get(node))

    def __reduce__(self) -> tuple[object, ...]:
        graph = rows(self.output)
        lines = [self.lines.get(node) for node in read(graph)]
        return _restored, (graph, lines, self.captures, self.kind, self.name)

    def __str__(self) -> str:
        return text(self.output)


def _restored(
    graph: Sequence[Row],
    lines: Sequence[Location | None],
    captures: tuple[Tensor, ...],
    kind: Kind,
    name: str,
) -> Traced:
    """Restore a pickled trace."""
    nodes = read(graph)
    known = {node: line for node, line in zip(nodes, lines, strict=True) if line is not None}
    return Traced(nodes[-1], captures, kind, name, known)


_CPU = torch.device("cpu")
_SIGNATURES = {
    kind: inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in names]
    )
    for kind, names in INPUTS.items()
}


def trace(
    mod: Mod,
    kind: Kind,
    *,
    score_dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Traced:
    """Run `mod` on symbols and return what it does as a graph.

    Raises a `ModError` that names the user's line: for a Python branch on a traced value, an op
    that is not in the table, a result that is not a scalar, or a wrong number of arguments.
    """
    check_signature(mod, kind)
    recorder = Recorder(device or _CPU)
    result = _run(mod, kind, recorder.inputs(_input_nodes(kind, score_dtype)))
    wanted = torch.bool if kind == "mask" else score_dtype
    output = _result_node(result, wanted, recorder, mod, kind)
    return Traced(output, tuple(recorder.captures), kind, mod_name(mod), recorder.lines)


@functools.cache
def _input_nodes(kind: Kind, score_dtype: torch.dtype) -> tuple[Node, ...]:
    dtypes = dict.fromkeys(_FLOATS, score_dtype)
    return tuple(Node("input", (), dtypes.get(name, torch.int64), name) for name in INPUTS[kind])


_MODE = TraceMode()  # it has no state


def _run(mod: Mod, kind: Kind, symbols: list[Symbol]) -> Any:
    """Call `mod` with symbols; any exception becomes a ModError."""
    try:
        with _MODE:
            return mod(*symbols)
    except QuireError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0]
        if "__array_ufunc__" in reason:
            raise ModValueError(
                f"a mod is written in torch's functions, but {kind}_mod {mod_name(mod)!r} uses one "
                f"of numpy{describe(raising_location(error))}. Write torch. in place of np."
            ) from error
        raise UnsupportedOpError(
            f"{kind}_mod {mod_name(mod)!r} cannot be traced: {type(error).__name__}: {reason}"
            f"{describe(raising_location(error))}. If PyTorch can run it, the call still runs, on "
            f"the slower eager path."
        ) from error


def _result_node(
    result: object, wanted: torch.dtype, recorder: Recorder, mod: Mod, of: Kind
) -> Node:
    if type(result) is Symbol and result.node.dtype is wanted and result.recorder is recorder:
        return result.node
    kind = f"{of}_mod"
    if isinstance(result, Recorded | Tensor) and len(result.shape) > 0:
        raise ModResultError(
            f"{kind} {mod_name(mod)!r} must return one scalar for each element, but returned a "
            f"tensor of shape {list(result.shape)}. Reduce or index it."
        )
    if not isinstance(result, Symbol | bool | int | float | np.generic | Tensor):
        advice = "Is a return statement missing?" if result is None else "Return a single value."
        raise ModResultError(
            f"{kind} {mod_name(mod)!r} must return one scalar for each element, but returned "
            f"{type(result).__name__}. {advice}"
        )
    value = recorder.lift(result)
    dtype = promote([value])
    if wanted == torch.bool and dtype != torch.bool:
        raise ModResultError(
            f"{kind} {mod_name(mod)!r} must return a truth value, but returned {dtype}. "
            f"Compare, as in q_idx >= kv_idx, or convert with .bool()."
        )
    return recorder.node(value, wanted)


def mod_name(mod: Mod) -> str:
    """The name of a mod in messages and pictures."""
    while isinstance(mod, functools.partial):
        mod = mod.func
    return getattr(mod, "__name__", None) or type(mod).__name__


def call_name(*mods: Mod | str | None) -> str:
    """The name of a call in a profile, by its mods or their names: 'attention(alibi, causal)'.

    A mod that is None has no name. Of mods with the same name, the first is named.
    """
    given = (mod for mod in mods if mod is not None)
    names = dict.fromkeys(mod if isinstance(mod, str) else mod_name(mod) for mod in given)
    return f"attention({', '.join(names)})" if names else "attention"


def mod_kind(mod: Mod) -> Kind:
    """'mask' for a function of 4 positional arguments, 'score' for one of 5."""
    kind: Kind
    arity = _arity(mod, "a mod", "(score, b, h, q_idx, kv_idx)")
    for kind in ("score", "mask"):
        if len(INPUTS[kind]) == arity.least:
            return kind
    raise ModSignatureError(
        f"a mod must be a mask_mod(b, h, q_idx, kv_idx) or a score_mod(score, b, h, q_idx, kv_idx)"
        f", but {mod_name(mod)!r} takes {arity.least} positional arguments. Give it 4 or 5."
    )


def check_signature(mod: Mod, kind: Kind, name: str = "") -> None:
    """Raise unless `mod` can be called with the arguments of its kind.

    `name` is what messages call it, if it is the value of another argument than `{kind}_mod`.
    """
    if type(mod) is types.FunctionType and not mod.__dict__:  # true for nearly every mod, and fast
        code: types.CodeType | None = mod.__code__
        expected = len(INPUTS[kind])
    else:
        code = _code_of_class(type(mod))  # type: ignore[arg-type]  # every class has a hash
        expected = len(INPUTS[kind]) + 1
    if code is not None and code.co_argcount == expected and not code.co_kwonlyargcount:
        return
    arguments, name = f"({', '.join(INPUTS[kind])})", name or f"{kind}_mod"
    arity = _arity(mod, name, arguments)
    count = len(INPUTS[kind])
    if not arity.least <= count <= arity.most:
        raise ModSignatureError(
            f"{name} must take {count} arguments {arguments}, but {mod_name(mod)!r} takes "
            f"{arity.least}. Change its signature."
        )
    if arity.keywords:
        raise ModSignatureError(
            f"{name} must take {count} arguments {arguments}, but {mod_name(mod)!r} needs "
            f"{', '.join(arity.keywords)} as well. Give it a default, or use functools.partial."
        )


@functools.lru_cache(maxsize=256)
def _code_of_class(kind: type) -> types.CodeType | None:
    """The code that runs when an object of a class is called, if it is a plain method."""
    name = "forward" if issubclass(kind, torch.nn.Module) else "__call__"
    function = getattr(kind, name, None)
    if type(function) is not types.FunctionType or function.__dict__:
        return None
    return None if hasattr(kind, "__signature__") else function.__code__


class _Arity(NamedTuple):
    """How many positional arguments a function needs and accepts, and which keywords it needs."""

    least: int
    most: float
    keywords: tuple[str, ...] = ()


def _arity(mod: Mod, what: str, arguments: str) -> _Arity:
    if not callable(mod):
        raise NotCallableError(
            f"{what} must be a function of {arguments}, but is a {type(mod).__name__}. Pass the "
            f"function itself."
        )
    if isinstance(mod, types.FunctionType) and not hasattr(mod, "__wrapped__"):
        code = mod.__code__
        if not code.co_kwonlyargcount:  # true for nearly every mod, and fast
            most = math.inf if code.co_flags & inspect.CO_VARARGS else code.co_argcount
            return _Arity(code.co_argcount - len(mod.__defaults__ or ()), most)
    try:
        target = mod.forward if isinstance(mod, torch.nn.Module) else mod
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # there is no signature
        return _Arity(0, math.inf)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return _Arity(
        least=sum(p.default is p.empty for p in positional),
        most=math.inf if variadic else len(positional),
        keywords=tuple(
            p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty
        ),
    )
