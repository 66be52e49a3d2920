"""Checks of nested tensors and of their mask, as PyTorch makes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from quire.errors import ArgumentError, DeviceError, DtypeError, OptionError, RankError, ShapeError
from quire.support.torch_private import is_jagged, nested_size, ragged_dimension


def check(query: Any, key: Any, value: Any, attn_mask: Any, is_causal: bool) -> None:
    """Raise if the arguments are not valid. The checks are PyTorch's, in its order."""
    tensors = (query, key, value)
    if not all(is_jagged(x) for x in tensors):
        kinds = [_kind(x) for x in tensors]
        raise ArgumentError(
            f"query, key and value must be nested tensors in the layout torch.jagged, but are "
            f"{listed(kinds)}. Use F.scaled_dot_product_attention for dense ones, or "
            f"torch.nested.as_nested_tensor(..., layout=torch.jagged)."
        )
    if not query.dtype == key.dtype == value.dtype:
        raise DtypeError(
            f"query, key and value must have the same dtype, but have "
            f"{listed([str(x.dtype) for x in tensors])}. Convert them with .to(dtype)."
        )
    if not query.device == key.device == value.device:
        raise DeviceError(
            f"query, key and value must be on one device, but are on "
            f"{listed([str(x.device) for x in tensors])}. Move them with .to(device)."
        )
    dims = [len(nested_size(x)) for x in tensors]
    if min(dims) < 3 or len(set(dims)) > 1:
        raise RankError(
            f"query, key and value must have the same number of dimensions, at least 3, but have "
            f"{listed(dims)}. They are [B, H, j, D], or [B, j, D] for one head."
        )
    _check_ragged_dimension([ragged_dimension(x) for x in tensors], dims[0])
    _check_mask(query, attn_mask, is_causal)


def _check_ragged_dimension(ragged: list[int], num_dims: int) -> None:
    if len(set(ragged)) > 1:
        raise ShapeError(
            f"query, key and value must be ragged on the same dimension, but are on "
            f"{listed(ragged)}. Transpose them alike, with .transpose(1, 2)."
        )
    if ragged[0] == num_dims - 1:
        raise ShapeError(
            f"the last dimension of query, key and value must be the head dim, but it is the "
            f"ragged one, {ragged[0]}. They are [B, H, j, D], or [B, j, D] for one head."
        )
    if num_dims > 4 and ragged[0] == num_dims - 2:
        raise RankError(
            f"query, key and value must have at most 4 dimensions if sequences are ragged, but "
            f"have {num_dims}. Flatten the heads into one dimension."
        )


def _check_mask(query: Tensor, attn_mask: Any, is_causal: bool) -> None:
    if attn_mask is None:
        return
    if is_causal:
        raise OptionError(
            "only one of attn_mask and is_causal=True must be given, but both are. Put the causal "
            "mask into attn_mask, or leave one of them out."
        )
    if not isinstance(attn_mask, Tensor):
        raise ArgumentError(
            f"attn_mask must be a tensor, but is a {type(attn_mask).__name__}. Convert it with "
            f"torch.as_tensor."
        )
    if attn_mask.dtype not in (torch.bool, query.dtype):
        raise DtypeError(
            f"attn_mask must be of torch.bool or of the query's dtype {query.dtype}, but is of "
            f"{attn_mask.dtype}. Convert it with .to(dtype)."
        )
    if attn_mask.device != query.device:
        raise DeviceError(
            f"attn_mask must be on the query's device {query.device}, but is on "
            f"{attn_mask.device}. Move it with .to(device)."
        )


def _kind(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"nested in the layout {value.layout}" if value.is_nested else "dense"


def listed(words: Iterable[object]) -> str:
    """Return "a, b and c" for three words."""
    first, second, third = words
    return f"{first}, {second} and {third}"
