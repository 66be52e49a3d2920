"""Code for systems that are not this one: it stands alone, and Windows' code runs here as well."""

from __future__ import annotations

import ctypes
import dataclasses
import struct
from collections.abc import Callable, Iterator

import llvmlite.binding as llvm
import pytest
import torch

import quire
from quire import mods, plans
from quire.codegen.convention import KernelSpec
from quire.codegen.kernels.append import write_append
from quire.codegen.kernels.backward import write_backward
from quire.codegen.kernels.decode import write_decode
from quire.codegen.kernels.forward import write_forward
from quire.codegen.kernels.pyramid import PYRAMID_DTYPES, write_pyramid
from quire.codegen.kernels.tangent import write_tangent
from quire.codegen.llvm import jit, parallel
from quire.codegen.llvm.target import Target, code_triple
from quire.codegen.llvm.types import F32
from quire.codegen.mods.arguments import ModArguments
from quire.codegen.phases.observe import write_observe
from quire.codegen.phases.tiles import TileShape
from quire.config import config
from quire.ir.differentiate import score_tangent
from quire.runtime import cache
from quire.runtime import launch as launching
from quire.runtime.mods import lower

WINDOWS = code_triple("x86_64-pc-windows-msvc")
MACOS = "apple-macosx13.0"


def target(name: str, triple: str = "") -> Target:
    named = Target.named(name)
    return dataclasses.replace(named, triple=triple or named.triple)


TARGETS = {
    "linux x86-64-v3": target("x86-64-v3"),
    "linux aarch64": target("aarch64"),
    "macos x86-64-v3": target("x86-64-v3", f"x86_64-{MACOS}"),
    "macos arm64": target("aarch64", f"arm64-{MACOS}"),
    "windows x86-64-v3": target("x86-64-v3", WINDOWS),
    "windows x86-64-v4": target("x86-64-v4", WINDOWS),
}
NEEDS_NATIVE = pytest.mark.skipif(
    not llvm.get_process_triple().startswith("x86_64"), reason="no processor of x86_64 to run on"
)


# --- what objects leave undefined


def undefined(image: bytes) -> set[str]:
    """The symbols that an object, in ELF or Mach-O, wants from elsewhere."""
    return set(_elf(image) if image.startswith(b"\x7fELF") else _macho(image))


def _elf(image: bytes) -> Iterator[str]:
    (start,) = struct.unpack_from("<Q", image, 40)
    size, count = struct.unpack_from("<HH", image, 58)
    sections = [struct.unpack_from("<IIQQQQII", image, start + i * size) for i in range(count)]
    for _, kind, _, _, offset, length, names, _ in sections:
        for at in range(offset, offset + length, 24) if kind == 2 else ():
            name, _, _, section = struct.unpack_from("<IBBH", image, at)
            if name and section == 0:
                yield _string(image, sections[names][4] + name)


def _macho(image: bytes) -> Iterator[str]:
    magic, *_, commands = struct.unpack_from("<5I", image)
    assert magic == 0xFEEDFACF
    at = 32
    for _ in range(commands):
        command, size, symbols, count, names = struct.unpack_from("<5I", image, at)
        for entry in range(symbols, symbols + 16 * count, 16) if command == 2 else ():
            name, kind = struct.unpack_from("<IB", image, entry)
            if kind & 0x0F == 1:  # external, and in no section
                yield _string(image, names + name)
        at += size


def _string(image: bytes, at: int) -> str:
    return image[at : image.index(b"\0", at)].decode()


@pytest.mark.parametrize("name", TARGETS)
def test_an_undefined_symbol_would_be_seen(name: str) -> None:
    text = "declare double @sin(double)\ndefine double @f(double %x) {\n"
    text += "  %y = call double @sin(double %x)\n  ret double %y\n}"
    image = jit._machine(TARGETS[name]).emit_object(llvm.parse_assembly(text))
    assert {symbol.strip("_") for symbol in undefined(image)} == {"sin"}


def kernels(target: Target) -> Iterator[str]:
    """Everything that is ever compiled but mods, in the dtypes that are the hardest to convert."""
    for dtypes in (("float16", "int8"), ("float32", "bfloat16"), ("float64", "float64")):
        query, stored = dtypes
        yield write_forward(KernelSpec(target, query, stored, stored, query)).text
        for width in (0, 128):
            spec = KernelSpec(target, query, stored, stored, query, width, width)
            yield write_decode(spec).text
        yield write_append(target, query, stored).text
    for dtype in ("float16", "bfloat16", "float64"):
        for write in (write_backward, write_tangent):
            yield write(KernelSpec(target, dtype, dtype, dtype, dtype)).text
    for form in ("panel", "row"):
        yield write_observe(form, TileShape(target, F32)).text
    yield from (write_pyramid(dtype).text for dtype in PYRAMID_DTYPES)
    yield parallel.TEXT


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_kernels_stand_alone(name: str) -> None:
    for text in kernels(TARGETS[name]):
        assert undefined(jit.compile_object(text, TARGETS[name])) == set()


MASKS = {
    "block_diffusion": mods.block_diffusion(64, 8),
    "causal": mods.causal,
    "dilated_sliding_window": mods.dilated_sliding_window(64, 3),
    "document": mods.document(lengths=[50, 70]),
    "global_sliding_window": mods.global_sliding_window(2, torch.tensor([True, False])),
    "neighbourhood": mods.neighbourhood((8, 8), (3, 3)),
    "noop_mask": mods.noop_mask,
    "padding": mods.padding([5, 0, 12]),
    "prefix_lm": mods.prefix_lm(4),
    "shared_prefix": mods.shared_prefix([0, 3, 5, 8], [2, 2, 2]),
    "sliding_window": mods.sliding_window(256),
    "tree": mods.tree([-1, 0, 0, 1]),
}
SCORES = {
    "alibi": mods.alibi(8),
    "distance_bias": mods.distance_bias(torch.rand(8, 5)),
    "relative_position_bias": mods.relative_position_bias(torch.rand(8, 8), max_distance=8),
    "softcap": mods.softcap(20.0),
    "table_bias": mods.table_bias(torch.rand(9, 9)),
}
COMPOSE = {
    "and_masks",
    "in_turn",
    "not_mask",
    "offset",
    "or_masks",
}  # which add nothing but what they join
FUNCTIONS = {
    "waves": lambda score, b, h, q, kv: (score * q).sin() + score.exp() / (kv + 1) ** 0.5,
    "divisions": lambda score, b, h, q, kv: score.tanh() + (q % (kv + 7)) // 3 + score.log(),
}


def test_no_mod_is_left_out() -> None:
    # Types have capitals; modules that learn compute what the functions of their names do.
    assert {*MASKS, *SCORES, *COMPOSE} == {name for name in mods.__all__ if name.islower()}


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_mods_stand_alone(name: str) -> None:
    tile = TileShape(TARGETS[name], F32)
    each = [{"mask_mod": mask} for mask in MASKS.values()]
    each += [{"score_mod": score} for score in (SCORES | FUNCTIONS).values()]
    for given in each:
        kernel = quire.kernel(**given)
        for form in ("panel", "row", "backward", "tangent"):
            graphs = kernel.final
            if graphs.score is not None:
                graphs = graphs._replace(tangent=score_tangent(graphs.score, True, ()))
            arguments = ModArguments.of(graphs.everything(form), kernel.arguments.captures)
            text = lower(form, tile, graphs, arguments).text
            assert undefined(jit.compile_object(text, TARGETS[name])) == set()


# --- Windows


def test_windows_convention() -> None:
    """Arguments are in rcx, rdx, r8, r9, and xmm6 to xmm15 are as they were for the caller."""
    text = "define i64 @f(i64 %a, i64 %b, i64 %c, i64 %d) {\n  %x = sub i64 %a, %d\n  ret i64 %x\n}"
    windows, linux = (jit.assembly(text, TARGETS[f"{name} x86-64-v3"]) for name in SYSTEMS)
    assert "%rcx, %rax" in windows and "%r9, %rax" in windows
    assert "%rdi, %rax" in linux and "%rcx, %rax" in linux
    spec = KernelSpec(TARGETS["windows x86-64-v3"], "float32", "float32", "float32", "float32")
    assembly = jit.assembly(write_forward(spec).text, spec.target)
    for number in range(6, 16):
        assert f"vmovaps\t%xmm{number}, " in assembly


SYSTEMS = ("windows", "linux")

# A function of this system that calls one of Windows.
ENTER = """
define void @enter(ptr %kernel, ptr %argument) {
  call win64cc void %kernel(ptr %argument)
  ret void
}
"""


@pytest.fixture(scope="module")
def enter() -> Iterator[Callable[[int, int], None]]:
    code = jit.load(jit.compile_object(ENTER, Target.host()), ["enter"])
    yield ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(code.address("enter"))
    del code


@NEEDS_NATIVE
@pytest.mark.parametrize("frame", [100, 5000, 9000, 200_000])
def test_a_large_frame_on_windows(enter: Callable[[int, int], None], frame: int) -> None:
    text = f"""
    define void @next(ptr %at) nounwind {{
      %room = alloca [{frame} x i8], align 16
      %old = load i64, ptr %at
      store volatile i64 %old, ptr %room
      %kept = load volatile i64, ptr %room
      %new = add i64 %kept, 1
      store i64 %new, ptr %at
      ret void
    }}"""
    windows = TARGETS["windows x86-64-v3"]
    assert ("callq\t*%r11" in jit.assembly(text, windows)) == (frame > 4096)
    code = jit.load(jit.compile_object(text, windows), ["next"])
    number = ctypes.c_int64(41)
    enter(code.address("next"), ctypes.addressof(number))
    assert number.value == 42


@NEEDS_NATIVE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows_code_gives_the_same_bits(
    enter: Callable[[int, int], None], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_THREADS", "1")
    config.cache_clear()
    q, k, v = torch.randn(3, 1, 2, 150, 64, dtype=dtype).unbind()
    captured = torch.randn(300)
    launched = []

    def numbers() -> list[torch.Tensor | None]:
        plans.known.clear()  # plans know the code that was compiled before
        parts = [part.clone().requires_grad_() for part in (q, k, v)]
        memory = quire.Dense(*parts[1:])
        out = quire.attention(
            parts[0],
            memory,
            score_mod=lambda score, b, h, q_idx, kv_idx: score + captured[q_idx - kv_idx + 150],
            mask=mods.sliding_window(40),
            backend="jit",
        )
        out.sum().backward()
        with torch.no_grad():
            last = quire.attention(q[:, :, -1:], quire.Dense(k, v), backend="jit")
        return [out.detach(), last, *(part.grad for part in parts)]

    def entry(kernel: int) -> Callable[[int], None]:
        launched.append(kernel)
        return lambda argument: enter(kernel, argument)

    here = numbers()
    windows = dataclasses.replace(Target.host(), triple=WINDOWS)
    monkeypatch.setattr(Target, "host", lambda: windows)
    # A trial would call the code in the convention of this system, and read a stray register.
    monkeypatch.setattr(cache, "_failure", lambda target, keep: None)
    monkeypatch.setattr(launching, "_entry", entry)
    there = numbers()
    plans.known.clear()
    assert len(launched) == 3  # forward, backward, and for a single query
    for ours, theirs in zip(here, there, strict=True):
        assert torch.equal(ours, theirs)
