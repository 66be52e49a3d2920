"""quire::attention: attention as an operator that graphs of PyTorch can hold.

    attention(query, key, value, captures, tables, numbers, text) -> results
    attention.inference                       the same without a backward pass, and sooner
    attention_backward(query, ..., text, out, lse, grad_out, grad_lse, wanted) -> gradients
    seed() -> two random numbers, for dropout

`arguments.py` says what goes in; PyTorch passes it by position. Results are the output and what
`form.aux` asks for. If the form says that a backward pass follows, the output is in the working
dtype, and lse comes second.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from quire.autograd import sink_gradient
from quire.checks import shapes_only
from quire.errors import BackendError, TensorKindError
from quire.memory import Dense, Memory, Queries, output_layout
from quire.mods.dropout import drawn_seed
from quire.operator.arguments import BACKWARD_SCHEMA, SCHEMA, BackwardArguments, CallArguments
from quire.operator.text import Form
from quire.plans import find, over_ranks
from quire.request import Call, call_of
from quire.results import Above, Result, Wanted, working_dtype
from quire.runtime.work import Flops, flops_of
from quire.support.torch_private import profiled

CONTIGUOUS = torch.contiguous_format

_LIBRARY = torch.library.Library("quire", "DEF")
_LIBRARY.define(f"attention({SCHEMA}) -> Tensor[]")
_LIBRARY.define(f"attention.inference({SCHEMA}) -> Tensor[]")
_LIBRARY.define(f"attention_backward({BACKWARD_SCHEMA}) -> Tensor[]")
_LIBRARY.define("seed() -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


# --- the forward pass ----------------------------------------------------------------------------


def _forward(*args: Any) -> list[Tensor]:
    given = CallArguments(*args)
    form = given.form
    if over_ranks.get() is not None:
        raise BackendError(
            "attention inside of context_parallel must not be in a graph, but torch.compile or "
            "torch.export has put it into one. Call quire.distributed.attention there: it breaks "
            "the graph."
        )
    with profiled(form):
        plan, call = find(given.request())
        return _given(call, plan.forward(call), form)


def _given(call: Call, result: Result, form: Form) -> list[Tensor]:
    """Return the results that the form promises, in the user's layout."""
    memory, query = call.request.memory, call.request.query
    given = [memory.as_given(query, result.out)]
    for name in form.others:
        rows: Tensor = getattr(result, name)
        given.append(
            memory.keys_as_given(rows) if name == "key_mass" else memory.as_given(query, rows)
        )
    return given


def _fake_forward(*args: Any) -> list[Tensor]:
    given = CallArguments(*args)
    form, query, named = given.form, given.query, given.named_tables()
    memory = given.memory(named)
    with shapes_only():
        memory.check(query, Queries(None, named.get("q_offsets"), named.get("q_lengths")))
    placed = memory.as_placed(query, query)
    shape, strides = output_layout(placed, given.value.shape[-1])
    working = working_dtype(query.dtype)
    out = query.new_empty_strided(shape, strides, dtype=working if form.learns else query.dtype)
    results = [memory.as_given(query, out)]
    for name in form.others:
        if name == "key_mass":
            results.append(_fake_mass(memory, query, working))
            continue
        rows = query.new_empty(shape[:3], dtype=torch.int64 if name == "argmax" else working)
        results.append(memory.as_given(query, rows))
    return results


def _fake_mass(memory: Memory, query: Tensor, dtype: torch.dtype) -> Tensor:
    if not isinstance(memory, Dense):
        raise TensorKindError(
            "key_mass must be asked for outside of a graph of torch.compile or torch.export for "
            "ragged and paged memory, since its size depends on lengths, but it is asked for "
            "inside. Leave it out."
        )
    return query.new_empty((query.shape[0], query.shape[1], memory.key.shape[2]), dtype=dtype)


# --- the backward pass ---------------------------------------------------------------------------


@torch.no_grad()
def _backward(*args: Any) -> list[Tensor]:
    return _gradients_of(BackwardArguments.of(args))


def _gradients_of(given: BackwardArguments) -> list[Tensor]:
    """Return the gradients that are wanted. Autograd records them if gradients are enabled."""
    args, wanted = given.call, given.wanted
    form = args.form
    with profiled(form, "backward of "):
        plan, call = find(args.request())
        query, memory, sink = args.query, call.request.memory, call.request.sink
        learned = wanted[3 + form.sink :]
        asked = Wanted(
            query=wanted[0],
            key=wanted[1],
            value=wanted[2],
            captures=call.captures,
            learned=tuple(n for n, wants in enumerate(learned) if wants),
        )
        grads = [
            None if x is None else memory.as_placed(query, x)
            for x in (given.grad_out, given.grad_lse)
        ]
        out, lse = (memory.as_placed(query, x) for x in (given.out, given.lse))
        found = plan.backward(call.placed, asked, Above(out, lse, grads[0], grads[1], sink))
        gradients: list[Tensor | None] = [
            None if found.query is None else memory.as_given(query, found.query),
            None if found.key is None else memory.keys_as_given(found.key),
            None if found.value is None else memory.keys_as_given(found.value),
        ]
        if sink is not None:
            gradients.append(sink_gradient(sink, found) if wanted[3] else None)
        gradients += found.captures
        computed = [
            _laid_out(grad, _empty_gradient(args, place))
            for place, grad in enumerate(gradients)
            if wanted[place] and grad is not None
        ]
        assert len(computed) == sum(wanted), "a gradient that is wanted is computed"
        return computed


def _empty_gradient(call: CallArguments, place: int) -> Tensor:
    """Return memory for the gradient of `learnable[place]`, laid out as kernels compute it."""
    tensor = call.learnable[place]
    if place not in (1, 2):
        return torch.empty_like(tensor)
    # The sums of keys and values are contiguous as [B, Hkv, S, D].
    if call.form.memory == "ragged":
        return torch.empty_like(tensor.transpose(0, 1), memory_format=CONTIGUOUS).transpose(0, 1)
    return torch.empty_like(tensor, memory_format=CONTIGUOUS)


def _laid_out(grad: Tensor, expected: Tensor) -> Tensor:
    """Return a gradient with the dtype and strides that a graph expects."""
    if grad.dtype == expected.dtype and grad.stride() == expected.stride():
        return grad
    return expected.copy_(grad)


def _fake_backward(*args: Any) -> list[Tensor]:
    given = BackwardArguments.of(args)
    return [_empty_gradient(given.call, place) for place, wants in enumerate(given.wanted) if wants]


# --- autograd ------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    given = CallArguments(*inputs)
    ctx.learns, ctx.text, ctx.numbers = given.form.learns, given.text, given.numbers
    ctx.num_captures = len(given.captures)
    out, lse = output[:2] if ctx.learns else (output[0], output[0])
    ctx.save_for_backward(out, lse, *given.learnable, *given.tables)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    if not ctx.learns:
        raise TensorKindError(
            "quire::attention must be told of a backward pass when its graph is made, but the "
            "graph was made without gradients. Make it again with inputs that require grad."
        )
    out, lse, query, key, value, *rest = ctx.saved_tensors
    count, needs = ctx.num_captures, ctx.needs_input_grad
    captures, tables = rest[:count], rest[count:]
    wanted = [*needs[:3], *(needs[3] if count else ())]
    call = CallArguments(query, key, value, captures, tables, numbers=ctx.numbers, text=ctx.text)
    given = BackwardArguments(call, out, lse, grad_out=grads[0], grad_lse=grads[1], wanted=wanted)
    if torch.is_grad_enabled():  # a backward pass of this one may follow
        computed = _gradients_of(given)
    else:
        computed = torch.ops.quire.attention_backward(*given.flat)
    found = iter(computed)
    every = [next(found) if wants else None for wants in wanted]
    no_number: Any = None if ctx.numbers else []  # torch takes an empty list for one of tensors
    return (*every[:3], every[3:], [None] * len(tables), no_number, None)


# --- counting ------------------------------------------------------------------------------------


@register_flop_formula(torch.ops.quire.attention, get_raw=True)
def _forward_flops(*args: Any, out_val: Any = None) -> int:
    return _flops(CallArguments(*args)).forward


@register_flop_formula(torch.ops.quire.attention_backward, get_raw=True)
def _backward_flops(*args: Any, out_val: Any = None) -> int:
    return _flops(BackwardArguments.of(args).call).backward


def _flops(given: CallArguments) -> Flops:
    """Return the operations of a call of the operator."""
    with torch.no_grad():
        return flops_of(call_of(given.request()))


# --- the operators -------------------------------------------------------------------------------

for _name, _compute, _shapes in (
    ("attention", _forward, _fake_forward),
    ("attention.inference", _forward, _fake_forward),
    ("attention_backward", _backward, _fake_backward),
):
    _LIBRARY.impl(_name, _compute, "CPU")
    torch.library.register_fake(f"quire::{_name}", _shapes, lib=_LIBRARY)
torch.library.register_autograd("quire::attention", _gradients, setup_context=_save, lib=_LIBRARY)
_LIBRARY.impl("seed", lambda: torch.tensor(drawn_seed(), device="cpu"), "CompositeExplicitAutograd")
torch.library.register_fake(
    "quire::seed", lambda: torch.empty(2, dtype=torch.int64, device="cpu"), lib=_LIBRARY
)
