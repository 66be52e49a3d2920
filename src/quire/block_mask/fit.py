"""Whether a block mask is for the tensors that it is given with."""

from __future__ import annotations

import torch

from quire.block_mask.lists import NOOP_BLOCK_SIZE
from quire.block_mask.mask import BlockMask
from quire.block_mask.mask_mods import sliced_mask_mod
from quire.errors import BlockMaskShapeError, DeviceError


def check_fits(
    block_mask: BlockMask, B: int, H: int, q_len: int, kv_len: int, device: torch.device
) -> None:
    """Refuse a mask that is not for B batches, H query heads and these lengths.

    A mask with a B or H of 1 serves any number of them; one of NOOP_BLOCK_SIZE any lengths.
    """
    if block_mask.is_sliced:
        nowhere = torch.empty(())
        sliced_mask_mod(nowhere, nowhere, nowhere, nowhere)
    if len(block_mask.grid_shape) != 4:
        raise BlockMaskShapeError(
            f"expected a block mask with kv_indices of shape [B, H, rows, blocks], got "
            f"{list(block_mask.kv_indices.shape)}. Give its tensors all four dimensions."
        )
    for axis, name, size in ((0, "B", B), (1, "H", H)):
        made_for = block_mask.grid_shape[axis]
        if made_for not in (1, size):
            raise BlockMaskShapeError(
                f"expected a block mask with {name}={size}, as the query has, or {name}=1, got "
                f"{name}={made_for}: block_mask.shape={block_mask.shape}, and the query has B={B}, "
                f"H={H}. Create it with create_block_mask(..., {name}={size}, ...) or {name}=None."
            )
    if block_mask.BLOCK_SIZE != (NOOP_BLOCK_SIZE, NOOP_BLOCK_SIZE):
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
            f"expected a block mask with rows for q_len={q_len} queries, got {num_rows} rows of "
            f"{q_block} and seq_lengths={made_for}. Set the seq_lengths that the rows are for."
        )
    if made_for == (q_len, kv_len):
        return
    other = "smaller" if q_len > made_for[0] or kv_len > made_for[1] else "larger"
    raise BlockMaskShapeError(
        f"expected a block mask for q_len={q_len} and kv_len={kv_len}, got one that "
        f"was created for block_mask.shape={block_mask.shape}. It was created for a {other} "
        f"length: create a new block mask for this one, or call block_mask.resize({q_len}, "
        f"{kv_len}) if its mask_mod does not depend on the lengths."
    )
