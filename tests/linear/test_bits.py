"""A row of a packed layer has the same bits in every batch, at every width, with any threads."""

from __future__ import annotations

from typing import get_args

import pytest
import targets
import torch
import torch.nn.functional as F
from compare import assert_as_good_as
from guards import EDGES, Edge, everything_guarded, guarded
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quire import reference
from quire.linear import PackedLinear, Weights

WEIGHTS = get_args(Weights)
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 33, 64, 127, 128, 129, 300, 512)


def layer_of(width: int, depth: int, weights: Weights, *, bias: bool = False) -> PackedLinear:
    weight = torch.randn(width, depth) / depth**0.5
    return PackedLinear.from_weight(weight, torch.randn(width) if bias else None, weights=weights)


def assert_rows_alike(layer: PackedLinear, x: Tensor, counts: tuple[int, ...]) -> None:
    """Every batch of rows of x, and all of them with one thread, give the same rows."""
    torch.set_num_threads(2)
    whole = layer(x)
    for count in counts:
        for first in {0, len(x) - count}:
            part = layer(x[first : first + count])
            assert torch.equal(part, whole[first : first + count]), f"{count} rows from {first}"
    torch.set_num_threads(1)
    assert torch.equal(layer(x), whole)


@pytest.mark.every_width
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_row_does_not_depend_on_the_others(weights: Weights) -> None:
    layer = layer_of(200, 330, weights, bias=True)
    assert_rows_alike(layer, torch.randn(512, 330), ROWS)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(("depth", "width"), [(576, 960), (1536, 576), (1, 1), (63, 17), (65, 129)])
def test_odd_and_common_sizes(weights: Weights, depth: int, width: int) -> None:
    assert_rows_alike(layer_of(width, depth, weights), torch.randn(70, depth), (1, 4, 6, 16, 64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_activations(dtype: torch.dtype) -> None:
    layer = layer_of(100, 200, "int8")
    assert_rows_alike(layer, torch.randn(40, 200).to(dtype), (1, 3, 9, 40))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_all_widths_of_vectors_give_the_same_bits(weights: Weights) -> None:
    weight, x = torch.randn(70, 200), torch.randn(21, 200)
    results = []
    for name in targets.names():
        with targets.use(name):
            results.append(PackedLinear.from_weight(weight, weights=weights)(x))
    assert len(results) > 1
    for other in results[1:]:
        assert torch.equal(results[0], other)


@pytest.mark.every_width
@given(
    depth=st.integers(1, 700),  # a chain of sums has at most 256
    width=st.integers(1, 70),
    rows=st.integers(1, 140),  # a chunk has at most 128
    weights=st.sampled_from(WEIGHTS),
    data=st.data(),
)
def test_any_sizes_and_strides(
    depth: int, width: int, rows: int, weights: Weights, data: st.DataObject
) -> None:
    layer = layer_of(width, depth, weights)
    step = data.draw(st.sampled_from([1, 2]), "step of columns")
    wide = torch.randn(rows, depth * step + data.draw(st.integers(0, 3), "gap"))
    x = wide[:, : depth * step : step]
    whole = layer(x)
    integers = weights.endswith("a8")
    truth = reference.linear(x, layer.weight, integers=integers)
    rounded = reference.quantised_rows(x).float() if integers else x
    assert_as_good_as(whole, F.linear(rounded, layer.weight), truth, most=2.0)
    first = data.draw(st.integers(0, rows - 1), "first row")
    last = data.draw(st.integers(first + 1, rows), "last row")
    assert torch.equal(layer(x[first:last].contiguous()), whole[first:last])
    backwards = x.flip(0)
    assert torch.equal(layer(backwards), whole.flip(0))


@pytest.mark.every_width
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_nothing_is_touched_beside_its_memory(weights: Weights, edge: Edge) -> None:
    layer = layer_of(37, 70, weights, bias=True)
    layer.packed = guarded(layer.packed, edge)
    with everything_guarded(edge):
        for rows in (1, 2, 3, 5, 9, 40):
            layer(torch.randn(rows, 70))
