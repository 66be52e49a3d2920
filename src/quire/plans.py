"""The cache of plans: a request like an earlier one is neither checked nor planned again.

    compute(request)    find the plan of a request, or make one; run it
    key_of              the key of a call in the cache: all that checks and plans depend on
    CallPlan            computes all calls with the same key, forward and backward

A key has two parts. The layout has the shapes, strides and dtypes of the operands; it is read
before the mods are traced. The other part has the graphs of the mods, the shapes of the tensors
that they capture, and the content of the block mask. The number of keys (S) is not in a key, so a
KV cache that grows in place needs one plan. A request with rare arguments has no key: it is checked
and planned at every call.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from quire import autograd
from quire.aux_outputs import NO_AUX
from quire.backends import choose, inductor
from quire.backends.eager import per_sequence as eager
from quire.backends.recheck import recheck
from quire.block_mask import BlockMask, BlockRows
from quire.codegen.convention import MOST_ROWS
from quire.codegen.mods.arguments import CaptureShape
from quire.config import Backend as BackendName
from quire.config import config
from quire.ir.trace import Traced
from quire.memory import Dense, One, Paged, Placed
from quire.request import Call, Problem, Request, call_of, check, check_mods
from quire.results import Above, Gradients, Result, Wanted
from quire.runtime.backward import BackwardPlans
from quire.runtime.forward import ForwardPlan
from quire.support.bounded import BoundedDict
from quire.support.torch_private import is_ordinary, is_transformed, is_zero_tensor

Key: TypeAlias = tuple[object, ...]

MOST_KEYS = 2**19  # graphs of larger positions differ, and such calls take long anyway
MOST_BYTES = 2**16  # of a block mask; comparing a larger one would take too long


def compute(request: Request) -> Result:
    """Find the plan of a request, or make one, and run it. Results have the user's layout."""
    plan, call = find(request)
    result = plan.run(call)
    if isinstance(call.placed.rows, One):
        return result
    memory, query = request.memory, request.query
    if request.aux is NO_AUX:
        return Result(memory.as_given(query, result.out))
    given = {name: memory.as_given(query, rows) for name, rows in result.by_query.items()}
    mass = result.key_mass
    return Result(**given, key_mass=None if mass is None else memory.keys_as_given(mass))


known: BoundedDict[Key, CallPlan] = BoundedDict(256)


def find(request: Request) -> tuple[CallPlan, Call]:
    """Return the plan of a request, from the cache or new, and the call to run it with.

    A request whose plan is in the cache needs no checks: an equal one has passed them.
    """
    layout = layout_of(request)
    if layout is None:
        check(request)
        return make(call_of(request))
    call = call_of(request)
    key = key_of(layout, call)
    plan = None if key is None else known.get(key)
    if plan is not None:
        return plan, call
    check(request)
    plan, call = make(call)
    if key is not None and key == key_of(layout, call):  # else another thread edited the mask
        known.keep(key, plan)
    return plan, call


def make(call: Call) -> tuple[CallPlan, Call]:
    """Return a new plan, and the call with a seed for its dropout."""
    check_mods(call)
    backend = choose(call)  # before the seed: a call that raises must draw no random number
    call = call.seeded()
    return CallPlan(call, backend), call


# --- keys -----------------------------------------------------------------------------------------


def layout_of(request: Request) -> Key | None:
    """Return all that a plan takes from the request itself; None if the request has no key."""
    memory, queries, scale = request.memory, request.queries, request.scale
    if (
        request.backend != "auto"
        or request.dropout_p != 0.0
        or request.kernel_options is not None
        or request.generator is not None
        or not (scale is None or type(scale) is float)
        or queries.offsets is not None
        or queries.lengths is not None
        or isinstance(queries.start, Tensor)
        or config().backend != "auto"
    ):
        return None
    if type(memory) is Dense:
        operands: Key | None = _dense_layout(request.query, memory)
    elif type(memory) is Paged and queries.start is None:
        operands = _paged_layout(request.query, memory)
    else:
        return None
    sink = request.sink
    if operands is None or not (sink is None or is_ordinary(sink)):
        return None
    return (*operands, scale, request.aux, None if sink is None else (sink.shape, sink.dtype))


def _dense_layout(query: Tensor, memory: Dense) -> Key | None:
    if type(memory.start) is not int or memory.start != 0:
        return None
    return operand_layout(query, memory.key, memory.value)


def _paged_layout(query: Tensor, memory: Paged) -> Key | None:
    """Return the layout of a decoding step; None if sequences have more than a few queries."""
    key, table = memory.key, memory.page_table
    operands = operand_layout(query, key, memory.value)
    if (
        operands is None
        or query.shape[2] > MOST_ROWS
        or not is_ordinary(table)
        or table.dim() != 2
        or key.shape[2] == 0
        or table.shape[1] * key.shape[2] > MOST_KEYS
    ):
        return None
    layout: list[object] = [*operands, "pages", key.shape[2], table.shape]
    for scale in (memory.key_scale, memory.value_scale):
        if scale is None:
            layout.append(None)
        elif is_ordinary(scale):
            layout += (scale.shape, scale.stride(), scale.dtype)
        else:
            return None
    return tuple(layout)


def operand_layout(query: Tensor, key: Tensor, value: Tensor) -> Key | None:
    """Return shapes, strides and dtypes of query [B, Hq, L, D], key and value [B, Hkv, S, D].

    Return None if a tensor is not a plain CPU tensor, or if autocast, a transform of torch.func or
    QUIRE_CHECK is active.
    """
    for tensor in (query, key, value):
        if (
            type(tensor) is not Tensor
            or not tensor.is_cpu
            or tensor.is_nested
            or tensor.layout is not torch.strided
            or tensor.is_neg()
            or is_zero_tensor(tensor)
        ):
            return None
    q_shape, k_shape, v_shape = query.shape, key.shape, value.shape
    if (
        not len(q_shape) == len(k_shape) == len(v_shape) == 4
        or k_shape[:3] != v_shape[:3]
        or k_shape[2] > MOST_KEYS
        or q_shape[2] > MOST_KEYS
        or torch.is_autocast_enabled("cpu")
        or is_transformed()
        or config().check_rows
        or not all(tensor.untyped_storage().nbytes() for tensor in (query, key, value))
    ):
        return None
    return (
        q_shape,
        query.stride(),
        query.dtype,
        k_shape[:2],
        k_shape[3],
        key.stride(),
        key.dtype,
        v_shape[3],
        value.stride(),
        value.dtype,
        torch.get_num_threads(),
    )


def key_of(layout: Key, call: Call) -> Key | None:
    """Return the key of a call whose request has this layout; None if its mods have no key."""
    _, placed, problem, captures = call
    learns = call.learns
    rows = placed.rows
    if isinstance(rows, One):
        if rows.q_start > MOST_KEYS:
            return None
    elif learns or placed.content is None:  # a backward plan depends on the lengths of sequences
        return None
    key: list[object] = [*layout, learns]
    for mod in (problem.score_mod, problem.mask_mod, problem.partial_mod):
        if mod is None:
            key.append(None)
            continue
        if not isinstance(mod, Traced):
            return None
        key.append(mod.output)
    for tensor in captures:
        if not is_ordinary(tensor):
            return None
        key += (CaptureShape.of(tensor), tensor.shape)
    if problem.block_mask is None:
        return tuple(key)
    return _with_blocks(key, call, problem.block_mask)


def _with_blocks(key: list[object], call: Call, mask: BlockMask) -> Key | None:
    """Return `key` with the content of the block mask; None if the mask has no key."""
    placed = call.placed
    # A block mask counts from the first query: with q_start, each step would have another graph.
    if placed.rows.q_start != 0 or mask.device != placed.query.device or mask.nbytes > MOST_BYTES:
        return None
    return (*key, mask.content(), placed.key.shape[2])


# --- plans ----------------------------------------------------------------------------------------


class CallPlan:
    """Computes a call and others with the same key: forward, and backward if it needs gradients.

    Kernels give up on an index outside a captured tensor, and in a backward pass on numbers that
    are not finite. The eager backend then computes the call.
    """

    __slots__ = ("_backward", "_blocks", "_forward", "_learns", "_problem", "backend")

    def __init__(self, call: Call, backend: BackendName) -> None:
        problem, mask = call.problem, call.problem.block_mask
        self.backend, self._learns = backend, call.learns
        self._forward: ForwardPlan | None = None  # made at the first call
        self._backward: BackwardPlans | None = None
        # A plan must not keep captured tensors alive, and the user may edit the mask after a call.
        self._problem: Problem = problem.without_captures()
        self._blocks: BlockRows | None = None if mask is None else mask.rows(*call.placed.lengths)

    def run(self, call: Call) -> Result:
        """Compute a call. The output has the dtype of the query."""
        if self.backend == "inductor":
            return inductor.attention(call)
        result = autograd.recorded(self, call) if self._learns else self.forward(call)
        dtype = call.placed.query.dtype
        if result.out.dtype == dtype:
            return result
        return result._replace(out=result.out.to(dtype))

    def forward(self, call: Call) -> Result:
        """Compute the forward pass, without autograd."""
        found, request = None, call.request
        if self.backend == "jit":
            if self._forward is None:
                self._forward = ForwardPlan.of(call, self._learns)
            found = self._forward.run(call)
        if found is None:
            with autograd.without_autocast(call.placed.query), torch.no_grad():
                return eager.forward(call.problem, call.placed, request.sink, request.aux)
        if config().check_rows:
            recheck(call, found)
        return found

    def backward(self, placed: Placed, wanted: Wanted, above: Above) -> Gradients:
        """Return the gradients. The mods load from `wanted.captures`."""
        problem, found = self._problem.with_captures(wanted.captures), None
        if self.backend == "jit":
            self._backward = self._backward or BackwardPlans()
            found = self._backward.run(problem, placed, self._blocks, wanted, above)
        return found or eager.backward(problem, placed, self._blocks, wanted, above)
