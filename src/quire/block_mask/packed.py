"""The mask of documents that are packed into one sequence, from their lengths or offsets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from quire.arguments import lengths_tensor, offsets_tensor
from quire.block_mask.classify import classify
from quire.block_mask.lists import as_block_size
from quire.block_mask.mask_mods import Device, MaskMod
from quire.block_mask.tiles import fastest_form

if TYPE_CHECKING:
    from quire.block_mask.mask import BlockMask

Mask = TypeVar("Mask", bound="BlockMask")

LENGTHS_ADVICE = "Give the tokens of each document."
OFFSETS_ADVICE = "Give where each document starts, and where the last one ends."


def from_lengths(
    kind: type[Mask],
    lengths: int | Sequence[int] | Tensor,
    causal: bool,
    block_size: int | tuple[int, int],
    device: Device | None,
) -> Mask:
    """The block mask, of the class `kind`, of documents of these lengths."""
    several = [lengths] if isinstance(lengths, int) else lengths
    return _from_ids(
        kind, ids_of_lengths(lengths_tensor(several, LENGTHS_ADVICE)), causal, block_size, device
    )


def from_offsets(
    kind: type[Mask],
    offsets: Sequence[int] | Tensor,
    causal: bool,
    block_size: int | tuple[int, int],
    device: Device | None,
) -> Mask:
    """The block mask, of the class `kind`, of documents that start at these offsets."""
    bounds = offsets_tensor(offsets, OFFSETS_ADVICE)
    return _from_ids(kind, ids_of_lengths(bounds.diff()), causal, block_size, device)


def ids_of_lengths(lengths: Tensor) -> Tensor:
    """The number of the document at each position: int32 [S]."""
    numbers = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)
    return torch.repeat_interleave(numbers, lengths.long())


def _from_ids(
    kind: type[Mask],
    ids: Tensor,
    causal: bool,
    block_size: int | tuple[int, int],
    device: Device | None,
) -> Mask:
    ids = ids if device is None else ids.to(device)
    size, mod = as_block_size(block_size), _same_document(ids, causal)
    length = len(ids)
    form = fastest_form(mod, "mask", ids.device)
    return kind._from_runs(
        classify(form, (1, 1, length, length), size, ids.device),
        True,
        BLOCK_SIZE=size,
        mask_mod=mod,
        seq_lengths=(length, length),
        device=ids.device,
    )


def _same_document(ids: Tensor, causal: bool) -> MaskMod:
    def document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ids[q_idx] == ids[kv_idx]

    def causal_document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)

    return causal_document if causal else document
