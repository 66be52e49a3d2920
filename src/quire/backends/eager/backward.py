"""The backward pass of dense memory. It computes the scores of each tile again.

P is the softmax, dX the gradient of X, and delta = sum(dO * O) - d lse for each row:

    dV = dropped(P)^T dO      dP = dropped(dO V^T)      dS = P * (dP - delta)

If the scores are weights W and not those of a softmax, then P = W * share, with share = 1 / sum(W)
or 1, and dS = share * (dP - delta). There, `lse` is the sum of W.

dS is the gradient of the modified scores. Autograd computes the gradients of the raw scores and of
captured tensors from it. If gradients are enabled, autograd records every step here, so that the
result can be differentiated again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from quire.backends.eager.far import Normaliser, normaliser
from quire.backends.eager.tile import Tile, by_group, weigh, weighted_sum
from quire.backends.eager.tiling import Keys, Stripe, stripes
from quire.block_mask.blocks import BlockRows
from quire.memory import Placed
from quire.request import Problem
from quire.results import Above, Gradients, Wanted, divisor_of
from quire.support.torch_private import in_transform

T = TypeVar("T")


class Given(NamedTuple):
    """Inputs of each row: the gradient dO [B, Hq, L, Dv], delta and the divisor [B, Hq, L].

    The divisor is the log-sum-exp of a softmax, or else what weights are divided by.
    """

    out: Tensor
    delta: Tensor
    divisor: Tensor

    @staticmethod
    def of(problem: Problem, above: Above) -> Given:
        """Compute delta from the output and the gradients."""
        out, _, grad_out, grad_lse = above.of_weights(problem.weighting)[:4]
        divisor = above.lse
        if problem.weighting != "softmax":
            divisor = divisor_of(problem.weighting, divisor)
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        delta = (grad_out * out).sum(-1)
        return Given(grad_out, delta if grad_lse is None else delta - grad_lse, divisor)

    def divided(self, found: Normaliser | None) -> Given:
        """Replace the divisor by a shift, and multiply factors of probabilities by their share."""
        if found is None:
            return self
        shift, share = found
        return Given(self.out * share.unsqueeze(-1), self.delta * share, shift)

    def at(self, stripe: Stripe, dtype: torch.dtype) -> Given:
        """Return the inputs of a stripe, with delta and divisor as [b, h, rows, 1]."""
        out, delta, divisor = (tensor[stripe.rows].to(dtype) for tensor in self)
        return Given(out, delta.unsqueeze(-1), divisor.unsqueeze(-1))


def backward(
    problem: Problem, placed: Placed, blocks: BlockRows | None, wanted: Wanted, above: Above
) -> Gradients:
    """Return the gradients of query, key, value and captures of dense memory, in the working dtype.

    `blocks` are the blocks of the mask in the forward pass: it may have been edited since.
    """
    given = Given.of(problem, above)
    if above.whole:
        given = given.divided(normaliser(problem, placed, blocks, above.lse, above.sink))
    sums = _zeros(placed, wanted)._replace(delta=given.delta, lse=given.divisor)
    if not (wanted.scores or wanted.value):
        return sums
    compute = checkpointed(functools.partial(_tile_gradients, problem, placed, wanted))
    for stripe in stripes(problem, placed, blocks):
        rows = placed.query[stripe.rows].to(placed.dtype)
        given_rows = given.at(stripe, placed.dtype)
        for keys in stripe.tiles:
            part = compute(stripe, keys, rows, given_rows)
            if part is not None:
                _add(sums, part, stripe, keys)
    return sums


def _zeros(placed: Placed, wanted: Wanted) -> Gradients:
    def zeros(tensor: Tensor, want: bool, dtype: torch.dtype) -> Tensor | None:
        return torch.zeros(tensor.shape, dtype=dtype, device=tensor.device) if want else None

    query, key, value = (
        zeros(tensor, want, placed.dtype)
        for tensor, want in zip(placed.operands, wanted[:3], strict=True)
    )
    captures = (
        zeros(tensor, tensor.requires_grad, torch.promote_types(tensor.dtype, placed.dtype))
        for tensor in wanted.captures
    )
    return Gradients(query, key, value, tuple(captures))


def _add(sums: Gradients, part: Gradients, stripe: Stripe, keys: Keys) -> None:
    """Add the gradients of one tile to the sums."""
    if sums.query is not None and part.query is not None:
        sums.query[stripe.rows] += part.query
    for total, grad in ((sums.key, part.key), (sums.value, part.value)):
        if total is not None and grad is not None:
            here = total[stripe.rows_of(keys, total)]
            here += grad.sum_to_size(here.shape)  # all batches may share one batch of keys
    for total, grad in zip(sums.captures, part.captures, strict=True):
        if total is not None and grad is not None:
            total += grad


def checkpointed(compute: Callable[..., T]) -> Callable[..., T]:
    """Return `compute` with checkpointing: autograd keeps its inputs, and computes it again."""
    if in_transform() or not torch.is_grad_enabled():  # torch.func does not support checkpoints
        return compute
    return functools.partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=False)


def _tile_gradients(
    problem: Problem,
    placed: Placed,
    wanted: Wanted,
    stripe: Stripe,
    key_range: Keys,
    rows: Tensor,
    given: Given,
) -> Gradients | None:
    """Return what one tile adds to the gradients; None if its mask is false everywhere."""
    tile = Tile(problem, placed, stripe, key_range)
    if tile.is_empty:
        return None
    keys, values = tile.keys, tile.values
    raw, modified = _recorded(tile, tile.raw_scores(rows))
    scores = tile.masked(modified)
    read = scores != -math.inf
    weights, slope = weigh(problem, scores, given.divisor)
    grad_query = grad_key = grad_value = None
    grad_captures: tuple[Tensor | None, ...] = (None,) * len(wanted.captures)
    if wanted.value:
        grad_value = _sum_over_rows(tile.reweighed(weights), given.out, read, values)
    if wanted.scores:
        grad_kept = by_group(given.out, values) @ values.transpose(-2, -1)
        grad_kept = grad_kept.view(scores.shape)
        grad_weights = tile.reweighed(weights, grad_kept)
        grad_scores = slope * torch.where(read, grad_weights - given.delta, 0.0)
        grad_raw, grad_captures = _through_mod(
            tile, raw, modified, captures=wanted.captures, grad=grad_scores, read=read
        )
        if problem.prob_mod is not None:
            grad_captures = _with_prob_mod(tile, weights, grad_kept, grad_captures)
        grad_products = grad_raw * problem.scale
        if wanted.query:
            grad_query = weighted_sum(by_group(grad_products, keys), keys, by_group(read, keys))
            grad_query = grad_query.view_as(rows)
        if wanted.key:
            grad_key = _sum_over_rows(grad_products, rows, read, keys)
    return Gradients(grad_query, grad_key, grad_value, grad_captures)


def _sum_over_rows(weights: Tensor, rows: Tensor, read: Tensor, keys: Tensor) -> Tensor:
    """Return weights^T @ rows, summed over the query heads of a key head: [b, kvh, keys, n]."""
    by_key, read_by_key = (by_group(x, keys).transpose(-2, -1) for x in (weights, read))
    return weighted_sum(by_key, by_group(rows, keys), read_by_key)


# --- through the score_mod -----------------------------------------------------------------------


def _recorded(tile: Tile, raw: Tensor, only: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the raw and the modified scores. Autograd records the score_mod between them."""
    if not torch.is_grad_enabled():
        raw = raw.requires_grad_()  # not detached: forward mode may have given it a tangent
    with torch.enable_grad():
        return raw, tile.modified(raw, only=only)


def _through_mod(
    tile: Tile,
    raw: Tensor,
    modified: Tensor,
    *,
    captures: tuple[Tensor, ...],
    grad: Tensor,
    read: Tensor,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return the gradients of raw scores and captures from `grad`, that of the modified scores.

    `grad` is 0 for scores that are not read, but 0 times a derivative of inf is NaN. If the
    gradient of a capture is not finite, the mod runs again on the scores that are read.
    """
    if modified is raw:
        return grad, (None,) * len(captures)
    grad_raw, *grad_captures = _gradients(modified, (raw, *captures), grad)
    if any(x is not None and not bool(x.isfinite().all()) for x in grad_captures):
        raw, modified = _recorded(tile, raw, only=read)
        _, *grad_captures = _gradients(modified, (raw, *captures), grad)
    if grad_raw is None:
        return torch.zeros_like(grad), tuple(grad_captures)
    return torch.where(read, grad_raw, 0.0), tuple(grad_captures)


def _with_prob_mod(
    tile: Tile, weights: Tensor, grad: Tensor, others: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Return gradients of captures, with those of the prob_mod's own in their places.

    `grad` is the gradient of the weights after prob_mod and dropout.
    """
    problem = tile.problem
    assert problem.prob_mod is not None, "there is a prob_mod"
    own, (score, mask) = problem.prob_mod.captures, (problem.score_mod, problem.mask_mod)
    first = sum(len(mod.captures) for mod in (score, mask) if mod is not None)
    with torch.enable_grad():
        changed = tile.reweighed(weights if torch.is_grad_enabled() else weights.detach())
    found = _gradients(changed, own, grad)
    return (*others[:first], *found, *others[first + len(own) :])


def _gradients(
    output: Tensor, inputs: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Return torch.autograd.grad, with None for inputs that do not require grad."""
    sources = [tensor for tensor in inputs if tensor.requires_grad]
    if not sources or not output.requires_grad:
        return (None,) * len(inputs)
    twice = torch.is_grad_enabled()
    found = iter(torch.autograd.grad(output, sources, grad, create_graph=twice, allow_unused=True))
    return tuple(next(found) if tensor.requires_grad else None for tensor in inputs)
