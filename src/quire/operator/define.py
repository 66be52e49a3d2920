"""quire::attention: attention as an operator that graphs of PyTorch can hold.

    attention(query, key, value, captures, tables, numbers, text) -> results
    attention.inference                       the same without a backward pass, and sooner
    attention_backward(grads, results, query, key, ..., text, wanted) -> gradients
    seed() -> two random numbers, for dropout

`text` is a `Form`. `captures` are the sink, if there is one, and the tensors that the mods
captured: all that may have a gradient besides query, key and value. `tables` and `numbers` are in
the order in which the form names them. Results are the output and what `form.aux` asks for. If the
form says that a backward pass follows, the output is in the working dtype, and lse comes second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from quire.autograd import sink_gradient
from quire.block_mask import BlockMask
from quire.checks import shapes_only
from quire.errors import BackendError, TensorKindError
from quire.ir.trace import Mod
from quire.memory import Dense, Memory, Paged, Queries, Ragged
from quire.mods.dropout import drawn_seed
from quire.operator.text import MODS, Form, read
from quire.plans import find, over_ranks
from quire.request import Call, Mask, Request, call_of
from quire.results import Above, Result, Wanted, output_layout, working_dtype
from quire.runtime.work import Flops, flops_of
from quire.support.torch_private import profiled

_LIBRARY = torch.library.Library("quire", "DEF")
_SAME = "Tensor query, Tensor key, Tensor value, Tensor[] captures, Tensor[] tables"
_LIBRARY.define(f"attention({_SAME}, SymInt[] numbers, str text) -> Tensor[]")
_LIBRARY.define(f"attention.inference({_SAME}, SymInt[] numbers, str text) -> Tensor[]")
_LIBRARY.define(
    f"attention_backward(Tensor? grad_out, Tensor? grad_lse, Tensor out, Tensor lse, {_SAME}, "
    "SymInt[] numbers, str text, bool[] wanted) -> Tensor[]"
)
_BACKWARD = (
    "grad_out",
    "grad_lse",
    "out",
    "lse",
    "query",
    "key",
    "value",
    "captures",
    "tables",
    "numbers",
    "text",
    "wanted",
)
_LIBRARY.define("seed() -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


# --- from operands to a request ------------------------------------------------------------------


def request_of(
    operands: tuple[Tensor, Tensor, Tensor],
    captures: list[Tensor],
    tables: list[Tensor],
    numbers: list[int],
    form: Form,
) -> Request:
    """Return the request that a call of the operator stands for."""
    named: dict[str, Any] = dict(zip(form.numbers, numbers, strict=True))
    if tables:
        named |= zip(form.tables, tables, strict=True)
    first = 1 if form.sink else 0
    mods: dict[str, Mod] = {}
    for field, mod in form.mods.items():
        last = first + len(mod.captures)
        mods[field] = mod.on(tuple(captures[first:last]), MODS[field])
        first = last
    masks: tuple[Mask, ...] = (mods["mask_mod"],) if "mask_mod" in mods else ()
    if form.block_size is not None:
        masks += (_block_mask(named, form.block_size, mods.get("partial_mod")),)
    seed = named.get("seed")
    return Request(
        operands[0],
        memory_of(operands, named, form.memory),
        Queries(named.get("q_start"), named.get("q_offsets"), named.get("q_lengths")),
        score_mod=mods.get("score_mod"),
        masks=masks,
        scale=form.scale,
        dropout_p=form.dropout_p,
        sink=captures[0] if form.sink else None,
        aux=form.aux,
        backend=form.backend,
        learns=form.learns,
        seed=None if seed is None else (int(seed[0]), int(seed[1])),
    )


def memory_of(operands: tuple[Tensor, Tensor, Tensor], named: dict[str, Any], kind: str) -> Memory:
    """Return the memory of a call, from its tables by name."""
    _, key, value = operands
    if kind == "dense":
        return Dense(key, value, named.get("start", 0))
    if kind == "ragged":
        return Ragged(key, value, named["offsets"], named.get("lengths"))
    optional = {name: named.get(name) for name in ("first_page", "key_scale", "value_scale")}
    return Paged(key, value, named["page_table"], named["lengths"], **optional)


def _block_mask(named: dict[str, Any], size: tuple[int, int], mask_mod: Any) -> BlockMask:
    rows = named["kv_indices"].shape[-2]
    return BlockMask.from_kv_blocks(
        named["kv_num_blocks"],
        named["kv_indices"],
        named.get("full_kv_num_blocks"),
        named.get("full_kv_indices"),
        BLOCK_SIZE=size,
        mask_mod=mask_mod,
        seq_lengths=(min(named["mask_q_len"], rows * size[0]), named["mask_kv_len"]),
        compute_q_blocks=False,
    )


# --- the forward pass ----------------------------------------------------------------------------


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captures: list[Tensor],
    tables: list[Tensor],
    numbers: list[int],
    text: str,
) -> list[Tensor]:
    form = read(text)
    if over_ranks.get() is not None:
        raise BackendError(
            "attention inside of context_parallel must not be in a graph, but torch.compile or "
            "torch.export has put it into one. Call quire.distributed.attention there: it breaks "
            "the graph."
        )
    with profiled(form):
        plan, call = find(request_of((query, key, value), captures, tables, numbers, form))
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


def _fake_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captures: list[Tensor],
    tables: list[Tensor],
    numbers: list[int],
    text: str,
) -> list[Tensor]:
    form = read(text)
    named = dict(zip(form.tables, tables, strict=True))
    memory = memory_of((query, key, value), named, form.memory)
    with shapes_only():
        memory.check(query, Queries(None, named.get("q_offsets"), named.get("q_lengths")))
    placed = memory.as_placed(query, query)
    shape, strides = output_layout(placed, value.shape[-1])
    working = working_dtype(query.dtype)
    out = query.new_empty_strided(shape, strides, dtype=working if form.learns else query.dtype)
    results = [memory.as_given(query, out)]
    for name in form.others:
        if name == "key_mass":
            results.append(_fake_mass(memory, query, key, working))
            continue
        rows = query.new_empty(shape[:3], dtype=torch.int64 if name == "argmax" else working)
        results.append(memory.as_given(query, rows))
    return results


def _fake_mass(memory: Memory, query: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor:
    if not isinstance(memory, Dense):
        raise TensorKindError(
            "key_mass must be asked for outside of a graph of torch.compile or torch.export for "
            "ragged and paged memory, since its size depends on lengths, but it is asked for "
            "inside. Leave it out."
        )
    return query.new_empty((query.shape[0], query.shape[1], key.shape[2]), dtype=dtype)


# --- the backward pass ---------------------------------------------------------------------------


@torch.no_grad()
def _backward(*args: Any, **given: Any) -> list[Tensor]:
    named = dict(zip(_BACKWARD, args)) | given  # noqa: B905  torch passes most by position
    return _computed_gradients(**named)


def _computed_gradients(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captures: list[Tensor],
    tables: list[Tensor],
    numbers: list[int],
    text: str,
    wanted: list[bool],
) -> list[Tensor]:
    """Return the gradients that are wanted. Autograd records them if gradients are enabled."""
    form = read(text)
    with profiled(form, "backward of "):
        plan, call = find(request_of((query, key, value), captures, tables, numbers, form))
        memory, loaded, sink = call.request.memory, call.captures, call.request.sink
        learned = wanted[3 + form.sink :]
        asked = Wanted(
            query=wanted[0],
            key=wanted[1],
            value=wanted[2],
            captures=loaded,
            learned=tuple(n for n, wants in enumerate(learned) if wants),
        )
        given = [None if x is None else memory.as_placed(query, x) for x in (grad_out, grad_lse)]
        above = Above(
            memory.as_placed(query, out), memory.as_placed(query, lse), given[0], given[1], sink
        )
        found = plan.backward(call.placed, asked, above)
        gradients: list[Tensor | None] = [
            None if found.query is None else memory.as_given(query, found.query),
            None if found.key is None else memory.keys_as_given(found.key),
            None if found.value is None else memory.keys_as_given(found.value),
        ]
        if sink is not None:
            gradients.append(sink_gradient(sink, found) if wanted[3] else None)
        gradients += found.captures
        inputs = (query, key, value, *captures)
        computed = [
            _like(x, grad)
            for x, grad, wants in zip(inputs, gradients, wanted, strict=True)
            if wants and grad is not None
        ]
        assert len(computed) == sum(wanted), "a gradient that is wanted is computed"
        return computed


def _like(tensor: Tensor, grad: Tensor) -> Tensor:
    """Return a gradient in the dtype and with the strides that a graph expects."""
    expected = torch.empty_like(tensor)
    if grad.dtype == tensor.dtype and grad.stride() == expected.stride():
        return grad
    return expected.copy_(grad)


def _fake_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captures: list[Tensor],
    tables: list[Tensor],
    numbers: list[int],
    text: str,
    wanted: list[bool],
) -> list[Tensor]:
    inputs = (query, key, value, *captures)
    return [torch.empty_like(x) for x, wants in zip(inputs, wanted, strict=True) if wants]


# --- autograd ------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    query, key, value, captures, tables, numbers, text = inputs
    form = read(text)
    ctx.form, ctx.numbers, ctx.text, ctx.num_captures = form, numbers, text, len(captures)
    out, lse = output[:2] if form.learns else (output[0], output[0])
    saved = (out, lse, query, key, value, *captures, *tables)
    ctx.save_for_backward(*saved)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    out, lse, query, key, value, *rest = ctx.saved_tensors
    count = ctx.num_captures
    captures, tables = rest[:count], rest[count:]
    if not ctx.form.learns:
        raise TensorKindError(
            "quire::attention must be told of a backward pass when its graph is made, but the "
            "graph was made without gradients. Make it again with inputs that require grad."
        )
    needs = ctx.needs_input_grad
    wanted = [*needs[:3], *(needs[3] if count else ())]
    given = {
        "grad_out": grads[0],
        "grad_lse": grads[1],
        "out": out,
        "lse": lse,
        "query": query,
        "key": key,
        "value": value,
        "captures": captures,
        "tables": tables,
        "numbers": ctx.numbers,
        "text": ctx.text,
        "wanted": wanted,
    }
    twice = torch.is_grad_enabled()  # a backward pass of this one may follow
    compute = _computed_gradients if twice else torch.ops.quire.attention_backward
    found = iter(compute(**given))
    every = [next(found) if wants else None for wants in wanted]
    no_number: Any = None if ctx.numbers else []  # torch takes an empty list for one of tensors
    return (*every[:3], every[3:], [None] * len(tables), no_number, None)


# --- counting ------------------------------------------------------------------------------------


@register_flop_formula(torch.ops.quire.attention, get_raw=True)
def _forward_flops(*args: Any, out_val: Any = None) -> int:
    return _flops(args).forward


@register_flop_formula(torch.ops.quire.attention_backward, get_raw=True)
def _backward_flops(*_: Any, out_val: Any = None, **kwargs: Any) -> int:
    named = dict(zip(_BACKWARD, _)) | kwargs  # noqa: B905
    return _flops([named[name] for name in _BACKWARD[4:-1]]).backward


def _flops(args: Sequence[Any]) -> Flops:
    """Return the operations of a call of the operator with these arguments."""
    query, key, value, captures, tables, numbers, text = args
    with torch.no_grad():
        request = request_of((query, key, value), captures, tables, numbers, read(text))
        return flops_of(call_of(request))


# --- the operators -------------------------------------------------------------------------------

for _name, _compute, _shapes in (
    ("attention", _forward, _fake_forward),
    ("attention.inference", _forward, _fake_forward),
    ("attention_backward", _backward, _fake_backward),
):
    _LIBRARY.impl(_name, _compute, "CPU")
    torch.library.register_fake(f"quire::{_name}", _shapes, lib=_LIBRARY)
torch.library.register_autograd("quire::attention", _gradients, setup_context=_save, lib=_LIBRARY)
_LIBRARY.impl("seed", lambda: torch.tensor(drawn_seed()), "CompositeExplicitAutograd")
torch.library.register_fake("quire::seed", lambda: torch.empty(2, dtype=torch.int64), lib=_LIBRARY)
