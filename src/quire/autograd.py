"""The autograd Function of attention. A plan computes its forward and backward pass.

    result = recorded(passes, call)    # differentiable in query, key, value, sink and captures

The backward pass needs only the output and the log-sum-exp of the forward pass.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.checks import check_held, is_vmapped
from quire.errors import QuireError, TensorKindError
from quire.memory import Placed
from quire.request import Call
from quire.results import Above, Gradients, Result, Wanted, folded, is_far
from quire.support.torch_private import lost_memory

_EMPTY = torch.empty(0, device="cpu")


class Passes(Protocol):
    """Computes a call, forward and backward."""

    def forward(self, call: Call) -> Result:
        """Return the results without autograd: `out` in the working dtype, and always `lse`."""

    def backward(self, placed: Placed, wanted: Wanted, above: Above) -> Gradients:
        """Return the gradients. Autograd records the computation if gradients are enabled.

        The mods load from `wanted.captures`.
        """


def recorded(passes: Passes, call: Call) -> Result:
    """Compute a call, and let autograd record it."""
    apply: Any = Attention.apply
    step = Step(passes, call)
    return Result(*apply(step, *call.placed[:3], call.request.sink, *call.captures))


class Step:
    """A call and what computes it. It is no tuple: torch.func looks for tensors inside of those."""

    __slots__ = ("call", "passes")

    def __init__(self, passes: Passes, call: Call) -> None:
        self.passes, self.call = passes, call


class Attention(torch.autograd.Function):
    """Takes step, query, key, value, sink, *captures. Returns the fields of a Result.

    The captured tensors are inputs, so that they get gradients, and so that autograd raises if one
    is changed in place before the backward pass.
    """

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor | None, ...]:
        """Return the results, without autograd."""
        step, query, key, value, sink, *captures = inputs
        call = step.call.on((query, key, value), sink, tuple(captures))
        with without_autocast(query):
            result: Result = step.passes.forward(call)
        return tuple(result)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save what the backward pass needs. Only autograd holds tensors, so it can free them."""
        step, *tensors = inputs
        ctx.passes = step.passes
        ctx.placed = step.call.placed.on(_EMPTY, _EMPTY, _EMPTY)
        out, lse, *others = output
        ctx.mark_non_differentiable(*(x for x in others if x is not None))
        ctx.save_for_backward(out, lse, *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: Any) -> Any:
        """Return the gradients of the inputs that need one, and None for the others."""
        out, lse, query, key, value, sink, *captures = ctx.saved_tensors
        _, wants_query, wants_key, wants_value, wants_sink, *learned = ctx.needs_input_grad
        _check_held((query, key, value, *captures))
        detached = tuple(map(_detached, captures, learned))
        indices = tuple(index for index, wants in enumerate(learned) if wants)
        wanted = Wanted(wants_query, wants_key, wants_value, detached, indices)
        above = Above(out, lse, grad_out, grad_lse, sink)
        with without_autocast(query), _batched_refused(above):
            found = ctx.passes.backward(ctx.placed.on(query, key, value), wanted, above)
        grad_sink = sink_gradient(sink, found).to(sink.dtype) if wants_sink else None
        operands = zip((found.query, found.key, found.value), (query, key, value), strict=True)
        return (
            None,
            *(_as_dtype_of(x, grad) for grad, x in operands),
            grad_sink,
            *map(_as_dtype_of, captures, found.captures),
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Raise: there is no forward-mode derivative."""
        raise TensorKindError(
            "attention has gradients in reverse mode alone, but was called with a tangent, as by "
            "torch.func.jvp, jacfwd or hessian. Use torch.func.vjp, jacrev(function, chunk_size=1) "
            "or torch.autograd.functional.jvp, which goes backward twice."
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        """Raise: a captured tensor is mapped. (Mapped operands were refused earlier.)"""
        raise TensorKindError(
            "attention cannot look through torch.vmap, but a captured tensor is mapped by it. Put "
            "the mapped dimension into the batch dimension, and index the captured tensor by b."
        )


# PyTorch asks for the signature at every call, and finds it sooner if it is an attribute.
Attention.forward.__signature__ = inspect.signature(Attention.forward)  # type: ignore[attr-defined]


def _check_held(tensors: Sequence[Tensor]) -> None:
    """Raise if the memory of a tensor was freed since the forward pass."""
    for place, tensor in enumerate(tensors):
        if lost_memory(tensor):
            check_held(("query", "key", "value", "a captured tensor")[min(place, 3)], tensor)


def _as_dtype_of(tensor: Tensor, grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.to(tensor.dtype)


@contextlib.contextmanager
def _batched_refused(above: Above) -> Iterator[None]:
    """Raise our own error if torch.vmap passes in many gradients at once and an operation fails."""
    try:
        yield
    except RuntimeError as error:
        given = [grad for grad in (above.grad_out, above.grad_lse) if grad is not None]
        if isinstance(error, QuireError) or not any(map(is_vmapped, given)):
            raise
        raise TensorKindError(
            "the backward pass takes one gradient of the output at a time, but was given many, by "
            "torch.func.jacrev, is_grads_batched=True or vectorize=True. Use "
            "torch.func.jacrev(function, chunk_size=1), or leave the other two out."
        ) from error


def sink_gradient(sink: Tensor, found: Gradients) -> Tensor:
    """Return the gradient of `sink` [Hq]: it has no value, so dP = 0 and dS = -P * delta."""
    delta, lse = found.delta, found.lse
    assert delta is not None and lse is not None, "the gradients of a call come with both"
    logit = sink.to(lse.dtype).view(1, -1, 1)
    nowhere = logit.isneginf() | lse.isneginf()  # with a sink, lse is -inf in rows of no sequence
    log_weights = torch.where(nowhere, -math.inf, logit - lse)
    rounded_up = is_far(lse) & (log_weights > 0.0)  # no weight is above 1
    weights = torch.exp(torch.where(rounded_up, 0.0, log_weights))
    return -folded((weights * delta).transpose(1, 2).flatten(0, 1))


def _detached(capture: Tensor, learned: bool) -> Tensor:
    """Detach a captured tensor from its history: another capture may be computed from it."""
    if learned and torch.is_grad_enabled():
        return capture.view_as(capture)
    return capture.detach().requires_grad_() if learned else capture.detach()


def without_autocast(query: Tensor) -> torch.autocast:
    """Turn autocast off: the operands are cast already, and the passes choose their own dtypes."""
    return torch.autocast(query.device.type, enabled=False)
