"""The specification: attention written down once, in the plainest torch.

Only tests import this. Every question of meaning is answered here, and every other path is
compared with it. Mods are evaluated as the user wrote them, by torch.vmap, never through our
tracer. Whole score matrices are made; nothing here is meant to be fast.

- A row that may attend nowhere gives 0, log-sum-exp -inf, gradient 0. Never NaN.
- A key is read by a row where the mask holds and its score is above -inf. What is not finite in a
  key or value reaches exactly the rows that read it.
- Scores are scaled before the score_mod sees them, in float32 (float64 for float64 inputs).
- Query head h reads key head h // (Hq // Hkv).
- Blocks that a block mask does not list do not exist; its mask_mod is not asked in full blocks.
- A sink is one more logit in each row's softmax, with no value. It is part of the log-sum-exp, so
  that probability = exp(score - lse) holds with and without it; it is no part of the maximum.
- Dropout drops probabilities after the softmax and scales the kept ones by 1 / (1 - p).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention.flex_attention import BlockMask


class Reference(NamedTuple):
    """out [B, Hq, L, Dv], lse and max_scores [B, Hq, L], probabilities [B, Hq, L, S]."""

    out: Tensor
    lse: Tensor
    max_scores: Tensor
    probabilities: Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
    q_start: int = 0,
) -> Reference:
    """Attention of query [B, Hq, L, D] over key [B or 1, Hkv, S, D] and value [B or 1, Hkv, S, Dv].

    `keep` [B, Hq, L, S] says what dropout keeps.
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    group = query.shape[1] // key.shape[1]
    batch = query.shape[0]
    keys, values = (x.repeat_interleave(group, 1).expand(batch, -1, -1, -1) for x in (key, value))
    shape = (*query.shape[:3], key.shape[2])
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale

    mask = torch.ones(shape, dtype=torch.bool)
    if mask_mod is not None:
        mask = mask & evaluate(mask_mod, shape, q_start=q_start)
    if block_mask is not None:
        mask = mask & block_mask_elements(block_mask, shape)

    scores = scale * _dot(query.to(dtype), keys.to(dtype), mask)
    if score_mod is not None:
        scores = evaluate(score_mod, shape, scores, q_start=q_start).to(dtype)
    scores = torch.where(mask, scores, -math.inf)
    read = scores != -math.inf

    logits = scores
    if sink is not None:
        column = sink.to(dtype).view(1, -1, 1, 1).expand(*shape[:3], 1)
        logits = torch.cat([scores, column], dim=-1)
    empty = (logits == -math.inf).all(-1, keepdim=True) if logits.shape[-1] else ~read.any(-1, True)
    safe = torch.where(empty, 0.0, logits)
    lse = torch.where(empty.squeeze(-1), -math.inf, torch.logsumexp(safe, -1))
    probabilities = torch.where(empty, 0.0, torch.softmax(safe, -1))[..., : shape[3]]
    if keep is not None:
        factor = 0.0 if dropout_p == 1.0 else 1.0 / (1.0 - dropout_p)
        probabilities = torch.where(keep, probabilities * factor, 0.0)
    out = _weighted_sum(probabilities, values, read, query.dtype)
    peak = scores.amax(-1) if shape[3] else scores.new_full(shape[:3], -math.inf)
    return Reference(out, lse, peak, probabilities)


def evaluate(
    mod: Callable[..., Any],
    shape: tuple[int, ...],
    scores: Tensor | None = None,
    *,
    q_start: int = 0,
) -> Tensor:
    """A mod as PyTorch evaluates it: mapped over b, h, q_idx and kv_idx."""
    if 0 in shape:
        return torch.empty(shape, dtype=torch.bool) if scores is None else scores

    def one(*args: Tensor) -> Tensor:
        result = mod(*args)
        return result if isinstance(result, Tensor) else torch.tensor(result)

    prefix = () if scores is None else (0,)
    function: Callable[..., Any] = one
    for axis in (3, 2, 1, 0):
        dims = tuple(0 if other == axis else None for other in range(4))
        function = torch.vmap(function, in_dims=(*prefix, *dims))
    starts = (0, 0, q_start, 0)
    indices = [torch.arange(at, at + size) for at, size in zip(starts, shape, strict=True)]
    with TransformGetItemToIndex():
        result: Tensor = function(*(() if scores is None else (scores,)), *indices)
    return result


def block_mask_elements(block_mask: BlockMask, shape: tuple[int, ...]) -> Tensor:
    """The elements that a block mask allows, block by listed block: [B, Hq, L, S]."""
    allowed = torch.zeros(shape, dtype=torch.bool)
    holds = evaluate(block_mask.mask_mod, shape)
    rows, columns = block_mask.BLOCK_SIZE
    lists = [(block_mask.kv_num_blocks, block_mask.kv_indices, False)]
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        lists.append((block_mask.full_kv_num_blocks, block_mask.full_kv_indices, True))
    for counts, indices, full in lists:
        for b, h in ((b, h) for b in range(shape[0]) for h in range(shape[1])):
            mask_b, mask_h = min(b, counts.shape[0] - 1), min(h, counts.shape[1] - 1)
            for row in range(min(counts.shape[2], -(-shape[2] // rows))):
                for block in indices[mask_b, mask_h, row, : counts[mask_b, mask_h, row]].tolist():
                    at = (
                        b,
                        h,
                        slice(row * rows, min((row + 1) * rows, shape[2])),
                        slice(block * columns, min((block + 1) * columns, shape[3])),
                    )
                    allowed[at] = True if full else (allowed[at] | holds[at])
    return allowed


def _dot(query: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    """query @ keys^T, in which a key that is not finite is seen only where the mask holds."""
    if bool(torch.isfinite(keys).all()) and bool(torch.isfinite(query).all()):
        return query @ keys.transpose(-2, -1)
    wide = mask.unsqueeze(-1)
    seen_keys = torch.where(wide, keys.unsqueeze(-3), 0.0)
    seen_query = torch.where(wide, query.unsqueeze(-2), 0.0)
    return (seen_query * seen_keys).sum(-1)


def _weighted_sum(
    probabilities: Tensor, values: Tensor, read: Tensor, dtype: torch.dtype
) -> Tensor:
    """probabilities @ values in `dtype`, in which a value is seen only by the rows that read it."""
    if bool(torch.isfinite(values).all()):
        return probabilities.to(dtype) @ values.to(dtype)
    seen = torch.where(read.unsqueeze(-1), values.to(dtype).unsqueeze(-3), 0.0)
    weights = torch.where(read, probabilities.to(dtype), 0.0)
    return (weights.unsqueeze(-1) * seen).sum(-2)
