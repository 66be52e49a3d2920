"""Every mod of the gallery against PyTorch, forward: python benchmarks/gallery.py.

PyTorch is given what it takes: a dense mask or bias, made before, as `attn_mask` of SDPA, and for
the causal mask `is_causal`. What SDPA cannot compute has torch operations as its peer. Before two
calls are timed, their results are compared.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _race import Table, race, run_parts
from torch import Tensor

import quire
from quire import Dense

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import catalogue

SHAPE = (1, catalogue.HEADS, catalogue.LENGTH, 64)
SDPA, OPERATIONS = "x as fast as SDPA", "x as fast as torch ops"

Call = Callable[[], Tensor]


def masks(table: Table, seconds: float, threads: int) -> None:
    """Masks, against SDPA with a dense mask of truth values."""
    query, key, value = operands()
    for name, expression in catalogue.MASKS.items():
        mask = catalogue.made(expression)
        blocks = quire.create_block_mask(mask, None, None, catalogue.LENGTH, catalogue.LENGTH)
        known = {"causal": {"is_causal": True}, "noop_mask": {}}
        dense = quire.create_mask(mask, None, None, catalogue.LENGTH, catalogue.LENGTH)
        options = known.get(name, {"attn_mask": dense})
        ours = functools.partial(quire.flex_attention, query, key, value, mask_mod=mask)
        peer = functools.partial(F.scaled_dot_product_attention, query, key, value, **options)
        add(
            table,
            seconds,
            name,
            ours=ours,
            peer=peer,
            unit=SDPA,
            sparsity=round(blocks.sparsity(), 1),
        )


def scores(table: Table, seconds: float, threads: int) -> None:
    """Score mods, against SDPA with a dense bias, or torch operations where there is none."""
    query, key, value = operands()
    for name, expression in catalogue.SCORES.items():
        mod = catalogue.made(expression)
        ours = functools.partial(quire.attention, query, Dense(key, value), score_mod=mod)
        if "softcap" in expression:
            peer = functools.partial(by_operations, query, key, value, score_mod=mod)
            add(table, seconds, name, ours=ours, peer=peer, unit=OPERATIONS)
        else:
            bias = changed(mod, torch.zeros(SHAPE[:3] + SHAPE[2:3]))
            peer = functools.partial(
                F.scaled_dot_product_attention, query, key, value, attn_mask=bias
            )
            add(table, seconds, name, ours=ours, peer=peer, unit=SDPA)


def weights(table: Table, seconds: float, threads: int) -> None:
    """Weights, against SDPA where they make a softmax, and else against torch operations."""
    query, key, value = operands()
    softmax = {
        "softmax": (key, value),
        "exp": (key, value),
        "softmax_one": tuple(F.pad(x, (0, 0, 0, 1)) for x in (key, value)),  # a score of 0
    }
    for name, expression in catalogue.WEIGHTS.items():
        weight = catalogue.made(expression)
        ours = functools.partial(quire.attention, query, Dense(key, value), weight=weight)
        if name in softmax:
            peer = functools.partial(F.scaled_dot_product_attention, query, *softmax[name])
            add(table, seconds, name, ours=ours, peer=peer, unit=SDPA)
        else:
            peer = functools.partial(by_operations, query, key, value, weight=weight)
            add(table, seconds, name, ours=ours, peer=peer, unit=OPERATIONS)


def probs(table: Table, seconds: float, threads: int) -> None:
    """Mods on probabilities, against torch operations."""
    query, key, value = operands()
    for name, expression in catalogue.PROBS.items():
        mod = catalogue.made(expression)
        ours = functools.partial(quire.attention, query, Dense(key, value), prob_mod=mod)
        peer = functools.partial(by_operations, query, key, value, prob_mod=mod)
        add(table, seconds, name, ours=ours, peer=peer, unit=OPERATIONS)


def operands() -> Tensor:
    """Return query, key and value."""
    torch.manual_seed(0)
    return torch.randn(3, *SHAPE)


@torch.no_grad()
def changed(mod: Callable[..., Tensor], score: Tensor) -> Tensor:
    """Return what a score mod makes of scores [1, H, N, N]."""
    places = [torch.arange(size) for size in score.shape]
    b, h, q_idx, kv_idx = torch.meshgrid(*places, indexing="ij")
    return mod(score, b, h, q_idx, kv_idx)


def by_operations(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score_mod: Callable[..., Tensor] | None = None,
    weight: Callable[..., Tensor] | None = None,
    prob_mod: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Return attention with mods, by torch operations on all scores."""
    score = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if score_mod is not None:
        score = changed(score_mod, score)
    if weight is None:
        share = score.softmax(-1)
    else:
        weighed = changed(weight, score)
        share = weighed / weighed.sum(-1, keepdim=True)
    return (share if prob_mod is None else changed(prob_mod, share)) @ value


@torch.no_grad()
def add(
    table: Table, seconds: float, name: str, *, ours: Call, peer: Call, unit: str, **more: Any
) -> None:
    """Compare the results of two calls, time both and add the row of a mod."""
    torch.testing.assert_close(ours(), peer(), atol=1e-4, rtol=1e-3)
    times = race({"ours": ours, "peer": peer}, seconds)
    milliseconds = {f"{who}_ms": round(time * 1e3, 3) for who, time in times.items()}
    table.add(name, times["peer"] / times["ours"], unit, **milliseconds, **more)


if __name__ == "__main__":
    run_parts("gallery", __doc__, (masks, scores, weights, probs))
