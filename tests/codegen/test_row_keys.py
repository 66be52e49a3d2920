"""What few queries are computed with, for vectors of every width."""

from __future__ import annotations

import ctypes

import pytest
import torch

from quire.codegen.llvm import jit
from quire.codegen.llvm.builder import Module
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import F32, F64, PTR, Type
from quire.codegen.phases.order import KEYS_OF_RUN, RUNS_OF_BLOCK, sum_of_block
from quire.codegen.phases.transpose import transpose

pytestmark = pytest.mark.every_width

VECTORS = [(F32, 4), (F32, 8), (F32, 16), (F64, 2), (F64, 4), (F64, 8)]


def run(module: Module, source: torch.Tensor, target: torch.Tensor) -> None:
    code = jit.load(jit.compile_object(module.text, Target.host()), ["run"])
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(code.address("run"))
    function(source.data_ptr(), target.data_ptr())


def dtype_of(element: Type) -> torch.dtype:
    return torch.float32 if element == F32 else torch.float64


@pytest.mark.parametrize(("element", "lanes"), VECTORS)
def test_squares_are_transposed(element: Type, lanes: int) -> None:
    square = torch.randn(lanes, lanes, dtype=dtype_of(element))
    found, module = torch.zeros_like(square), Module()
    with module.function("run", {"square": PTR, "into": PTR}) as f:
        source, target = f.parameters
        type, size = element.vector(lanes), element.size
        rows = [f.load(type, source, k * lanes, align=size) for k in range(lanes)]
        for k, column in enumerate(transpose(f, rows)):
            f.store(column, target, k * lanes, align=size)
    run(module, square, found)
    assert torch.equal(found, square.T)


@pytest.mark.parametrize(("element", "lanes"), VECTORS)
def test_a_block_is_summed_run_by_run(element: Type, lanes: int) -> None:
    numbers = torch.rand(RUNS_OF_BLOCK, KEYS_OF_RUN, dtype=dtype_of(element))
    total, module = torch.zeros(1, dtype=numbers.dtype), Module()
    with module.function("run", {"numbers": PTR, "total": PTR}) as f:
        source, target = f.parameters
        f.store(sum_of_block(f, element.vector(lanes), source), target)
    run(module, numbers, total)
    runs = torch.zeros(RUNS_OF_BLOCK, dtype=numbers.dtype)
    for key in range(KEYS_OF_RUN):
        runs = runs + numbers[:, key]
    expected = runs[0]
    for each in runs[1:]:
        expected = expected + each
    assert total[0] == expected
