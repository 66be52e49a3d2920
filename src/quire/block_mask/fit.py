"""The check that a block mask fits the tensors of a call."""

from __future__ import annotations

import torch

from quire.block_mask.mask import BlockMask
from quire.block_mask.mask_mods import sliced_mask_mod
from quire.errors import BlockMaskShapeError, DeviceError


def check_fits(
    block_mask: BlockMask, B: int, H: int, q_len: int, kv_len: int, device: torch.device
) -> None:
    """Raise if a mask is not for B batches, H query heads, these lengths and this device.

    A mask with a B or H of 1 is for any number of them, one with NOOP_BLOCK_SIZE for any lengths.
    """
    if block_mask.is_sliced:
        nowhere = torch.empty(())
        sliced_mask_mod(nowhere, nowhere, nowhere, nowhere)
    if len(block_mask.grid_shape) != 4:
        raise BlockMaskShapeError(
            f"kv_indices of a block mask must have shape [B, H, rows, blocks], but has "
            f"{list(block_mask.kv_indices.shape)}. Give its tensors all four dimensions."
        )
    for axis, name, size in ((0, "B", B), (1, "H", H)):
        made_for = block_mask.grid_shape[axis]
        if made_for not in (1, size):
            raise BlockMaskShapeError(
                f"a block mask must have {name}={size}, as the query, or {name}=1, but has "
                f"{name}={made_for}: block_mask.shape={block_mask.shape}, and the query has B={B}, "
                f"H={H}. Create it with create_block_mask(..., {name}={size}, ...) or {name}=None."
            )
    if not block_mask.is_endless:
        _check_lengths(block_mask, q_len, kv_len)
    if block_mask.device != device:
        raise DeviceError(
            f"Expect q/k/v and block_mask to be on the same device but got {device} and "
            f"{block_mask.device}. Move the mask with block_mask.to({str(device)!r})."
        )


def _check_lengths(block_mask: BlockMask, q_len: int, kv_len: int) -> None:
    made_for = block_mask.seq_lengths
    num_rows, q_block = block_mask.grid_shape[-2], block_mask.BLOCK_SIZE[0]
    if num_rows * q_block < q_len <= made_for[0]:  # seq_lengths was set by hand
        raise BlockMaskShapeError(
            f"a block mask must have rows for q_len={q_len} queries, but has {num_rows} rows of "
            f"{q_block} and seq_lengths={made_for}. Set the seq_lengths that the rows are for."
        )
    if made_for == (q_len, kv_len):
        return
    other = "smaller" if q_len > made_for[0] or kv_len > made_for[1] else "larger"
    raise BlockMaskShapeError(
        f"a block mask must be for q_len={q_len} and kv_len={kv_len}, but was created for "
        f"block_mask.shape={block_mask.shape}. It was created for a {other} length: create a new "
        f"block mask for this one, or call block_mask.resize({q_len}, {kv_len}) if its mask_mod "
        f"does not depend on the lengths."
    )
