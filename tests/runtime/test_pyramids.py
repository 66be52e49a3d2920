"""Compiled pyramids against those of torch."""

from __future__ import annotations

import math

import pytest
import torch

from quire.codegen.pyramid import DTYPES
from quire.ir.pyramid import Pyramid, heap
from quire.runtime.pyramids import build

pytestmark = pytest.mark.every_width


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 37])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8, torch.float16], ids=str)
def test_a_pyramid_is_the_heap(dtype: torch.dtype, count: int, largest: bool) -> None:
    numbers = torch.randint(0 if dtype in (torch.bool, torch.uint8) else -9, 9, (2 * count,))
    tensor = numbers.to(dtype)[::2]
    if dtype.is_floating_point and count > 3:
        tensor[2], tensor[1] = math.nan, math.inf
    pyramid = Pyramid(0, 0, largest, 1 << (count - 1).bit_length())
    (found,) = build([tensor], [pyramid])
    assert torch.equal(found[1:].nan_to_num(99), heap(tensor, pyramid)[1:].nan_to_num(99))
    assert found.is_contiguous() and found.shape == (2 * pyramid.leaves,)


def test_other_dimensions_stay_in_place() -> None:
    tensor = torch.randint(0, 99, (3, 5, 2))
    (found,) = build([tensor], [Pyramid(0, 1, True, 8)])
    assert found.shape == (3, 16, 2)
    assert torch.equal(found[:, 1], tensor.amax(1))
