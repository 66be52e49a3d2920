"""merge_over_ranks(): each rank has results over its own keys; all get the result over all keys."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from quire.api.merge import merge_attention
from quire.distributed.group import TIMEOUT, RankGroup
from quire.errors import ShapeError


def merge_over_ranks(
    out: Tensor,
    lse: Tensor,
    *,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    timeout: timedelta = TIMEOUT,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of attention over the keys of all ranks, the same bits on every rank.

        part = Dense(key, value, start=first)  # this rank's part of a cache; or pages of it
        out, aux = attention(query, part, mask=causal, q_start=n, return_aux=AuxRequest(lse=True))
        out, lse = merge_over_ranks(out, aux.lse)

    For decoding, with a cache whose parts are on several ranks: every rank has the same queries,
    and one small message per step takes the place of the keys. `merge_attention` merges results,
    rank 0 first, in float32, and they are rounded once. A rank without keys has lse -inf. There is
    no gradient.
    """
    group = RankGroup.of(mesh, timeout)
    error = None
    if out.shape[:-1] != lse.shape:
        error = ShapeError(
            f"lse must have shape {list(out.shape[:-1])}, since out has {list(out.shape)}, but has "
            f"{list(lse.shape)}. Give what attention returned."
        )
    group.agree({"shape of out": [*out.shape], "dtype": str(out.dtype)}, error)
    parts = zip(*(group.gather(x.detach().contiguous()) for x in (out, lse)), strict=True)
    total, total_lse = next(parts)
    total = total.to(lse.dtype)
    for other, other_lse in parts:
        total, total_lse = merge_attention(total, total_lse, other.to(lse.dtype), other_lse)
    return total.to(out.dtype), total_lse
