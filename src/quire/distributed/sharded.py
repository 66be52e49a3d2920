"""DTensor operands that are sharded along the sequence: taken apart, and put together again.

A DTensor knows how its shards lie on a mesh. Along the dimension of the plan it must be sharded by
tokens, in the shards of the plan. Along other dimensions of the mesh it may be sharded by batch
entries, as in data parallelism, or by heads, as in tensor parallelism. Then each group of ranks
computes its own call, and mods get the numbers that heads and batch entries have in the whole.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from quire import checks
from quire.distributed.context_plan import ContextPlan
from quire.distributed.local import Lookups
from quire.errors import ArgumentError, OptionError
from quire.ir.trace import Mod
from quire.memory import Dense, Queries, Ragged
from quire.memory.tables import checked_offsets, packed, unpacked
from quire.request import Request
from quire.results import Result

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

BATCH, HEADS, TOKENS = 0, 1, 2  # dimensions of [B, H, tokens, D]


class Shards(NamedTuple):
    """A request on plain tensors, and how its results become DTensors.

    `shape` is that of the whole query. `own` has the batch entries and heads of this rank, if
    it has not all. If operands `is_packed`, as those of Ragged, the request has them as one batch
    entry.
    """

    request: Request
    given: str  # the name of the memory
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()
    shape: torch.Size = torch.Size()
    own: Lookups = Lookups()
    is_packed: bool = False

    @staticmethod
    def of(request: Request, plan: ContextPlan) -> Shards:
        """Take the operands of a request apart, if they are DTensors."""
        query, memory, given = request.query, request.memory, type(request.memory).__name__
        if isinstance(memory, Ragged) and plan.is_ragged:
            return _packed(request, memory, plan)
        if type(query) in (Tensor, torch.nn.Parameter):
            return Shards(request, given)
        from torch.distributed.tensor import DTensor  # importing it takes a while

        if not isinstance(query, DTensor) or not isinstance(memory, Dense):
            return Shards(request, given)
        for name, x in (("query", query), ("key", memory.key), ("value", memory.value)):
            _check(name, x, query, plan)
        checks.check_sink(request.sink, query)
        key, value = (x.to_local() for x in (memory.key, memory.value))  # type: ignore[attr-defined]
        plain = request._replace(query=query.to_local(), memory=Dense(key, value, memory.start))
        place = query.device_mesh, query.placements
        own = Lookups(entries=_own(query, BATCH), heads=_own(query, HEADS))
        _check_own(own, request, plan)
        return Shards(_of_own(plain, own), given, *place, shape=query.shape, own=own)

    def masked(self, plan: ContextPlan) -> Mod:
        """Return the mask of a plan for the batch entries and heads of this rank."""
        return self.own.mapped(plan.mask, "mask")

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the batch entries of this rank, and the heads of the whole."""
        batch, heads = self.request.query.shape[:2]
        return batch, heads if self.own.heads is None else self.shape[HEADS]

    def wrapped(self, result: Result) -> Result:
        """Return results as DTensors or packed, if the operands were."""
        if self.is_packed:
            return Result(**{name: unpacked(x) for name, x in result.by_query.items()})
        if self.mesh is None:
            return result
        return Result(**{name: self._wrapped(x) for name, x in result.by_query.items()})

    def _wrapped(self, rows: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        shape = torch.Size((*self.shape[:3], *rows.shape[3:]))
        strides = torch.empty(shape, device="meta").stride()
        whole: Tensor = DTensor.from_local(
            rows.contiguous(), self.mesh, self.placements, shape=shape, stride=strides
        )
        return whole


def _packed(request: Request, memory: Ragged, plan: ContextPlan) -> Shards:
    """Return a request on the packed sequences of a rank, as one batch entry."""
    memory.check(request.query, Queries(start=0))
    offsets = checked_offsets("offsets", memory.offsets, len(memory.key)).tolist()
    if offsets != plan.offsets or memory.lengths is not None:
        raise ArgumentError(
            f"offsets must be those of the plan, {plan.offsets}, without lengths, but are "
            f"{offsets}. Give Ragged(key, value, plan.offsets)."
        )
    query, key, value = map(packed, (request.query, memory.key, memory.value))
    plain = request._replace(query=query, memory=Dense(key, value), queries=Queries(start=0))
    return Shards(plain, "Ragged", is_packed=True)


def _check(name: str, given: Tensor, query: DTensor, plan: ContextPlan) -> None:
    """Raise if an operand does not lie on its mesh as the plan needs it."""
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(given, DTensor):
        raise ArgumentError(
            f"{name} must be a DTensor, since the query is one, but is a {type(given).__name__}. "
            f"Make all of them DTensors, or give local shards."
        )
    mesh, placements = given.device_mesh, given.placements
    if mesh != query.device_mesh or placements != query.placements:
        raise ArgumentError(
            f"{name} must lie on its mesh as the query does, {query.placements}, but has "
            f"{placements}. Redistribute it."
        )
    groups = [mesh.get_group(n) for n in range(mesh.ndim)]
    along = [n for n, group in enumerate(groups) if group == plan.group.process_group]
    sharded = [n for n, each in enumerate(placements) if each == Shard(TOKENS)]
    if sharded != along or len(along) != 1:
        raise ArgumentError(
            f"{name} must be sharded along dimension {TOKENS} on the mesh dimension of the plan, "
            f"and on no other, but has {placements}. Redistribute it, or make the plan with the "
            f"mesh dimension that it is sharded on."
        )
    if any(x.is_partial() for x in placements):
        raise ArgumentError(
            f"{name} must not be partial, but has {placements}. Redistribute it, or give local "
            f"shards."
        )
    by_heads = _ranks_along(given, HEADS)
    if given.shape[HEADS] % by_heads:
        raise ArgumentError(
            f"the heads of {name} must be a multiple of the {by_heads} ranks that share them, but "
            f"there are {given.shape[HEADS]}. Redistribute it."
        )


def _ranks_along(given: DTensor, dim: int) -> int:
    """Return over how many ranks a dimension of an operand is sharded."""
    from torch.distributed.tensor import Shard

    mesh = given.device_mesh
    sharded = [n for n, each in enumerate(given.placements) if each == Shard(dim)]
    return math.prod(mesh.size(n) for n in sharded)


def _own(query: DTensor, dim: int) -> Tensor | None:
    """Return the numbers along a dimension that this rank has, int32; None if it has all."""
    from torch.distributed.tensor import Shard

    if _ranks_along(query, dim) == 1:
        return None
    own = torch.arange(query.shape[dim], dtype=torch.int32)
    for n, each in enumerate(query.placements):
        if each == Shard(dim):
            own = own.tensor_split(_cuts(len(own), query.device_mesh.size(n)))[
                query.device_mesh.get_local_rank(n)
            ]
    return own


def _cuts(length: int, parts: int) -> list[int]:
    """Return where a dimension is cut into parts; the last ones may be shorter, or empty."""
    size = -(-length // parts)
    return [min(length, n * size) for n in range(1, parts)]


def _check_own(own: Lookups, request: Request, plan: ContextPlan) -> None:
    """Raise if a rank cannot compute its batch entries or heads as a part of the whole."""
    what = "heads" if own.heads is not None else "batch entries"
    if request.dropout_p and (own.heads is not None or own.entries is not None):
        raise OptionError(
            f"dropout_p must be 0 if operands are sharded by {what}, since ranks would draw "
            f"the same numbers for other {what}, but is {request.dropout_p}. Redistribute "
            f"the operands."
        )
    if own.entries is not None and plan.sizes[0] != 1:
        raise ArgumentError(
            f"the mask of the plan must be the same for all batch entries if operands are sharded "
            f"by these, but the plan has {plan.sizes[0]}. Redistribute the operands."
        )


def _of_own(request: Request, own: Lookups) -> Request:
    """Return a request whose score mod and sink are those of these batch entries and heads."""
    score_mod, sink = request.score_mod, request.sink
    if score_mod is not None:
        score_mod = own.mapped(score_mod, "score")
    if sink is not None and own.heads is not None:
        sink = sink[own.heads.long()]
    return request._replace(score_mod=score_mod, sink=sink)
