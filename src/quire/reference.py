"""The specification: attention written down once, in the plainest torch.

Only tests import this. Every question of meaning is answered here, and every other path is
compared with it. Mods are evaluated as the user wrote them, by torch.vmap, never through our
tracer. Whole score matrices are made; nothing here is meant to be fast.

- A mod means for each element what torch means on ordinary tensors. A Python number by which a
  bfloat16 or float16 is multiplied or divided is not rounded first, as it would be by torch.vmap.

- A row that may attend nowhere gives 0, log-sum-exp -inf, gradient 0. Never NaN.
- A key is read by a row where the mask holds and its score is above -inf. What is not finite in a
  key or value reaches exactly the rows that read it, forward and backward.
- A score_mod is asked where the mask holds and nowhere else, and its slope is that of the elements
  that are read: what it would do elsewhere, to a value, a gradient or an index, does not matter.
- Scores are scaled before the score_mod sees them, in float32 (float64 for float64 inputs). The
  log-sum-exp and the maximum have that dtype, the output that of the query.
- Query head h reads key head h // (Hq // Hkv). One batch of keys serves every batch of queries.
- Blocks that a block mask does not list do not exist; its mask_mod is not asked in full blocks. It
  counts from its own first row and column, wherever the queries and keys sit.
- A sink is one more logit in each row's softmax, with no value. It is part of the log-sum-exp, so
  that probability = exp(score - lse) holds with and without it; it is no part of the maximum.
- Dropout drops probabilities after the softmax and scales the kept ones by 1 / (1 - p).
- The slope of the log-sum-exp is the softmax, also where lse is so far from 0 that float32 holds
  no more of it than the largest score. Then n equal keys have the slope 1 / n each, not 1.
- A score of NaN makes its row NaN, and so does one of inf, though the log-sum-exp is inf.
- The argmax of a row is the absolute position of the key with the largest score after the mods, of
  equals the first; NaN counts as largest. It is -1 where nothing is read.
- The entropy of a row is -sum p ln p over the probabilities of its keys before dropout. A sink has
  its share of the probability and adds no term. It is 0 where nothing is read and has no gradient.
- The mass of a key is the sum of its probabilities over the queries of one query head, before
  dropout; a sink has its share of each row. A row that is NaN makes those keys NaN that it reads.
  It has no gradient.
- In ragged memory each sequence is attention of its own. `b` is its number, positions count from
  its first row, and its last query sits at its last key; with more queries than keys both begin at
  0. A row of the query that belongs to no sequence is a row that may attend nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from quire.ir.vectorise import AsOnTensors


class Reference(NamedTuple):
    """out [B, Hq, L, Dv], probabilities [B, Hq, L, S], key_mass [B, Hq, S], others [B, Hq, L]."""

    out: Tensor
    lse: Tensor
    max_scores: Tensor
    probabilities: Tensor
    argmax: Tensor
    entropy: Tensor
    key_mass: Tensor


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
    kv_start: int = 0,
    b_start: int = 0,
) -> Reference:
    """Attention of query [B, Hq, L, D] over key [B or 1, Hkv, S, D] and value [B or 1, Hkv, S, Dv].

    `keep` [B, Hq, L, S] says what dropout keeps. Positions begin at `q_start` and `kv_start`, and
    the numbers of sequences at `b_start`.
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    batch, q_heads, q_len, head_dim = query.shape
    keys, values = (
        x.repeat_interleave(q_heads // x.shape[1], 1).expand(batch, -1, -1, -1)
        for x in (key, value)
    )
    shape = (batch, q_heads, q_len, key.shape[2])
    starts = (b_start, 0, q_start, kv_start)
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    finite = all(bool(torch.isfinite(x.to(dtype)).all()) for x in (query, key, value))

    mask = torch.ones(shape, dtype=torch.bool)
    if block_mask is not None:
        mask = block_mask_elements(block_mask, shape)
    if mask_mod is not None:
        mask = evaluate(mask_mod, mask, starts, fill=False)

    def scores_where(live: Tensor) -> Tensor:
        scores = scale * _dot(query.to(dtype), keys.to(dtype), live, finite)
        if score_mod is not None:
            scores = evaluate(score_mod, live, starts, scores, fill=-math.inf)
        return torch.where(live, scores, -math.inf)

    with torch.no_grad():  # first what is read; what is not takes no part in any gradient
        read = scores_where(mask) != -math.inf
    scores = scores_where(read)

    logits = scores
    if sink is not None:
        column = sink.to(dtype).view(1, -1, 1, 1).expand(*shape[:3], 1)
        logits = torch.cat([scores, column], dim=-1)
    empty = (logits == -math.inf).all(-1, keepdim=True)
    safe = torch.where(empty, 0.0, logits)
    lse = torch.where(empty.squeeze(-1), -math.inf, _log_sum_exp(safe))
    probabilities = torch.where(read, torch.softmax(safe, -1)[..., : shape[3]], 0.0)
    entropy = torch.special.entr(probabilities.detach()).sum(-1)
    key_mass = probabilities.detach().sum(-2)
    if keep is not None:
        factor = 0.0 if dropout_p == 1.0 else 1.0 / (1.0 - dropout_p)
        probabilities = torch.where(keep, probabilities * factor, 0.0)
    out = _weighted_sum(probabilities.to(query.dtype), values.to(query.dtype), read, finite)
    lowest = scores.new_full((*shape[:3], 1), -math.inf)  # the maximum of no keys at all
    candidates = torch.cat([scores, lowest], -1).detach()
    max_scores = candidates.amax(-1)
    argmax = torch.where(read.any(-1), candidates.argmax(-1) + kv_start, -1)
    return Reference(out, lse, max_scores, probabilities, argmax, entropy, key_mass)


class RaggedReference(NamedTuple):
    """out [total, Hq, Dv], the others [total, Hq], of which key_mass has a row for each key."""

    out: Tensor
    lse: Tensor
    max_scores: Tensor
    argmax: Tensor
    entropy: Tensor
    key_mass: Tensor


def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_rows: list[range],
    kv_rows: list[range],
    *,
    q_starts: list[int] | None = None,
    **options: Any,
) -> RaggedReference:
    """Attention of query [total, Hq, D] over key and value [total, Hkv, D], one after the other.

    Sequence b has the rows `q_rows[b]` of the query and `kv_rows[b]` of key and value, and its
    first query the position `q_starts[b]`. The `options` are those of `attention`.
    """
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    numbers = query.new_full(query.shape[:2], -math.inf, dtype=wide)
    out = query.new_zeros(*query.shape[:2], value.shape[2])
    found = [out, numbers, numbers, numbers.new_full((), -1).long().expand_as(numbers)]
    found += [torch.zeros_like(numbers), numbers.new_zeros(len(key), query.shape[1])]
    for b, (rows, keys) in enumerate(zip(q_rows, kv_rows, strict=True)):
        q_start = max(0, len(keys) - len(rows)) if q_starts is None else q_starts[b]
        ends = [(rows.start, rows.stop), *2 * [(keys.start, keys.stop)]]
        operands = [
            tensor[first:last].transpose(0, 1).unsqueeze(0)
            for tensor, (first, last) in zip((query, key, value), ends, strict=True)
        ]
        one = attention(*operands, q_start=q_start, b_start=b, **options)
        parts = (one.out, one.lse, one.max_scores, one.argmax, one.entropy, one.key_mass)
        places = [torch.tensor(rows, dtype=torch.int64)] * 5
        places.append(torch.tensor(keys, dtype=torch.int64))
        found = [
            whole.index_copy(0, at, part[0].transpose(0, 1).to(whole.dtype))
            for whole, at, part in zip(found, places, parts, strict=True)
        ]
    return RaggedReference(*found)


def evaluate(
    mod: Callable[..., Any],
    where: Tensor,
    starts: tuple[int, ...],
    scores: Tensor | None = None,
    *,
    fill: float | bool,
) -> Tensor:
    """A mod, as on ordinary tensors, at each element where `where` holds; `fill` elsewhere."""
    at = where.nonzero(as_tuple=True)
    result = torch.full_like(where if scores is None else scores, fill)
    if at[0].numel() == 0:  # torch.vmap refuses to map over nothing
        return result

    def one(*args: Tensor) -> Tensor:
        value = mod(*args)
        return value if isinstance(value, Tensor) else torch.tensor(value)

    indices = [index + start for index, start in zip(at, starts, strict=True)]
    with AsOnTensors():
        values = torch.vmap(one)(*(() if scores is None else (scores[at],)), *indices)
    return result.index_put(at, values.to(result.dtype))


def block_mask_elements(block_mask: BlockMask, shape: tuple[int, ...]) -> Tensor:
    """The elements that a block mask allows: [B, Hq, L, S]."""
    full = torch.zeros(shape, dtype=torch.bool)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _listed(block_mask, block_mask.full_kv_num_blocks, block_mask.full_kv_indices, shape)
    partial = _listed(block_mask, block_mask.kv_num_blocks, block_mask.kv_indices, shape)
    return full | evaluate(block_mask.mask_mod, partial & ~full, (0, 0, 0, 0), fill=False)


def _listed(
    block_mask: BlockMask, counts: Tensor, indices: Tensor, shape: tuple[int, ...]
) -> Tensor:
    """The elements of the blocks that are in a list."""
    listed = torch.zeros(shape, dtype=torch.bool)
    rows, columns = block_mask.BLOCK_SIZE
    for b in range(shape[0]):
        for h in range(shape[1]):
            at = min(b, counts.shape[0] - 1), min(h, counts.shape[1] - 1)  # one may serve them all
            for row in range(counts.shape[2]):
                for block in indices[at][row, : counts[at][row]].tolist():
                    height = slice(row * rows, (row + 1) * rows)
                    listed[b, h, height, block * columns : (block + 1) * columns] = True
    return listed


def _dot(query: Tensor, keys: Tensor, mask: Tensor, finite: bool) -> Tensor:
    """query @ keys^T, in which what is not finite is seen only where the mask holds."""
    if finite:
        return query @ keys.transpose(-2, -1)
    wide = mask.unsqueeze(-1)
    seen_query = torch.where(wide, query.unsqueeze(-2), 0.0)
    seen_keys = torch.where(wide, keys.unsqueeze(-3), 0.0)
    return (seen_query * seen_keys).sum(-1)


def _log_sum_exp(logits: Tensor) -> Tensor:
    """torch.logsumexp, whose slope is exp(logit - lse): not the softmax where lse is rounded."""
    if logits.shape[-1] == 0:
        return torch.logsumexp(logits, -1)
    largest = logits.detach().amax(-1, keepdim=True)
    largest = torch.where(largest.isinf(), 0.0, largest)
    return (logits - largest).exp().sum(-1).log() + largest.squeeze(-1)


def _weighted_sum(probabilities: Tensor, values: Tensor, read: Tensor, finite: bool) -> Tensor:
    """probabilities @ values, in which what is not finite is seen only by the rows that read it."""
    if finite:
        return probabilities @ values
    seen = torch.where(read.unsqueeze(-1), values.unsqueeze(-3), 0.0)
    return (probabilities.unsqueeze(-1) * seen).sum(-2)
