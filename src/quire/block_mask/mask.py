"""BlockMask: what a user does with a block mask.

The fields and constructors are in `tensors.py`. What PyTorch's own methods do right is inherited
from its class (`as_tuple`, `numel`, `to_string`, `_flatten`, ...).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from quire.block_mask import algebra, files, parts
from quire.block_mask.blocks import EMPTY, BlockRows
from quire.block_mask.checks import as_block_size
from quire.block_mask.mask_mods import (
    Device,
    move_mod,
    same_mod,
    sliced_mask_mod,
    traced_mod,
)
from quire.block_mask.tensors import DEFAULT_BLOCK_SIZE, BlockTensors
from quire.errors import BlockMaskShapeError, DeviceError
from quire.mods import Mask, document
from quire.mods import causal as causal_mask
from quire.mods.objects import same_tensor
from quire.support.torch_private import (
    block_mask_context,
    block_mask_tensors,
    flattened,
    is_torch_slice,
    unflattened,
)


class BlockMask(BlockTensors):
    """A block-sparse attention mask, with PyTorch's fields and methods.

    >>> kv_num_blocks = torch.tensor([[[1, 2]]])
    >>> kv_indices = torch.tensor([[[[0, 0], [1, 0]]]])  # any order; only the first 1, 2 are read
    >>> BlockMask.from_kv_blocks(kv_num_blocks, kv_indices, BLOCK_SIZE=64).to_dense()
    tensor([[[[1, 0],
              [1, 1]]]], dtype=torch.int32)

    `kv_num_blocks` [B, H, rows] and `kv_indices` [B, H, rows, width] list the blocks in which
    `mask_mod` decides. `full_kv_*` have the same shapes, and list the blocks in which every query
    sees every key. `q_*` and `full_q_*`, [B, H, columns] and [B, H, columns, rows], list the query
    blocks that read each key block. `dq_*` is the order of additions in a deterministic backward
    pass on a GPU: `dq_kv_order` [B, H, columns], `dq_write_order` and `dq_write_order_full`
    [B, H, columns, rows]. It is kept unchanged. A block that is listed twice counts once, and a
    block in both lists is full.

    `==` and `hash` compare masks by identity. `equal` compares their content. A pickled mask
    contains the graph of its mask_mod and the tensors that it captured.
    """

    # --- how masks are made ----------------------------------------------------------------------

    @classmethod
    def from_torch(cls, mask: torch_flex.BlockMask) -> Self:
        """Return `mask` if it is of this class, else a new mask with the tensors of PyTorch's mask.

        A slice of PyTorch's mask keeps the query length of the whole mask. Here the query length
        is cut to the rows that the slice has.
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
    def from_lengths(
        cls,
        lengths: int | Sequence[int] | Tensor,
        causal: bool = False,
        BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
        *,
        device: Device | None = None,
    ) -> Self:
        """Make the mask of documents packed into one sequence, none of which sees another.

        >>> BlockMask.from_lengths([300, 0, 212], causal=True).shape
        (1, 1, 512, 512)

        `lengths` [N] has the number of tokens of each document. An int is a single document.
        `device` None is the device of `lengths`, and the CPU if it is not a tensor.
        """
        several = [lengths] if isinstance(lengths, int) else lengths
        return cls._of_documents(document(lengths=several), causal, BLOCK_SIZE, device)

    @classmethod
    def from_offsets(
        cls,
        offsets: Sequence[int] | Tensor,
        causal: bool = False,
        BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
        *,
        device: Device | None = None,
    ) -> Self:
        """As `from_lengths`. `offsets` [N + 1] are the starts of documents, and the last end."""
        return cls._of_documents(document(offsets=offsets), causal, BLOCK_SIZE, device)

    @classmethod
    def _of_documents(
        cls, mod: Mask, causal: bool, block_size: int | tuple[int, int], device: Device | None
    ) -> Self:
        ids: Tensor = mod.fields["ids"]
        if device is not None:
            ids = ids.to(device)
            mod = document(ids)
        sizes = (1, 1, len(ids), len(ids))
        mod = mod & causal_mask if causal else mod
        return cls._from_mod(mod, sizes, as_block_size(block_size), ids.device)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: Device = "cpu") -> Self:
        """Read the mask that `save` wrote. A damaged file is refused, and no code in it is run."""
        return files.load(cls, path).to(device)

    save = files.save

    # --- masks made from a mask ------------------------------------------------------------------

    __getitem__ = parts.take
    for_queries = parts.for_queries
    resize = parts.resize
    _adjust = parts.crop
    __invert__ = algebra.complement

    def __and__(self, other: torch_flex.BlockMask) -> Self:
        """Return the mask of what both masks allow. A B or H of 1 stands for any number."""
        if not isinstance(other, torch_flex.BlockMask):
            return NotImplemented
        return algebra.join(self, BlockMask.from_torch(other), algebra.AND)

    def __or__(self, other: torch_flex.BlockMask) -> Self:
        """Return the mask of what at least one of the masks allows."""
        if not isinstance(other, torch_flex.BlockMask):
            return NotImplemented
        return algebra.join(self, BlockMask.from_torch(other), algebra.OR)

    # --- what a mask says ------------------------------------------------------------------------

    def to_dense(self) -> Tensor:
        """Return 1 for each block that is computed, 0 for others: int32 [..., rows, columns]."""
        return (self._cells() != EMPTY).to(torch.int32)

    def sparsity(self) -> float:
        """Return the percentage of the mask's elements that lie in blocks which are not computed.

        Elements beyond the lengths do not count, so it is never negative. An empty mask has 0.
        """
        if self.numel() == 0:
            return 0.0
        computed = self._as_runs().num_elements(self.seq_lengths, self.BLOCK_SIZE)
        return 100 * (1 - computed / self.numel())

    def rows(
        self, q_len: int | None = None, kv_len: int | None = None, groups: int = 0
    ) -> BlockRows:
        """Return the spans of keys that each row of blocks reads, from the tensors as they are now.

        Give lengths for a mask of NOOP_BLOCK_SIZE, which has none of its own. If the heads of each
        of `groups` groups read the same, there are rows for the groups.
        """
        lengths = (
            self.seq_lengths[0] if q_len is None else q_len,
            self.seq_lengths[1] if kv_len is None else kv_len,
        )
        return BlockRows(self._as_runs(groups), self.BLOCK_SIZE, lengths)

    def equal(self, other: object) -> bool:
        """Return whether `other` has the same shape, block size, blocks and mask_mod.

        The order of a list and its unused entries do not matter. Two mask_mods are the same if they
        are one function, or have the same graph and captured tensors with the same values.
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

    # --- moving and copying ----------------------------------------------------------------------

    def to(self, device: Device) -> Self:
        """Return the mask on another device, with the tensors that its mask_mod captured.

        If a captured tensor has to move, the new mask_mod is a graph with the moved tensors, and no
        longer follows the variables of the original function. A mask_mod that cannot be traced is
        rebuilt with the moved tensors of its closure and of its functools.partial; its globals and
        attributes do not move.
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
            state["mask_mod"] = traced_mod(self.mask_mod, self.device, "Pickle")
        return state

    def __copy__(self) -> Self:
        twin = object.__new__(type(self))
        _ = self.kv_indices  # make the tensors, so that both masks share them
        twin.__dict__.update(self.__dict__)
        return twin

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


def check_fits(
    block_mask: BlockMask, B: int, H: int, q_len: int, kv_len: int, device: torch.device
) -> None:
    """Raise if a mask is not for B batches, H query heads, these lengths and this device.

    A mask with a B or H of 1 is for any number of them, one with NOOP_BLOCK_SIZE for any lengths.
    """
    if block_mask.is_sliced:
        nowhere = torch.empty(())
        sliced_mask_mod(nowhere, nowhere, nowhere, nowhere)
    grid_shape = block_mask.grid_shape
    if len(grid_shape) != 4:
        raise BlockMaskShapeError(
            f"kv_indices of a block mask must have shape [B, H, rows, blocks], but has "
            f"{list(block_mask.kv_indices.shape)}. Give its tensors all four dimensions."
        )
    for name, size, made_for in zip(("B", "H"), (B, H), grid_shape, strict=False):
        if made_for not in (1, size):
            raise BlockMaskShapeError(
                f"a block mask must have {name}={size}, as the query, or {name}=1, but has "
                f"{name}={made_for}: block_mask.shape={block_mask.shape}, and the query has B={B}, "
                f"H={H}. Create it with create_block_mask(..., {name}={size}, ...) or {name}=None."
            )
    if not block_mask.is_endless:
        _check_lengths(block_mask, grid_shape[-2], q_len, kv_len)
    if block_mask.device != device:
        raise DeviceError(
            f"Expect q/k/v and block_mask to be on the same device but got {device} and "
            f"{block_mask.device}. Move the mask with block_mask.to({str(device)!r})."
        )


def _check_lengths(block_mask: BlockMask, num_rows: int, q_len: int, kv_len: int) -> None:
    made_for, q_block = block_mask.seq_lengths, block_mask.BLOCK_SIZE[0]
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
