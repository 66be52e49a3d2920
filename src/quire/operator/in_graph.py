"""A request as a call of `quire::attention`: where a graph is being made, or a mode watches.

    by_operator(request)         for modes and profilers, which see the operator that it calls
    compute_in_graph(request)    for Dynamo, which traces it in place of `plans.compute`

Somebody watches in torch.compile, torch.export and make_fx, under FakeTensorMode, FlopCounterMode
or selective checkpointing, and while torch.profiler records. All other calls run directly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.attention import flex_attention as torch_flex

from quire import plans
from quire.aux_outputs import AuxRequest
from quire.backends import inductor
from quire.errors import BackendError, UnsupportedOpError
from quire.ir.trace import Kind, Mod, Traced, mod_name
from quire.memory import Dense, Ragged
from quire.operator import define as define  # makes the operators
from quire.operator.dynamo import ENTRY, Inputs, operator
from quire.operator.text import MODS, WrittenMod, write
from quire.request import Request, ready
from quire.results import Result
from quire.support.dynamo import traced_as
from quire.support.torch_private import is_in_a_graph, is_transformed, is_watched
from quire.support.torch_private.tracing import know_entries


class Parts(NamedTuple):
    """A request, taken apart for the operator. `tables` are in the order of their names."""

    inputs: Inputs
    mods: tuple[Mod | None, Mod | None, Mod | None]  # in the order of MODS


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
    inputs = Inputs(
        operands=(request.query, memory.key, memory.value),
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
    )
    return Parts(inputs, (request.score_mod, mask_mod, partial_mod))


def results_of(found: list[Tensor], request: Request, learns: bool) -> Result:
    """Return the list that the operator returned as a result; the output in the query's dtype."""
    aux = request.aux
    wanted = AuxRequest(aux[0] or learns, *aux[1:])
    fields: dict[str, Tensor] = {"out": found[0].to(request.query.dtype)}
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
    return results_of(found, request, learns)


def _check_request(request: Request) -> None:
    if request.generator is not None:
        raise BackendError(
            "generator must be None inside torch.compile, whose graphs hold no generators, but one "
            "is given. Leave it out: torch's default generator is used, as torch.manual_seed sets "
            "it."
        )


# --- everywhere else -----------------------------------------------------------------------------


def by_operator(request: Request) -> Result | None:
    """Compute a request that somebody watches; None if the operator cannot take it."""
    if not isinstance(request.query, Tensor) or not _goes_by_operator(request):
        return None
    mods = _ready(request)
    return None if mods is None else _called(request, mods)


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
    """Return the traced mods by field; None if one cannot be traced and tensors have memory."""
    _, mods = parts_of(request._replace(dropout_p=0.0))
    traced = {}
    for mod, (field, kind) in zip(mods, MODS.items(), strict=True):
        if mod is None:
            continue
        found = ready(mod, kind, request.query)
        if not isinstance(found, Traced):
            if is_in_a_graph(request.query):
                raise _not_in_a_graph(mod, kind)
            return None
        traced[field] = found
    return traced


def _not_in_a_graph(mod: Mod, kind: Kind) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"{kind}_mod {mod_name(mod)!r} must be made of the operations in quire's table if a graph "
        f"is made of the call, but it is not; the warning before this error names the line. Write "
        f"it with the operations of the table, or call it outside of the graph."
    )


def _called(request: Request, mods: dict[str, Traced]) -> Result:
    inputs, _ = parts_of(request)
    captures = [tensor for mod in mods.values() for tensor in mod.captures]
    if request.sink is not None:
        captures.insert(0, request.sink)
    tensors = (*inputs.operands, *captures)
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    form = inputs.form({field: WrittenMod.of(mod) for field, mod in mods.items()}, learns)
    given = (*inputs.operands, captures, list(inputs.tables), list(inputs.numbers), write(form))
    found = operator(learns)(*given)
    return results_of(found, request, learns)


plans.by_operator = by_operator
traced_as(compute_in_graph)(plans.compute)
