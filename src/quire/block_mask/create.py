"""Masks from mods: the block mask of a mask_mod, the dense mask of any mod."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from quire.block_mask.classify import classify
from quire.block_mask.lists import as_block_size, as_count
from quire.block_mask.mask import DEFAULT_BLOCK_SIZE, BlockMask
from quire.block_mask.mask_mods import Device, MaskMod
from quire.block_mask.tiles import Sizes, evaluate_tiles, fastest_form
from quire.dynamo import instead, own
from quire.errors import ArgumentError, ModSignatureError
from quire.ir.trace import mod_kind, mod_name
from quire.warn import warn

ScoreMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@instead(own(torch_flex.create_block_mask))
def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Device | None = None,
    BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """The block mask of a mask_mod.

    >>> def causal(b, h, q_idx, kv_idx):
    ...     return q_idx >= kv_idx
    >>> create_block_mask(causal, None, None, 1024, 1024).sparsity()
    43.75

    A `B` or `H` of None makes a mask that serves every batch or head. `device` None is the
    accelerator if there is one, and the CPU otherwise. With `separate_full_blocks=False` the
    mask_mod is asked in every block. `compute_dq_write_order` adds what a deterministic backward
    pass on a GPU needs, for key blocks in descending order or, with `dq_kv_order=False`,
    ascending. `_compile` is deprecated and changes nothing.
    """
    if mod_kind(mask_mod) != "mask":
        raise ModSignatureError(
            f"create_block_mask requires a mask_mod(b, h, q_idx, kv_idx), got "
            f"{mod_name(mask_mod)!r}, which has the arguments of a score_mod. "
            f"Use create_mask, or write it as a mask."
        )
    if not isinstance(dq_kv_order, bool):
        raise ArgumentError(
            f"dq_kv_order must be a bool when using create_block_mask, got {dq_kv_order!r}. "
            f"Give an order of your own to BlockMask.from_kv_blocks."
        )
    if _compile:
        warn(
            "_compile is deprecated and has no effect: create_block_mask needs no compiler. "
            "Leave it out.",
            DeprecationWarning,
        )
    block_size, sizes = as_block_size(BLOCK_SIZE), _sizes(B, H, Q_LEN, KV_LEN)
    place = _device(device)
    mask = BlockMask._from_runs(
        classify(fastest_form(mask_mod, "mask", place), sizes, block_size, place),
        separate_full_blocks,
        BLOCK_SIZE=block_size,
        mask_mod=mask_mod,
        seq_lengths=sizes[2:],
        device=place,
    )
    if compute_dq_write_order:
        mask.dq_kv_order_spt = dq_kv_order
        mask._add_write_order()
    return mask


@instead(own(torch_flex.create_mask))
def create_mask(
    mod_fn: ScoreMod | MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Device | None = None,
) -> Tensor:
    """Where attention may look, element by element: bool [B, H, Q_LEN, KV_LEN].

    >>> create_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 2, 2)
    tensor([[[[ True, False],
              [ True,  True]]]])

    A score_mod allows what it does not turn into -inf, given scores of 0.
    """
    kind, sizes, place = mod_kind(mod_fn), _sizes(B, H, Q_LEN, KV_LEN), _device(device)
    mask = torch.empty(sizes, dtype=torch.bool, device=place)
    mod = fastest_form(mod_fn, kind, place)
    for tile, values in evaluate_tiles(mod, kind, sizes, (1, 1), place):
        mask[tile] = values
    return mask


def _sizes(B: int | None, H: int | None, Q_LEN: int, KV_LEN: int) -> Sizes:
    return (
        as_count("B", 1 if B is None else B),
        as_count("H", 1 if H is None else H),
        as_count("Q_LEN", Q_LEN),
        as_count("KV_LEN", KV_LEN),
    )


def _device(device: Device | None) -> torch.device:
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    return torch.device(device)
