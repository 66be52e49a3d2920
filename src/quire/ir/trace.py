"""From a plain Python function to a graph: run it once on symbols.

    traced = trace(lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx - kv_idx], "score")
    traced.output      # the root node
    traced.captures    # (bias,)

A `Traced` is a mod itself: it can be called, composed, traced again and pickled.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from quire.errors import ModResultError, ModSignatureError
from quire.ir import forms as forms  # fills the table of what can be written
from quire.ir.graph import Node, cast, const, text
from quire.ir.interpret import interpret
from quire.ir.simplify import simplest
from quire.ir.symbol import Location, Recorder, Symbol, TraceMode, describe

Kind: TypeAlias = Literal["score", "mask"]
Mod: TypeAlias = Callable[..., Any]

MASK_INPUTS = ("b", "h", "q_idx", "kv_idx")
SCORE_INPUTS = ("score", *MASK_INPUTS)


@dataclass(frozen=True, eq=False)
class Traced:
    """A mod as a graph, with the tensors it captured and the source line of each node."""

    output: Node
    captures: tuple[Tensor, ...]
    kind: Kind
    name: str
    lines: dict[Node, Location] = field(default_factory=dict, repr=False)

    def __call__(self, *args: Any) -> Any:
        names = SCORE_INPUTS if self.kind == "score" else MASK_INPUTS
        env = dict(zip(names, args, strict=True))
        symbols = [value for value in args if isinstance(value, Symbol)]
        if symbols:
            return symbols[0].recorder.splice(self.output, self.captures, env)
        return interpret(self.output, env, self.captures, where=self.where)

    @property
    def __name__(self) -> str:
        return self.name

    def where(self, node: Node) -> str:
        """' at file.py:3: `the line`' for a node of this graph."""
        return describe(self.lines.get(node))

    def __str__(self) -> str:
        return text(self.output)


def trace(
    mod: Mod,
    kind: Kind,
    *,
    score_dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Traced:
    """Run `mod` on symbols and return what it does as a graph.

    Raises a `ModError` that names the user's line: a Python branch on a traced value, an op that
    the table does not have, a result that is no scalar, a wrong number of arguments.
    """
    check_signature(mod, kind)
    recorder = Recorder(device or torch.device("cpu"))
    symbols = [Symbol(Node("input", (), torch.int64, name), recorder) for name in MASK_INPUTS]
    if kind == "score":
        symbols.insert(0, Symbol(Node("input", (), score_dtype, "score"), recorder))
    with TraceMode():
        result = mod(*symbols)
    wanted = score_dtype if kind == "score" else torch.bool
    output = _result_node(result, wanted, recorder, mod)
    return Traced(output, tuple(recorder.captures), kind, mod_name(mod), recorder.lines)


def _result_node(result: object, wanted: torch.dtype, recorder: Recorder, mod: Mod) -> Node:
    kind = "mask_mod" if wanted == torch.bool else "score_mod"
    if isinstance(result, Symbol | bool | int | float | Tensor):
        value = recorder.lift(result)
        dtype = value.dtype if isinstance(value, Symbol) else torch.tensor(value).dtype
        if wanted == torch.bool and dtype != torch.bool:
            raise ModResultError(
                f"{kind} {mod_name(mod)!r} must return a truth value, but returned {dtype}. "
                f"Compare, as in q_idx >= kv_idx, or convert with .bool()."
            )
        return simplest(cast(value.node, wanted)) if isinstance(value, Symbol) else const(value, wanted)
    hint = " Is a return statement missing?" if result is None else ""
    raise ModResultError(
        f"{kind} {mod_name(mod)!r} must return one scalar, but returned "
        f"{type(result).__name__}.{hint or ' Return a single value for each element.'}"
    )


def mod_name(mod: Mod) -> str:
    """The name a mod goes by in messages and pictures."""
    inner = mod
    while hasattr(inner, "func"):  # functools.partial
        inner = inner.func
    return getattr(inner, "__name__", None) or type(inner).__name__


def mod_kind(mod: Mod) -> Kind:
    """'mask' for a function of 4 positional arguments, 'score' for one of 5."""
    required, _ = _positional(mod)
    match required:
        case 4:
            return "mask"
        case 5:
            return "score"
    raise ModSignatureError(
        f"expected a mask_mod(b, h, q_idx, kv_idx) or a score_mod(score, b, h, q_idx, kv_idx), "
        f"but {mod_name(mod)!r} takes {required} positional arguments. Give it 4 or 5."
    )


def check_signature(mod: Mod, kind: Kind) -> None:
    """Raise unless `mod` can be called with the arguments of its kind."""
    names = SCORE_INPUTS if kind == "score" else MASK_INPUTS
    if not callable(mod):
        raise ModSignatureError(
            f"{kind}_mod must be a function of ({', '.join(names)}), but got a "
            f"{type(mod).__name__}. Pass the function itself."
        )
    required, most = _positional(mod)
    if not required <= len(names) <= most:
        raise ModSignatureError(
            f"{kind}_mod must take {len(names)} arguments ({', '.join(names)}), but "
            f"{mod_name(mod)!r} takes {required}. Change its signature."
        )


def _positional(mod: Mod) -> tuple[int, float]:
    """How many positional arguments `mod` needs at least, and takes at most."""
    if isinstance(mod, Traced):
        count = 5 if mod.kind == "score" else 4
        return count, count
    if isinstance(mod, types.FunctionType) and not hasattr(mod, "__wrapped__"):
        code = mod.__code__
        most = float("inf") if code.co_flags & inspect.CO_VARARGS else code.co_argcount
        return code.co_argcount - len(mod.__defaults__ or ()), most
    target = mod.forward if isinstance(mod, torch.nn.Module) else mod
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return 0, float("inf")
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is p.empty for p in positional)
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return required, float("inf") if variadic else len(positional)
