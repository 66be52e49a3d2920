"""Checks of what block masks are made from: sizes, and lists of blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.block_mask.blocks import ceil_div
from quire.checks.arguments import dtype_name, whole_number
from quire.errors import ArgumentError, BlockMaskError, DeviceError
from quire.support.torch_private import is_wrapped

INDEX_DTYPES = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def as_count(name: str, value: object, least: int = 0) -> int:
    """Return `value`, a number of tokens, batches, heads or blocks, as an int."""
    advice = "Give the number of tokens, batches, heads or blocks as an int."
    return whole_number(name, value, minimum=least, advice=advice)


def as_block_size(value: object) -> tuple[int, int]:
    """Return BLOCK_SIZE as a pair: the queries and the keys of a block."""
    sizes = value if isinstance(value, (tuple, list)) else (value, value)
    if len(sizes) != 2:
        raise ArgumentError(
            f"BLOCK_SIZE must be an int or a pair (q_block, kv_block), but is {value!r}. Give 128, "
            f"the default."
        )
    return as_count("BLOCK_SIZE[0]", sizes[0], 1), as_count("BLOCK_SIZE[1]", sizes[1], 1)


def check_lists(
    name: str,
    num_blocks: Tensor | None,
    indices: Tensor | None,
    *,
    num_columns: int | None = None,
    leading: torch.Size | None = None,
) -> None:
    """Raise if the tensors `<name>_num_blocks` and `<name>_indices` are not lists of blocks.

    Blocks count up to `num_columns`, by default the width of `indices`. The shape of `num_blocks`
    must begin with `leading`. Values are checked on the CPU only: reading them on another device
    would wait for it.
    """
    if not isinstance(num_blocks, Tensor) or not isinstance(indices, Tensor):
        got = f"{type(num_blocks).__name__} and {type(indices).__name__}"
        raise BlockMaskError(
            f"{name}_num_blocks and {name}_indices must be both provided or, unless they are kv_*, "
            f"omitted, but are {got}. Give two tensors."
        )
    counts, lists = f"{name}_num_blocks", f"{name}_indices"
    if indices.dim() < 2:
        raise BlockMaskError(
            f"BlockMask must have at least 2 dimensions, but {lists} has shape "
            f"{list(indices.shape)}. Give it the shape [B, H, rows, blocks]."
        )
    if num_blocks.shape != indices.shape[:-1]:
        raise BlockMaskError(
            f"{counts} must have the shape of {lists} without its last dimension, "
            f"{list(indices.shape[:-1])}, but has shape {list(num_blocks.shape)}. Give one count "
            f"per row."
        )
    if leading is not None and num_blocks.shape[: len(leading)] != leading:
        raise BlockMaskError(
            f"{counts} must begin with the dimensions {list(leading)} of kv_num_blocks, but has "
            f"shape {list(num_blocks.shape)}. Expand one of them."
        )
    for tensor_name, tensor in ((counts, num_blocks), (lists, indices)):
        if tensor.dtype not in INDEX_DTYPES:
            raise BlockMaskError(
                f"{tensor_name} must hold integers, but is {dtype_name(tensor.dtype)}. Convert it "
                f"with .to(torch.int32)."
            )
    if is_readable(num_blocks) and is_readable(indices):
        columns = indices.shape[-1] if num_columns is None else num_columns
        _check_values(counts, num_blocks, lists, indices, columns)


def check_mask_lists(
    lists: Sequence[Tensor | None], seq_lengths: tuple[int, int], block_size: tuple[int, int]
) -> None:
    """Raise if the eight tensors in `lists` are not the lists of a mask for these lengths.

    They are num_blocks and indices for each of kv, full_kv, q and full_q. All but those of kv may
    be None.
    """
    num_columns = ceil_div(seq_lengths[1], block_size[1])
    kv_num_blocks = lists[0]
    check_lists("kv", *lists[:2], num_columns=num_columns)
    assert kv_num_blocks is not None
    rows, batch = kv_num_blocks.shape, kv_num_blocks.shape[:-1]
    for name, pair, size, leading in (
        ("full_kv", lists[2:4], num_columns, rows),
        ("q", lists[4:6], rows[-1], batch),
        ("full_q", lists[6:8], rows[-1], batch),
    ):
        if any(tensor is not None for tensor in pair):
            check_lists(name, *pair, num_columns=size, leading=leading)
    if rows[-1] * block_size[0] < seq_lengths[0]:
        raise BlockMaskError(
            f"a BlockMask must have at least {ceil_div(seq_lengths[0], block_size[0])} rows of "
            f"blocks for {seq_lengths[0]} queries in blocks of {block_size[0]}, but has "
            f"{rows[-1]}. Give the seq_lengths that the rows are for."
        )


def check_devices(*tensors: Tensor | None) -> None:
    """Raise if the tensors of a block mask are not all on one device."""
    devices = sorted({str(tensor.device) for tensor in tensors if tensor is not None})
    if len(devices) > 1:
        raise DeviceError(
            f"the tensors of a BlockMask must be on one device, but are on "
            f"{' and '.join(devices)}. Move them with .to(device)."
        )


def is_readable(tensor: Tensor) -> bool:
    """Whether Python can read the values without waiting for a device or breaking a trace."""
    return (
        tensor.device.type == "cpu"
        and type(tensor) is Tensor
        and not torch.compiler.is_compiling()
        and not is_wrapped(tensor)
    )


def _check_values(
    counts: str, num_blocks: Tensor, lists: str, indices: Tensor, num_columns: int
) -> None:
    width = indices.shape[-1]
    wrong = (num_blocks < 0) | (num_blocks > width)
    if wrong.any():
        raise BlockMaskError(
            f"{counts} must be between 0 and {width}, the entries in a row of {lists}, but is "
            f"{num_blocks[wrong][0].item()} {_first(wrong)}. Count the blocks that are listed."
        )
    listed = torch.arange(width, device=num_blocks.device) < num_blocks.unsqueeze(-1)
    wrong = listed & ((indices < 0) | (indices >= num_columns))
    if wrong.any():
        raise BlockMaskError(
            f"{lists} must be between 0 and {num_columns - 1}, since seq_lengths and BLOCK_SIZE "
            f"make {num_columns} blocks, but is {indices[wrong][0].item()} {_first(wrong)}. "
            f"Lower {counts}, or give the seq_lengths that the mask is for."
        )


def _first(wrong: Tensor) -> str:
    return f"at {wrong.nonzero()[0].tolist()}"
