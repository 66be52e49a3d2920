"""The tiled path in torch ops: any mod, any device, memory linear in the sequence.

Scores are made one tile at a time and folded into a running maximum, sum and output (online
softmax); the backward pass makes each tile again from the saved log-sum-exp. Autograd is used for
one thing only, the derivative of a score_mod. Empty blocks of a block mask are never visited.

    stripe: some batches x some heads x a range of queries
    tile:   a stripe x a range of keys, the unit of work
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.ir.trace import Mod
from quire.problem import Problem
from quire.vectorise import evaluate

TILE_ELEMENTS = 2**20
TILE_SIDE = 512


class Result(NamedTuple):
    """Attention and what is known about each row: out [B, Hq, L, Dv], the others [B, Hq, L]."""

    out: Tensor
    lse: Tensor
    max_scores: Tensor


def attention(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None = None
) -> Result:
    """query [B, Hq, L, D], key [B or 1, Hkv, S, D], value [B or 1, Hkv, S, Dv], sink [Hq]."""
    captures = problem.captures(working_dtype(query.dtype))
    return Result(*TiledAttention.apply(problem, query, key, value, sink, *captures))


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """What scores and sums are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# --- which tiles there are -----------------------------------------------------------------------


class Tile(NamedTuple):
    """A range of keys and the masks that hold in it."""

    keys: slice
    masks: tuple[Mod, ...]


class Stripe(NamedTuple):
    """A range of query rows for some batches and heads, and the tiles it reads in order."""

    batch: slice
    heads: slice
    queries: slice
    tiles: list[Tile]


class Sizes(NamedTuple):
    """The axis lengths of one call."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int

    @staticmethod
    def of(query: Tensor, key: Tensor) -> Sizes:
        """Read off query [B, Hq, L, D] and key [., Hkv, S, D]."""
        batch, q_heads, q_len, _ = query.shape
        return Sizes(batch, q_heads, key.shape[1], q_len, key.shape[2])

    @property
    def group(self) -> int:
        """How many query heads read one key head."""
        return self.q_heads // self.kv_heads


def stripes(problem: Problem, sizes: Sizes) -> Iterator[Stripe]:
    """All the work of a call, a stripe at a time."""
    rows = min(sizes.q_len, TILE_SIDE)
    keys = min(sizes.kv_len, TILE_SIDE)
    pairs = max(1, TILE_ELEMENTS // max(1, rows * keys))
    blocks = problem.block_mask
    if blocks is None:
        for batch, heads in _pair_ranges(sizes, pairs, each_batch=False, each_head=False):
            for start in range(0, sizes.q_len, rows):
                spans = [(0, sizes.kv_len, False)]
                yield _stripe(problem, batch, heads, start, min(start + rows, sizes.q_len), spans)
        return
    block_rows = blocks.rows(sizes.q_len, sizes.kv_len)
    each_batch, each_head = (count > 1 for count in block_rows.cells.shape[:2])
    for batch, heads in _pair_ranges(sizes, pairs, each_batch, each_head):
        for row, first, last in block_rows.queries():
            spans = [tuple(s) for s in block_rows.spans(batch.start, heads.start, row)]
            for start in range(first, last, rows):
                yield _stripe(problem, batch, heads, start, min(start + rows, last), spans)


def _pair_ranges(
    sizes: Sizes, pairs: int, each_batch: bool, each_head: bool
) -> Iterator[tuple[slice, slice]]:
    """Batches and heads cut into ranges of about `pairs`; whole groups, or one head each."""
    if each_head:
        heads = 1
    else:
        heads = min(sizes.q_heads, max(1, pairs // sizes.group) * sizes.group)
    whole = heads == sizes.q_heads
    batches = max(1, pairs // sizes.q_heads) if whole and not each_batch else 1
    for b in range(0, sizes.batch, batches):
        for h in range(0, sizes.q_heads, heads):
            yield slice(b, min(b + batches, sizes.batch)), slice(h, min(h + heads, sizes.q_heads))


def _stripe(
    problem: Problem, batch: slice, heads: slice, start: int, stop: int, spans: list[Any]
) -> Stripe:
    pairs = (batch.stop - batch.start) * (heads.stop - heads.start)
    width = max(TILE_SIDE, TILE_ELEMENTS // (pairs * (stop - start)))
    tiles = [
        Tile(slice(k, min(k + width, last)), problem.masks(full))
        for first, last, full in spans
        for k in range(first, last, width)
    ]
    return Stripe(batch, heads, slice(start, stop), tiles)


# --- one tile ------------------------------------------------------------------------------------


class View:
    """The operands of one call as the tiles of a stripe see them.

    Query heads of a group are folded into rows, so that keys are never repeated:
    [b, Hkv * G, rows, D] is read as [b, Hkv, G * rows, D].
    """

    def __init__(self, problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> None:
        self.problem = problem
        self.query, self.key, self.value = query, key, value
        self.sizes = Sizes.of(query, key)
        self.dtype = working_dtype(query.dtype)
        finite = [bool(torch.isfinite(x.detach()).all()) for x in (query, key, value)]
        self.finite_query, self.finite_key, self.finite_value = finite

    def stripes(self) -> Iterator[Stripe]:
        return stripes(self.problem, self.sizes)

    def kv_range(self, tensor: Tensor, stripe: Stripe) -> tuple[slice, slice]:
        """The batches and key heads of key or value that a stripe reads."""
        group = self.sizes.group
        heads = slice(stripe.heads.start // group, (stripe.heads.stop - 1) // group + 1)
        return (stripe.batch if tensor.shape[0] > 1 else slice(0, 1)), heads

    def rows(self, tensor: Tensor, stripe: Stripe) -> Tensor:
        """The stripe's rows of a tensor shaped like the query, in the working dtype."""
        return tensor[stripe.batch, stripe.heads, stripe.queries].to(self.dtype)

    def keys(self, tensor: Tensor, stripe: Stripe, tile: Tile) -> Tensor:
        """The tile's rows of key or value, in the working dtype."""
        batch, heads = self.kv_range(tensor, stripe)
        return tensor[batch, heads, tile.keys].to(self.dtype)

    def fold(self, rows: Tensor, kv: Tensor) -> Tensor:
        return rows.reshape(rows.shape[0], kv.shape[1], -1, rows.shape[-1])

    def matmul(self, rows: Tensor, kv: Tensor) -> Tensor:
        """rows [b, h, r, n] times kv [., kvh, n, m], group by group: [b, h, r, m]."""
        return (self.fold(rows, kv) @ kv).reshape(*rows.shape[:-1], kv.shape[-1])

    def raw_scores(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Scaled scores before any mod."""
        return self.matmul(rows, keys.transpose(-2, -1)) * self.problem.scale

    def indices(self, stripe: Stripe, tile: Tile) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The b, h, q_idx and kv_idx of a tile, as vectors."""
        problem, device = self.problem, self.query.device
        ranges = (
            (stripe.batch, 0),
            (stripe.heads, 0),
            (stripe.queries, problem.q_start),
            (tile.keys, problem.kv_start),
        )
        b, h, q_idx, kv_idx = (
            torch.arange(r.start + at, r.stop + at, device=device) for r, at in ranges
        )
        return b, h, q_idx, kv_idx

    def mask(self, stripe: Stripe, tile: Tile) -> Tensor | None:
        """Where the masks hold, broadcastable to the tile's scores; None for everywhere."""
        result = None
        for mod in tile.masks:
            holds = evaluate(mod, "mask", *self.indices(stripe, tile))
            result = holds if result is None else result & holds
        return result

    def modified(self, raw: Tensor, stripe: Stripe, tile: Tile, mask: Tensor | None) -> Tensor:
        """The scores after the score_mod, before the mask."""
        mod = self.problem.score_mod
        if mod is None:
            return raw
        scores = evaluate(mod, "score", *self.indices(stripe, tile), score=raw, live=mask)
        return scores.to(self.dtype).broadcast_to(raw.shape)

    def dropped(self, weights: Tensor, stripe: Stripe, tile: Tile) -> Tensor:
        """`weights` after dropout."""
        dropout = self.problem.dropout
        if dropout is None:
            return weights
        keep = evaluate(dropout.keep, "mask", *self.indices(stripe, tile))
        return torch.where(keep, weights * dropout.factor, 0.0)


def masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Scores with -inf where the mask does not hold."""
    return scores if mask is None else torch.where(mask, scores, -math.inf)


def weighted_sum(view: View, weights: Tensor, kv: Tensor, read: Tensor, finite: bool) -> Tensor:
    """weights @ kv in which a row of kv that is not finite reaches only those that read it."""
    if finite:
        return view.matmul(weights, kv)
    bad = ~torch.isfinite(kv).all(-1)
    total = view.matmul(weights, torch.where(bad.unsqueeze(-1), 0.0, kv))
    group = weights.shape[1] // kv.shape[1]
    for column in bad.any(0).any(0).nonzero().flatten().tolist():
        row = kv[:, :, column, :].repeat_interleave(group, 1).unsqueeze(2)
        is_bad = bad[:, :, column].repeat_interleave(group, 1)[:, :, None, None]
        reached = read[..., column, None] & is_bad
        total = total + torch.where(reached, weights[..., column, None] * row, 0.0)
    return total


# --- forward -------------------------------------------------------------------------------------


def forward(view: View, sink: Tensor | None) -> Result:
    """Attention over all stripes, without a record for autograd."""
    sizes, value = view.sizes, view.value
    out = empty_like_query(view.query, value.shape[-1])
    rows = (sizes.batch, sizes.q_heads, sizes.q_len)
    lse = torch.empty(rows, dtype=view.dtype, device=out.device)
    max_scores = torch.empty_like(lse)
    for stripe in view.stripes():
        at = (stripe.batch, stripe.heads, stripe.queries)
        out[at], lse[at], max_scores[at] = _forward_stripe(view, stripe, sink)
    return Result(out, lse, max_scores)


def _forward_stripe(view: View, stripe: Stripe, sink: Tensor | None) -> Result:
    rows = view.rows(view.query, stripe)
    peak = rows.new_full((*rows.shape[:-1], 1), -math.inf)
    total = torch.zeros_like(peak)
    sums = rows.new_zeros((*rows.shape[:-1], view.value.shape[-1]))
    for tile in stripe.tiles:
        mask = view.mask(stripe, tile)
        if mask is not None and not bool(mask.any()):
            continue
        raw = view.raw_scores(rows, view.keys(view.key, stripe, tile))
        scores = masked(view.modified(raw, stripe, tile, mask), mask)
        new_peak = torch.maximum(peak, scores.amax(-1, keepdim=True))
        shift = finite_or_zero(new_peak)
        rescale, weights = torch.exp(peak - shift), torch.exp(scores - shift)
        total = total * rescale + weights.sum(-1, keepdim=True)
        kept = view.dropped(weights, stripe, tile)
        keys = view.keys(view.value, stripe, tile)
        tile_sum = weighted_sum(view, kept, keys, scores != -math.inf, view.finite_value)
        sums, peak = sums * rescale + tile_sum, new_peak
    return _finish(sums, total, peak, None if sink is None else sink[stripe.heads])


def _finish(sums: Tensor, total: Tensor, peak: Tensor, sink: Tensor | None) -> Result:
    """Normalise by the sum of weights, which the sink joins once."""
    top = peak
    if sink is not None:
        logit = sink.to(sums.dtype).view(1, -1, 1, 1)
        top = torch.maximum(peak, logit)
        shift = finite_or_zero(top)
        total = total * torch.exp(finite_or_zero(peak) - shift) + torch.exp(logit - shift)
        sums = sums * torch.exp(finite_or_zero(peak) - shift)
    lse = torch.where(total == 0, -math.inf, finite_or_zero(top) + torch.log(total))
    out = torch.where(total == 0, 0.0, sums / total)
    return Result(out, lse.squeeze(-1), peak.squeeze(-1))


def finite_or_zero(peak: Tensor) -> Tensor:
    """A maximum that can be subtracted: 0 where nothing has been seen yet."""
    return torch.where(peak == -math.inf, 0.0, peak)


def empty_like_query(query: Tensor, head_dim: int) -> Tensor:
    """An output [B, Hq, L, head_dim] whose dimensions lie in memory in the query's order."""
    order = sorted(range(4), key=lambda dim: (query.stride(dim), -dim), reverse=True)
    shape = (*query.shape[:-1], head_dim)
    out = query.new_empty([shape[dim] for dim in order])
    return out.permute([order.index(dim) for dim in range(4)])


# --- backward ------------------------------------------------------------------------------------


class Gradients:
    """Sums of the gradients that are wanted; None for the others."""

    def __init__(self, view: View, captures: tuple[Tensor, ...], wanted: tuple[bool, ...]) -> None:
        tensors = (view.query, view.key, view.value)
        self.query, self.key, self.value = (
            torch.zeros(x.shape, dtype=view.dtype, device=x.device) if want else None
            for x, want in zip(tensors, wanted, strict=False)
        )
        self.captures: list[Tensor | None] = [None] * len(captures)


def backward(
    view: View,
    captures: tuple[Tensor, ...],
    wanted: tuple[bool, ...],
    lse: Tensor,
    delta: Tensor,
    grad_out: Tensor,
    *,
    differentiable: bool,
) -> Gradients:
    """The gradients of query, key, value and captures, `wanted` in that order.

    `delta` [B, Hq, L] is sum(grad_out * out) - grad_lse. When `differentiable`, every step is
    recorded, so that the result can be differentiated again.
    """
    grads = Gradients(view, captures, wanted[:3])
    places = [i for i, want in enumerate(wanted[3:]) if want]
    learned = [captures[i] for i in places]
    need_scores = wanted[0] or wanted[1] or bool(learned)
    for stripe in view.stripes():
        at = (stripe.batch, stripe.heads, stripe.queries)
        rows = view.rows(view.query, stripe)
        upstream = grad_out[at].to(view.dtype)
        row_lse, row_delta = lse[at].unsqueeze(-1), delta[at].unsqueeze(-1)
        for tile in stripe.tiles:
            mask = view.mask(stripe, tile)
            if mask is not None and not bool(mask.any()):
                continue
            keys = view.keys(view.key, stripe, tile)
            values = view.keys(view.value, stripe, tile)
            raw = view.raw_scores(rows, keys)
            if not differentiable:
                raw = raw.detach().requires_grad_(need_scores)
            with torch.set_grad_enabled(differentiable or need_scores):
                modified = view.modified(raw, stripe, tile, mask)
            scores = masked(modified if differentiable else modified.detach(), mask)
            read = scores != -math.inf
            weights = torch.where(read, torch.exp(scores - finite_or_zero(row_lse)), 0.0)
            kept = view.dropped(weights, stripe, tile)
            if grads.value is not None:
                _add_keys(view, grads.value, stripe, tile, kept, upstream, read)
            if not need_scores:
                continue
            grad_weights = view.dropped(
                view.matmul(upstream, values.transpose(-2, -1)), stripe, tile
            )
            grad_scores = torch.where(read, weights * (grad_weights - row_delta), 0.0)
            grad_raw = _through_mod(
                modified, raw, learned, grad_scores, grads.captures, places, differentiable
            )
            if grads.query is not None:
                product = weighted_sum(view, grad_raw, keys, read, view.finite_key)
                grads.query[at] += product * view.problem.scale
            if grads.key is not None:
                scaled = grad_raw * view.problem.scale
                _add_keys(view, grads.key, stripe, tile, scaled, rows, read)
    return grads


def _through_mod(
    modified: Tensor,
    raw: Tensor,
    learned: list[Tensor],
    grad_scores: Tensor,
    sums: list[Tensor | None],
    places: list[int],
    differentiable: bool,
) -> Tensor:
    """The gradient of the raw scores; that of the learned captures is added to `sums`."""
    if modified is raw:
        return grad_scores
    if not modified.requires_grad:
        return torch.zeros_like(grad_scores)
    grad_raw, *grad_learned = torch.autograd.grad(
        modified, [raw, *learned], grad_scores, create_graph=differentiable, allow_unused=True
    )
    for place, grad in zip(places, grad_learned, strict=True):
        if grad is not None:
            known = sums[place]
            sums[place] = grad if known is None else known + grad
    return torch.zeros_like(grad_scores) if grad_raw is None else grad_raw


def _add_keys(
    view: View,
    sums: Tensor,
    stripe: Stripe,
    tile: Tile,
    weights: Tensor,
    rows: Tensor,
    read: Tensor,
) -> None:
    """Add weights^T @ rows to the tile's keys, over the heads of each group and, if the keys are
    shared by all batches, over those."""
    batch, heads = view.kv_range(sums, stripe)
    num_heads = heads.stop - heads.start
    shape = (weights.shape[0], num_heads, -1)
    turned = weights.reshape(*shape, weights.shape[-1]).transpose(-2, -1)
    folded = rows.reshape(*shape, rows.shape[-1])
    if not bool(torch.isfinite(rows.detach()).all()):
        turned_read = read.reshape(*shape, read.shape[-1]).transpose(-2, -1)
        product = _select_sum(turned, folded, turned_read)
    else:
        product = turned @ folded
    if batch.stop - batch.start != product.shape[0]:
        product = product.sum(0, keepdim=True)
    sums[batch, heads, tile.keys] += product


def _select_sum(weights: Tensor, rows: Tensor, read: Tensor) -> Tensor:
    """weights @ rows in which a row that is not finite reaches only those that read it."""
    bad = ~torch.isfinite(rows).all(-1)
    total = weights @ torch.where(bad.unsqueeze(-1), 0.0, rows)
    for column in bad.any(0).any(0).nonzero().flatten().tolist():
        reached = (read[..., column] & bad[..., column, None]).unsqueeze(-1)
        product = weights[..., column, None] * rows[..., column, None, :]
        total = total + torch.where(reached, product, 0.0)
    return total


class TiledAttention(torch.autograd.Function):
    """Inputs: problem, query, key, value, sink, *captures. Outputs: out, lse, max_scores."""

    @staticmethod
    def forward(
        problem: Problem,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        *captures: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        view = View(problem.with_captures(captures), query, key, value)
        return tuple(forward(view, sink))  # type: ignore[return-value]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        problem, query, key, value, sink, *captures = inputs
        out, lse, max_scores = output
        ctx.problem = problem
        ctx.mark_non_differentiable(max_scores)
        ctx.save_for_backward(query, key, value, sink, out, lse, *captures)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: Any) -> Any:
        query, key, value, sink, out, lse, *captures = ctx.saved_tensors
        wants = ctx.needs_input_grad
        differentiable = torch.is_grad_enabled()
        if not differentiable:
            own = ctx.problem.num_replaceable  # an untraced mod reads the originals
            captures[:own] = [
                tensor.detach().requires_grad_(want)
                for tensor, want in zip(captures[:own], wants[5:], strict=False)
            ]
        view = View(ctx.problem.with_captures(tuple(captures)), query, key, value)
        upstream = torch.zeros_like(out) if grad_out is None else grad_out
        delta = (upstream.to(view.dtype) * out.to(view.dtype)).sum(-1)
        if grad_lse is not None:
            delta = delta - grad_lse
        wanted = (*wants[1:4], *wants[5:])
        grads = backward(
            view, tuple(captures), wanted, lse, delta, upstream, differentiable=differentiable
        )
        grad_sink = None
        if sink is not None and wants[4]:
            weight = torch.exp(sink.to(view.dtype).view(1, -1, 1) - lse)
            grad_sink = -(weight * delta).sum((0, 2)).to(sink.dtype)
        main = zip((grads.query, grads.key, grads.value), (query, key, value), strict=True)
        return (
            None,
            *(None if grad is None else grad.to(tensor.dtype) for grad, tensor in main),
            grad_sink,
            *grads.captures,
        )
