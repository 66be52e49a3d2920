"""The blocks that each row of query blocks reads, as lists and as a grid.

    indices  num_blocks            cells, one row per query block, one column per key block
    0 . . .       1                █ . . .
    2 0 . .       2        <->     ░ . █ .
    1 3 2 .       3                . ░ ░ █

A list is the first `num_blocks` entries of a row of `indices`, in any order; what follows is
undefined. A block mask has two pairs of them, the partial blocks (░, the mask_mod decides) and the
full ones (█). Comes in: such tensors, of any leading dimensions and on any device. Goes out: grids,
lists. What odd lists mean is decided by the grid: a block listed twice counts
once, a block in both lists is full, an entry beyond the last block is not there.
"""

from __future__ import annotations

import operator
from typing import Final

import torch
from torch import Tensor

from quire.errors import ArgumentError, BlockMaskError, DeviceError
from quire.torch_private import is_wrapped

EMPTY: Final = 0
PARTIAL: Final = 1
FULL: Final = 2

NOOP_BLOCK_SIZE: Final = 1 << 30
"""Blocks of this size in both directions mark a mask that is good for every length."""

INDEX_DTYPES = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def ceil_div(length: int, block: int) -> int:
    """The number of blocks that cover `length` tokens."""
    return -(-length // block)


def as_count(name: str, value: object, least: int = 0) -> int:
    """`value` as a Python int of at least `least`, or an ArgumentError that names it."""
    try:
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        count = least - 1
    if count < least:
        raise ArgumentError(
            f"expected {name} to be an integer of at least {least}, got {value!r}. "
            f"Give the number of tokens, batches, heads or blocks as an int."
        )
    return count


def as_block_size(value: object) -> tuple[int, int]:
    """`BLOCK_SIZE` as (query tokens, key tokens) per block."""
    sizes = value if isinstance(value, (tuple, list)) else (value, value)
    if len(sizes) != 2:
        raise ArgumentError(
            f"expected BLOCK_SIZE to be an int or a pair (q_block, kv_block), got {value!r}. "
            f"The default is 128."
        )
    return as_count("BLOCK_SIZE[0]", sizes[0], 1), as_count("BLOCK_SIZE[1]", sizes[1], 1)


def lists_to_grid(num_blocks: Tensor, indices: Tensor, num_columns: int) -> Tensor:
    """Lists [..., R], [..., R, W] as an int32 grid [..., R, num_columns] of 0 and 1."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < num_blocks.unsqueeze(-1)
    columns = indices.long()
    inside = listed & (columns >= 0) & (columns < num_columns)
    # Whatever is not listed lands in one column too many, which is cut off.
    grid = indices.new_zeros((*indices.shape[:-1], num_columns + 1), dtype=torch.int32)
    grid = grid.scatter(-1, torch.where(inside, columns, num_columns), 1)
    return grid[..., :num_columns].contiguous()


def grid_to_lists(grid: Tensor) -> tuple[Tensor, Tensor]:
    """A grid [..., R, C] as int32 lists [..., R], [..., R, C].

    A row lists its blocks in ascending order and then, as PyTorch does, the others.
    """
    marked = (grid != EMPTY).to(torch.int32)
    order = torch.argsort(marked, dim=-1, descending=True, stable=True)
    return marked.sum(-1).to(torch.int32), order.to(torch.int32)


def transpose_lists(num_blocks: Tensor, indices: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """The query blocks that read each key block: lists [..., C], [..., C, R]."""
    return grid_to_lists(lists_to_grid(num_blocks, indices, num_columns).transpose(-2, -1))


def block_extents(length: int, block: int, num_blocks: int, device: torch.device) -> Tensor:
    """How many of the first `length` tokens lie in each of `num_blocks` blocks."""
    starts = torch.arange(num_blocks, device=device) * block
    return (length - starts).clamp(0, block)


def write_order(grid: Tensor, q_indices: Tensor, order: Tensor | bool | None) -> Tensor:
    """When each key block adds to the gradient of the query blocks in its row of `q_indices`.

    A query block receives one contribution per key block that it reads; the rank of a key block
    among them makes the sum deterministic. Ranks follow ascending key blocks, descending ones
    (`order=True`), or an explicit permutation `order[..., rank] = key block`.
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
    """Refuse tensors `<name>_num_blocks` and `<name>_indices` that do not list blocks.

    There are `num_columns` blocks to list, by default as many as a list is wide, and the shape of
    the counts must begin with `leading`. Values are looked at on the CPU only: elsewhere that
    would wait for the device.
    """
    if not isinstance(num_blocks, Tensor) or not isinstance(indices, Tensor):
        got = f"{type(num_blocks).__name__} and {type(indices).__name__}"
        raise BlockMaskError(
            f"expected {name}_num_blocks and {name}_indices to be two tensors, got {got}. "
            f"They must be both provided or, unless they are kv_*, omitted."
        )
    counts, lists = f"{name}_num_blocks", f"{name}_indices"
    if indices.dim() < 2:
        raise BlockMaskError(
            f"BlockMask must have at least 2 dimensions: expected {lists} of shape "
            f"[B, H, rows, blocks], got {list(indices.shape)}. Unsqueeze it."
        )
    if num_blocks.shape != indices.shape[:-1]:
        raise BlockMaskError(
            f"expected {counts} to have the shape of {lists} without its last dimension, "
            f"{list(indices.shape[:-1])}, got {list(num_blocks.shape)}. Give one count per row."
        )
    if leading is not None and num_blocks.shape[: len(leading)] != leading:
        raise BlockMaskError(
            f"expected {counts} to begin with the dimensions {list(leading)} of kv_num_blocks, "
            f"got {list(num_blocks.shape)}. Expand one of them."
        )
    for tensor_name, tensor in ((counts, num_blocks), (lists, indices)):
        if tensor.dtype not in INDEX_DTYPES:
            raise BlockMaskError(
                f"expected {tensor_name} to hold integers, got {tensor.dtype}. "
                f"Convert it with .to(torch.int32)."
            )
    if is_readable(num_blocks) and is_readable(indices):
        columns = indices.shape[-1] if num_columns is None else num_columns
        _check_values(counts, num_blocks, lists, indices, columns)


def check_devices(*tensors: Tensor | None) -> None:
    """Refuse the tensors of a block mask that are not all on one device."""
    devices = sorted({str(tensor.device) for tensor in tensors if tensor is not None})
    if len(devices) > 1:
        raise DeviceError(
            f"expected the tensors of a BlockMask on one device, got {' and '.join(devices)}. "
            f"Move them with .to(device)."
        )


def is_readable(tensor: Tensor) -> bool:
    """Whether values can be looked at without waiting, and without breaking a trace."""
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
            f"expected {counts} between 0 and the {width} entries that a row of {lists} has, got "
            f"{num_blocks[wrong][0].item()} {_first(wrong)}. Count the blocks that are listed."
        )
    listed = torch.arange(width) < num_blocks.unsqueeze(-1)
    wrong = listed & ((indices < 0) | (indices >= num_columns))
    if wrong.any():
        raise BlockMaskError(
            f"expected {lists} between 0 and {num_columns - 1}, since seq_lengths and BLOCK_SIZE "
            f"make {num_columns} blocks, got {indices[wrong][0].item()} {_first(wrong)}. "
            f"Lower {counts}, or give the seq_lengths that the mask is for."
        )


def _first(wrong: Tensor) -> str:
    return f"at {wrong.nonzero()[0].tolist()}"
