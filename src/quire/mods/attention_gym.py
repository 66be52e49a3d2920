"""The same mods under the names and arguments of attention-gym, for code that uses it.

>>> from quire.mods.attention_gym import causal_mask, generate_doc_mask_mod
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quire.mods.compose import Mask, MaskMod, ScoreChange, and_masks
from quire.mods.masks import (
    block_diffusion,
    causal,
    dilated_sliding_window,
    global_sliding_window,
    neighbourhood,
    prefix_lm,
    sliding_window,
)
from quire.mods.packed import document, shared_prefix
from quire.mods.scores import alibi, softcap

causal_mask = causal
generate_alibi_bias = alibi
generate_block_diffusion_mask = block_diffusion
generate_dilated_sliding_window = dilated_sliding_window
generate_global_sliding_window = global_sliding_window
generate_prefix_lm_mask = prefix_lm
generate_shared_prefix_mask_mod = shared_prefix
generate_sliding_window = sliding_window


def generate_doc_mask_mod(mask_mod: MaskMod, offsets: Tensor | Sequence[int]) -> Mask:
    """`document` with `mask_mod` inside each document; `offsets` [N + 1]."""
    return document(offsets=offsets, mask_mod=mask_mod)


def generate_packed_causal_doc_mask_mod(offsets: Tensor | Sequence[int]) -> Mask:
    """`document` and `causal`; `offsets` [N + 1]."""
    return and_masks(document(offsets=offsets), causal)


def generate_natten(canvas_w: int, canvas_h: int, kernel_w: int, kernel_h: int) -> Mask:
    """`neighbourhood` in two dimensions. The canvas need not be square, nor the kernel odd."""
    return neighbourhood((canvas_h, canvas_w), (kernel_h, kernel_w))


def generate_tanh_softcap(soft_cap: float, approx: bool = False) -> ScoreChange:
    """`softcap`. `approx`, which chooses an instruction on GPUs, has no effect."""
    return softcap(soft_cap)


__all__ = [
    "causal_mask",
    "generate_alibi_bias",
    "generate_block_diffusion_mask",
    "generate_dilated_sliding_window",
    "generate_doc_mask_mod",
    "generate_global_sliding_window",
    "generate_natten",
    "generate_packed_causal_doc_mask_mod",
    "generate_prefix_lm_mask",
    "generate_shared_prefix_mask_mod",
    "generate_sliding_window",
    "generate_tanh_softcap",
]
