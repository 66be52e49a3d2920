"""Compare the errors of quire and of PyTorch: both in float32, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import quire
from quire.tools.demo.mod import HEAD_DIM, HEADS, block_mask, mask_mod


class Check(NamedTuple):
    """The largest error of one result, PyTorch's and ours, and its largest value."""

    name: str
    theirs: float
    ours: float
    largest: float

    @property
    def holds(self) -> bool:
        """Whether our error is at most four times PyTorch's, plus a rounding of the largest."""
        rounding = 2 * torch.finfo(torch.float32).eps * max(1.0, self.largest)
        return self.ours <= 4 * self.theirs + rounding


class Results(NamedTuple):
    """The results that are compared."""

    output: Tensor
    log_sum_exp: Tensor
    query_gradient: Tensor
    key_gradient: Tensor
    value_gradient: Tensor


def check(tokens: int) -> Iterator[Check]:
    """Yield a check for each result of the demo's mod on random tensors."""
    query, key, value = torch.randn(3, 1, HEADS, tokens, HEAD_DIM)
    ours, theirs = by_quire(query, key, value), by_torch(query, key, value)
    truth = written_out(query.double(), key.double(), value.double())
    for name, their, our, exact in zip(Results._fields, theirs, ours, truth, strict=True):
        yield Check(
            name.replace("_", " "),
            theirs=(their - exact).abs().max().item(),
            ours=(our - exact).abs().max().item(),
            largest=exact.abs().max().item(),
        )


def by_quire(*operands: Tensor) -> Results:
    """Return the results of quire's flex_attention."""
    query, key, value = leaves = _leaves(operands)
    mask, request = block_mask(query.shape[2]), quire.AuxRequest(lse=True)
    out, aux = quire.flex_attention(query, key, value, block_mask=mask, return_aux=request)
    assert aux.lse is not None
    return Results(out.detach(), aux.lse.detach(), *_gradients(out, leaves))


def by_torch(*operands: Tensor) -> Results:
    """Return the results of PyTorch's flex_attention.

    It has no backward pass on a CPU, so the gradients are those of `written_out`.
    """
    mask, request = block_mask(operands[0].shape[2]), torch_flex.AuxRequest(lse=True)
    out, aux = torch_eager(*operands, block_mask=mask, return_aux=request)
    return Results(out, aux.lse, *written_out(*operands)[2:])


def torch_eager(*operands: Tensor, **options: Any) -> Any:
    """Call PyTorch's flex_attention in eager mode, without Dynamo, which would slow it down."""
    before = torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        attend: Callable[..., Any] = torch_flex.flex_attention
        return attend(*operands, **options)
    finally:
        torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before


def written_out(*operands: Tensor) -> Results:
    """Return the results of PyTorch's scaled_dot_product_attention with the mask as a matrix."""
    query, key, value = leaves = _leaves(operands)
    tokens = query.shape[2]
    mask = quire.create_mask(
        mask_mod(tokens), None, None, Q_LEN=tokens, KV_LEN=tokens, device="cpu"
    )
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    scores = (query @ key.mT).detach() * HEAD_DIM**-0.5
    lse = scores.masked_fill(~mask, -math.inf).logsumexp(-1)
    return Results(out.detach(), lse, *_gradients(out, leaves))


def _leaves(operands: Sequence[Tensor]) -> list[Tensor]:
    return [operand.detach().requires_grad_() for operand in operands]


def _gradients(out: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    upstream = torch.linspace(-1, 1, HEAD_DIM, dtype=out.dtype).expand_as(out)
    return torch.autograd.grad(out, leaves, upstream)
