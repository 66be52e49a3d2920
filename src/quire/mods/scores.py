"""Changes of scores: biases by position, learned or not, and a soft limit.

`score` comes scaled. Tables are captured as they are given: one that requires grad is trained.
Their drawings show what is added to the scores of head 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.arguments import finite_positive, tensor_of, whole_number
from quire.errors import ShapeError
from quire.mods.compose import ScoreMod, named


def alibi(H: int, slopes: Tensor | None = None) -> ScoreMod:
    """Lower a score in proportion to the distance, each of the `H` heads by a slope of its own.

    alibi(8):

         0.0  0.5  1.0  1.5
        -0.5  0.0  0.5  1.0
        -1.0 -0.5  0.0  0.5
        -1.5 -1.0 -0.5  0.0

    Made for causal masks: scores of later keys, were they shown, would rise. The slopes are
    2^(-8 / H), 2^(-16 / H), ..., 2^-8, which is the paper's choice where H is a power of two; give
    `slopes` [H] for others, or to learn them.
    """
    H = whole_number("H", H, minimum=1, advice="Give the number of query heads.")
    if slopes is None:
        slopes = torch.tensor([2.0 ** (-8 * (head + 1) / H) for head in range(H)])
    advice = "Give a float tensor with one slope for each head."
    slope = tensor_of("floats", "slopes", slopes, ranks=(1,), advice=advice)
    if len(slope) != H:
        raise ShapeError(
            f"slopes must have one entry for each of {H} heads, got {len(slope)}. {advice}"
        )

    @named(f"alibi_{H}")
    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + slope[h] * (kv_idx - q_idx)

    return mod


def softcap(soft_cap: float) -> ScoreMod:
    """Keep every score between -`soft_cap` and `soft_cap`, and small ones as they are (Gemma 2).

    softcap(2) of scores -8 -2 -1 -0.1 0 0.1 1 2 8:

        -2.0 -1.5 -0.9 -0.1  0.0  0.1  0.9  1.5  2.0
    """
    advice = "Give the score that none may pass, or leave the mod out."
    soft_cap = finite_positive("soft_cap", soft_cap, advice=advice)

    @named(f"softcap_{soft_cap:g}")
    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return soft_cap * torch.tanh(score / soft_cap)

    return mod


def relative_position_bias(
    table: Tensor, bidirectional: bool = True, max_distance: int = 128
) -> ScoreMod:
    """Add a learned bias for the distance, in buckets that widen as it grows (T5).

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

    `table` is [num_buckets, H], the weight of a T5 model's `relative_attention_bias`; the drawings
    number its entries. Half of the buckets are for later keys; with `bidirectional=False`, as in a
    decoder, none are, and later keys share bucket 0. T5 does not scale its scores: give `scale=1`.
    """
    advice = "Give a float tensor [num_buckets, H]."
    bias = tensor_of("floats", "table", table, ranks=(2,), advice=advice)
    num_buckets = len(bias)
    _check_buckets(num_buckets, bidirectional, advice)
    max_exact = _max_exact(num_buckets, bidirectional)
    max_distance = whole_number(
        "max_distance",
        max_distance,
        minimum=max_exact + 1,
        advice=f"With {num_buckets} buckets, distances below {max_exact} have one each.",
    )
    # From max_distance on there is one bucket, so the formula is needed at a few distances only.
    # Looking them up gives the same integers whatever rounding a logarithm has where the mod runs.
    reach = torch.arange(-max_distance, max_distance + 1, device=bias.device)
    bucket = _bucket(reach, num_buckets, bidirectional, max_distance).int()

    side = "" if bidirectional else "_causal"

    @named(f"relative_position_bias_{num_buckets}_{max_distance}{side}")
    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = torch.clamp(kv_idx - q_idx, min=-max_distance, max=max_distance)
        return score + bias[bucket[distance + max_distance], h]

    return mod


def table_bias(table: Tensor) -> ScoreMod:
    """Add a bias for each pair of positions: [L, S], [H, L, S] or [B, H, L, S].

    table_bias(torch.tensor([[0.0, 1.5, 2.0], [-1.0, 0.0, 0.5]])):

         0.0  1.5  2.0
        -1.0  0.0  0.5

    A dimension of size 1 serves all heads, batches or positions, as in PyTorch's broadcasting.
    """
    bias = tensor_of(
        "floats",
        "table",
        table,
        ranks=(2, 3, 4),
        advice="Give a float tensor [L, S], [H, L, S] or [B, H, L, S].",
    )

    @named(f"table_bias_{'x'.join(map(str, bias.shape))}")
    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        place = (b, h, q_idx, kv_idx)[-bias.ndim :]
        entry = tuple(0 if n == 1 else idx for idx, n in zip(place, bias.shape, strict=True))
        return score + bias[entry]

    return mod


def distance_bias(table: Tensor) -> ScoreMod:
    """Add a learned bias for the distance, one for each up to n on both sides.

    distance_bias(torch.tensor([9.0, 1.0, 0.0, 3.0, 4.0])):

         0.0  1.0  9.0  9.0
         3.0  0.0  1.0  9.0
         4.0  3.0  0.0  1.0
         4.0  4.0  3.0  0.0

    `table` is [2n + 1] or, for each head, [H, 2n + 1]. Its middle entry is for the query's own
    position, the entry d places later for the key d positions before the query. Keys farther than
    n share the entry of the farthest.
    """
    advice = "Give a float tensor [2n + 1] or [H, 2n + 1], distance 0 in the middle."
    bias = tensor_of("floats", "table", table, ranks=(1, 2), advice=advice)
    if bias.shape[-1] % 2 == 0:
        raise ShapeError(
            "table must have an odd number of entries, as many for later keys as for earlier ones, "
            f"got {bias.shape[-1]}. {advice}"
        )
    reach = bias.shape[-1] // 2

    @named(f"distance_bias_{reach}")
    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        entry = torch.clamp(q_idx - kv_idx, min=-reach, max=reach) + reach
        return score + (bias[entry] if bias.ndim == 1 else bias[h, entry])

    return mod


def _check_buckets(num_buckets: int, bidirectional: bool, advice: str) -> None:
    minimum = 4 if bidirectional else 2
    if num_buckets < minimum:
        raise ShapeError(
            f"table must have at least {minimum} buckets, so that some are exact and some wide, "
            f"got {num_buckets}. {advice}"
        )


def _max_exact(num_buckets: int, bidirectional: bool) -> int:
    """The first distance that shares a bucket with the next."""
    return num_buckets // (4 if bidirectional else 2)


def _bucket(distance: Tensor, num_buckets: int, bidirectional: bool, max_distance: int) -> Tensor:
    """T5's bucket of each `distance` from query to key: exact when near, logarithmic when far."""
    max_exact = _max_exact(num_buckets, bidirectional)
    if bidirectional:
        num_buckets = num_buckets // 2
        first, away = (distance > 0) * num_buckets, distance.abs()
    else:
        first, away = torch.zeros_like(distance), (-distance).clamp(min=0)
    # float32, and in this order: at the edge of a bucket the rounding decides, as in T5 itself.
    ratio = (away.clamp(min=max_exact).float() / max_exact).log()
    step = ratio / math.log(max_distance / max_exact) * (num_buckets - max_exact)
    wide = (max_exact + step.long()).clamp(max=num_buckets - 1)
    return first + torch.where(away < max_exact, away, wide)
