"""Changes of scores: biases by position, learned or not, and a soft limit.

A score_mod is given the score after scaling. A table is not copied, so a table that requires grad
is trained. The drawings show what is added to the scores of head 0. Each class `Learned...` is the
mod of that name as a module, with its table as a parameter.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor, nn

from quire.checks.arguments import finite_positive, tensor_of, whole_number
from quire.errors import ShapeError
from quire.mods.compose import ScoreChange, ScoreModule

Device: TypeAlias = torch.device | str | None
Dtype: TypeAlias = torch.dtype | None


def alibi(H: int, slopes: Tensor | None = None) -> ScoreChange:
    """Lower a score by distance times slope. Each of the `H` heads has its own slope (ALiBi).

    alibi(8):

         0.0  0.5  1.0  1.5
        -0.5  0.0  0.5  1.0
        -1.0 -0.5  0.0  0.5
        -1.5 -1.0 -0.5  0.0

    Use it with a causal mask: it would raise the scores of later keys. The slopes are 2^(-8 / H),
    2^(-16 / H), ..., 2^-8, as in the paper if H is a power of two. Give a float tensor `slopes` [H]
    for other slopes, or to learn them.
    """
    H = whole_number("H", H, minimum=1, advice="Give the number of query heads.")
    if slopes is None:
        slopes = _slopes(H)
    advice = "Give a float tensor with one slope for each head."
    slope = tensor_of("floats", "slopes", slopes, ranks=(1,), advice=advice)
    if len(slope) != H:
        raise ShapeError(
            f"slopes must have one entry for each of {H} heads, but has {len(slope)}. {advice}"
        )
    return ScoreChange(_alibi, f"alibi_{H}", slopes=slope)


def _alibi(
    score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, slopes: Tensor
) -> Tensor:
    return score + slopes[h] * (kv_idx - q_idx)


class LearnedAlibi(ScoreModule):
    """`alibi` with a parameter `slopes` [H], which starts with the slopes of `alibi(num_heads)`."""

    def __init__(self, num_heads: int, *, device: Device = None, dtype: Dtype = None) -> None:
        super().__init__()
        num_heads = _num_heads(num_heads)
        self.slopes = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the slopes to their first values."""
        with torch.no_grad():
            self.slopes.copy_(_slopes(len(self.slopes)))

    def forward(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return the new score."""
        return _alibi(score, b, h, q_idx, kv_idx, slopes=self.slopes)

    def extra_repr(self) -> str:
        """The sizes that `repr` shows."""
        return f"num_heads={len(self.slopes)}"


def softcap(soft_cap: float) -> ScoreChange:
    """Limit scores to between -`soft_cap` and `soft_cap`. Small ones hardly change (Gemma 2).

    softcap(2) of scores -8 -2 -1 -0.1 0 0.1 1 2 8:

        -2.0 -1.5 -0.9 -0.1  0.0  0.1  0.9  1.5  2.0
    """
    advice = "Give the largest score that is allowed, or leave the mod out."
    soft_cap = finite_positive("soft_cap", soft_cap, advice=advice)
    return ScoreChange(_softcap, f"softcap_{soft_cap:g}", soft_cap=soft_cap)


def _softcap(
    score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, soft_cap: float
) -> Tensor:
    return soft_cap * torch.tanh(score / soft_cap)


def relative_position_bias(
    table: Tensor, bidirectional: bool = True, max_distance: int = 128
) -> ScoreChange:
    """Add a bias for the distance. Large distances share an entry of `table` (T5).

    relative_position_bias(torch.arange(8.0)[:, None], max_distance=9):

         0.0  5.0  6.0  6.0  6.0  7.0
         1.0  0.0  5.0  6.0  6.0  6.0
         2.0  1.0  0.0  5.0  6.0  6.0
         2.0  2.0  1.0  0.0  5.0  6.0
         2.0  2.0  2.0  1.0  0.0  5.0
         3.0  2.0  2.0  2.0  1.0  0.0

    relative_position_bias(torch.arange(4.0)[:, None], bidirectional=False, max_distance=4):

         0.0  0.0  0.0  0.0  0.0
         1.0  0.0  0.0  0.0  0.0
         2.0  1.0  0.0  0.0  0.0
         3.0  2.0  1.0  0.0  0.0
         3.0  3.0  2.0  1.0  0.0

    `table` [num_buckets, H] is the weight of a T5 model's `relative_attention_bias`. Half of the
    buckets are for later keys. With `bidirectional=False`, as in a decoder, all later keys share
    bucket 0. T5 does not scale its scores, so call attention with `scale=1`.
    """
    advice = "Give a float tensor [num_buckets, H]."
    bias = tensor_of("floats", "table", table, ranks=(2,), advice=advice)
    num_buckets = len(bias)
    max_distance = _check_buckets(num_buckets, bidirectional, max_distance, advice)
    buckets = _buckets(num_buckets, bidirectional, max_distance, bias.device)
    side = "" if bidirectional else "_causal"
    name = f"relative_position_bias_{num_buckets}_{max_distance}{side}"
    fields = {"table": bias, "buckets": buckets, "max_distance": max_distance}
    return ScoreChange(_relative_position_bias, name, **fields)


def _relative_position_bias(
    score: Tensor, *place: Tensor, table: Tensor, buckets: Tensor, max_distance: int
) -> Tensor:
    _, h, q_idx, kv_idx = place
    distance = torch.clamp(kv_idx - q_idx, min=-max_distance, max=max_distance)
    return score + table[buckets[distance + max_distance], h]


class LearnedRelativePositionBias(ScoreModule):
    """`relative_position_bias` with a parameter `table` [num_buckets, H], which starts as 0."""

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        bidirectional: bool = True,
        max_distance: int = 128,
        *,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        num_heads, advice = _num_heads(num_heads), "Give how many biases each head has."
        num_buckets = whole_number("num_buckets", num_buckets, minimum=1, advice=advice)
        max_distance = _check_buckets(num_buckets, bidirectional, max_distance, advice)
        self.bidirectional, self.max_distance = bidirectional, max_distance
        self.table = nn.Parameter(torch.zeros(num_buckets, num_heads, device=device, dtype=dtype))
        # Not a buffer: after `to_empty` its values would be lost, and no checkpoint has them.
        self._buckets = _buckets(num_buckets, bidirectional, max_distance, torch.device("cpu"))

    def reset_parameters(self) -> None:
        """Set the table to 0."""
        nn.init.zeros_(self.table)

    def forward(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return the new score."""
        tables = {"table": self.table, "buckets": self._buckets.to(self.table.device)}
        reach = self.max_distance
        return _relative_position_bias(score, b, h, q_idx, kv_idx, **tables, max_distance=reach)

    def extra_repr(self) -> str:
        """The sizes that `repr` shows."""
        num_buckets, num_heads = self.table.shape
        return (
            f"num_heads={num_heads}, num_buckets={num_buckets}, "
            f"bidirectional={self.bidirectional}, max_distance={self.max_distance}"
        )


def table_bias(table: Tensor) -> ScoreChange:
    """Add `table` [L, S], [H, L, S] or [B, H, L, S] to the scores.

    table_bias(torch.tensor([[0.0, 1.5, 2.0], [-1.0, 0.0, 0.5]])):

         0.0  1.5  2.0
        -1.0  0.0  0.5

    A dimension of size 1 is used for all heads, batches or positions, as in broadcasting.
    """
    advice = "Give a float tensor [L, S], [H, L, S] or [B, H, L, S]."
    bias = tensor_of("floats", "table", table, ranks=(2, 3, 4), advice=advice)
    return ScoreChange(_table_bias, f"table_bias_{'x'.join(map(str, bias.shape))}", table=bias)


def _table_bias(score: Tensor, *place: Tensor, table: Tensor) -> Tensor:
    sizes = zip(place[-table.ndim :], table.shape, strict=True)
    return score + table[tuple(0 if size == 1 else idx for idx, size in sizes)]


class LearnedTableBias(ScoreModule):
    """`table_bias` with a parameter `table` of the given sizes, which starts as 0."""

    def __init__(self, *shape: int, device: Device = None, dtype: Dtype = None) -> None:
        super().__init__()
        advice = "Give the sizes L, S or H, L, S or B, H, L, S."
        sizes = [whole_number("a size", size, minimum=1, advice=advice) for size in shape]
        if not 2 <= len(sizes) <= 4:
            raise ShapeError(f"table must be 2-D or 3-D or 4-D, but has sizes {sizes}. {advice}")
        self.table = nn.Parameter(torch.zeros(sizes, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Set the table to 0."""
        nn.init.zeros_(self.table)

    def forward(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return the new score."""
        return _table_bias(score, b, h, q_idx, kv_idx, table=self.table)

    def extra_repr(self) -> str:
        """The sizes that `repr` shows."""
        return ", ".join(map(str, self.table.shape))


def distance_bias(table: Tensor) -> ScoreChange:
    """Add a bias for the distance, with an entry of `table` for each distance from -n to n.

    distance_bias(torch.tensor([9.0, 1.0, 0.0, 3.0, 4.0])):

         0.0  1.0  9.0  9.0
         3.0  0.0  1.0  9.0
         4.0  3.0  0.0  1.0
         4.0  4.0  3.0  0.0

    `table` is [2n + 1], or [H, 2n + 1] with a row for each head. The middle entry is for the
    query's own position; the entry d places after it is for the key d positions before the query.
    Keys that are farther away than n use the first or the last entry.
    """
    advice = "Give a float tensor [2n + 1] or [H, 2n + 1], distance 0 in the middle."
    bias = tensor_of("floats", "table", table, ranks=(1, 2), advice=advice)
    if bias.shape[-1] % 2 == 0:
        raise ShapeError(
            "table must have an odd number of entries, as many for later keys as for earlier ones, "
            f"but has {bias.shape[-1]}. {advice}"
        )
    reach = bias.shape[-1] // 2
    return ScoreChange(_distance_bias, f"distance_bias_{reach}", table=bias, reach=reach)


def _distance_bias(score: Tensor, *place: Tensor, table: Tensor, reach: int) -> Tensor:
    # `reach` is given, since reading the shape of a tensor would dominate the time of a trace.
    _, h, q_idx, kv_idx = place
    entry = torch.clamp(q_idx - kv_idx, min=-reach, max=reach) + reach
    return score + (table[entry] if table.ndim == 1 else table[h, entry])


class LearnedDistanceBias(ScoreModule):
    """`distance_bias` with a parameter `table` [H, 2 * reach + 1], which starts as 0."""

    def __init__(
        self, num_heads: int, reach: int, *, device: Device = None, dtype: Dtype = None
    ) -> None:
        super().__init__()
        num_heads, advice = _num_heads(num_heads), "Give the largest distance with its own entry."
        self.reach = whole_number("reach", reach, minimum=0, advice=advice)
        width = 2 * self.reach + 1
        self.table = nn.Parameter(torch.zeros(num_heads, width, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Set the table to 0."""
        nn.init.zeros_(self.table)

    def forward(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return the new score."""
        return _distance_bias(score, b, h, q_idx, kv_idx, table=self.table, reach=self.reach)

    def extra_repr(self) -> str:
        """The sizes that `repr` shows."""
        return f"num_heads={len(self.table)}, reach={self.reach}"


def _num_heads(num_heads: int) -> int:
    return whole_number("num_heads", num_heads, minimum=1, advice="Give the heads of the query.")


def _slopes(num_heads: int) -> Tensor:
    """The slopes of the paper [num_heads], from 2^(-8 / num_heads) down to 2^-8."""
    return torch.tensor([2.0 ** (-8 * (head + 1) / num_heads) for head in range(num_heads)])


def _check_buckets(num_buckets: int, bidirectional: bool, max_distance: int, advice: str) -> int:
    """Return `max_distance`, after checking that it is large enough for `num_buckets`."""
    minimum = 4 if bidirectional else 2
    if num_buckets < minimum:
        raise ShapeError(
            f"table must have at least {minimum} buckets, so that some are for one distance and "
            f"some for many, but has {num_buckets}. {advice}"
        )
    max_exact = _max_exact(num_buckets, bidirectional)
    return whole_number(
        "max_distance",
        max_distance,
        minimum=max_exact + 1,
        advice=f"With {num_buckets} buckets, each distance below {max_exact} has its own.",
    )


def _max_exact(num_buckets: int, bidirectional: bool) -> int:
    """The smallest distance that shares a bucket with the next one."""
    return num_buckets // (4 if bidirectional else 2)


def _buckets(
    num_buckets: int, bidirectional: bool, max_distance: int, device: torch.device
) -> Tensor:
    """T5's bucket of every distance `kv_idx - q_idx` from -max_distance to max_distance: int32.

    Each small distance has its own bucket. For larger ones the buckets follow the logarithm, and
    beyond `max_distance` all share the last bucket. The mod looks buckets up in this table, so that
    they do not depend on how a kernel rounds a logarithm.
    """
    distance = torch.arange(-max_distance, max_distance + 1, device=device)
    max_exact = _max_exact(num_buckets, bidirectional)
    if bidirectional:
        num_buckets = num_buckets // 2
        first, away = (distance > 0) * num_buckets, distance.abs()
    else:
        first, away = torch.zeros_like(distance), (-distance).clamp(min=0)
    # In float32 and in this order, so that rounding at the edge of a bucket is as in T5 itself.
    ratio = (away.clamp(min=max_exact).float() / max_exact).log()
    step = ratio / math.log(max_distance / max_exact) * (num_buckets - max_exact)
    wide = (max_exact + step.long()).clamp(max=num_buckets - 1)
    return (first + torch.where(away < max_exact, away, wide)).int()
