"""The derivative in a direction on compiled kernels: the backward kernel with other operands.

The half of the backward kernel that gives the gradient of the query computes

    grad_query = scale * sum over keys of P * (values . grad_out) * d score * keys

With K' and Q' the tangents of keys and queries, values = [K, K'] and grad_out = [Q', Q] make the
product the tangent of the raw score. With keys = [K, V, 1] and queries = [Q, 0, 0] the scores are
the same, and the columns of V and 1 hold the sums that out' and lse' need (see
`backends/eager/tangent.py`). Tangents of values are those of a forward pass over V'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.block_mask import BlockRows
from quire.memory import Dense, One, Placed
from quire.request import Call, Problem, Request
from quire.results import Above, Result, Tangents, Wanted
from quire.runtime.backward import BackwardPlan, Pass
from quire.runtime.forward import ForwardPlan


class Sums(NamedTuple):
    """Sums over keys, with S' the tangent of a score: P S' V [B, Hq, L, Dv] and P S' [B, Hq, L]."""

    out: Tensor
    mean: Tensor


def tangent(
    problem: Problem, placed: Placed, blocks: BlockRows | None, above: Above, along: Tangents
) -> Result | None:
    """Return the tangents of out and lse; None if the eager backend has to compute them.

    That is so for tangents of captured tensors and of a sink, int8 pages, numbers that are not
    finite, and an lse too far from 0.
    """
    others = (along.sink, *along.captures)
    if any(x is not None for x in others) or placed.key_scale is not None:
        return None
    moved = None
    if along.value is not None:
        moved = _values(problem, placed.on(placed.query, placed.key, along.value), above.sink)
        if moved is None:
            return None
    if along.query is None and along.key is None:
        return None if moved is None else Result(moved, torch.zeros_like(above.lse))
    sums = _sums(problem, placed, blocks, above, along)
    if sums is None:
        return None
    out = torch.addcmul(sums.out, sums.mean.unsqueeze(-1), above.out, value=-1)
    return Result(out if moved is None else out + moved, sums.mean)


def _values(problem: Problem, placed: Placed, sink: Tensor | None) -> Tensor | None:
    """Return P V', the forward pass over other values."""
    request = Request(placed.query, Dense(placed.key, placed.value), sink=sink)
    call = Call(request, placed, problem, problem.captures)
    found = ForwardPlan.of(call, learns=True).run(call)
    return None if found is None else found.out


def _sums(
    problem: Problem, placed: Placed, blocks: BlockRows | None, above: Above, along: Tangents
) -> Sums | None:
    """Return the sums over keys. Dropout drops P S' V, but not P S', which is summed once more."""
    whole = _columns(problem, placed, blocks, above, along, values=[placed.value])
    if whole is None:
        return None
    *columns, mean = whole.unbind(-1)
    if problem.dropout is not None:
        kept = _columns(problem._replace(dropout=None), placed, blocks, above, along, values=[])
        if kept is None:
            return None
        mean = kept.squeeze(-1)
    return Sums(whole[..., : len(columns)], mean)


def _columns(
    problem: Problem,
    placed: Placed,
    blocks: BlockRows | None,
    above: Above,
    along: Tangents,
    values: Sequence[Tensor],
) -> Tensor | None:
    """Return the sums over keys of P S' times the columns of `values` and a column of ones."""
    dtype = placed.dtype
    query, key = (x.to(dtype) for x in placed.operands[:2])
    ones = key.new_ones((*key.shape[:-1], 1))
    keys = torch.cat([key, *(x.to(dtype) for x in values), ones], -1)
    width = query.shape[-1]
    queries = torch.nn.functional.pad(query, (0, keys.shape[-1] - width))
    pairs = []
    if along.query is not None:
        pairs.append((along.query.to(dtype), key))
    if along.key is not None:
        pairs.append((query, along.key.to(dtype)))
    moved, others = pairs[0]
    if len(pairs) > 1:
        moved, others = (torch.cat(side, -1) for side in zip(*pairs, strict=True))
    operands = placed.on(queries, keys, others)
    results = Result(above.out, above.lse)
    plan = BackwardPlan.of(problem, operands, blocks, (), results)
    captures = (*problem.captures, *plan.added_captures)
    wanted = Wanted(True, False, False, problem.captures, ())
    found = QuerySums(
        plan, operands, captures, wanted, Above(above.out, above.lse, moved, None)
    ).compute()
    return None if found is None else found[..., width:]


class QuerySums(Pass):
    """A backward pass for the gradient of the query alone, with delta = 0."""

    def compute(self) -> Tensor | None:
        """Return it; None if a number is not finite, or lse too far from 0."""
        placed = self.placed
        new = torch.empty_like if isinstance(placed.rows, One) else torch.zeros_like
        query = new(placed.query)
        flags = torch.zeros(2, dtype=torch.int64, device="cpu")
        fields = self._fields(query, None, None, self.above.lse)
        fields |= {"delta": 0, "odd": flags.data_ptr()}
        for part in self._rounds():
            self._launch(fields, part)
        return None if bool(flags.any()) else query
