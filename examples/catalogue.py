"""The mods of quire and of these examples, each for 2,048 tokens and 8 heads of one sequence.

    quire draw examples/catalogue.py:three_documents --q-len 2048

A mod is kept as the expression that makes it, so that pages can show the code that ran.
`benchmarks/gallery.py` times each of them against PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from long_context import long_context
from native_sparse import finished, near
from torch import Tensor, nn
from train_gpt import REACH, by_distance, own_piece
from weight_curves import keep_large, sharpen

from quire import mods, weights

LENGTH, HEADS = 2048, 8

is_global = torch.arange(LENGTH) % 512 == 0
parents = torch.cat([torch.tensor([-1]), torch.arange(LENGTH - 1) // 2])  # each node has two
table = torch.linspace(-2, 2, 32)[:, None].expand(32, HEADS).contiguous()
near_and_far = torch.linspace(-4, 4, 513).abs().neg()
pieces = torch.arange(LENGTH)[None] // 400
learned = torch.linspace(0, -6, REACH + 1).expand(HEADS, -1).contiguous()
plane = torch.sin(torch.arange(LENGTH) / 200)[:, None] * torch.cos(torch.arange(LENGTH) / 150)

MASKS = {
    "noop_mask": "noop_mask",
    "causal": "causal",
    "not_mask": "not_mask(causal)",
    "sliding_window": "sliding_window(256)",
    "dilated_sliding_window": "dilated_sliding_window(512, 128)",
    "global_sliding_window": "global_sliding_window(128, is_global)",
    "prefix_lm": "prefix_lm(700)",
    "padding": "padding([1500])",
    "document": "document(lengths=[700, 148, 900, 300])",
    "and_masks": "causal & document(lengths=[700, 148, 900, 300])",
    "or_masks": "sliding_window(128) | document(lengths=[512, 1024, 512])",
    "shared_prefix": "shared_prefix([0, 700, 1300, 1700, 2048], [0, 0, 0, 0])",
    "tree": "tree(parents)",
    "neighbourhood": "neighbourhood(canvas=(32, 64), kernel=(9, 15))",
    "block_diffusion": "block_diffusion(seq_len=1024, block_size=128)",
    "offset": "offset(causal, 512)",
    "long_context": "offset(long_context, 262_144 * 2 - 1024, 262_144 * 2 - 1024)",
    "near": "near",
    "finished": "offset(finished, 16_384)",
    "three_documents": "three_documents",
    "own_piece": "Mask(own_piece, document=pieces)",
}
"""Names of masks, and the expressions that make them."""

SCORES = {
    "alibi": "alibi(8)",
    "softcap": "softcap(30.0)",
    "distance_bias": "distance_bias(near_and_far)",
    "relative_position_bias": "relative_position_bias(table)",
    "table_bias": "table_bias(plane)",
    "in_turn": "alibi(8) >> softcap(30.0)",
    "by_distance": "ScoreChange(by_distance, bias=learned)",
    "LearnedAlibi": "LearnedAlibi(8)",
    "LearnedDistanceBias": "trained(LearnedDistanceBias(8, reach=256), near_and_far)",
    "LearnedRelativePositionBias": "trained(LearnedRelativePositionBias(8), table)",
    "LearnedTableBias": "trained(LearnedTableBias(2048, 2048), plane)",
}
"""Names of score mods, and the expressions that make them."""

WEIGHTS = {
    "softmax": "softmax",
    "softmax_one": "softmax_one",
    "exp": "exp",
    "sigmoid": "sigmoid(-1.0)",
    "softplus": "softplus",
    "relu": "relu",
    "squared_relu": "squared_relu",
}
"""Names of weights, and the expressions that make them."""

PROBS = {"keep_large": "keep_large", "sharpen": "sharpen"}
"""Names of mods on probabilities, and the expressions that make them."""

ORIGINS = {
    "long_context": "examples/long_context.py",
    "near": "examples/native_sparse.py",
    "finished": "examples/native_sparse.py",
    "three_documents": "examples/catalogue.py",
    "own_piece": "examples/train_gpt.py",
    "by_distance": "examples/train_gpt.py",
    "keep_large": "examples/weight_curves.py",
    "sharpen": "examples/weight_curves.py",
}
"""Where a mod comes from that is not of the library."""


def made(expression: str) -> Callable[..., Any]:
    """Return the mod of an expression."""
    found: Callable[..., Any] = eval(expression, vars(mods) | vars(weights) | globals())
    return found


def trained(mod: nn.Module, values: Tensor) -> nn.Module:
    """Return a learned mod whose parameter has these values, as if it had been trained."""
    (parameter,) = mod.parameters()
    with torch.no_grad():
        parameter.copy_(values)
    return mod


def three_documents(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Let a query see its own document, of three of 683 tokens, up to itself."""
    return (kv_idx <= q_idx) & (kv_idx // 683 == q_idx // 683)


__all__ = [
    "MASKS",
    "ORIGINS",
    "PROBS",
    "SCORES",
    "WEIGHTS",
    "by_distance",
    "finished",
    "keep_large",
    "long_context",
    "made",
    "near",
    "own_piece",
    "sharpen",
    "three_documents",
    "trained",
]
