"""merge_attention(): the result over all keys, from two results over different keys.

    (out_a, aux_a), (out_b, aux_b) = (
        attention(query, shard, mask=causal, q_start=0, return_aux=AuxRequest(lse=True))
        for shard in (Dense(key[:, :, :100], value[:, :, :100]),
                      Dense(key[:, :, 100:], value[:, :, 100:], start=100))
    )
    out, lse = merge_attention(out_a, aux_a.lse, out_b, aux_b.lse)

An output is a weighted mean of values, and exp(lse) is the sum of its weights. So the merged output
is the mean of both outputs, weighted by exp(lse).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire import checks
from quire.errors import DeviceError, DtypeError, RankError, ShapeError

LSE_DTYPES = (torch.float32, torch.float64)


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `(out, lse)` of attention over two sets of keys from the results over each set.

        out, lse = merge_attention(out_a, lse_a, out_b, lse_b)
        out, lse = merge_attention(out, lse, out_c, lse_c)    # and so on

    Both sides are results of `attention` for the same queries, with `AuxRequest(lse=True)`. `out_a`
    and `out_b` [B, Hq, L, Dv] come with `lse_a` and `lse_b` [B, Hq, L]; those of packed queries are
    [total, Hq, Dv] and [total, Hq]. The two sides must have no key in common. A sink counts as a
    key: give it to one call only.

    A row that reads no key on one side has lse -inf there, and the exact bits of the other side are
    returned. A row that reads no key on both sides is 0, with lse -inf. An lse of inf outweighs any
    finite lse. Two of them make the row NaN, and an lse of NaN makes row and lse NaN.

    `out` has the dtype of `out_a`. It is computed in float32, or in float64 if an argument is
    float64. In a long chain of bfloat16, begin with `out_a.float()`, so that only the end rounds.
    Results can be differentiated any number of times. A side that reads no key has gradient 0.
    """
    _check_sides(out_a, lse_a, out_b, lse_b)
    doubles = torch.float64 in (out_a.dtype, out_b.dtype, lse_a.dtype)
    working = torch.float64 if doubles else torch.float32
    out, lse = _merged(*(x.to(working) for x in (out_a, lse_a, out_b, lse_b)))
    return out.to(out_a.dtype), lse.to(lse_a.dtype)


def _merged(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    # `where` gives the branch that it does not take gradient 0. Times an infinite derivative that
    # is NaN, so the functions of lse are given 0 in rows that only one side reads.
    reads_a, reads_b = lse_a != -math.inf, lse_b != -math.inf
    shared = reads_a & reads_b
    a, b = torch.where(shared, lse_a, 0.0), torch.where(shared, lse_b, 0.0)
    lse = torch.where(reads_a, lse_a, torch.where(reads_b, lse_b, -math.inf))
    lse = torch.where(shared, torch.logaddexp(a, b), lse)

    reads_a, reads_b, shared = (x.unsqueeze(-1) for x in (reads_a, reads_b, shared))
    ahead = torch.where(shared, (lse_a - lse_b).unsqueeze(-1), 0.0)
    # The sigmoids are exp(lse_a - lse) and exp(lse_b - lse). They add up to 1, however large both.
    both = torch.sigmoid(ahead) * out_a + torch.sigmoid(-ahead) * out_b
    either = torch.where(reads_a, out_a, torch.where(reads_b, out_b, 0.0))
    return torch.where(shared, both, either), lse


def _check_sides(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    named = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    for name, tensor in named.items():
        checks.check_strided(name, tensor)
        checks.check_dtype(name, tensor, LSE_DTYPES if name.startswith("lse") else checks.DTYPES)
        if tensor.device != out_a.device:
            raise DeviceError(
                f"both sides must be on one device, but out_a is on {out_a.device} and {name} on "
                f"{tensor.device}. Move them with .to(device)."
            )
    if out_a.dim() == 0:
        raise RankError(
            "out_a must be [batch, heads, length, head_dim] or [total, heads, head_dim], but has "
            "shape []. Give what attention returned."
        )
    expected = {"out_b": out_a.shape, "lse_a": out_a.shape[:-1], "lse_b": out_a.shape[:-1]}
    for name, shape in expected.items():
        if named[name].shape != shape:
            raise ShapeError(
                f"{name} must have shape {list(shape)}, since out_a has {list(out_a.shape)}, but "
                f"has {list(named[name].shape)}. Give results for the same queries."
            )
    if lse_a.dtype != lse_b.dtype:
        raise DtypeError(
            f"lse_a and lse_b must have one dtype, but are {lse_a.dtype} and {lse_b.dtype}. "
            f"Convert one with .to(dtype)."
        )
