"""Compiled pyramids against those of torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from quire.codegen.kernels.pyramid import PYRAMID_DTYPES
from quire.ir.pyramid import Axis, Pyramid, axes_of, heap
from quire.runtime.pyramids import WORTH, build

pytestmark = pytest.mark.every_width

PLENTY = 2**62


def random_numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    """Every second number of a tensor, with a NaN and an infinity where there can be."""
    numbers = torch.randint(
        0 if dtype in (torch.bool, torch.uint8) else -9, 9, (*shape[:-1], 2 * shape[-1])
    )
    tensor = numbers.to(dtype)[..., ::2]
    if dtype.is_floating_point and shape[-1] > 3:
        tensor[..., 2], tensor[..., 1] = math.nan, math.inf
    return tensor


def entries(found: Tensor, pyramid: Pyramid) -> Tensor:
    """All but entry 0 of each axis, which nobody reads, and numbers for NaN."""
    for axis in pyramid.axes:
        found = found.narrow(axis.dim, 1, 2 * axis.leaves - 1)
    return found.nan_to_num(99)


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 37, 300])
@pytest.mark.parametrize("dtype", [*PYRAMID_DTYPES, torch.uint8, torch.float16], ids=str)
def test_a_pyramid_is_the_heap(dtype: torch.dtype, count: int, largest: bool) -> None:
    every_second = random_numbers(dtype, count)
    for tensor in (every_second, every_second.contiguous()):
        pyramid = Pyramid(0, axes_of((count,), (0,), dtype.itemsize), largest)
        (found,) = build([tensor], [pyramid], PLENTY)
        assert torch.equal(entries(found, pyramid), entries(heap(tensor, pyramid), pyramid))
        assert found.stride() == (1,) and list(found.shape) == pyramid.shape(tensor.shape)


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("grains", [(0, 0), (1, 0), (0, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [*PYRAMID_DTYPES, torch.float16], ids=str)
def test_a_pyramid_of_rectangles_is_the_heap_of_heaps(
    dtype: torch.dtype, grains: tuple[int, int], largest: bool
) -> None:
    for shape in ((1, 1), (3, 5), (8, 64), (37, 300), (1, 70), (70, 1)):
        axes = tuple(
            Axis(dim, 1 << max(0, -(-shape[dim] >> grain) - 1).bit_length(), grain)
            for dim, grain in enumerate(grains)
        )
        pyramid = Pyramid(0, axes, largest)
        numbers = random_numbers(dtype, *shape)
        for tensor in (numbers, numbers.contiguous(), numbers.T.contiguous().T):
            (found,) = build([tensor], [pyramid], PLENTY)
            assert torch.equal(entries(found, pyramid), entries(heap(tensor, pyramid), pyramid))
        whole = numbers.amax() if largest else numbers.amin()
        assert torch.equal(found[1, 1].nan_to_num(99), whole.nan_to_num(99))


@pytest.mark.parametrize("dims", [(0,), (1,), (3,), (0, 1), (1, 3), (0, 3)], ids=str)
def test_pyramids_in_every_place_of_a_tensor(dims: tuple[int, ...]) -> None:
    tensor = torch.randint(-99, 99, (3, 5, 2, 9)).permute(0, 1, 3, 2)
    for grain in (0, 1):
        axes = tuple(Axis(dim, 8 >> grain, grain) for dim in dims if tensor.shape[dim] <= 8)
        pyramid = Pyramid(0, axes, True)
        (found,) = build([tensor], [pyramid], PLENTY)
        assert list(found.shape) == pyramid.shape(tensor.shape)
        assert torch.equal(entries(found, pyramid), entries(heap(tensor, pyramid), pyramid))


def test_other_dimensions_stay_in_place() -> None:
    tensor = torch.randint(0, 99, (3, 5, 2))
    (found,) = build([tensor], [Pyramid(0, (Axis(1, 8),), True)], PLENTY)
    assert found.shape == (3, 16, 2)
    assert torch.equal(found[:, 1], tensor.amax(1))
    (found,) = build([tensor], [Pyramid(0, (Axis(0, 4), Axis(2, 2)), False)], PLENTY)
    assert found.shape == (8, 5, 4)
    assert torch.equal(found[1, :, 1], tensor.amin((0, 2)))
    assert torch.equal(found[4:7, :, 2:], tensor)
    (found,) = build([tensor], [Pyramid(0, (Axis(0, 4), Axis(1, 8), Axis(2, 2)), True)], PLENTY)
    assert found[1, 1, 1] == tensor.max()


def test_leaves_have_more_elements_where_memory_would_not_hold_them() -> None:
    assert axes_of((128, 100), (0, 1), 1) == (Axis(0, 128), Axis(1, 128))
    assert axes_of((8192, 8192), (0, 1), 1) == (Axis(0, 1024, 3), Axis(1, 1024, 3))
    assert axes_of((2, 8192, 8192), (1, 2), 8) == (Axis(1, 256, 5), Axis(2, 256, 5))
    assert axes_of((1 << 18,), (0,), 8) == (Axis(0, 1 << 18),)
    assert axes_of((1 << 20,), (0,), 8) == (Axis(0, 1 << 18, 2),)
    assert axes_of((1 << 30, 2), (1,), 8) == (Axis(1, 1, 1),)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32], ids=str)
def test_what_is_not_worth_its_time_may_be_anything(dtype: torch.dtype) -> None:
    table = torch.ones(4, 4, dtype=dtype)
    ends = [Pyramid(0, (Axis(0, 4), Axis(1, 4)), largest) for largest in (False, True)]
    work = table.nbytes * WORTH
    assert all(found[1, 1] == 1 for found in build([table], ends, work))
    low, high = build([table], ends, work - 1)
    assert low.shape == high.shape == (8, 8)
    if dtype.is_floating_point:
        assert low.isnan().all() and high.isnan().all()
    else:
        assert (low < table.max()).all() and (high >= table.max()).all()
