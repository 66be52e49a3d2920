"""How Dynamo, the tracer of torch.compile and torch.export, treats functions of quire.

    traced_as             it traces another function in place of this one
    entered_by_callers    it traces this function as a part of its caller
    as_one_node           it puts a call of this function into the graph, and does not enter it
    instead               it breaks the graph here; where it must not, it traces PyTorch's function
    never_traced          it always breaks the graph here

Importing Dynamo takes seconds, so this module does not import it: it sets the attributes that
`torch.compiler.disable` and `torch.compiler.assume_constant_result` would set.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

from quire.support import torch_private
from quire.support.warn import warn

P = ParamSpec("P")
R = TypeVar("R")
Function = TypeVar("Function", bound=Callable[..., Any])


class OneGraphWarning(UserWarning):
    """PyTorch's operators compute instead of quire, since the graph must not break."""


def instead(theirs: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function: Dynamo does not trace it; where a break is forbidden, trace `theirs`.

    @instead(torch_attention)
    def attention(query): ...
    """

    def decorate(ours: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(ours)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_compiling() and must_be_one_graph():
                result: R = theirs(*args, **kwargs)
                return result
            return ours(*args, **kwargs)

        never_traced(ours)
        return _entered_by_twin(never_entered(call))

    return decorate


def traced_as(other: Callable[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function: Dynamo traces `other` in its place, and never enters it by itself."""

    def decorate(ours: Callable[P, R]) -> Callable[P, R]:
        torch_private.mark_inlined(ours, other)
        torch_private.skip_code(ours.__code__)
        return ours

    return decorate


def entered_by_callers(function: Function) -> Function:
    """Decorate a function: Dynamo traces it as part of its caller, or if it is compiled itself."""
    return _entered_by_twin(never_entered(function))


def as_one_node(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function: Dynamo puts calls of it into its graph, which runs it on fake tensors.

    The function must accept fake and functional tensors.
    """
    node = never_entered(own(function))

    @constant_when_traced
    def allow() -> bool:
        torch.compiler.allow_in_graph(node)
        return True

    def traced(*args: P.args, **kwargs: P.kwargs) -> R:
        allow()
        return node(*args, **kwargs)

    return _entered_by_twin(traced_as(traced)(function))


def own(function: Function) -> Function:
    """Return a copy of `function`, which `patch_torch` does not change."""
    assert isinstance(function, types.FunctionType), "only Python functions have code to copy"
    parts = function.__globals__, function.__name__, function.__defaults__, function.__closure__
    twin = types.FunctionType(function.__code__, *parts)
    twin.__kwdefaults__ = function.__kwdefaults__
    return cast(Function, functools.update_wrapper(twin, function))


def never_traced(function: Function) -> Function:
    """Make Dynamo break the graph at `function`, and run it and its callees without tracing."""
    torch_private.mark_disabled(function, "quire computes between graphs")
    return never_entered(function)


def never_entered(function: Function) -> Function:
    """Make Dynamo run `function` without tracing it, unless its caller is being traced.

    After a graph break, Dynamo would trace it again, and compile a new graph for every mod.
    """
    torch_private.skip_code(function.__code__)
    return function


def _entered_by_twin(function: Function) -> Function:
    """Make `torch.compile(function)` compile a copy with its own code, which Dynamo may trace."""
    twin = own(function)
    twin.__code__ = function.__code__.replace()
    torch_private.mark_original(function, twin)
    return function


def constant_when_traced(function: Function) -> Function:
    """Make Dynamo run `function` while it traces, and treat the result as a constant."""
    torch_private.mark_constant(function)
    return function


@constant_when_traced
def must_be_one_graph() -> bool:
    """Return whether the caller is being traced and the graph may not break; if so, warn once."""
    if not torch_private.is_one_graph():
        return False
    _warn_once()
    return True


@functools.cache
def _warn_once() -> None:
    warn(
        "quire makes block masks and writes pages between graphs, but fullgraph=True and "
        "torch.export allow only one graph: PyTorch's own functions take their place. Make masks "
        "before the graph, or compile without fullgraph=True.",
        OneGraphWarning,
    )
