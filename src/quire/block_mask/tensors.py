"""The state of a block mask: tensors that list its blocks, or runs of blocks until they are needed.

A mask that is made from a mask_mod keeps runs of blocks (`blocks.py`), which take memory for what
exists only. When a user reads one of its tensors, all of them are made and replace the runs. From
then on the tensors are the only state: a user may change them and `seq_lengths` in place, so
nothing that is computed from them is kept.

`BlockTensors` has the fields of PyTorch's `BlockMask`, and is a subclass of it so that other
libraries recognise it. `mask.py` adds what a user does with a mask.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import noop_mask

from quire.block_mask.blocks import (
    EMPTY,
    FULL,
    NOOP_BLOCK_SIZE,
    PARTIAL,
    Runs,
    ceil_div,
    grid_to_lists,
    lists_to_grid,
    transpose_lists,
    write_order,
)
from quire.block_mask.checks import (
    as_block_size,
    as_count,
    check_devices,
    check_lists,
    check_mask_lists,
)
from quire.block_mask.classify import classify
from quire.block_mask.mask_mods import sliced_mask_mod
from quire.block_mask.tiles import Sizes, fastest_form
from quire.errors import ArgumentError, BlockMaskError
from quire.mods.compose import MaskMod
from quire.support.torch_private import block_mask_order, block_mask_tensors, outside_transforms

DEFAULT_BLOCK_SIZE = 128
MOST_AT_ONCE = 2**16
"""A mask of at most this many blocks gets its tensors when it is made."""

_LISTS = tuple(
    f"{name}_{part}"
    for name in ("kv", "full_kv", "q", "full_q")
    for part in ("num_blocks", "indices")
)


class _MadeOf(NamedTuple):
    """The runs from which the tensors of a mask will be made, and their device."""

    runs: Runs
    separate_full_blocks: bool
    device: torch.device


Mask = TypeVar("Mask", bound="BlockTensors")


class BlockTensors(torch_flex.BlockMask):
    """The fields of a block mask, its constructors, and the questions about its blocks."""

    _made_of: _MadeOf | None = None  # only while the mask has no tensors
    lists_pages = False
    """Whether its columns are pages of a cache, listed in the order of a sequence."""

    def __init__(
        self,
        seq_lengths: tuple[int, int],
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None = None,
        full_kv_indices: Tensor | None = None,
        q_num_blocks: Tensor | None = None,
        q_indices: Tensor | None = None,
        full_q_num_blocks: Tensor | None = None,
        full_q_indices: Tensor | None = None,
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
        lists = (
            kv_num_blocks,
            kv_indices,
            full_kv_num_blocks,
            full_kv_indices,
            q_num_blocks,
            q_indices,
            full_q_num_blocks,
            full_q_indices,
        )
        check_mask_lists(lists, (q_len, kv_len), BLOCK_SIZE)
        check_devices(*lists, dq_write_order, dq_write_order_full, dq_kv_order)
        if dq_write_order_full is not None and dq_write_order is None:
            raise BlockMaskError(
                "dq_write_order_full requires dq_write_order, but dq_write_order is None. Give the "
                "order of the partial blocks too."
            )
        super().__init__(
            (q_len, kv_len),
            *lists,
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
        """Make a mask from the key blocks that each row of query blocks reads.

        `kv_num_blocks` [B, H, rows] says how many entries of `kv_indices` [B, H, rows, width] are
        read; `full_kv_*` has the same shapes. Without `seq_lengths` the lengths are rows and width
        times `BLOCK_SIZE`. With them, width may be smaller than the number of key blocks.
        """
        if dq_kv_order is not None and not isinstance(dq_kv_order, bool | Tensor):
            raise ArgumentError(
                f"dq_kv_order must be a bool, Tensor, or None, but is {dq_kv_order!r}. "
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
    def _from_cells(cls, cells: Tensor, separate_full_blocks: bool, **fields: Any) -> Self:
        """Make a mask from cells [..., rows, columns] of EMPTY, PARTIAL and FULL.

        `fields` are arguments of `from_kv_blocks`.
        """
        partial = grid_to_lists(cells == PARTIAL if separate_full_blocks else cells != EMPTY)
        full = grid_to_lists(cells == FULL) if separate_full_blocks else (None, None)
        return cls.from_kv_blocks(*partial, *full, **fields)

    def _with_cells(self, cells: Tensor, **changes: Any) -> Self:
        """Make a mask from cells, with the fields of this mask that `changes` does not give."""
        fields: dict[str, Any] = {
            "separate_full_blocks": self.separates_full_blocks,
            "BLOCK_SIZE": self.BLOCK_SIZE,
            "mask_mod": self.mask_mod,
            "seq_lengths": self.seq_lengths,
        }
        return self._from_cells(cells, **fields | changes)

    @classmethod
    def _from_mod(
        cls,
        mask_mod: MaskMod,
        sizes: Sizes,
        block_size: tuple[int, int],
        device: torch.device,
        separate_full_blocks: bool = True,
    ) -> Self:
        """Make the mask of `mask_mod` for `sizes`: batches, heads, queries and keys."""
        return cls._from_runs(
            classify(fastest_form(mask_mod, "mask", device), sizes, block_size, device),
            separate_full_blocks,
            BLOCK_SIZE=block_size,
            mask_mod=mask_mod,
            seq_lengths=sizes[2:],
            device=device,
        )

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
        """Make a mask that keeps `runs` until somebody reads one of its tensors.

        A small mask gets its tensors at once, since Dynamo can pass a mask to PyTorch's operator
        only if it has them.
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
            _made_of=_MadeOf(
                runs if separate_full_blocks else runs.all_partial(), separate_full_blocks, device
            ),
        )
        if math.prod(runs.shape) <= MOST_AT_ONCE:
            _ = mask.kv_indices
        return mask

    def __getattr__(self, name: str) -> Any:
        """Make the tensors when one of them is read for the first time."""
        if self._made_of is None or name not in _LISTS:
            raise AttributeError(f"a BlockMask has no attribute {name!r}")
        made = self._with_cells(self._cells())
        self.__dict__.update({each: getattr(made, each) for each in _LISTS})
        del self._made_of
        return self.__dict__[name]

    @property
    def _runs(self) -> Runs | None:
        """The runs of a mask that has no tensors yet. None for any other mask."""
        return self._made_of and self._made_of.runs

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self._made_of.device if self._made_of else self.kv_indices.device

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """Batches, heads, rows of blocks and columns of blocks."""
        if self._runs is not None:
            return self._runs.shape
        return (*self.kv_num_blocks.shape, self._num_columns())

    @property
    def shape(self) -> tuple[int, ...]:
        """Batches, heads, queries and keys."""
        return (*self.grid_shape[:-2], *self.seq_lengths)

    @property
    def separates_full_blocks(self) -> bool:
        """Whether full blocks have their own list. If not, the mask_mod decides in every block."""
        if self._made_of is not None:
            return self._made_of.separate_full_blocks
        return self.full_kv_num_blocks is not None

    @property
    def is_sliced(self) -> bool:
        """Whether this is a slice that has no mask_mod of its own yet."""
        return self.mask_mod is sliced_mask_mod

    @property
    def is_endless(self) -> bool:
        """Whether the mask can be used with sequences of any length."""
        return self.BLOCK_SIZE == (NOOP_BLOCK_SIZE, NOOP_BLOCK_SIZE)

    @property
    def nbytes(self) -> int:
        """The memory of the runs or of the tensors."""
        if self._runs is not None:
            return self._runs.nbytes
        tensors = (getattr(self, name) for name in block_mask_tensors(self))
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def content(self) -> tuple[object, ...]:
        """A hashable value with lengths, block size and blocks: equal for masks with equal rows."""
        if self._runs is not None:
            return (self.seq_lengths, self.BLOCK_SIZE, *self._runs.content())
        lists = self.kv_num_blocks, self.kv_indices, *(self._full_lists() or ())
        arrays = [tensor.numpy(force=True) for tensor in lists]
        parts = [(array.shape, array.dtype.str, array.tobytes()) for array in arrays]
        return (self.seq_lengths, self.BLOCK_SIZE, *parts)

    def _cells(self) -> Tensor:
        """EMPTY, PARTIAL or FULL for each block: [..., rows, columns]."""
        if self._runs is not None:
            return torch.from_numpy(self._runs.cells()).to(self.device)
        num_columns = self._num_columns()
        cells = lists_to_grid(self.kv_num_blocks, self.kv_indices, num_columns)
        if full := self._full_lists():
            cells = cells.masked_fill(lists_to_grid(*full, num_columns) != EMPTY, FULL)
        return cells

    def _as_runs(self, groups: int = 0) -> Runs:
        """The runs of the mask as it is now. Leading dimensions beyond [B, H] become part of B.

        If the heads of each of `groups` groups have the same lists, there are runs for the groups.
        """
        if self._runs is not None:
            return self._runs.by_group(groups) if groups else self._runs
        with outside_transforms():
            lists = [(self.kv_num_blocks, self.kv_indices)]
            if full := self._full_lists():
                lists.append(full)
            *several, rows, columns = (1, 1, *self.grid_shape)
            batches, heads = math.prod(several[:-1]), several[-1]
            arrays = [
                (
                    counts.numpy(force=True).reshape(batches, heads, rows),
                    indices.numpy(force=True).reshape(batches, heads, rows, indices.shape[-1]),
                )
                for counts, indices in lists
            ]
            if 1 < groups < heads and heads % groups == 0:
                step = heads // groups
                first = [(counts[:, ::step], indices[:, ::step]) for counts, indices in arrays]
                if all(map(_repeats, itertools.chain(*first), itertools.chain(*arrays))):
                    arrays, heads = first, groups
            kinds = (PARTIAL, FULL)
            given = [(*pair, kind) for pair, kind in zip(arrays, kinds, strict=False)]
            return Runs.of_lists((batches, heads, rows, columns), *given)

    def _num_columns(self) -> int:
        return ceil_div(self.seq_lengths[1], self.BLOCK_SIZE[1])

    def _full_lists(self) -> tuple[Tensor, Tensor] | None:
        if self.full_kv_num_blocks is None or self.full_kv_indices is None:
            return None
        return self.full_kv_num_blocks, self.full_kv_indices

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
                "BlockMask must have q_num_blocks and q_indices to compute dq_write_order, but has "
                "neither. Create the mask with compute_q_blocks=True."
            )
        cells, order = self._cells(), block_mask_order(self)
        self.dq_write_order = write_order(cells, self.q_indices, order)
        if self.full_q_indices is not None:
            self.dq_write_order_full = write_order(cells, self.full_q_indices, order)


def _repeats(first: NDArray[np.integer], every: NDArray[np.integer]) -> bool:
    """Return whether all heads [B, H, ...] of each group are the `first` [B, groups, ...] of it."""
    batches, groups, *others = first.shape
    heads = every.reshape(batches, groups, every.shape[1] // max(1, groups), *others)
    return all(np.array_equal(first, heads[:, :, at]) for at in range(1, heads.shape[2]))
