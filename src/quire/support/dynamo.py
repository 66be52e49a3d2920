"""How torch.compile and torch.export meet quire: by a graph break, or by PyTorch's own operator.

Dynamo, which traces Python for both, need not look into quire: it calls us as we stand, between
two graphs. Where only one graph is allowed (`fullgraph=True`, export) PyTorch's operator is traced
in our place, with one warning.

Importing Dynamo takes seconds, so nothing here does before it is at work: functions are marked as
`torch.compiler.disable` and `torch.compiler.assume_constant_result` would mark them.
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
    """PyTorch's operators compute, since quire would have broken a graph that must stay whole."""


def instead(theirs: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Keep Dynamo out of a function, and trace `theirs` where the graph may not break.

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


def own(function: Function) -> Function:
    """A twin of `function`, which stays what it is when `patch_torch` changes PyTorch's."""
    assert isinstance(function, types.FunctionType), "only Python functions have code to copy"
    parts = function.__globals__, function.__name__, function.__defaults__, function.__closure__
    twin = types.FunctionType(function.__code__, *parts)
    twin.__kwdefaults__ = function.__kwdefaults__
    return cast(Function, functools.update_wrapper(twin, function))


def never_traced(function: Function) -> Function:
    """Have Dynamo break the graph at `function` and run it, with all that it calls, as it is."""
    torch_private.mark_disabled(function, "quire computes between graphs")
    return never_entered(function)


def never_entered(function: Function) -> Function:
    """Have Dynamo run `function` as it is, unless what calls it is being traced.

    After a break nothing is left to trace, and trying would tie a graph to every mod it is given.
    """
    torch_private.skip_code(function.__code__)
    return function


def _entered_by_twin(function: Function) -> Function:
    """Have `torch.compile(function)` compile a twin with code of its own, which may be entered."""
    twin = own(function)
    twin.__code__ = function.__code__.replace()
    torch_private.mark_original(function, twin)
    return function


def constant_when_traced(function: Function) -> Function:
    """Have Dynamo run `function` while it traces, and take the result for a constant."""
    torch_private.mark_constant(function)
    return function


@constant_when_traced
def must_be_one_graph() -> bool:
    """Whether what calls this is being traced where the graph may not break; if so, warn."""
    if not torch_private.is_one_graph():
        return False
    _warn_once()
    return True


@functools.cache
def _warn_once() -> None:
    warn(
        "quire runs between graphs, but fullgraph=True and torch.export allow only one: PyTorch's "
        "own operators take its place. Compile without fullgraph=True to have quire compute.",
        OneGraphWarning,
    )
