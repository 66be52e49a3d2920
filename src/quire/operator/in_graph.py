"""A request as a call of `quire::attention`: where a graph is being made, or a mode watches.

    by_operator(request)         for modes and profilers, which see the operator that it calls
    compute_in_graph(request)    for Dynamo, which traces it in place of `plans.compute`

Somebody watches in torch.compile, torch.export, make_fx and torch.jit.trace, under FakeTensorMode,
FlopCounterMode or selective checkpointing, and while torch.profiler records. All other calls run
directly.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.attention import flex_attention as torch_flex

from quire import plans
from quire.aux_outputs import AuxRequest
from quire.backends import inductor
from quire.errors import BackendError, UnsupportedOpError
from quire.ir.trace import Kind, Mod, Traced, mod_name, trace
from quire.memory import Dense, Ragged
from quire.operator import define as define  # makes the operators
from quire.operator.dynamo import ENTRY, Inputs, operator
from quire.operator.text import MODS, WrittenMod, write
from quire.request import Request, autocast, ready
from quire.results import Result, working_dtype
from quire.support.dynamo import constant_when_traced, traced_as
from quire.support.torch_private import (
    is_in_a_graph,
    is_jit_tracing,
    is_transformed,
    is_watched,
)
from quire.support.torch_private.tracing import know_entries
from quire.support.torch_private.transforms import unrecorded


class Parts(NamedTuple):
    """A request, taken apart for the operator. `tables` are in the order of their names."""

    inputs: Inputs
    mods: tuple[Mod | None, Mod | None, Mod | None, Mod | None]  # in the order of MODS


def parts_of(request: Request) -> Parts:
    """Take a request apart. Dynamo traces this function, so it is written plainly."""
    memory, queries = request.memory, request.queries
    tables: dict[str, Any] = {}
    numbers: dict[str, int] = {}
    if isinstance(memory, Dense):
        kind, numbers["start"] = "dense", memory.start
    elif isinstance(memory, Ragged):
        kind = "ragged"
        tables["offsets"], tables["lengths"] = memory.offsets, memory.lengths
    else:
        kind = "paged"
        tables["page_table"], tables["lengths"] = memory.page_table, memory.lengths
        tables["first_page"] = memory.first_page
        tables["key_scale"], tables["value_scale"] = memory.key_scale, memory.value_scale
    if isinstance(queries.start, int | torch.SymInt):
        numbers["q_start"] = queries.start
    else:
        tables["q_start"] = queries.start
    tables["q_offsets"], tables["q_lengths"] = queries.offsets, queries.lengths
    mask_mod = partial_mod = block_size = None
    for mask in request.masks:
        if isinstance(mask, torch_flex.BlockMask):
            for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
                tables[name] = getattr(mask, name)
            numbers["mask_q_len"], numbers["mask_kv_len"] = mask.seq_lengths
            partial_mod, block_size = mask.mask_mod, mask.BLOCK_SIZE
        else:
            mask_mod = mask
    if request.dropout_p != 0.0:
        tables["seed"] = torch.ops.quire.seed()
    given = {
        name: table if isinstance(table, Tensor) else torch.as_tensor(table)
        for name, table in tables.items()
        if table is not None
    }
    query, key, value = autocast(request.query, memory.key, memory.value)
    inputs = Inputs(
        operands=(query, key, value),
        sink=request.sink,
        tables=tuple(given.values()),
        numbers=tuple(numbers.values()),
        memory=kind,
        table_names=tuple(given),
        number_names=tuple(numbers),
        scale=request.scale,
        dropout_p=request.dropout_p,
        aux=request.aux[:-1],
        block_size=block_size,
        backend=request.backend,
        weighting=request.weighting,
    )
    return Parts(inputs, (request.score_mod, mask_mod, request.prob_mod, partial_mod))


def results_of(found: list[Tensor], inputs: Inputs, learns: bool) -> Result:
    """Return the list that the operator returned as a result; the output in the query's dtype."""
    aux = inputs.aux
    wanted = AuxRequest(aux[0] or learns, *aux[1:])
    fields: dict[str, Tensor] = {"out": found[0].to(inputs.operands[0].dtype)}
    place = 1
    for name, asked in zip(AuxRequest._fields, wanted):  # noqa: B905  Dynamo takes no strict=
        if asked:
            fields[name] = found[place]
            place += 1
    return Result(**fields)


# --- inside torch.compile ------------------------------------------------------------------------


def compute_in_graph(request: Request) -> Result:
    """Compute a request where Dynamo traces: `ENTRY` stands for the operator and traces mods."""
    if request.backend == "inductor" or request.query.device.type != "cpu":
        return inductor.in_graph(request)
    know_entries()
    _check_request(request)
    parts = parts_of(request)
    learns, found = ENTRY(*parts.inputs, *parts.mods)
    return results_of(found, parts.inputs, learns)


def _check_request(request: Request) -> None:
    if request.generator is not None:
        raise BackendError(
            "generator must be None where a graph is made, which holds no generators, but one is "
            "given. Leave it out: torch's default generator is used, as torch.manual_seed sets it."
        )
    if _is_onnx_export():
        raise BackendError(
            "a model must compute attention with PyTorch's operators if it is exported to ONNX, "
            "which has no operator for quire's kernels, but it calls quire. For the export, call "
            "torch.nn.functional.scaled_dot_product_attention, or load a model of transformers "
            "with attn_implementation='sdpa'."
        )


@constant_when_traced
def _is_onnx_export() -> bool:
    onnx = sys.modules.get("torch.onnx")  # importing it would take long
    return onnx is not None and bool(onnx.is_in_onnx_export())


# --- everywhere else -----------------------------------------------------------------------------


def by_operator(request: Request) -> Result | None:
    """Compute a request that somebody watches; None if the operator cannot take it."""
    if not isinstance(request.query, Tensor):
        return None
    if _is_recorded(request.query):
        _check_request(request)
    if not _goes_by_operator(request):
        return None
    mods = _ready(request)
    return None if mods is None else _called(request, mods)


def _is_recorded(query: Tensor) -> bool:
    """Return whether the call becomes part of a graph, in which no kernel can be seen."""
    return is_in_a_graph(query) or is_jit_tracing()


def _goes_by_operator(request: Request) -> bool:
    """Return whether the operator can take a request that somebody watches."""
    query = request.query
    if not is_watched():  # a fake tensor outside of its mode: all operands must be fake
        memory = request.memory
        if not all(map(is_in_a_graph, (query, memory.key, memory.value))):
            return False
    plain = type(query) is Tensor or type(query) is Parameter or is_in_a_graph(query)
    return (
        plain
        and query.device.type == "cpu"
        and not query.is_nested
        and request.backend != "inductor"
        and request.generator is None
        and hasattr(request.memory, "place")
        and not is_transformed()
    )


def _ready(request: Request) -> dict[str, Traced] | None:
    """Return the traced mods by field; None if one cannot be traced and no graph is made."""
    _, mods = parts_of(request._replace(dropout_p=0.0))
    read = _read_for_a_graph if _is_recorded(request.query) else ready
    traced = {}
    for mod, (field, kind) in zip(mods, MODS.items(), strict=True):
        if mod is None:
            continue
        found = read(mod, kind, request.query)
        if not isinstance(found, Traced):
            return None
        traced[field] = found
    return traced


def _read_for_a_graph(mod: Mod, kind: Kind, query: Tensor) -> Traced:
    try:
        with unrecorded():
            return trace(mod, kind, score_dtype=working_dtype(query.dtype), device=query.device)
    except UnsupportedOpError as error:
        reason = str(error).partition(". ")[0]  # names the user's line
        raise UnsupportedOpError(
            f"{kind}_mod {mod_name(mod)!r} must be made of the operations in quire's table if a "
            f"graph is made of the call, but {reason}. Write it with the operations of the table, "
            f"or call it outside of the graph."
        ) from error


def _called(request: Request, mods: dict[str, Traced]) -> Result:
    inputs, _ = parts_of(request)
    captures = [tensor for mod in mods.values() for tensor in mod.captures]
    if request.sink is not None:
        captures.insert(0, request.sink)
    tensors = (*inputs.operands, *captures)
    # torch.jit.trace records a second time, without gradients, and compares.
    records = torch.is_grad_enabled() or is_jit_tracing()
    learns = records and any(x.requires_grad for x in tensors)
    form = inputs.form({field: WrittenMod.of(mod) for field, mod in mods.items()}, learns)
    given = (*inputs.operands, captures, list(inputs.tables), list(inputs.numbers), write(form))
    found = operator(learns)(*given)
    return results_of(found, inputs, learns)


plans.by_operator = by_operator
traced_as(compute_in_graph)(plans.compute)
