"""The specification: attention in plain torch, and linear layers.

Only tests import this module. It decides every question of meaning, and every other path is
compared with it. Mods are evaluated as the user wrote them, by torch.vmap, without quire's tracer.
Whole score matrices are computed; nothing here is meant to be fast. A row is a query of one head.

- A mod computes for each element what it computes on ordinary tensors. A Python number that
  multiplies or divides a bfloat16 or float16 is not rounded first, as torch.vmap would do.
- A row that reads no key has output 0, log-sum-exp -inf and gradient 0, never NaN.
- A row reads a key if the mask is true and the score is above -inf. An inf or NaN in a key or value
  reaches exactly the rows that read it, forward and backward.
- Bits are not decided here, only numbers. In which order the kernels add, the same for any number
  of queries, is written in `codegen/phases/order.py`.
- A score_mod is called only where the mask is true. Only elements that are read have a gradient;
  values, gradients and indices of the mod elsewhere have no effect.
- Scores are scaled before the score_mod, in float32 (float64 for float64 inputs). The log-sum-exp
  and the maximum have that dtype, the output has that of the query.
- Query head h reads key head h // (Hq // Hkv). A key batch of 1 is shared by all query batches.
- A block mask skips blocks that it does not list, and does not call its mask_mod in full blocks. It
  counts from its own first row and column, whatever the positions of queries and keys are.
- A sink is one more logit in each row's softmax, with no value. It is part of the log-sum-exp, so
  that probability = exp(score - lse) is true with and without it. It is not part of the maximum.
- A prob_mod is called with the probability of each key that is read, and returns what its value is
  multiplied by. The other results are those of the softmax. It comes before dropout.
- Dropout drops probabilities after the softmax and multiplies the others by 1 / (1 - p).
- The gradient of the log-sum-exp is the softmax, even if |lse| is so large that in float32 it
  equals the largest score. Then each of n equal keys has the gradient 1 / n, not 1.
- A score of NaN makes its row NaN. A score of inf does so too, and the log-sum-exp is inf.
- The argmax of a row is the absolute position of the key with the largest score after the mods. Of
  equal scores it is the first; NaN counts as the largest. It is -1 if the row reads no key.
- The entropy of a row is -sum p ln p over the probabilities of its keys before dropout. A sink
  takes part of the probability and adds no term. It is 0 if the row reads no key. No gradient.
- The mass of a key is the sum of its probabilities over the queries of one query head, before
  dropout; a sink takes part of the probability. If a row is NaN, so is the mass of each key that it
  reads. No gradient.
- With `weighting` "shares" or "sums", what the last mod returns is the weight of a key and not a
  score. That mod is `weight`, or else the score_mod. `weight` is called where the score_mod, if
  there is one, returns a score above -inf; other keys are not read. The output is the sum of
  weight times value; with "shares" it is divided by the sum of the weights. If that sum is 0, so
  is the output, with gradient 0. A weight of -inf means that the key is not read. Other weights
  may be negative, inf or NaN, and are multiplied and added as they are. The sum of the weights
  stands in place of the log-sum-exp, 0 if no key is read; the largest weight in place of the
  maximum, weight / sum in place of a probability. There is no sink, and no entropy.
- The weights of a row are its probabilities before dropout, and 0 for keys that it does not read; a
  sink takes part of the probability. No gradient.
- In ragged memory, each sequence is computed on its own. `b` is its number and positions count from
  its first row. Its last query has the position of its last key; with more queries than keys, both
  begin at 0. A row of the query that belongs to no sequence is a row that reads no key.
- A linear layer multiplies by the weights that its format decodes to. Integer activations have one
  scale for 32 numbers of a row, their largest magnitude / 127, and are rounded half to even. If one
  of the 32 is not finite, the results of the row are NaN.
- In paged memory, an entry of -1 in the page table is a hole: no query reads the positions of that
  page, as if a mask hid them. All other keys keep their positions.
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
    """out [B, Hq, L, Dv], key_mass [B, Hq, S], others [B, Hq, L].

    probabilities (after dropout) and weights (before) are [B, Hq, L, S].
    """

    out: Tensor
    lse: Tensor
    max_scores: Tensor
    probabilities: Tensor
    argmax: Tensor
    entropy: Tensor
    key_mass: Tensor
    weights: Tensor


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
    weighting: str = "softmax",
    weight: Callable[..., Any] | None = None,
    prob_mod: Callable[..., Any] | None = None,
    q_start: int = 0,
    kv_start: int = 0,
    b_start: int = 0,
) -> Reference:
    """Attention of query [B, Hq, L, D] over key [B or 1, Hkv, S, D] and value [B or 1, Hkv, S, Dv].

    `keep` [B, Hq, L, S] is true where dropout keeps a probability, `sink` is [Hq]. Positions begin
    at `q_start` and `kv_start`, and the numbers of sequences at `b_start`.
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
    whole = torch.ones(shape, dtype=torch.bool)
    mask = whole if block_mask is None else block_mask_elements(block_mask, shape)
    if mask_mod is not None:
        mask = evaluate(mask_mod, mask, starts, fill=False)

    def scores_where(live: Tensor) -> Tensor:
        scores = scale * _dot(query.to(dtype), keys.to(dtype), live, finite)
        if score_mod is not None:
            scores = evaluate(score_mod, live, starts, scores, fill=-math.inf)
        scores = torch.where(live, scores, -math.inf)
        if weight is None:
            return scores
        given = live if score_mod is None else live & (scores != -math.inf)
        return evaluate(weight, given, starts, scores, fill=-math.inf)

    with torch.no_grad():  # find what is read first: all other scores have no gradient
        read = scores_where(mask) != -math.inf
    scores = scores_where(read)
    if weighting == "softmax":
        lse, probabilities = _softmax(scores, read, sink)
    else:
        lse, probabilities = _given_weights(scores, read, divided=weighting == "shares")
    undropped = probabilities.detach()
    if prob_mod is not None:
        probabilities = evaluate(prob_mod, read, starts, probabilities, fill=0.0)
    if keep is not None:
        factor = 0.0 if dropout_p == 1.0 else 1.0 / (1.0 - dropout_p)
        probabilities = torch.where(keep, probabilities * factor, 0.0)
    candidates = torch.nn.functional.pad(scores, (0, 1), value=-math.inf).detach()  # S may be 0
    return Reference(
        out=_weighted_sum(probabilities.to(query.dtype), values.to(query.dtype), read, finite),
        lse=lse,
        max_scores=candidates.amax(-1),
        probabilities=probabilities,
        argmax=torch.where(read.any(-1), candidates.argmax(-1) + kv_start, -1),
        entropy=torch.special.entr(undropped).sum(-1),
        key_mass=undropped.sum(-2),
        weights=undropped,
    )


def _softmax(scores: Tensor, read: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp [B, Hq, L] and the probabilities of scores [B, Hq, L, S]."""
    logits = scores
    if sink is not None:
        column = sink.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        logits = torch.cat([scores, column], dim=-1)
    empty = (logits == -math.inf).all(-1, keepdim=True)
    safe = torch.where(empty, 0.0, logits)
    lse = torch.where(empty.squeeze(-1), -math.inf, _log_sum_exp(safe))
    return lse, torch.where(read, torch.softmax(safe, -1)[..., : scores.shape[3]], 0.0)


def _given_weights(scores: Tensor, read: Tensor, *, divided: bool) -> tuple[Tensor, Tensor]:
    """Return the sums of weights [B, Hq, L], and the weights, divided by them or as they are."""
    weights = torch.where(read, scores, 0.0)
    total = weights.sum(-1)
    if not divided:
        return total, weights
    nothing = total == 0.0
    divisor = torch.where(nothing, 1.0, total).unsqueeze(-1)
    return total, torch.where(nothing.unsqueeze(-1), 0.0, weights / divisor)


class RaggedReference(NamedTuple):
    """out [total, Hq, Dv], the others [total, Hq]; key_mass has a row for each key."""

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
    """Attention of query [total, Hq, D] over key [total, Hkv, D] and value [total, Hkv, Dv].

    Sequence b has the rows `q_rows[b]` of the query and `kv_rows[b]` of key and value. Its first
    query has the position `q_starts[b]`. The `options` are those of `attention`.
    """
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    nothing = query.new_full(query.shape[:2], -math.inf, dtype=wide)
    is_softmax = options.get("weighting", "softmax") == "softmax"
    found = {
        "out": query.new_zeros(*query.shape[:2], value.shape[2]),
        "lse": nothing if is_softmax else torch.zeros_like(nothing),
        "max_scores": nothing,
        "argmax": torch.full(query.shape[:2], -1),
        "entropy": torch.zeros_like(nothing),
        "key_mass": nothing.new_zeros(len(key), query.shape[1]),
    }
    for b, (rows, keys) in enumerate(zip(q_rows, kv_rows, strict=True)):
        q_start = max(0, len(keys) - len(rows)) if q_starts is None else q_starts[b]
        operands = (
            tensor[at.start : at.stop].transpose(0, 1).unsqueeze(0)
            for tensor, at in ((query, rows), (key, keys), (value, keys))
        )
        one = attention(*operands, q_start=q_start, b_start=b, **options)._asdict()
        for name, whole in found.items():
            at = torch.tensor(keys if name == "key_mass" else rows, dtype=torch.int64)
            part = one[name][0].transpose(0, 1).to(whole.dtype)
            found[name] = whole.index_copy(0, at, part)
    return RaggedReference(**found)


def evaluate(
    mod: Callable[..., Any],
    where: Tensor,
    starts: tuple[int, ...],
    scores: Tensor | None = None,
    *,
    fill: float | bool,
) -> Tensor:
    """Return what a mod computes where `where` [B, Hq, L, S] is true, and `fill` elsewhere."""
    at = where.nonzero(as_tuple=True)
    result = torch.full_like(where if scores is None else scores, fill)
    if at[0].numel() == 0:  # torch.vmap refuses a dimension of size 0
        return result

    def one(*args: Tensor) -> Tensor:
        value = mod(*args)
        return value if isinstance(value, Tensor) else torch.tensor(value)

    indices = [index + start for index, start in zip(at, starts, strict=True)]
    with AsOnTensors():
        values = torch.vmap(one)(*(() if scores is None else (scores[at],)), *indices)
    return result.index_put(at, values.to(result.dtype))


def block_mask_elements(block_mask: BlockMask, shape: tuple[int, ...]) -> Tensor:
    """Return where a block mask is true: [B, Hq, L, S]."""
    full = torch.zeros(shape, dtype=torch.bool)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _listed(block_mask, block_mask.full_kv_num_blocks, block_mask.full_kv_indices, shape)
    partial = _listed(block_mask, block_mask.kv_num_blocks, block_mask.kv_indices, shape)
    return full | evaluate(block_mask.mask_mod, partial & ~full, (0, 0, 0, 0), fill=False)


def _listed(
    block_mask: BlockMask, counts: Tensor, indices: Tensor, shape: tuple[int, ...]
) -> Tensor:
    """Return a tensor [B, Hq, L, S] that is true in the blocks of a list."""
    listed = torch.zeros(shape, dtype=torch.bool)
    rows, columns = block_mask.BLOCK_SIZE
    for b in range(shape[0]):
        for h in range(shape[1]):
            at = min(b, counts.shape[0] - 1), min(h, counts.shape[1] - 1)  # a size of 1 is shared
            for row in range(counts.shape[2]):
                for block in indices[at][row, : counts[at][row]].tolist():
                    height = slice(row * rows, (row + 1) * rows)
                    listed[b, h, height, block * columns : (block + 1) * columns] = True
    return listed


def _dot(query: Tensor, keys: Tensor, mask: Tensor, finite: bool) -> Tensor:
    """Return query @ keys^T. A number that is not finite counts only where `mask` is true."""
    if finite:
        return query @ keys.transpose(-2, -1)
    wide = mask.unsqueeze(-1)
    seen_query = torch.where(wide, query.unsqueeze(-2), 0.0)
    seen_keys = torch.where(wide, keys.unsqueeze(-3), 0.0)
    return (seen_query * seen_keys).sum(-1)


def _log_sum_exp(logits: Tensor) -> Tensor:
    """Return torch.logsumexp with the softmax as gradient.

    torch's own gradient is exp(logit - lse), which is not the softmax if lse was rounded.
    """
    if logits.shape[-1] == 0:
        return torch.logsumexp(logits, -1)
    largest = logits.detach().amax(-1, keepdim=True)
    largest = torch.where(largest.isinf(), 0.0, largest)
    return (logits - largest).exp().sum(-1).log() + largest.squeeze(-1)


def _weighted_sum(probabilities: Tensor, values: Tensor, read: Tensor, finite: bool) -> Tensor:
    """Return probabilities @ values. A value that is not finite reaches only rows that read it."""
    if finite:
        return probabilities @ values
    seen = torch.where(read.unsqueeze(-1), values.unsqueeze(-3), 0.0)
    return (probabilities.unsqueeze(-1) * seen).sum(-2)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, integers: bool = False
) -> Tensor:
    """Return x @ weight.T + bias in float64; x is first rounded to integers, if so."""
    rows = quantised_rows(x) if integers else x.double()
    result = rows @ weight.double().T
    return result if bias is None else result + bias.double()


def quantised_rows(x: Tensor) -> Tensor:
    """Return rows [M, K] as integers times their scales, in float64."""
    depth = x.shape[1]
    groups = torch.nn.functional.pad(x.float(), (0, -depth % 32)).unflatten(1, (-1, 32))
    largest = groups.abs().amax(2, keepdim=True)
    inverse = torch.where(largest > 0, 127 / largest, 0)
    scale = torch.where(largest.isfinite(), largest / 127, torch.nan)
    numbers = (groups * inverse).round().nan_to_num().double()
    rows: Tensor = (numbers * scale.double()).flatten(1)[:, :depth]
    return rows
