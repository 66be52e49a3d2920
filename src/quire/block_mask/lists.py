"""The key blocks that each row of query blocks reads, as lists and as a grid.

    indices  num_blocks            cells, one row per query block, one column per key block
    0 . . .       1                █ . . .
    2 0 . .       2        <->     ░ . █ .
    1 3 2 .       3                . ░ ░ █

The list of a row is the first `num_blocks` entries of `indices`, in any order; the entries after
them are not read. A block mask has two lists for each row: the partial blocks (░), in which the
mask_mod decides, and the full ones (█). This module converts lists to grids of cells and back, for
tensors with any leading dimensions and on any device, and checks lists.

A block that is listed twice counts once. A block in both lists is full. An entry beyond the last
block is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from quire.checks.arguments import dtype_name, whole_number
from quire.errors import ArgumentError, BlockMaskError, DeviceError
from quire.support.torch_private import is_wrapped

EMPTY: Final = 0
PARTIAL: Final = 1
FULL: Final = 2

NOOP_BLOCK_SIZE: Final = 1 << 30
"""A mask with blocks of this size in both directions can be used with sequences of any length."""

INDEX_DTYPES = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def ceil_div(length: int, block: int) -> int:
    """The number of blocks that cover `length` tokens."""
    return -(-length // block)


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


def lists_to_grid(num_blocks: Tensor, indices: Tensor, num_columns: int) -> Tensor:
    """Turn lists [..., R], [..., R, W] into an int32 grid [..., R, num_columns] of 0 and 1."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < num_blocks.unsqueeze(-1)
    columns = indices.long()
    inside = listed & (columns >= 0) & (columns < num_columns)
    # Entries that are not listed are written to an additional last column, which is cut off.
    grid = indices.new_zeros((*indices.shape[:-1], num_columns + 1), dtype=torch.int32)
    grid = grid.scatter(-1, torch.where(inside, columns, num_columns), 1)
    return grid[..., :num_columns].contiguous()


def grid_to_lists(grid: Tensor) -> tuple[Tensor, Tensor]:
    """Turn a grid [..., R, C] into int32 lists [..., R], [..., R, C].

    A row lists its blocks in ascending order and after them, as PyTorch does, all other blocks.
    """
    marked = (grid != EMPTY).to(torch.int32)
    order = torch.argsort(marked, dim=-1, descending=True, stable=True)
    return marked.sum(-1).to(torch.int32), order.to(torch.int32)


def transpose_lists(num_blocks: Tensor, indices: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """The query blocks that read each key block: lists [..., C], [..., C, R]."""
    return grid_to_lists(lists_to_grid(num_blocks, indices, num_columns).transpose(-2, -1))


def write_order(grid: Tensor, q_indices: Tensor, order: Tensor | bool | None) -> Tensor:
    """The turn at which a key block adds to the gradient of each query block in `q_indices`.

    Each key block that a query block reads adds to its gradient. If they add in a fixed order, the
    sum is deterministic. The order is ascending key blocks, descending ones if `order` is True, or
    a permutation `order` [..., C] of the key blocks. Grid [..., R, C] and lists `q_indices`
    [..., C, R] give int32 [..., C, R].
    """
    reads = (grid != EMPTY).to(torch.int32)
    if isinstance(order, Tensor):
        by_rank = order.long().unsqueeze(-2).expand_as(reads)
        arranged = reads.gather(-1, by_rank)
        before = arranged.cumsum(-1) - arranged
        ranks = torch.empty_like(before).scatter(-1, by_rank, before)
    else:
        ranks = reads.cumsum(-1) - reads
        if order:
            ranks = reads.sum(-1, keepdim=True) - 1 - ranks
    rows = q_indices.long().clamp(0, max(grid.shape[-2] - 1, 0))
    return ranks.transpose(-2, -1).gather(-1, rows).to(torch.int32)


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
    listed = torch.arange(width) < num_blocks.unsqueeze(-1)
    wrong = listed & ((indices < 0) | (indices >= num_columns))
    if wrong.any():
        raise BlockMaskError(
            f"{lists} must be between 0 and {num_columns - 1}, since seq_lengths and BLOCK_SIZE "
            f"make {num_columns} blocks, but is {indices[wrong][0].item()} {_first(wrong)}. "
            f"Lower {counts}, or give the seq_lengths that the mask is for."
        )


def _first(wrong: Tensor) -> str:
    return f"at {wrong.nonzero()[0].tolist()}"
