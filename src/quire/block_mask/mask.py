"""BlockMask: the tensors that list blocks, the mask_mod, and what can be asked of them.

Comes in: lists of blocks, as tensors on any device. Goes out: a subclass of PyTorch's `BlockMask`
with the same fields, so that other libraries know it. What PyTorch's own methods do right is
inherited (`as_tuple`, `numel`, `to_string`, `_flatten`, ...).

What a mask says is kept once. Made from a mask_mod it has runs of blocks, and no tensors until one
is asked for. From then on the tensors are the only state: a user may edit them and `seq_lengths` in
place, so nothing that is derived from them is kept.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import noop_mask

from quire.block_mask import algebra, files, packed, parts
from quire.block_mask.index import expand_index
from quire.block_mask.lists import (
    EMPTY,
    FULL,
    PARTIAL,
    as_block_size,
    as_count,
    block_extents,
    ceil_div,
    check_devices,
    check_lists,
    grid_to_lists,
    lists_to_grid,
    transpose_lists,
    write_order,
)
from quire.block_mask.mask_mods import (
    Device,
    MaskMod,
    move_mod,
    same_mod,
    same_tensor,
    sliced_mask_mod,
    try_trace,
)
from quire.block_mask.rows import BlockRows
from quire.block_mask.runs import Runs
from quire.errors import (
    ArgumentError,
    BlockMaskError,
    BlockMaskShapeError,
    MaskPickleError,
    ModError,
)
from quire.ir.trace import mod_name
from quire.torch_private import (
    block_mask_context,
    block_mask_order,
    block_mask_tensors,
    flattened,
    is_torch_slice,
    unflattened,
)


class _MadeOf(NamedTuple):
    """What the tensors of a mask will be made of, and where."""

    runs: Runs
    device: torch.device


_LISTS = (
    *("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"),
    *("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"),
)

BlockIndex: TypeAlias = Any  # int, slice, Tensor, list or ..., alone or in a tuple

DEFAULT_BLOCK_SIZE = 128
MOST_AT_ONCE = 2**16
"""Blocks of a mask up to which its tensors are made with it."""


class BlockMask(torch_flex.BlockMask):
    """A block-sparse attention mask, with PyTorch's fields and methods.

    >>> kv_num_blocks = torch.tensor([[[1, 2]]])
    >>> kv_indices = torch.tensor([[[[0, 0], [1, 0]]]])  # any order; the tail is not read
    >>> BlockMask.from_kv_blocks(kv_num_blocks, kv_indices, BLOCK_SIZE=64).to_dense()
    tensor([[[[1, 0],
              [1, 1]]]], dtype=torch.int32)

    `kv_*` lists the blocks in which `mask_mod` decides, `full_kv_*` those in which everything is
    allowed, `q_*` and `full_q_*` the same seen from the keys; `dq_*` orders the additions of a
    deterministic backward pass on a GPU and is kept as given. A block listed twice counts once,
    and a block in both lists is full.

    Masks are equal where they are the same object, and hash so; `equal` compares what they say.
    A mask pickles with the graph of its mask_mod and the tensors it captured.
    """

    # What takes the place of the tensors until one is asked for.
    _made_of: _MadeOf
    _separate_full_blocks: bool

    def __init__(
        self,
        seq_lengths: tuple[int, int],
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None,
        full_kv_indices: Tensor | None,
        q_num_blocks: Tensor | None,
        q_indices: Tensor | None,
        full_q_num_blocks: Tensor | None,
        full_q_indices: Tensor | None,
        BLOCK_SIZE: tuple[int, int] = (DEFAULT_BLOCK_SIZE, DEFAULT_BLOCK_SIZE),
        mask_mod: MaskMod = noop_mask,
        *,
        dq_write_order: Tensor | None = None,
        dq_write_order_full: Tensor | None = None,
        dq_kv_order: Tensor | None = None,
        dq_kv_order_spt: bool | None = None,
    ) -> None:
        BLOCK_SIZE = as_block_size(BLOCK_SIZE)
        q_len, kv_len = (as_count("seq_lengths", length) for length in seq_lengths)
        num_columns = ceil_div(kv_len, BLOCK_SIZE[1])
        check_lists("kv", kv_num_blocks, kv_indices, num_columns=num_columns)
        *batch, num_rows = kv_num_blocks.shape
        for name, num_blocks, indices, size, leading in (
            ("full_kv", full_kv_num_blocks, full_kv_indices, num_columns, kv_num_blocks.shape),
            ("q", q_num_blocks, q_indices, num_rows, torch.Size(batch)),
            ("full_q", full_q_num_blocks, full_q_indices, num_rows, torch.Size(batch)),
        ):
            if num_blocks is not None or indices is not None:
                check_lists(name, num_blocks, indices, num_columns=size, leading=leading)
        check_devices(
            *(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices),
            *(q_num_blocks, q_indices, full_q_num_blocks, full_q_indices),
            *(dq_write_order, dq_write_order_full, dq_kv_order),
        )
        if num_rows * BLOCK_SIZE[0] < q_len:
            raise BlockMaskError(
                f"expected at least {ceil_div(q_len, BLOCK_SIZE[0])} rows of blocks for "
                f"{q_len} queries in blocks of {BLOCK_SIZE[0]}, got {num_rows}. "
                f"Give the seq_lengths that the rows are for."
            )
        if dq_write_order_full is not None and dq_write_order is None:
            raise BlockMaskError(
                "dq_write_order_full requires dq_write_order: expected both, got only the "
                "first. Give the order of the partial blocks too."
            )
        super().__init__(
            (q_len, kv_len),
            kv_num_blocks,
            kv_indices,
            full_kv_num_blocks,
            full_kv_indices,
            q_num_blocks,
            q_indices,
            full_q_num_blocks,
            full_q_indices,
            BLOCK_SIZE,
            mask_mod,
            dq_write_order=dq_write_order,
            dq_write_order_full=dq_write_order_full,
            dq_kv_order=dq_kv_order,
            dq_kv_order_spt=dq_kv_order_spt,
        )

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None = None,
        full_kv_indices: Tensor | None = None,
        BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
        mask_mod: MaskMod | None = None,
        seq_lengths: tuple[int, int] | None = None,
        compute_q_blocks: bool = True,
        *,
        dq_write_order: Tensor | None = None,
        dq_write_order_full: Tensor | None = None,
        dq_kv_order: Tensor | bool | None = None,
    ) -> Self:
        """A mask from the key blocks that each row of query blocks reads.

        `kv_indices` [B, H, rows, width] may be narrower than the keys have blocks if `seq_lengths`
        are given; without them the lengths are rows and width times `BLOCK_SIZE`.
        """
        if dq_kv_order is not None and not isinstance(dq_kv_order, bool | Tensor):
            raise ArgumentError(
                f"dq_kv_order must be a bool, Tensor, or None, got {dq_kv_order!r}. "
                f"Give True for descending key blocks or a tensor that orders them."
            )
        block_size = as_block_size(BLOCK_SIZE)
        if seq_lengths is None:
            check_lists("kv", kv_num_blocks, kv_indices)
            num_rows, width = kv_indices.shape[-2:]
            seq_lengths = (num_rows * block_size[0], width * block_size[1])
        mask = cls(
            seq_lengths,
            kv_num_blocks,
            kv_indices,
            full_kv_num_blocks,
            full_kv_indices,
            None,
            None,
            None,
            None,
            BLOCK_SIZE=block_size,
            mask_mod=mask_mod if mask_mod is not None else noop_mask,
            dq_write_order=dq_write_order,
            dq_write_order_full=dq_write_order_full,
            dq_kv_order=dq_kv_order if isinstance(dq_kv_order, Tensor) else None,
            dq_kv_order_spt=dq_kv_order if isinstance(dq_kv_order, bool) else None,
        )
        if compute_q_blocks:
            mask._add_q_blocks()
        return mask

    @classmethod
    def from_torch(cls, mask: torch_flex.BlockMask) -> Self:
        """`mask` as one of ours: itself, or a new mask around the tensors of PyTorch's own.

        PyTorch's slices keep the query length of the whole mask; here it ends with the last row.
        """
        if isinstance(mask, cls):
            return mask
        fields = {
            name: getattr(mask, name)
            for name in (*block_mask_tensors(mask), *block_mask_context(mask))
        }
        q_len, kv_len = mask.seq_lengths
        num_rows = mask.kv_indices.shape[-2] if mask.kv_indices.dim() > 1 else 0
        fields["seq_lengths"] = (min(q_len, num_rows * mask.BLOCK_SIZE[0]), kv_len)
        if is_torch_slice(mask.mask_mod):
            fields["mask_mod"] = sliced_mask_mod
        return cls(**fields)

    @classmethod
    def _from_cells(
        cls,
        cells: Tensor,
        separate_full_blocks: bool,
        *,
        BLOCK_SIZE: tuple[int, int],
        mask_mod: MaskMod,
        seq_lengths: tuple[int, int],
        compute_q_blocks: bool = True,
    ) -> Self:
        kv_num_blocks, kv_indices = grid_to_lists(
            cells == PARTIAL if separate_full_blocks else cells != EMPTY
        )
        full_kv_num_blocks, full_kv_indices = (
            grid_to_lists(cells == FULL) if separate_full_blocks else (None, None)
        )
        return cls.from_kv_blocks(
            kv_num_blocks,
            kv_indices,
            full_kv_num_blocks,
            full_kv_indices,
            BLOCK_SIZE=BLOCK_SIZE,
            mask_mod=mask_mod,
            seq_lengths=seq_lengths,
            compute_q_blocks=compute_q_blocks,
        )

    @classmethod
    def from_lengths(
        cls,
        lengths: int | Sequence[int] | Tensor,
        causal: bool = False,
        BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
        *,
        device: Device | None = None,
    ) -> Self:
        """The mask of documents packed into one sequence, of which none sees another.

        >>> BlockMask.from_lengths([300, 0, 212], causal=True).shape
        (1, 1, 512, 512)

        `device` None is that of the lengths, and the CPU for numbers.
        """
        return packed.from_lengths(cls, lengths, causal, BLOCK_SIZE, device)

    @classmethod
    def from_offsets(
        cls,
        offsets: Sequence[int] | Tensor,
        causal: bool = False,
        BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
        *,
        device: Device | None = None,
    ) -> Self:
        """As `from_lengths`, from where each document starts and the last one ends."""
        return packed.from_offsets(cls, offsets, causal, BLOCK_SIZE, device)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: Device = "cpu") -> Self:
        """The mask that `save` wrote. A damaged file is refused, and no code of it is run."""
        return files.load(cls, path).to(device)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the mask to one file: its blocks, and the graph and tensors of its mask_mod.

        What orders the backward pass on a GPU (`dq_*`) is not kept.
        """
        files.save(self, path)

    @classmethod
    def _from_runs(
        cls,
        runs: Runs,
        separate_full_blocks: bool,
        *,
        BLOCK_SIZE: tuple[int, int],
        mask_mod: MaskMod,
        seq_lengths: tuple[int, int],
        device: torch.device,
    ) -> Self:
        """A mask whose tensors are made when one of them is asked for; at once if they are small.

        Dynamo can follow a mask that has its tensors into PyTorch's operator.
        """
        mask = object.__new__(cls)
        mask.__dict__.update(
            seq_lengths=seq_lengths,
            BLOCK_SIZE=BLOCK_SIZE,
            mask_mod=mask_mod,
            dq_write_order=None,
            dq_write_order_full=None,
            dq_kv_order=None,
            dq_kv_order_spt=None,
            _made_of=_MadeOf(runs if separate_full_blocks else runs.all_partial(), device),
            _separate_full_blocks=separate_full_blocks,
        )
        if math.prod(runs.shape) <= MOST_AT_ONCE:
            _ = mask.kv_indices
        return mask

    def __getattr__(self, name: str) -> Any:
        made_of = self.__dict__.get("_made_of")
        if made_of is None or name not in _LISTS:
            raise AttributeError(f"a BlockMask has no attribute {name!r}")
        made = self._from_cells(
            torch.from_numpy(made_of.runs.cells()).to(made_of.device),
            self._separate_full_blocks,
            BLOCK_SIZE=self.BLOCK_SIZE,
            mask_mod=self.mask_mod,
            seq_lengths=self.seq_lengths,
        )
        self.__dict__.update({each: getattr(made, each) for each in _LISTS})
        del self.__dict__["_made_of"]
        return self.__dict__[name]

    @property
    def _runs(self) -> Runs | None:
        """The runs that it is made of; None where tensors are what counts."""
        made_of = self.__dict__.get("_made_of")
        return None if made_of is None else made_of.runs

    @property
    def device(self) -> torch.device:
        """Where its tensors are, or will be."""
        made_of = self.__dict__.get("_made_of")
        return self.kv_indices.device if made_of is None else made_of.device

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """Batches, heads, rows and columns of blocks."""
        if self._runs is not None:
            return self._runs.shape
        return (*self.kv_num_blocks.shape, self._num_columns())

    @property
    def shape(self) -> tuple[int, ...]:
        """Batches, heads, queries and keys."""
        return (*self.grid_shape[:-2], *self.seq_lengths)

    @property
    def separates_full_blocks(self) -> bool:
        """Whether full blocks are listed apart; if not, the mask_mod is asked in every block."""
        if self._runs is not None:
            return bool(self._separate_full_blocks)
        return self.full_kv_num_blocks is not None

    @property
    def is_sliced(self) -> bool:
        """Whether this is a slice that has not been given a mask_mod of its own."""
        return self.mask_mod is sliced_mask_mod

    def __getitem__(self, index: BlockIndex) -> Self:
        """The mask of some batches, heads and rows of blocks; no dimension is lost.

        >>> part = block_mask[0, :, 1]     # batch 0, every head, the second row of blocks
        >>> part.shape[-2]                 # the queries in that row
        128

        Positions move, so a slice refuses to use the mask_mod until it is given its own. Rows that
        are picked out of order count as whole blocks, except for the last.
        """
        where = expand_index(index, self.kv_num_blocks.shape)
        full = self._full_lists()
        sliced = self.from_kv_blocks(
            self.kv_num_blocks[where],
            self.kv_indices[where],
            full[0][where] if full else None,
            full[1][where] if full else None,
            BLOCK_SIZE=self.BLOCK_SIZE,
            mask_mod=sliced_mask_mod,
            seq_lengths=(self._num_queries(where[-1]), self.seq_lengths[1]),
            compute_q_blocks=self.q_indices is not None,
        )
        order = self.dq_kv_order
        if order is not None:
            order = order.expand(*self.kv_num_blocks.shape[:-1], -1)[where[:-1]]
        return sliced._keep_order_of(self, order)

    def for_queries(self, start: int, stop: int) -> Self:
        """The mask of the queries from `start` up to `stop`, over the same keys.

        >>> step = block_mask.for_queries(t, t + 1)
        >>> flex_attention(query[:, :, t : t + 1], key, value, block_mask=step)

        Its mask_mod is that of the whole, moved by `start`, so it can be used as it is. Any token
        can be the first, also one in the middle of a block.
        """
        return parts.for_queries(self, start, stop)

    def resize(self, q_len: int, kv_len: int) -> Self:
        """The mask for other lengths, shorter or longer, as if its mask_mod had made it for them.

        Blocks listed by hand, of which the mask_mod knows nothing, can be cropped and not extended.
        """
        return parts.resize(self, q_len, kv_len)

    def __and__(self, other: torch_flex.BlockMask) -> Self:
        """The mask of what both allow. A B or H of 1 serves every one of the other's."""
        if not isinstance(other, torch_flex.BlockMask):
            return NotImplemented
        return algebra.intersection(self, BlockMask.from_torch(other))

    def __or__(self, other: torch_flex.BlockMask) -> Self:
        """The mask of what at least one of them allows."""
        if not isinstance(other, torch_flex.BlockMask):
            return NotImplemented
        return algebra.union(self, BlockMask.from_torch(other))

    def __invert__(self) -> Self:
        """The mask of what this one does not allow."""
        return algebra.complement(self)

    def _num_queries(self, rows: slice | Tensor) -> int:
        num_rows, block = self.kv_indices.shape[-2], self.BLOCK_SIZE[0]
        picked = range(num_rows)[rows] if isinstance(rows, slice) else rows
        if len(picked) == 0:
            return 0
        left = self.seq_lengths[0] - int(picked[-1]) % num_rows * block
        return (len(picked) - 1) * block + max(0, min(block, left))

    def _adjust(self, new_q_len: int, new_kv_len: int) -> Self:
        """The upper left corner of the mask: blocks beyond the new lengths are gone.

        The mask_mod stays, so this is right where it does not depend on the lengths.
        """
        lengths = as_count("new_q_len", new_q_len), as_count("new_kv_len", new_kv_len)
        if lengths[0] > self.seq_lengths[0] or lengths[1] > self.seq_lengths[1]:
            raise BlockMaskShapeError(
                f"expected lengths of at most {self.seq_lengths}, which this block mask was "
                f"created for, got {lengths}. Create a new block mask for the longer sequence."
            )
        num_rows, num_columns = map(ceil_div, lengths, self.BLOCK_SIZE)
        order = self.dq_kv_order
        if order is not None:
            # A permutation keeps the same number of entries below the new end in each row.
            order = order[order < num_columns].view(*order.shape[:-1], num_columns)
        cropped = self._from_cells(
            self._cells()[..., :num_rows, :num_columns],
            self.full_kv_num_blocks is not None,
            BLOCK_SIZE=self.BLOCK_SIZE,
            mask_mod=self.mask_mod,
            seq_lengths=lengths,
            compute_q_blocks=self.q_indices is not None,
        )
        return cropped._keep_order_of(self, order)

    def _keep_order_of(self, whole: BlockMask, order: Tensor | None) -> Self:
        self.dq_kv_order, self.dq_kv_order_spt = order, whole.dq_kv_order_spt
        if whole.dq_write_order is not None:
            self._add_write_order()
        return self

    def _add_q_blocks(self) -> None:
        num_columns = self._num_columns()
        self.q_num_blocks, self.q_indices = transpose_lists(
            self.kv_num_blocks, self.kv_indices, num_columns
        )
        if full := self._full_lists():
            self.full_q_num_blocks, self.full_q_indices = transpose_lists(*full, num_columns)

    def _add_write_order(self) -> None:
        if self.q_indices is None:
            raise BlockMaskError(
                "BlockMask must have q_num_blocks and q_indices to compute dq_write_order, got "
                "neither. Create the mask with compute_q_blocks=True."
            )
        cells, order = self._cells(), block_mask_order(self)
        self.dq_write_order = write_order(cells, self.q_indices, order)
        if self.full_q_indices is not None:
            self.dq_write_order_full = write_order(cells, self.full_q_indices, order)

    def _full_lists(self) -> tuple[Tensor, Tensor] | None:
        if self.full_kv_num_blocks is None or self.full_kv_indices is None:
            return None
        return self.full_kv_num_blocks, self.full_kv_indices

    def _num_columns(self) -> int:
        return ceil_div(self.seq_lengths[1], self.BLOCK_SIZE[1])

    def _cells(self) -> Tensor:
        """EMPTY, PARTIAL or FULL for each block: [..., rows, columns]."""
        if self._runs is not None:
            return torch.from_numpy(self._runs.cells()).to(self.device)
        num_columns = self._num_columns()
        cells = lists_to_grid(self.kv_num_blocks, self.kv_indices, num_columns)
        if full := self._full_lists():
            cells = cells.masked_fill(lists_to_grid(*full, num_columns) != EMPTY, FULL)
        return cells

    @property
    def nbytes(self) -> int:
        """The memory of what it is kept as."""
        if self._runs is not None:
            return self._runs.nbytes
        tensors = (getattr(self, name) for name in block_mask_tensors(self))
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def content(self) -> tuple[object, ...]:
        """All that `rows` reads, as a value: two masks with the same content have the same rows."""
        if self._runs is not None:
            return (self.seq_lengths, self.BLOCK_SIZE, *self._runs.content())
        lists = self.kv_num_blocks, self.kv_indices, *(self._full_lists() or ())
        arrays = [tensor.numpy(force=True) for tensor in lists]
        parts = [(array.shape, array.dtype.str, array.tobytes()) for array in arrays]
        return (self.seq_lengths, self.BLOCK_SIZE, *parts)

    def to_dense(self) -> Tensor:
        """1 for each block that is computed, 0 for the others: int32 [..., rows, columns]."""
        return (self._cells() != EMPTY).to(torch.int32)

    def sparsity(self) -> float:
        """The percentage of the mask's elements that lie in blocks which are not computed.

        Elements beyond the lengths do not count, so it is never negative; 0 for an empty mask.
        """
        if self.numel() == 0:
            return 0.0
        if self._runs is not None:
            in_runs = self._runs.num_elements(self.seq_lengths, self.BLOCK_SIZE)
            return 100 * (1 - in_runs / self.numel())
        computed = self.to_dense()
        num_rows, num_columns = computed.shape[-2:]
        height = block_extents(self.seq_lengths[0], self.BLOCK_SIZE[0], num_rows, computed.device)
        width = block_extents(self.seq_lengths[1], self.BLOCK_SIZE[1], num_columns, computed.device)
        elements = (computed * height.unsqueeze(-1) * width).sum().item()
        return 100 * (1 - elements / self.numel())

    def rows(self, q_len: int | None = None, kv_len: int | None = None) -> BlockRows:
        """The mask as attention walks it, read from the tensors as they are now.

        The lengths are the mask's own unless others are given, as for a mask of NOOP_BLOCK_SIZE.
        """
        runs = self._runs
        if runs is None:
            cells = self._cells()
            cells = cells.reshape((1,) * (4 - cells.dim()) + cells.shape)
            runs = Runs.of_cells(cells.cpu().numpy())
        lengths = (
            self.seq_lengths[0] if q_len is None else q_len,
            self.seq_lengths[1] if kv_len is None else kv_len,
        )
        return BlockRows(runs, self.BLOCK_SIZE, lengths)

    def equal(self, other: object) -> bool:
        """Whether `other` says the same: shape, block size, partial and full blocks, mask_mod.

        Order and tails of the lists do not matter. Two mask_mods are the same if they are one
        function, or trace to the same graph over tensors with the same values.
        """
        if not isinstance(other, torch_flex.BlockMask):
            return False
        other = BlockMask.from_torch(other)
        return (
            self.shape == other.shape
            and self.BLOCK_SIZE == other.BLOCK_SIZE
            and same_tensor(self._cells(), other._cells())
            and same_mod(self.mask_mod, other.mask_mod, self.device)
        )

    def to(self, device: Device) -> Self:
        """The mask on another device, with the tensors that its mask_mod captured.

        If any of them moves, the new mask_mod is a trace, which no longer follows the variables of
        the original. One that cannot be traced is rebuilt around the moved tensors of its closure
        and of its functools.partial; what else it holds (globals, attributes) stays behind.
        """
        leaves, context = flattened(self)
        moved = tuple(leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        result: Self = unflattened(self, moved, context)
        stays = all(new is old for new, old in zip(moved, leaves, strict=True))
        rebuilt = self.mask_mod if stays else result.mask_mod
        result.mask_mod = move_mod(self.mask_mod, rebuilt, self.device, device)
        return result

    def __getstate__(self) -> dict[str, object]:
        state = dict(self.__dict__)
        if not self.is_sliced:
            traced = try_trace(self.mask_mod, "mask", self.device)
            if isinstance(traced, ModError):
                raise MaskPickleError(
                    f"expected a mask_mod that can be traced, since a BlockMask is pickled as the "
                    f"graph of its mask_mod, got {mod_name(self.mask_mod)!r}, which cannot: "
                    f"{traced} Pickle the arguments of create_block_mask and create it again."
                ) from traced
            state["mask_mod"] = traced
        return state

    def __copy__(self) -> Self:
        twin = object.__new__(type(self))
        _ = self.kv_indices  # a shallow copy has the same tensors, so there must be some
        twin.__dict__.update(self.__dict__)
        return twin

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin
