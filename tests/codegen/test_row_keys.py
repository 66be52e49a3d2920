"""The products of the decode kernel, for vectors of every width."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from quire.codegen.llvm import jit
from quire.codegen.llvm.builder import Module
from quire.codegen.llvm.target import WIDTHS, Target
from quire.codegen.llvm.types import F32, F64, I64, PTR, Type
from quire.codegen.llvm.values import Value
from quire.codegen.phases.order import CHAINS, over_chains, sum_of_block
from quire.codegen.phases.tiles import TileShape
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


@pytest.mark.parametrize("element", [F32, F64])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_block_is_summed_in_chains(element: Type, width: int) -> None:
    tile = TileShape(Target.named(f"x86-64-v3:{width}"), element)
    numbers = torch.rand(tile.target.block_kv, dtype=dtype_of(element))
    total, module = torch.zeros(1, dtype=numbers.dtype), Module()
    with module.function("run", {"numbers": PTR, "total": PTR}) as f:
        source, target = f.parameters
        found = sum_of_block(f, tile, lambda j: f.load(tile.vector, source, j, align=element.size))
        f.store(f.extract(found, tile.lanes - 1), target)
    run(module, numbers, total)
    assert total[0] == sum_in_chains(numbers)


@pytest.mark.parametrize("lead", [0, 5, 15])
@pytest.mark.parametrize("count", [1, 16, 31, 32, 100])
def test_a_part_of_a_block_is_summed_in_chains(count: int, lead: int) -> None:
    """Lanes run over queries, and keys that are not there add nothing."""
    tile = TileShape(Target.host(), F32)
    memory = torch.rand(CHAINS + count, tile.lanes)  # chains, then what the keys add
    found, module = torch.zeros(tile.lanes), Module()
    with module.function("run", {"memory": PTR, "total": PTR}) as f:
        chains, target = f.parameters

        def terms(keys: list[Value]) -> list[Value]:
            return [tile.load(f, chains, (CHAINS + j) * tile.lanes) for j in keys]

        sizes = {"count": f.value(count, I64), "lead": f.value(lead, I64)}
        f.store(over_chains(f, tile, chains, **sizes, terms=terms), target, align=4)
    numbers = memory[CHAINS:].clone()
    run(module, memory, found)
    whole = torch.zeros(tile.target.block_kv, tile.lanes)
    whole[lead : lead + count] = numbers
    assert torch.equal(found, sum_in_chains(whole))


def sum_in_chains(numbers: Tensor) -> Tensor:
    """The sum of a block as `phases/order.py` has it."""
    chains = torch.zeros_like(numbers[:CHAINS])
    for some in numbers.split(CHAINS):
        chains = chains + some
    while len(chains) > 1:
        first, second = chains.chunk(2)
        chains = first + second
    return chains[0]
