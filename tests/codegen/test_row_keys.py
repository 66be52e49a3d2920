"""The products of the decode kernel, for vectors of every width."""

from __future__ import annotations

import ctypes

import pytest
import torch

from quire.codegen.llvm import jit
from quire.codegen.llvm.builder import Module
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import F32, F64, PTR, Type
from quire.codegen.phases.row_keys import add_lanes

pytestmark = pytest.mark.every_width


@pytest.mark.parametrize(
    ("element", "lanes"), [(F32, 4), (F32, 8), (F32, 16), (F64, 2), (F64, 4), (F64, 8)]
)
@pytest.mark.parametrize("share", [1, 0.75, 0.5, 0.25])
def test_the_lanes_of_each_vector_are_added(element: Type, lanes: int, share: float) -> None:
    count = max(1, int(lanes * share))  # some of as many vectors as there are lanes
    dtype = torch.float32 if element == F32 else torch.float64
    numbers = torch.randint(-8, 8, (count, lanes)).to(dtype)
    sums = torch.zeros(lanes, dtype=dtype)
    module = Module()
    with module.function("add", {"numbers": PTR, "sums": PTR}) as f:
        source, target = f.parameters
        vectors = [f.load(element.vector(lanes), source, k * lanes) for k in range(count)]
        f.store(add_lanes(f, vectors), target)
    code = jit.load(jit.compile_object(module.text, Target.host()), ["add"])
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(code.address("add"))
    run(numbers.data_ptr(), sums.data_ptr())
    assert torch.equal(sums[:count], numbers.sum(1))
