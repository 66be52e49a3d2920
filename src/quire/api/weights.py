"""The probabilities of chosen rows, for `AuxRequest(weights=rows)`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.backends.eager.weights import weights
from quire.errors import ArgumentError, OptionError
from quire.plans import over_ranks
from quire.request import Request, call_of
from quire.support.dynamo import never_traced
from quire.support.torch_private import is_transformed


@never_traced
def weights_of(request: Request, rows: Sequence[int] | Tensor) -> Tensor:
    """Return the probabilities of some rows of the query, before dropout; without gradients.

    They are [B, Hq, rows, S], or [rows, Hq, S] for a query [total, Hq, D].
    """
    if over_ranks.get() is not None:
        raise OptionError(
            "AuxRequest.weights must be None inside of context_parallel, where each rank has a "
            "part of the keys, but rows are given. Gather the keys, and ask outside of it."
        )
    if is_transformed():
        raise OptionError(
            "AuxRequest.weights must be None inside of torch.func, but is given. Call attention "
            "again outside of it."
        )
    query = request.query
    is_packed = query.dim() == 3
    chosen = _checked(rows, query.shape[0] if is_packed else query.shape[2])
    call = call_of(request)
    placed = call.placed
    if placed.is_dense or is_packed:
        found = weights(call.problem, placed, request.sink, chosen)
        return found if placed.is_dense else found[0].transpose(0, 1)
    # The queries of all sequences lie one after the other.
    batch, _, q_len, _ = query.shape
    first = torch.arange(batch, device="cpu").unsqueeze(1) * q_len
    found = weights(call.problem, placed, request.sink, (first + chosen).flatten())
    shape = (query.shape[1], batch, len(chosen), found.shape[-1])
    return found[0].view(shape).transpose(0, 1)


def _checked(rows: object, length: int) -> Tensor:
    """Return the chosen rows of a query as a tensor [rows] of numbers from 0 on."""
    try:
        chosen = torch.as_tensor(list(rows) if isinstance(rows, range) else rows, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        chosen = torch.empty(0, 0, device="cpu")
    if chosen.dim() == 1 and len(chosen) == 0:
        return chosen.long()
    if chosen.dim() != 1 or chosen.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(
            f"AuxRequest.weights must be a list or a tensor of rows of the query, but is {rows!r}. "
            f"Give numbers such as [0, -1]."
        )
    low, high = int(chosen.min()), int(chosen.max())
    if low < -length or high >= length:
        raise ArgumentError(
            f"AuxRequest.weights must be rows of the query, from {-length} to {length - 1}, but "
            f"has {low if low < -length else high}. A row is counted in the query, not in the "
            f"sequence."
        )
    return torch.where(chosen < 0, chosen + length, chosen).long()
