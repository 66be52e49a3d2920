"""GGUF's blocks become packed weights without a change."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.linear import PackedLinear
from quire.linear.gguf import from_blocks

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_blocks_are_what_the_library_decodes(kind: str) -> None:
    numbers = np.random.default_rng(0).standard_normal((20, 96)).astype(np.float32)
    type_ = gguf.GGMLQuantizationType[kind]
    raw = gguf.quants.quantize(numbers, type_)
    weight = from_blocks(kind, torch.from_numpy(raw))
    assert weight is not None
    layer = PackedLinear.from_weight(weight)
    assert layer.shape.weights == ("int8" if kind == "Q8_0" else "int4")
    assert np.array_equal(layer.weight.numpy(), gguf.quants.dequantize(raw, type_))
    assert PackedLinear.from_weight(weight, weights="w8a8").shape.weights in ("w8a8", "w4a8")


def test_other_blocks_are_left() -> None:
    assert from_blocks("Q6_K", torch.zeros(1, 210, dtype=torch.uint8)) is None
