"""The loops that all the time is spent in keep everything in registers, on every target."""

from __future__ import annotations

import functools
import re

import pytest

from quire.codegen.convention import KernelSpec
from quire.codegen.kernels.backward import write_backward
from quire.codegen.kernels.forward import write_forward
from quire.codegen.kernels.linear import LinearSpec, write_linear
from quire.codegen.llvm import jit
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import F32, F64
from quire.codegen.phases.gradient_tiles import UNROLLED, query_strips
from quire.codegen.phases.tiles import NARROW_ROWS, SMALL_ROWS, TileShape
from quire.codegen.phases.weights import FORMATS

TARGETS = ["x86-64-v3", "x86-64-v4", "aarch64"]
FMA = re.compile(r"\bvfn?m(?:add|sub)\w+|\bfml[as]\b")
STACK = re.compile(r"%rsp|\bsp\b")


@functools.cache
def assembly(target: str, dtype: str, *, backward: bool = False) -> str:
    spec = KernelSpec(Target.named(target), dtype, dtype, dtype, dtype)
    write = write_backward if backward else write_forward
    return jit.assembly(write(spec).text, spec.target)


def innermost_loops(text: str, function: str) -> list[str]:
    """The blocks of a function that jump back to their own start."""
    found = re.search(rf"^{function}:(.*?)^\.Lfunc_end", text, re.DOTALL | re.MULTILINE)
    assert found, f"no function {function}"
    assert "%rsp, %rbp" not in found[1], "a frame pointer would hide uses of the stack"
    blocks = re.finditer(r"^(\.LBB\w+):(.*?)(?=^\.LBB|\Z)", found[1], re.DOTALL | re.MULTILINE)
    return [
        body
        for label, body in (block.groups() for block in blocks)
        if re.search(rf"^\s+(j|b\.|cb|tb)[^\n]*{re.escape(label)}$", body, re.MULTILINE)
    ]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("function", "unroll"), [("multiply_keys", 2), ("multiply_values", 1)])
def test_micro_kernels_do_not_spill(target: str, dtype: str, function: str, unroll: int) -> None:
    shape = Target.named(target)
    loops = [x for x in innermost_loops(assembly(target, dtype), function) if FMA.search(x)]
    counts = [len(FMA.findall(loop)) for loop in loops]
    assert counts == [rows * shape.vectors * unroll for rows in (shape.rows, SMALL_ROWS)]
    for loop in loops:
        assert not STACK.search(loop), f"the stack is used in\n{loop}"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("function", ["multiply_keys", "multiply_values"])
def test_narrow_micro_kernels_do_not_spill(target: str, dtype: str, function: str) -> None:
    text = assembly(target, dtype)
    parts = TileShape(Target.named(target), F32).parts()
    assert parts
    for part in parts:
        loops = [x for x in innermost_loops(text, part.named(function)) if FMA.search(x)]
        counts = [len(FMA.findall(loop)) for loop in loops]
        assert counts == [rows * part.vectors for rows in (NARROW_ROWS, SMALL_ROWS)]
        for loop in loops:
            assert not STACK.search(loop), f"the stack is used in\n{loop}"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("target", TARGETS)
def test_micro_kernels_of_gradients_do_not_spill(target: str, dtype: str) -> None:
    shape = Target.named(target)
    tile = TileShape(shape, F32 if dtype == "float32" else F64)
    parts = [shape.vectors, *([2] if shape.vectors > 2 else [])]  # of whole panels, and of half
    expected = {
        "multiply_keys": [2 * rows * shape.vectors for rows in (shape.rows, SMALL_ROWS)],
        "add_queries": [rows * part for part in parts for _, rows in query_strips(tile)],
        "add_keys": [UNROLLED * rows * part for part in parts for rows in (shape.rows, SMALL_ROWS)],
    }
    text = assembly(target, dtype, backward=True)
    for function, wanted in expected.items():
        loops = [x for x in innermost_loops(text, function) if FMA.search(x)]
        counts = [len(FMA.findall(loop)) for loop in loops]
        assert counts == wanted, function
        for loop in loops:
            assert not STACK.search(loop), f"the stack is used in\n{loop}"


@pytest.mark.parametrize("target", TARGETS)
def test_the_softmax_does_not_spill(target: str) -> None:
    loops = innermost_loops(assembly(target, "float32"), "exponentiate")
    assert len(loops) == 2  # keys of a chain in pairs, and what is left
    for loop in loops:
        assert FMA.search(loop) and not STACK.search(loop), f"the stack is used in\n{loop}"


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_called_outside(target: str, dtype: str, backward: bool) -> None:
    """No library function: what is called is in the module, or a pointer that was passed."""
    text = assembly(target, dtype, backward=backward)
    called = set(re.findall(r"^\s+(?:callq|bl)\s+([A-Za-z_]\w*)", text, re.MULTILINE))
    defined = set(re.findall(r"^([A-Za-z_]\w*):", text, re.MULTILINE))
    assert called <= defined, called - defined


@pytest.mark.parametrize("name", FORMATS)
def test_tiles_of_linear_layers_do_not_spill(name: str) -> None:
    """Where registers are few, decoding integers spills."""
    spec = LinearSpec(Target.named("x86-64-v4"), name, "float32")
    text, tiling = jit.assembly(write_linear(spec).text, spec.target), spec.tiling
    tiles = [(size, name, "_once") for size in tiling.few]
    tiles += [(size, name, "") for size in tiling.of_many if size.rows <= tiling.direct]
    if tiling.decodes:
        tiles += [(size, "float32", "") for size in tiling.of_many]
    for size, format, suffix in tiles:
        function = f"tile_{size.rows}x{size.panels}_{format}{suffix}"
        (loop,) = innermost_loops(text, function)
        assert len(FMA.findall(loop)) >= size.rows * size.panels
        assert not STACK.search(loop), f"the stack is used in\n{loop}"


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_tiles_decode_a_group_first_where_registers_are_few(name: str) -> None:
    """A loop decodes a group of k to memory, and one that multiplies it does not spill."""
    spec = LinearSpec(Target.named("x86-64-v3"), name, "float32")
    text, tiling = jit.assembly(write_linear(spec).text, spec.target), spec.tiling
    for size in tiling.of_many:
        _, loop = innermost_loops(text, f"tile_{size.rows}x{size.panels}_{name}")
        assert len(FMA.findall(loop)) >= size.rows * size.panels
        assert not STACK.search(loop), f"the stack is used in\n{loop}"
