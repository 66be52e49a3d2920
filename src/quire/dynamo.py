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
from torch._C._dynamo import eval_frame

from quire.warn import warn

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
    function.__dict__.update(
        _torchdynamo_disable=True,
        _torchdynamo_disable_msg="quire computes between graphs",
    )
    return never_entered(function)


def never_entered(function: Function) -> Function:
    """Have Dynamo run `function` as it is, unless what calls it is being traced.

    After a break nothing is left to trace, and trying would tie a graph to every mod it is given.
    """
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def _entered_by_twin(function: Function) -> Function:
    """Have `torch.compile(function)` compile a twin with code of its own, which may be entered."""
    twin = own(function)
    twin.__code__ = function.__code__.replace()
    function.__dict__.update(
        _torchdynamo_orig_callable=twin,
        _torchdynamo_wrapper_id=id(function),
    )
    return function


def constant_when_traced(function: Function) -> Function:
    """Have Dynamo run `function` while it traces, and take the result for a constant."""
    function.__dict__.update(_dynamo_marked_constant=True)
    return function


@constant_when_traced
def must_be_one_graph() -> bool:
    """Whether what calls this is being traced where the graph may not break; if so, warn."""
    if not _is_one_graph():
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


def _is_one_graph() -> bool:
    from torch._dynamo import symbolic_convert, utils

    # The flags of torch.compiler hold for all threads; the translator is that of this one.
    translator = getattr(symbolic_convert.tls, "current_tx", None)
    if translator is None:
        return torch.compiler.is_exporting()
    return bool(translator.one_graph or utils._get_error_on_graph_break())
