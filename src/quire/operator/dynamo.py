"""How Dynamo, the tracer of torch.compile, puts `quire::attention` into its graph.

Dynamo traces the Python of a model. When it comes to `ENTRY`, it asks `attention_variable` below.
That lets Dynamo trace each mod into a graph of its own, reads that graph with quire's tracer, and
adds one call of the operator: with the mods as text, and with the tensors that they captured as
inputs of the user's graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.aux_outputs import AuxRequest
from quire.config import Backend as BackendName
from quire.errors import ModError
from quire.ir.multiples import is_multiple
from quire.ir.source import reading
from quire.ir.trace import INPUTS, Kind, Mod, Traced, trace
from quire.mods.weights import Weighting
from quire.operator.text import MODS, Form, WrittenMod, write
from quire.results import working_dtype
from quire.support.torch_private import is_transformed
from quire.support.torch_private.tracing import DynamoTrace, TracedFunction, graph_entry


class Inputs(NamedTuple):
    """A request without its mods: tensors, numbers, and constants that name them."""

    operands: tuple[Tensor, Tensor, Tensor]
    sink: Tensor | None
    tables: tuple[Tensor, ...]
    numbers: tuple[int, ...]
    memory: str
    table_names: tuple[str, ...]
    number_names: tuple[str, ...]
    scale: float | None
    dropout_p: float
    aux: tuple[bool, bool, bool, bool, bool]
    block_size: tuple[int, int] | None
    backend: BackendName
    weighting: Weighting

    def form(self, mods: dict[str, WrittenMod], learns: bool) -> Form:
        """Return the form of the call, with these mods."""
        return Form(
            memory=self.memory,
            tables=self.table_names,
            numbers=self.number_names,
            mods=mods,
            sink=self.sink is not None,
            learns=learns,
            scale=self.scale,
            dropout_p=float(self.dropout_p),
            aux=AuxRequest(*self.aux),
            block_size=self.block_size,
            backend=self.backend,
            weighting=self.weighting,
        )


def operator(learns: bool) -> Any:
    """Return the operator for a call, which a backward pass follows or not."""
    packet = torch.ops.quire.attention
    return packet.default if learns else packet.inference


def _write_call(dynamo: DynamoTrace, arguments: list[Any]) -> Any:
    """Add one call of the operator to Dynamo's graph. Return (learns, results)."""
    if is_transformed():  # the operator has gradients, but no tangents, and nothing maps it
        dynamo.break_graph("attention inside of torch.func or forward_ad cannot be part of a graph")
    count = len(Inputs._fields)
    inputs, mods = Inputs(*arguments[:count]), arguments[count:]
    operands = dynamo.items(inputs.operands)
    has_sink = not dynamo.is_none(inputs.sink)
    captures = [inputs.sink] if has_sink else []
    written = {}
    for mod, (field, kind) in zip(mods, MODS.items(), strict=True):
        if not dynamo.is_none(mod):
            written[field], tensors = _read_mod(dynamo, mod, kind, operands[0])
            captures += tensors
    learns = torch.is_grad_enabled() and any(
        dynamo.example(x).requires_grad for x in (*operands, *captures)
    )
    constants = {name: dynamo.constant(getattr(inputs, name)) for name in Inputs._fields[4:]}
    plain = Inputs(None, True if has_sink else None, (), (), **constants)  # type: ignore[arg-type]
    form = plain.form(written, learns)
    tables, numbers = dynamo.items(inputs.tables), dynamo.items(inputs.numbers)
    given = (*operands, captures, tables, numbers, write(form))
    results = dynamo.call(operator(learns), *given)
    return dynamo.pair(learns, results)


def _read_mod(
    dynamo: DynamoTrace, mod: Any, kind: Kind, query: Any
) -> tuple[WrittenMod, list[Any]]:
    """Return the text of a mod, and the variables of the tensors that it captured."""
    function, traced = _traced(dynamo, mod, kind, query)
    variables = [function.captured[id(tensor)] for tensor in traced.captures]
    return WrittenMod.of(traced)._replace(name=function.name), variables


def _traced(dynamo: DynamoTrace, mod: Any, kind: Kind, query: Any) -> tuple[TracedFunction, Traced]:
    """Return a mod as Dynamo traced it, and as our tracer did."""
    score = working_dtype(dynamo.example(query).dtype)
    dtypes = [score if name == "score" else torch.int64 for name in INPUTS[kind]]
    function = dynamo.traced(mod, dtypes, query)
    try:
        run = _with_inputs(partial(function.run, reading), kind)
        return function, trace(run, kind, score_dtype=score)
    except ModError as error:
        reason = str(error).partition(". ")[0]  # names the user's line
        dynamo.break_graph(f"{kind}_mod {function.name!r} cannot be part of a graph: {reason}.")


def _is_multiple(dynamo: DynamoTrace, arguments: list[Any]) -> Any:
    """Return whether a prob_mod is a multiple of the probability: Dynamo takes it as a constant."""
    mod, query = arguments
    return dynamo.known(is_multiple(_traced(dynamo, mod, "score", query)[1].output))


def _with_inputs(run: Callable[..., Any], kind: Kind) -> Mod:
    """Give a function of any arguments the signature of a mod."""
    if kind == "mask":
        return lambda b, h, q_idx, kv_idx: run(b, h, q_idx, kv_idx)
    return lambda score, b, h, q_idx, kv_idx: run(score, b, h, q_idx, kv_idx)


ENTRY = graph_entry("quire_attention", _write_call)
"""Stands for the operator where Dynamo traces. Nothing else may call it."""

MULTIPLE = graph_entry("quire_multiple", _is_multiple)
"""Takes a prob_mod and the query where Dynamo traces; says whether it is a multiple."""
