"""Every mod of the gallery against PyTorch: python benchmarks/gallery.py.

PyTorch is given what it takes: a dense mask or bias, made before, as `attn_mask` of SDPA, and for
the causal mask `is_causal`. A soft cap cannot be written so; its peer is torch operations.
"""

from __future__ import annotations

import functools
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from _race import Table, race, run_parts

import quire
from quire import Dense

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import catalogue

SHAPE = (1, catalogue.HEADS, catalogue.LENGTH, 64)


def masks(table: Table, seconds: float, threads: int) -> None:
    """Masks, against SDPA with a dense mask of truth values."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, *SHAPE)
    for name, expression in catalogue.MASKS.items():
        mask = catalogue.made(expression)
        blocks = quire.create_block_mask(mask, None, None, catalogue.LENGTH, catalogue.LENGTH)
        known = {"causal": {"is_causal": True}, "noop_mask": {}}
        dense = quire.create_mask(mask, None, None, catalogue.LENGTH, catalogue.LENGTH)
        options = known.get(name, {"attn_mask": dense})
        times = race(
            {
                "ours": functools.partial(quire.flex_attention, query, key, value, mask_mod=mask),
                "peer": functools.partial(
                    F.scaled_dot_product_attention, query, key, value, **options
                ),
            },
            seconds,
        )
        add(table, name, times, sparsity=round(blocks.sparsity(), 1))


def scores(table: Table, seconds: float, threads: int) -> None:
    """Score mods, against SDPA with a dense bias, or torch operations where there is none."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, *SHAPE)
    for name, expression in catalogue.SCORES.items():
        mod = catalogue.made(expression)
        if "softcap" in expression:
            peer = functools.partial(by_operations, query, key, value, mod)
            against = "x as fast as torch ops"
        else:
            peer = functools.partial(
                F.scaled_dot_product_attention, query, key, value, attn_mask=changed(mod)
            )
            against = "x as fast as SDPA"
        ours = functools.partial(quire.attention, query, Dense(key, value), score_mod=mod)
        add(table, name, race({"ours": ours, "peer": peer}, seconds), against)


def changed(mod, score: torch.Tensor | None = None) -> torch.Tensor:
    """Return what a score mod makes of scores [1, H, N, N], which are 0 by default."""
    places = [torch.arange(size) for size in (1, *SHAPE[1:3], SHAPE[2])]
    b, h, q_idx, kv_idx = torch.meshgrid(*places, indexing="ij")
    return mod(torch.zeros(h.shape) if score is None else score, b, h, q_idx, kv_idx)


def by_operations(query, key, value, mod) -> torch.Tensor:
    """Return attention with a score mod, by torch operations on all scores."""
    score = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    return changed(mod, score).softmax(-1) @ value


def add(
    table: Table, name: str, times: dict[str, float], unit: str = "x as fast as SDPA", **more
) -> None:
    """Add the row of a mod."""
    milliseconds = {f"{who}_ms": round(time * 1e3, 3) for who, time in times.items()}
    table.add(name, times["peer"] / times["ours"], unit, **milliseconds, **more)


if __name__ == "__main__":
    run_parts("gallery", __doc__, (masks, scores))
