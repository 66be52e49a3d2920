"""Masks made from mods: the block mask of a mask_mod, and the dense mask of any mod."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from quire.block_mask.checks import as_block_size, as_count
from quire.block_mask.mask import BlockMask
from quire.block_mask.mask_mods import Device
from quire.block_mask.tensors import DEFAULT_BLOCK_SIZE
from quire.block_mask.tiles import Sizes, evaluate_tiles, fastest_form
from quire.errors import ArgumentError, ModSignatureError
from quire.ir.trace import mod_kind, mod_name
from quire.mods.compose import MaskMod, ScoreMod
from quire.support.dynamo import instead, own
from quire.support.warn import warn


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
    """Make the block mask of a mask_mod.

    >>> def causal(b, h, q_idx, kv_idx):
    ...     return q_idx >= kv_idx
    >>> create_block_mask(causal, None, None, 1024, 1024).sparsity()
    43.75

    If `B` or `H` is None, the mask is for any number of batches or heads. `device` None is the
    accelerator if there is one, and the CPU otherwise. With `separate_full_blocks=False` the
    mask_mod decides in every block. `compute_dq_write_order` adds the order of additions for a
    deterministic backward pass on a GPU: key blocks descending, or ascending with
    `dq_kv_order=False`. `_compile` is deprecated and has no effect.
    """
    if mod_kind(mask_mod) != "mask":
        raise ModSignatureError(
            f"create_block_mask requires a mask_mod(b, h, q_idx, kv_idx), but "
            f"{mod_name(mask_mod)!r} has the arguments of a score_mod. Use create_mask, or write "
            f"it as a mask."
        )
    if not isinstance(dq_kv_order, bool):
        raise ArgumentError(
            f"dq_kv_order must be a bool when using create_block_mask, but is {dq_kv_order!r}. "
            f"Give another order to BlockMask.from_kv_blocks."
        )
    if _compile:
        warn(
            "_compile is deprecated and has no effect: create_block_mask needs no compiler. "
            "Leave it out.",
            DeprecationWarning,
        )
    block_size, sizes = as_block_size(BLOCK_SIZE), _sizes(B, H, Q_LEN, KV_LEN)
    mask = BlockMask._from_mod(mask_mod, sizes, block_size, _device(device), separate_full_blocks)
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
    """Return for each query and key whether the query sees the key: bool [B, H, Q_LEN, KV_LEN].

    >>> create_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 2, 2)
    tensor([[[[ True, False],
              [ True,  True]]]])

    `mod_fn` is a mask_mod or a score_mod. A score_mod is called with scores of 0, and hides a key
    by returning -inf.
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
