"""Forward and backward under autograd."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from quire.aux_outputs import NO_AUX, AuxRequest
from quire.block_mask.rows import BlockRows
from quire.checks import check_held, is_vmapped
from quire.eager.backward import Above, Gradients, Wanted, backward, folded
from quire.eager.far import is_far
from quire.eager.forward import Result, forward
from quire.eager.tile import Operands
from quire.eager.tiling import Sizes, block_rows
from quire.errors import QuireError, TensorKindError
from quire.problem import Problem

Forward: TypeAlias = Callable[..., Result]
"""run(problem, operands, sink, *, wanted), as `forward`."""

Backward: TypeAlias = Callable[[Problem, Operands, BlockRows | None, Wanted, Above], Gradients]
"""As `backward`; where gradients are enabled, what it does is recorded."""


def attention(
    problem: Problem,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor | None = None,
    *,
    wanted: AuxRequest | None = None,
    run: Forward = forward,
    run_backward: Backward = backward,
) -> Result:
    """query [B, Hq, L, D], key [B or 1, Hkv, S, D], value [B or 1, Hkv, S, Dv], sink [Hq].

    `run` computes the forward pass; the backward pass needs no more of it than its results.
    """
    apply: Any = TiledAttention.apply
    run = functools.partial(run, wanted=(wanted or NO_AUX)._replace(lse=True))
    passes = (run, run_backward)
    out, *numbers = apply(passes, problem, query, key, value, sink, *problem.captures)
    return Result(out.to(query.dtype), *numbers)


class TiledAttention(torch.autograd.Function):
    """Inputs: passes, problem, query, key, value, sink, *captures. Outputs: those of a Result.

    The output is in the working dtype, since the backward pass needs all of its digits.
    The captures of the problem are inputs of their own, so that they have gradients, and so that
    autograd notices when one is changed in place before the backward pass has read it again.
    """

    @staticmethod
    def forward(
        passes: tuple[Forward, Backward],
        problem: Problem,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        *captures: Tensor,
    ) -> Result:
        """Compute, unrecorded."""
        with _without_autocast(query):
            run, _ = passes
            return run(problem.with_captures(captures), Operands(query, key, value), sink)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep what the backward pass needs."""
        (_, ctx.run_backward), ctx.problem, *tensors = inputs
        out, lse, *others = output
        ctx.mark_non_differentiable(*others)
        ctx.save_for_backward(out, lse, *tensors)
        ctx.set_materialize_grads(False)
        masked = ctx.problem.block_mask is not None
        ctx.blocks = block_rows(ctx.problem, Sizes.of(*tensors[:2])) if masked else None

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: Any) -> Any:
        """The gradients of the inputs that need one."""
        out, lse, query, key, value, sink, *captures = ctx.saved_tensors
        _, _, *needs, wants_sink = ctx.needs_input_grad[:6]
        above = Above(out, lse, grad_out, grad_lse, sink)
        of_rows: tuple[Tensor | None, Tensor | None] = None, None

        def run(operands: Operands, wanted: Wanted) -> Gradients:
            nonlocal of_rows
            problem = ctx.problem.with_captures(wanted.captures)
            grads: Gradients = ctx.run_backward(problem, operands, ctx.blocks, wanted, above)
            of_rows = grads.delta, grads.lse
            return grads

        tensors, learns = (query, key, value, *captures), ctx.needs_input_grad[6:]
        grads = gradients(run, tensors, (*needs, *learns), above)
        grad_sink = _sink_gradient(sink, *of_rows).to(sink.dtype) if wants_sink else None
        return None, None, *grads[:3], grad_sink, *grads[3:]

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


def gradients(
    run: Callable[[Operands, Wanted], Gradients],
    tensors: Sequence[Tensor],
    needs: Sequence[bool],
    above: Above,
) -> list[Tensor | None]:
    """The gradients of query, key, value and captures, as autograd wants them."""
    query, key, value, *captures = tensors
    names = ("query", "key", "value", *("a captured tensor" for _ in captures))
    for name, tensor in zip(names, tensors, strict=True):
        check_held(name, tensor)  # it may have been given away since the forward pass
    wants_query, wants_key, wants_value, *learns = needs
    wanted = Wanted(wants_query, wants_key, wants_value, tuple(map(_alone, captures, learns)))
    with _without_autocast(query), _many_refused(above):
        grads = run(Operands(query, key, value), wanted)
    found = (grads.query, grads.key, grads.value, *grads.captures)
    return [
        None if grad is None else grad.to(tensor.dtype)
        for grad, tensor in zip(found, tensors, strict=True)
    ]


@contextlib.contextmanager
def _many_refused(above: Above) -> Iterator[None]:
    """Many gradients of the output at once, which torch.vmap can carry through some mods alone."""
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


# Torch asks for the signature at every call, and finds it sooner where it is written down.
TiledAttention.forward.__signature__ = inspect.signature(TiledAttention.forward)  # type: ignore[attr-defined]


def _sink_gradient(sink: Tensor, delta: Tensor | None, lse: Tensor | None) -> Tensor:
    """The sink is a score without a value: dP = 0, hence dS = -P * delta."""
    assert delta is not None and lse is not None, "the gradients of a call come with both"
    logit = sink.to(lse.dtype).view(1, -1, 1)
    nowhere = logit.isneginf() | lse.isneginf()  # with a sink, lse is -inf in rows of no sequence
    below = torch.where(nowhere, -math.inf, logit - lse)
    rounded_up = is_far(lse) & (below > 0.0)  # no weight is above 1
    weights = torch.exp(torch.where(rounded_up, 0.0, below))
    return -folded((weights * delta).transpose(1, 2).flatten(0, 1))


def _alone(capture: Tensor, learns: bool) -> Tensor:
    """A capture cut off from how it came about: another capture may have come about from it."""
    if not learns:
        return capture.detach()
    return (
        capture.view_as(capture) if torch.is_grad_enabled() else capture.detach().requires_grad_()
    )


def _without_autocast(query: Tensor) -> torch.autocast:
    """Operands were cast before; from here on the working dtype is meant."""
    return torch.autocast(query.device.type, enabled=False)
