"""A plan: who computes calls of one kind, and with which code."""

from __future__ import annotations

import torch

from quire import autograd
from quire.backends import inductor, jit
from quire.backends.eager import per_sequence as eager
from quire.backends.recheck import recheck
from quire.block_mask import BlockRows
from quire.config import Backend as BackendName
from quire.config import config
from quire.memory.placed import Placed
from quire.request import Call, Problem
from quire.results import Above, Gradients, Result, Wanted


class CallPlan:
    """Computes a call, and others like it: forward, and backward where the call learns.

    Kernels decline what they cannot do right: an index into a captured tensor that is out of range,
    numbers that are not finite in a backward pass. Torch ops then compute it.
    """

    __slots__ = ("_blocks", "_kernels", "_learns", "_problem", "backend")

    def __init__(self, call: Call, backend: BackendName) -> None:
        problem, mask = call.problem, call.problem.block_mask
        self.backend, self._learns = backend, autograd.learns(call)
        self._kernels = jit.Kernels(self._learns) if backend == "jit" else None
        # A plan outlives the tensors of its call, and a block mask may be edited after the call.
        self._problem: Problem = problem.without_captures()
        self._blocks: BlockRows | None = None if mask is None else mask.rows(*call.placed.lengths)

    def run(self, call: Call) -> Result:
        """Compute a call. `out` has the dtype of the query."""
        if self.backend == "inductor":
            return inductor.attention(call)
        result = autograd.recorded(self, call) if self._learns else self.forward(call)
        dtype = call.placed.query.dtype
        if result.out.dtype == dtype:
            return result
        return result._replace(out=result.out.to(dtype))

    def forward(self, call: Call) -> Result:
        """The forward pass, without a record for autograd."""
        found = None if self._kernels is None else self._kernels.forward(call)
        request = call.request
        if found is None:
            with torch.no_grad():
                return eager.forward(call.problem, call.placed, request.sink, request.aux)
        if config().check:
            recheck(call, found)
        return found

    def backward(self, placed: Placed, wanted: Wanted, above: Above) -> Gradients:
        """The backward pass, of mods that load from `wanted.captures`."""
        problem, found = self._problem.with_captures(wanted.captures), None
        if self._kernels is not None:
            found = self._kernels.backward(problem, placed, self._blocks, wanted, above)
        return found or eager.backward(problem, placed, self._blocks, wanted, above)
