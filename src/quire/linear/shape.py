"""What a packed layer is, and which tensors it has.

The kernel reads where the shape says that numbers are, and looks at no size. So tensors are
compared with the shape before: a file may be damaged, and a buffer can be exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from quire.checks.arguments import dtype_name
from quire.codegen.phases.norm import Norm
from quire.codegen.phases.weights import FORMATS
from quire.errors import ShapeError
from quire.linear.arguments import Weights, check_pairs, stored_as
from quire.linear.packing import count_panels

TENSORS = ("packed", "bias", "norm_weight", "norm_bias")
"""The buffers of a packed layer."""


class Shape(NamedTuple):
    """What a packed layer is, besides its tensors; all of it is written to files."""

    weights: Weights
    in_features: int
    out_features: int  # of the weights; a layer that merges pairs returns half as many
    half: int = 0
    merges: bool = False
    norm: Norm = "none"
    epsilon: float = 0.0
    dtype: str = "float32"  # of the layer that was packed
    conv1d: bool = False  # whether it was a Conv1D of transformers, whose weight is [K, N]

    @property
    def width(self) -> int:
        """Return how many numbers a row of the result has."""
        return self.out_features // 2 if self.merges else self.out_features

    def check(self, tensors: Mapping[str, Tensor | None]) -> None:
        """Raise unless a layer of this shape can have these tensors, of those in TENSORS."""
        check_pairs(self.out_features, self.half, merges=self.merges)
        panel = FORMATS[stored_as(self.weights)[0]].panel_bytes(self.in_features)
        sizes = (
            count_panels(self.out_features, self.half) * panel,
            self.out_features,
            self.in_features,
            self.in_features,
        )
        for name, size in zip(TENSORS, sizes, strict=True):
            _check_tensor(name, tensors.get(name), size)


def _check_tensor(name: str, tensor: Tensor | None, size: int) -> None:
    """Raise unless a tensor of a layer has so many numbers; packed weights are bytes."""
    packed = name == "packed"
    if tensor is None and not packed:
        return
    right = tensor is not None and tensor.shape == (size,)
    if packed and tensor is not None:
        right = right and tensor.dtype == torch.uint8 and tensor.is_contiguous()
    if not right:
        found = "missing" if tensor is None else f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
        raise ShapeError(
            f"{name} must have {size} {'bytes' if packed else 'numbers'} side by side, as the "
            f"shape of the layer says, but is {found}. Give the tensors of this layer."
        )
