"""The autograd Functions of attention. A plan computes its passes.

    result = recorded(passes, call)    # differentiable in query, key, value, sink and captures

    Attention    attention itself; its derivatives need only its output and log-sum-exp
    Derivative      any derivative of it: gradients, tangents, and derivatives of these (`steps.py`)

Inside of torch.func, a Function computes on plain tensors: PyTorch takes off one transform after
the other, and calls `backward`, `jvp` or `vmap` for it. Each of them calls a Function again, for
the transforms that are left.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.autograd.folding import Change, Role, mapped
from quire.autograd.steps import (
    DRAWN,
    HEADS,
    KEYS,
    ROWS,
    GradientStep,
    Passes,
    Pulled,
    Pushed,
    Step,
    TangentStep,
    Tensors,
    captured_roles,
)
from quire.checks import check_held
from quire.errors import TensorKindError
from quire.request import Call
from quire.results import Above, Gradients, Moved, Result, Tangents, Wanted, folded, is_far
from quire.support.dynamo import never_entered
from quire.support.torch_private import (
    is_dual,
    is_legacy_batched,
    is_transformed,
    lost_memory,
)
from quire.support.torch_private.transforms import (
    Duals,
    make_dual,
    on_plain_tensors,
    only_duals,
)

_EMPTY = torch.empty(0, device="cpu")


class AttentionStep(Step):
    """Takes query, key, value, sink, the seed of dropout, *captures; returns a Result's fields."""

    def __init__(self, passes: Passes, call: Call) -> None:
        self.passes, self.call, self.shell = passes, call, call.placed

    @functools.cached_property
    def inputs(self) -> tuple[Role, ...]:  # type: ignore[override]
        """Return the roles, which only torch.vmap asks for."""
        return ROWS, KEYS, KEYS, HEADS, DRAWN, *captured_roles(len(self.call.captures))

    outputs = (ROWS,) * len(Result._fields)

    def changed(self, change: Change) -> AttentionStep:
        """Return the step of another problem."""
        call = self.call._replace(problem=change.problem(self.call.problem))
        return AttentionStep(self.passes.changed(change), call)

    def compute(self, *tensors: Tensor | None) -> Tensors:
        """Compute on plain tensors, without autograd."""
        query, key, value, sink, _, *captures = tensors
        assert query is not None and key is not None and value is not None
        loaded = tuple([x for x in captures if x is not None])
        return tuple(self.passes.forward(self.call.on((query, key, value), sink, loaded)))


def recorded(passes: Passes, call: Call) -> Result:
    """Compute a call, and let autograd record it."""
    sink, dropout = call.request.sink, call.problem.dropout
    if is_dual():
        duals = only_duals((*call.placed[:3], sink, *call.captures))
        if duals is not None:
            return _with_tangents(passes, call, duals)
    apply: Any = Attention.apply
    step, drawn = AttentionStep(passes, call), None if dropout is None else dropout.drawn
    return Result(*apply(step, *call.placed[:3], sink, drawn, *call.captures))


def _with_tangents(passes: Passes, call: Call, duals: Duals) -> Result:
    """Compute a call of the first order in forward mode: nothing is saved, since nothing follows.

    A Function would be told the tangents after its results, when it is too late to compute both
    at once.
    """
    query, key, value, sink, *captures = duals.tensors
    assert query is not None and key is not None and value is not None
    plain = call.on((query, key, value), sink, tuple(x for x in captures if x is not None))
    by_query, by_key, by_value, by_sink, *by_captures = duals.tangents
    along = Tangents(by_query, by_key, by_value, by_sink, captures=tuple(by_captures))
    with on_plain_tensors(), without_autocast(query):
        found = passes.moved(plain, along)
        results, moved = found or Moved(passes.forward(plain), None)
        out, lse = results.out, results.lse
        assert lse is not None, "the results that are differentiated have lse"
        if moved is None:
            above, failed = Above(out, lse, None, None, sink), found is not None
            moved = passes.tangent(plain.placed, plain.captures, above, along, in_torch=failed)
    assert moved.lse is not None, "lse has a tangent, too"
    return results._replace(out=make_dual(out, moved.out), lse=make_dual(lse, moved.lse))


class Attention(torch.autograd.Function):
    """Takes step, query, key, value, sink, drawn, *captures. Returns the fields of a Result.

    The captured tensors are inputs, so that they get gradients, and so that autograd raises if one
    is changed in place before the backward pass. `drawn` is the seed of dropout as torch drew it:
    torch.vmap says whether it is another one for each call.
    """

    @staticmethod
    def forward(*inputs: Any) -> Tensors:
        """Return the results, without autograd."""
        step, *tensors = inputs
        with without_autocast(tensors[0]):
            results: Tensors = step.compute(*tensors)
        return results

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save what derivatives need. Only autograd holds tensors, so it can free them."""
        step, *tensors = inputs
        ctx.passes = step.passes
        ctx.placed = step.call.placed.on(_EMPTY, _EMPTY, _EMPTY)
        out, lse, *others = output
        ctx.mark_non_differentiable(*(x for x in others if x is not None))
        ctx.save_for_backward(out, lse, *tensors)
        if is_dual():
            ctx.save_for_forward(out, lse, *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: Any) -> Any:
        """Return the gradients of the inputs that need one, and None for the others."""
        out, lse, query, key, value, sink, _, *captures = ctx.saved_tensors
        _, wants_query, wants_key, wants_value, wants_sink, _, *learned = ctx.needs_input_grad
        _check_held((query, key, value, *captures))
        _check_one_gradient(grad_out, grad_lse)
        if torch.is_grad_enabled() or is_transformed():
            found = _derived_gradients(ctx, grad_out, grad_lse)
        else:
            detached = tuple(
                x.detach().requires_grad_() if wants else x.detach()
                for x, wants in zip(captures, learned, strict=True)
            )
            indices = tuple(index for index, wants in enumerate(learned) if wants)
            wanted = Wanted(wants_query, wants_key, wants_value, detached, indices)
            above = Above(out, lse, grad_out, grad_lse, sink)
            with without_autocast(query):
                found = ctx.passes.backward(ctx.placed.on(query, key, value), wanted, above)
        grad_sink = sink_gradient(sink, found).to(sink.dtype) if wants_sink else None
        operands = zip((found.query, found.key, found.value), (query, key, value), strict=True)
        return (
            None,
            *(_as_dtype_of(x, grad) for grad, x in operands),
            grad_sink,
            None,
            *map(_as_dtype_of, captures, found.captures),
        )

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Any) -> Any:
        """Return the tangents of out and lse, and None for the others."""
        query, key, value, sink, _, *captures = tangents
        saved = ctx.saved_tensors
        step = TangentStep(ctx.passes, ctx.placed, len(captures))
        along = (query, key, value, sink, *captures)
        out, lse = _derived(step, *saved, *along)
        return out, lse, *(None,) * (len(Result._fields) - 2)

    @staticmethod
    def vmap(info: Any, in_dims: Any, step: AttentionStep, *tensors: Any) -> Any:
        """Compute many calls as one."""
        return mapped(Attention.apply, step, info, in_dims[1:], tensors)


# PyTorch asks for the signature at every call, and finds it sooner if it is an attribute.
Attention.forward.__signature__ = inspect.signature(Attention.forward)  # type: ignore[attr-defined]


class Derivative(torch.autograd.Function):
    """Takes a step and its inputs, some of which are None. Returns its outputs."""

    @staticmethod
    def forward(*inputs: Any) -> Tensors:
        """Compute the step, without autograd."""
        step, *tensors = inputs
        with without_autocast(tensors[0]):
            found = step.compute(*tensors)
        given = set(map(id, tensors))  # a Function must not return an input that it saves
        return tuple(x if x is None or id(x) not in given else x.clone() for x in found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save all inputs."""
        ctx.step, *tensors = inputs
        ctx.save_for_backward(*tensors)
        if is_dual():
            ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Return the gradients of the inputs that need one, and None for the others."""
        _, *wants = ctx.needs_input_grad
        return None, *_derived(Pulled(ctx.step, tuple(wants)), *ctx.saved_tensors, *grads)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Any:
        """Return the tangents of the outputs."""
        return _derived(Pushed(ctx.step), *ctx.saved_tensors, *tangents)

    @staticmethod
    def vmap(info: Any, in_dims: Any, step: Step, *tensors: Any) -> Any:
        """Compute many steps as one."""
        return mapped(Derivative.apply, step, info, in_dims[1:], tensors)


# A backward pass may run inside of what torch.compile has compiled, between two graphs.
for _function in (Attention, Derivative):
    never_entered(_function.backward)
    never_entered(_function.jvp)
    never_entered(_function.vmap)


def _derived(step: Step, *tensors: Tensor | None) -> Tensors:
    """Compute a derivative, and let autograd record it."""
    apply: Any = Derivative.apply
    results: Tensors = apply(step, *tensors)
    return results


def _derived_gradients(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Gradients:
    """Return the gradients as a step, which can be differentiated and mapped."""
    _, query, key, value, sink, _, *learned = ctx.needs_input_grad
    step = GradientStep(ctx.passes, ctx.placed, (query, key, value, sink), tuple(learned))
    found = _derived(step, *ctx.saved_tensors, grad_out, grad_lse)
    query, key, value, delta, lse, *captures = found
    return Gradients(query, key, value, tuple(captures), delta=delta, lse=lse)


def _check_held(tensors: Sequence[Tensor]) -> None:
    """Raise if the memory of a tensor was freed since the forward pass."""
    for place, tensor in enumerate(tensors):
        if lost_memory(tensor):
            name = ("query", "key", "value", "a captured tensor")[min(place, 3)]
            check_held({name: tensor})


def _as_dtype_of(tensor: Tensor, grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.to(tensor.dtype)


def _check_one_gradient(*grads: Tensor | None) -> None:
    """Raise if PyTorch's first, older vmap passes in many gradients at once."""
    if any(grad is not None and is_legacy_batched(grad) for grad in grads):
        raise TensorKindError(
            "the backward pass takes one gradient of the output at a time, but was given many, by "
            "is_grads_batched=True or vectorize=True. Use torch.func.jacrev or torch.func.vmap of "
            "torch.func.vjp, or leave these arguments out."
        )


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


def without_autocast(query: Tensor) -> torch.autocast:
    """Turn autocast off: the operands are cast already, and the passes choose their own dtypes."""
    return torch.autocast(query.device.type, enabled=False)
