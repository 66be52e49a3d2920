"""DTensor operands that are sharded along the sequence: taken apart, and put together again.

A DTensor knows how its shards lie on a mesh. Along the dimension of the plan it must be sharded by
tokens, in the shards of the plan. Along other dimensions of the mesh, as that of data parallelism,
each group of ranks computes its own call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from quire.distributed.context_plan import ContextPlan
from quire.errors import ArgumentError
from quire.memory import Dense
from quire.request import Request
from quire.results import Result

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

TOKENS = 2  # the dimension of tokens in [B, H, tokens, D]


class Shards(NamedTuple):
    """A request on plain tensors, and how its results become DTensors; or why it cannot be."""

    request: Request
    error: Exception | None = None
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()
    batch: int = 0
    length: int = 0

    @staticmethod
    def of(request: Request, plan: ContextPlan) -> Shards:
        """Take the operands of a request apart, if they are DTensors."""
        query, memory = request.query, request.memory
        if type(query) in (Tensor, torch.nn.Parameter):
            return Shards(request)
        from torch.distributed.tensor import DTensor  # importing it takes a while

        if not isinstance(query, DTensor) or not isinstance(memory, Dense):
            return Shards(request)
        try:
            for name, x in (("query", query), ("key", memory.key), ("value", memory.value)):
                _check(name, x, query, plan)
        except ArgumentError as error:
            return Shards(request, error)
        key, value = (x.to_local() for x in (memory.key, memory.value))  # type: ignore[attr-defined]
        plain = request._replace(query=query.to_local(), memory=Dense(key, value, memory.start))
        place = query.device_mesh, query.placements
        return Shards(plain, None, *place, batch=len(query), length=plan.length)

    def wrapped(self, result: Result) -> Result:
        """Return results as DTensors, if the operands were."""
        if self.mesh is None:
            return result
        return Result(**{name: self._wrapped(x) for name, x in result.by_query.items()})

    def _wrapped(self, rows: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        shape = torch.Size((self.batch, rows.shape[1], self.length, *rows.shape[3:]))
        strides = torch.empty(shape, device="meta").stride()
        whole: Tensor = DTensor.from_local(
            rows.contiguous(), self.mesh, self.placements, shape=shape, stride=strides
        )
        return whole


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
    if any(x.is_partial() or x == Shard(1) for x in placements):
        raise ArgumentError(
            f"{name} must not be sharded by heads, which mods count, nor be partial, but has "
            f"{placements}. Redistribute it, or give local shards."
        )
