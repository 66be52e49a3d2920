"""Attention under autograd: the one Function, whatever computes its two passes.

    result = recorded(passes, call)    # differentiable in query, key, value, sink and captures

The backward pass needs no more of the forward pass than its output and its log-sum-exp.
"""

from __future__ import annotations

import contextlib
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

_NOTHING = torch.empty(0, device="cpu")


class Passes(Protocol):
    """What computes a call, forward and backward."""

    def forward(self, call: Call) -> Result:
        """The results, unrecorded: `out` in the working dtype, and always `lse`."""

    def backward(self, placed: Placed, wanted: Wanted, above: Above) -> Gradients:
        """The gradients. Where gradients are enabled, what it does is recorded.

        The mods load from `wanted.captures`.
        """


def recorded(passes: Passes, call: Call) -> Result:
    """Compute a call, and have autograd record it."""
    apply: Any = Attention.apply
    step = Step(passes, call)
    return Result(*apply(step, *call.placed[:3], call.request.sink, *call.captures))


class Step:
    """A call and what computes it. It is no tuple: torch.func looks for tensors inside of those."""

    __slots__ = ("call", "passes")

    def __init__(self, passes: Passes, call: Call) -> None:
        self.passes, self.call = passes, call


class Attention(torch.autograd.Function):
    """Inputs: step, query, key, value, sink, *captures. Outputs: those of a Result.

    The captures of the call are inputs of their own, so that they have gradients, and so that
    autograd notices when one is changed in place before the backward pass has read it again.
    """

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor | None, ...]:
        """Compute, unrecorded."""
        step, query, key, value, sink, *captures = inputs
        call = step.call.on((query, key, value), sink, tuple(captures))
        with without_autocast(query):
            result: Result = step.passes.forward(call)
        return tuple(result)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep what the backward pass needs. Tensors are kept where autograd can let go of them."""
        step, *tensors = inputs
        ctx.passes = step.passes
        ctx.placed = step.call.placed.on(_NOTHING, _NOTHING, _NOTHING)
        out, lse, *others = output
        ctx.mark_non_differentiable(*(x for x in others if x is not None))
        ctx.save_for_backward(out, lse, *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: Any) -> Any:
        """The gradients of the inputs that need one."""
        out, lse, query, key, value, sink, *captures = ctx.saved_tensors
        _, wants_query, wants_key, wants_value, wants_sink, *learned = ctx.needs_input_grad
        _check_held((query, key, value, *captures))
        alone = tuple(map(_alone, captures, learned))
        places = tuple(place for place, wants in enumerate(learned) if wants)
        wanted = Wanted(wants_query, wants_key, wants_value, alone, places)
        above = Above(out, lse, grad_out, grad_lse, sink)
        with without_autocast(query), _many_refused(above):
            found = ctx.passes.backward(ctx.placed.on(query, key, value), wanted, above)
        grad_sink = _sink_gradient(sink, found).to(sink.dtype) if wants_sink else None
        operands = zip((found.query, found.key, found.value), (query, key, value), strict=True)
        return (
            None,
            *(_as_dtype_of(x, grad) for grad, x in operands),
            grad_sink,
            *map(_as_dtype_of, captures, found.captures),
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """There is none: say so in our words."""
        raise TensorKindError(
            "attention has gradients in reverse mode alone, but was called with a tangent, as by "
            "torch.func.jvp, jacfwd or hessian. Use torch.func.vjp, jacrev(function, chunk_size=1) "
            "or torch.autograd.functional.jvp, which goes backward twice."
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        """Nor is there this: a captured tensor is mapped, since operands were looked at before."""
        raise TensorKindError(
            "attention cannot look through torch.vmap, but a captured tensor is mapped by it. Put "
            "the mapped dimension into the batch dimension, and index the captured tensor by b."
        )


def _check_held(tensors: Sequence[Tensor]) -> None:
    """Refuse a tensor whose memory was given away since the forward pass."""
    for place, tensor in enumerate(tensors):
        if lost_memory(tensor):
            check_held(("query", "key", "value", "a captured tensor")[min(place, 3)], tensor)


def _as_dtype_of(tensor: Tensor, grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.to(tensor.dtype)


@contextlib.contextmanager
def _many_refused(above: Above) -> Iterator[None]:
    """Refuse many gradients of the output at once: torch.vmap carries them through some mods."""
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


def _sink_gradient(sink: Tensor, found: Gradients) -> Tensor:
    """The sink is a score without a value: dP = 0, hence dS = -P * delta."""
    delta, lse = found.delta, found.lse
    assert delta is not None and lse is not None, "the gradients of a call come with both"
    logit = sink.to(lse.dtype).view(1, -1, 1)
    nowhere = logit.isneginf() | lse.isneginf()  # with a sink, lse is -inf in rows of no sequence
    below = torch.where(nowhere, -math.inf, logit - lse)
    rounded_up = is_far(lse) & (below > 0.0)  # no weight is above 1
    weights = torch.exp(torch.where(rounded_up, 0.0, below))
    return -folded((weights * delta).transpose(1, 2).flatten(0, 1))


def _alone(capture: Tensor, learned: bool) -> Tensor:
    """Detach a captured tensor from its history: another one may be computed from it."""
    if not learned:
        return capture.detach()
    return (
        capture.view_as(capture) if torch.is_grad_enabled() else capture.detach().requires_grad_()
    )


def without_autocast(query: Tensor) -> torch.autocast:
    """Operands were cast before; from here on the working dtype is meant."""
    return torch.autocast(query.device.type, enabled=False)
