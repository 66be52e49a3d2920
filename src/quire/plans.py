"""The cache of plans: a request like an earlier one is neither checked nor planned again.

    compute(request)    find the plan of a request, or make one; run it
    key_of              the key of a call in the cache: all that checks and plans depend on
    choose              the backend of a call: for `auto`, the first that can run it
    CallPlan            computes all calls with the same key, forward and backward

A key has two parts. The layout has shapes, strides and dtypes of the operands; it is read before
mods are traced. The other part has the graphs of the mods, the shapes of the tensors they capture,
and the content of the block mask. The number of keys (S) is not in a key, so a KV cache that grows
in place needs one plan. A request with rare arguments has no key: it is planned at every call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextvars import ContextVar
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from quire import autograd
from quire.autograd.folding import Change
from quire.aux_outputs import NO_AUX
from quire.backends import inductor, jit
from quire.backends.eager import per_sequence as eager
from quire.backends.recheck import recheck
from quire.block_mask import BlockMask, BlockRows
from quire.codegen.convention import FEW_ROWS, MANY_KEYS
from quire.codegen.mods.arguments import CaptureShape
from quire.config import Backend as BackendName
from quire.config import config
from quire.errors import ArgumentError, BackendError
from quire.ir.trace import Traced
from quire.memory import Dense, One, Paged, Placed
from quire.request import Call, Problem, Request, call_of, check, check_mods
from quire.results import Above, Gradients, Moved, Result, Tangents, Wanted
from quire.runtime import tangent as compiled
from quire.runtime.backward import BackwardPlans
from quire.runtime.forward import ForwardPlan
from quire.runtime.slices import Taking
from quire.support.bounded import BoundedDict
from quire.support.torch_private import is_ordinary, is_transformed, is_watched, is_zero_tensor

Key: TypeAlias = tuple[object, ...]

STRIDED = torch.strided
PLAIN = (Tensor, Parameter)
MOST_KEYS = 2**19  # graphs of larger positions differ, and such calls take long anyway
MOST_BYTES = 2**18  # of a block mask; plans keep a copy, and compare it with every call

by_operator: Callable[[Request], Result | None] = lambda request: None  # noqa: E731
"""Computes a request if a graph or a mode needs the operator; else None. operator/ sets it."""

over_ranks: ContextVar[Callable[[Request], Result] | None] = ContextVar("over_ranks", default=None)
"""Computes the requests of a block of code over many processes; `distributed/` sets it."""


def compute(request: Request) -> Result:
    """Find or make the plan of a request, and run it; if somebody watches, the operator does it."""
    together = over_ranks.get()
    if together is not None:
        return together(request)
    if is_watched() or type(request.query) not in PLAIN:
        watched = by_operator(request)
        if watched is not None:
            return watched
    plan, call = find(request)
    result, memory, query = plan.run(call), request.memory, request.query
    if isinstance(call.placed.rows, One):
        return result
    if request.aux is NO_AUX:
        return Result(memory.as_given(query, result.out))
    result = call.placed.with_all_positions(result)
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
    call = call_of(request, plain=True)
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
    query, memory, queries, _, _, scale, p, sink, aux, options, backend, generator, weighting = (
        request[:13]
    )
    start, offsets, lengths = queries
    if (
        backend != "auto"
        or p != 0.0
        or options is not None
        or generator is not None
        or not (scale is None or type(scale) is float)
        or offsets is not None
        or lengths is not None
        or isinstance(start, Tensor)
        or config().backend != "auto"
    ):
        return None
    operands: Key | None
    if type(memory) is Dense and memory.start == 0:
        operands = operand_layout(query, memory.key, memory.value)
        if operands is not None and query.shape[2] > FEW_ROWS:  # then keys decide on the kernel
            operands = (*operands, memory.key.shape[2] >= MANY_KEYS)
    elif type(memory) is Paged and start is None:
        operands = _paged_layout(query, memory)
    else:
        return None
    if operands is None:
        return None
    if sink is None:
        return (*operands, scale, aux, weighting)
    return (*operands, scale, aux, weighting, sink.shape, sink.dtype) if is_ordinary(sink) else None


def _paged_layout(query: Tensor, memory: Paged) -> Key | None:
    """Return the layout of a decoding step; None if sequences have more than a few queries."""
    key, table = memory.key, memory.page_table
    operands = operand_layout(query, key, memory.value)
    if (
        operands is None
        or query.shape[2] > FEW_ROWS
        or type(table) is not Tensor
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
            or tensor.layout is not STRIDED
            or tensor.dim() != 4
            or tensor.is_neg()
            or is_zero_tensor(tensor)
        ):
            return None
    q_shape = query.shape
    (k_batch, k_heads, kv_len, k_dim), (v_batch, v_heads, v_len, v_dim) = key.shape, value.shape
    if (
        kv_len != v_len
        or kv_len > MOST_KEYS
        or q_shape[2] > MOST_KEYS
        or torch.is_autocast_enabled("cpu")
        or is_transformed()
        or config().check_rows
        or not query.untyped_storage().nbytes()
        or not key.untyped_storage().nbytes()
        or not value.untyped_storage().nbytes()
    ):
        return None
    # One tuple without its own lines: this is a part of every call.
    return (
        q_shape, query.stride(), query.dtype, torch.get_num_threads(),
        k_batch, k_heads, k_dim, key.stride(), key.dtype,
        v_batch, v_heads, v_dim, value.stride(), value.dtype,
    )  # fmt: skip


def key_of(layout: Key, call: Call) -> Key | None:
    """Return the key of a call whose request has this layout; None if its mods have no key."""
    _, placed, problem, captures, learns = call
    _, score_mod, mask_mod, mask, partial_mod, *_ = problem
    rows, prob_mod = placed.rows, problem.prob_mod
    if isinstance(rows, One):
        if rows.q_start > MOST_KEYS:
            return None
    elif learns or placed.content is None:  # a backward plan depends on the lengths of sequences
        return None
    if score_mod is None and mask is None and prob_mod is None:
        if mask_mod is None:
            return (*layout, learns)
        if (
            problem.has_holes and problem.open_mask is None
        ):  # their table has the page table's shape
            return (*layout, learns, "holes")
    key: list[object] = [*layout, learns]
    for mod in (score_mod, mask_mod, prob_mod, partial_mod):
        if mod is None:
            key.append(None)
        elif isinstance(mod, Traced):
            key.append(mod.output)
        else:
            return None
    for tensor in captures:
        if not is_ordinary(tensor):
            return None
        key += (CaptureShape.of(tensor), tensor.shape)
    return tuple(key) if mask is None else _with_blocks(tuple(key), call, mask)


def _with_blocks(key: Key, call: Call, mask: BlockMask) -> Key | None:
    """Return `key` with the content of the block mask; None if the mask has no key.

    Its lists are cut by the lengths of sequences, which are part of the content of their tables.
    """
    placed = call.placed
    if mask.device != placed.query.device or mask.nbytes > MOST_BYTES:
        return None
    # A block mask counts from the first query: with q_start, each step would have another graph.
    if isinstance(placed.rows, One) and placed.rows.q_start != 0:
        return None
    return (*key, mask.content(), mask.lists_pages, placed.key.shape[2], placed.content)


# --- backends ------------------------------------------------------------------------------------


def _eager_obstacle(call: Call) -> str | None:
    device, why = call.placed.query.device, "and quire's own paths run on the CPU"
    return None if device.type == "cpu" else f"the tensors are on {device}, {why}"


OBSTACLES: dict[BackendName, Callable[[Call], str | None]] = {
    "jit": jit.obstacle,
    "eager": _eager_obstacle,
    "inductor": inductor.obstacle,
}
"""By backend: a function that returns why it cannot run a call, or None. `auto` tries in order."""


class Candidates(NamedTuple):
    """The user's choice in words, and the backends to try in order."""

    words: str
    names: tuple[BackendName, ...]


def choose(call: Call) -> BackendName:
    """Return the backend that the request names, or for 'auto' the first that can run the call."""
    chosen = candidates(call.request.backend)
    reasons = []
    for name in chosen.names:
        reason = OBSTACLES[name](call)
        if reason is None:
            return name
        reasons.append(f"  {name}: {reason}.\n")
    raise BackendError(
        f"{chosen.words} cannot run this call:\n{''.join(reasons)}"
        f"Call quire.explain(...) to see what could, or change the call."
    )


def candidates(name: BackendName) -> Candidates:
    """Return the backends to try for `name`. QUIRE_BACKEND takes the place of 'auto'."""
    where, words, remedy = "backend", f"backend={name!r}", "Leave it out"
    if name == "auto" and config().backend != "auto":
        name = config().backend
        where, words, remedy = "QUIRE_BACKEND", f"QUIRE_BACKEND={name}", "Unset it"
    if name == "auto":
        return Candidates(words, tuple(OBSTACLES))
    if name not in OBSTACLES:
        known = ", ".join(["auto", *OBSTACLES])
        raise ArgumentError(
            f"{where} must be one of {known}, but is {name!r}. {remedy} to let quire choose."
        )
    return Candidates(words, (name,))


# --- plans ----------------------------------------------------------------------------------------


class CallPlan:
    """Computes a call and others with the same key: forward, and backward if it needs gradients.

    Kernels give up on an index outside a captured tensor, and in a backward pass on numbers that
    are not finite. The eager backend then computes the call.
    """

    __slots__ = ("_backward", "_blocks", "_forward", "_learns", "backend", "problem")

    def __init__(self, call: Call, backend: BackendName) -> None:
        problem, mask = call.problem, call.problem.block_mask
        self.backend, self._learns = backend, call.learns and backend != "inductor"
        self._forward: ForwardPlan | None = None  # made at the first call
        self._backward: BackwardPlans | None = None
        # A plan must not keep captured tensors alive, and the user may edit the mask after a call.
        self.problem: Problem = problem.without_captures()
        self._blocks: BlockRows | None = None
        if mask is not None and call.learns:
            self._blocks = mask.rows(*call.placed.lengths)

    def run(self, call: Call) -> Result:
        """Compute a call. The output has the dtype of the query."""
        if self.backend == "inductor":
            return inductor.attention(call)
        result = autograd.recorded(self, call) if self._learns else self.forward(call)
        out, dtype = result.out, call.placed.query.dtype
        return result if out.dtype is dtype else result._replace(out=out.to(dtype))

    def forward(self, call: Call) -> Result:
        """Compute the forward pass, without autograd."""
        found = None
        if self.backend == "jit":
            plan = self._forward
            if plan is None:
                plan = self._forward = ForwardPlan.of(call, self._learns)
            found = plan.run(call)
        if found is None:
            request, placed, problem, *_ = call
            with autograd.without_autocast(placed.query), torch.no_grad():
                return eager.forward(problem, placed, request.sink, request.aux)
        if config().check_rows:
            recheck(call, found)
        return found

    def backward(
        self, placed: Placed, wanted: Wanted, above: Above, *, in_torch: bool = False
    ) -> Gradients:
        """Return the gradients. The mods load from `wanted.captures`."""
        problem, found = self.problem.with_captures(wanted.captures), None
        if self.backend == "jit" and not in_torch:
            self._backward = self._backward or BackwardPlans()
            found = self._backward.run(problem, placed, self._blocks, wanted, above)
        found = found or eager.backward(problem, placed, self._blocks, wanted, above)
        scales = placed.key_scale, placed.value_scale
        return found if scales == (None, None) else found.of_scaled(*scales)

    @property
    def has_slices(self) -> bool:
        """Return whether a kernel computes gradients, and so slice by slice."""
        return self.backend == "jit"

    def gradients_of_slices(
        self, placed: Placed, wanted: Wanted, above: Above, taking: Taking
    ) -> Gradients | None:
        """Return gradients of the query, and those of captures for each slice of queries.

        The sums of keys and values are taken. Added in ascending order of slices, they are the
        gradients of one call. None if no kernel can compute them, as with a NaN.
        """
        self._backward = self._backward or BackwardPlans()
        problem = self.problem.with_captures(wanted.captures)
        operands = problem, placed, self._blocks, wanted, above
        return self._backward.run(*operands, taking=taking)

    def tangent(
        self,
        placed: Placed,
        captures: tuple[Tensor, ...],
        above: Above,
        along: Tangents,
        *,
        in_torch: bool = False,
    ) -> Result:
        """Return the tangents of out and lse. The mods load from `captures`."""
        problem, found = self.problem.with_captures(captures), None
        if self.backend == "jit" and not in_torch and compiled.can(problem):
            found = compiled.tangent(problem, placed, self._blocks, above, along)
        return found or eager.tangent(problem, placed, self._blocks, above, along)

    def moved(self, call: Call, along: Tangents) -> Moved | None:
        """Return the results of a call and their tangents; None if one launch cannot give both."""
        return compiled.moved(call, self._blocks, along) if self.backend == "jit" else None

    def changed(self, change: Change) -> CallPlan:
        """Return the plan of another problem: of many calls as one, for instance."""
        plan = copy.copy(self)
        plan._forward = plan._backward = None
        plan.problem = change.problem(self.problem)
        plan._blocks = None if self._blocks is None else self._blocks.repeated(change.size)
        return plan
