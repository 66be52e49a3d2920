"""Targets say what they need; objects load, unload and refuse what they are not."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import textwrap
import threading
import weakref

import llvmlite.binding as llvm
import pytest
import targets
import torch

import quire
from quire.codegen.llvm import jit, target
from quire.codegen.llvm.builder import Module
from quire.codegen.llvm.target import Target, code_triple, missing_on
from quire.codegen.llvm.types import F32, F64, I64
from quire.config import config
from quire.errors import ArgumentError, BackendError, CodegenError
from quire.tools.doctor import report

LINUX = "x86_64-unknown-linux-gnu"


def answer(number: int) -> str:
    module = Module()
    with module.function("answer", {}, I64) as f:
        f.give_back(f.value(number, I64))
    return module.text


def call(code: jit.Code) -> int:
    return int(ctypes.CFUNCTYPE(ctypes.c_int64)(code.address("answer"))())


# --- targets


@pytest.mark.parametrize(
    ("name", "lanes", "panel"), [("x86-64-v3", 8, 16), ("x86-64-v4", 16, 64), ("aarch64", 4, 16)]
)
def test_named_targets(name: str, lanes: int, panel: int) -> None:
    named = Target.named(name)
    assert (named.lanes(F32), named.panel(F32)) == (lanes, panel)
    assert (named.lanes(F64), named.panel(F64)) == (lanes // 2, panel // 2)
    assert named == Target.named(name) and hash(named) == hash(Target.named(name))


@pytest.mark.parametrize("name", ["mips", "x86-64-v3:", "x86-64-v3:64", "x86-64-v3:512:1", ":512"])
def test_unknown_target(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"expected a target out of .*, got '{name}'"):
        Target.named(name)


@pytest.mark.parametrize(
    ("name", "bits", "shape"),
    [
        ("x86-64-v3:256", 256, (6, 2)),
        ("x86-64-v3:512", 512, (6, 4)),  # as a processor that has such vectors
        ("x86-64-v3:128", 128, (6, 4)),
        ("x86-64-v4:256", 256, (6, 4)),
        ("aarch64:512", 512, (6, 4)),
    ],
)
def test_a_width_brings_its_shape(name: str, bits: int, shape: tuple[int, int]) -> None:
    named, plain = Target.named(name), Target.named(name.partition(":")[0])
    assert (named.vector_bits, (named.rows, named.vectors)) == (bits, shape)
    assert (named.cpu, named.triple) == (plain.cpu, plain.triple)
    assert (repr(named) == repr(plain)) == (named == plain)  # the cache tells them apart


class TestChosenTarget:
    """QUIRE_TARGET."""

    def chosen(self, monkeypatch: pytest.MonkeyPatch, name: str) -> Target:
        monkeypatch.setenv("QUIRE_TARGET", name)
        config.cache_clear()
        return Target.host()

    def test_every_width(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in targets.names()[1:]:
            chosen = self.chosen(monkeypatch, name.upper())
            assert chosen.vector_bits == int(name.partition(":")[2])
            assert chosen.triple == llvm.get_process_triple()

    def test_unknown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(
            ArgumentError, match=r"^QUIRE_TARGET: expected a target out of .*'i386'"
        ):
            self.chosen(monkeypatch, "i386")

    def test_another_architecture(self, monkeypatch: pytest.MonkeyPatch) -> None:
        here = Target.host().triple.startswith(("aarch64", "arm64"))
        name, lacks = ("x86-64-v3", "x86_64") if here else ("aarch64", "aarch64")
        with pytest.raises(ArgumentError, match=f"got '{name}', and it lacks {lacks}. Unset it"):
            self.chosen(monkeypatch, name)

    def test_a_processor_without_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        features = dict.fromkeys((*target._FEATURES_OF_LEVEL["x86-64-v3"], "avx512f"), True)
        monkeypatch.setattr(llvm, "get_process_triple", lambda: LINUX)
        monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: features)
        target._host.cache_clear()
        try:
            assert self.chosen(monkeypatch, "x86-64-v3").vector_bits == 256
            with pytest.raises(ArgumentError, match="it lacks avx512bw avx512dq avx512vl avx512cd"):
                self.chosen(monkeypatch, "x86-64-v4")
        finally:
            target._host.cache_clear()

    def test_it_computes_and_is_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in targets.names()[1:]:
            with targets.use(name):
                q = torch.randn(1, 2, 70, 24)
                text = quire.explain(q, q, q)
                assert f"jit generates code for {Target.host()}.\n" in text
                assert dict(report())["kernels for"] == str(Target.host())
                sdpa = torch.nn.functional.scaled_dot_product_attention
                torch.testing.assert_close(quire.flex_attention(q, q, q), sdpa(q, q, q))


def test_what_a_host_lacks_is_named() -> None:
    good = {"avx2": True, "fma": True, "f16c": True}
    assert missing_on(LINUX, good) == ""
    assert missing_on("arm64-apple-macosx14", {}) == ""
    assert missing_on(LINUX, good | {"f16c": False}).endswith("this one lacks f16c")
    assert missing_on(LINUX, {}).endswith("this one lacks avx2 fma f16c")
    assert missing_on("riscv64-unknown-linux-gnu", {}).startswith("expected a processor of x86_64")


def test_windows_has_objects_in_elf_and_needs_x86() -> None:
    windows = "x86_64-pc-windows-msvc"
    assert code_triple(windows) == f"{windows}-elf"
    assert code_triple(LINUX) == LINUX
    assert code_triple("arm64-apple-darwin23.5.0") == "arm64-apple-darwin23.5.0"
    assert missing_on(windows, {"avx2": True, "fma": True, "f16c": True}) == ""
    assert "or of aarch64 without Windows, got" in missing_on("aarch64-pc-windows-msvc", {})


def test_a_host_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"avx2": True, "fma": True, "f16c": True, "avx512f": False}
    monkeypatch.setattr(llvm, "get_process_triple", lambda: "x86_64-pc-windows-msvc")
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: known)
    host = target._host.__wrapped__(None)
    assert host.triple == "x86_64-pc-windows-msvc-elf"
    assert host.features == "+avx2,-avx512f,+f16c,+fma"


def test_a_host_that_does_not_tell_its_features(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> None:
        raise RuntimeError("failed to get host cpu features.")

    monkeypatch.setattr(llvm, "get_host_cpu_features", unknown)
    monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: "apple-m1")
    monkeypatch.setattr(llvm, "get_process_triple", lambda: "arm64-apple-darwin23.5.0")
    host = target._host.__wrapped__(None)
    assert (host.cpu, host.features, host.vector_bits) == ("apple-m1", "", 128)
    assert "answer:" in jit.assembly(answer(42), host)
    monkeypatch.setattr(llvm, "get_process_triple", lambda: LINUX)
    with pytest.raises(BackendError, match="lacks avx2 fma f16c"):
        target._host.__wrapped__(None)


def test_an_old_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvm, "get_process_triple", lambda: LINUX)
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: {"avx2": True})
    with pytest.raises(BackendError, match="lacks fma f16c; use backend='eager'"):
        target._host.__wrapped__(None)


@pytest.mark.parametrize("name", ["x86-64-v3", "x86-64-v4", "aarch64"])
def test_assembly_for_any_target(name: str) -> None:
    text = jit.assembly(answer(42), Target.named(name))
    assert "answer:" in text and "42" in text
    assert jit.assembly(answer(42), Target.named(name)) == text


# --- objects


def test_an_object_loads_twice_without_compiling() -> None:
    image = jit.compile_object(answer(7), Target.host())
    first, second = jit.load(image, ["answer"]), jit.load(bytes(image), ["answer"])
    assert call(first) == call(second) == 7
    assert first.address("answer") != second.address("answer")


def test_code_is_freed_with_its_last_reference() -> None:
    """Libraries come and go many times over, and the memory maps of the process do not grow."""

    def maps() -> int:
        with open("/proc/self/maps") as file:
            return len(file.readlines())

    image = jit.compile_object(answer(7), Target.host())
    code = jit.load(image, ["answer"])
    tracker = weakref.ref(code._tracker)
    del code
    gc.collect()
    assert tracker() is None
    for round in range(4):
        alive = [jit.load(image, ["answer"]) for _ in range(100)]
        assert all(call(code) == 7 for code in alive)
        trackers = [weakref.ref(code._tracker) for code in alive]
        del alive
        gc.collect()
        assert not any(tracker() for tracker in trackers)
        if round == 0:
            after_one = maps()
    assert maps() <= after_one + 5


def test_code_and_constants_stay_together_in_a_full_address_space() -> None:
    """A process with no hole but one page near its libraries, and the next one 8 GB below."""
    script = textwrap.dedent("""
        import ctypes, mmap
        from quire.codegen.llvm import jit
        from quire.codegen.llvm.builder import Module
        from quire.codegen.llvm.target import Target
        from quire.codegen.llvm.types import F32

        PAGE, HUGE, NOTHING, AT_NO_OTHER_PLACE = 4096, 8 << 30, 0, 0x100000
        FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | AT_NO_OTHER_PLACE
        take = ctypes.CDLL(None).mmap
        take.restype = ctypes.c_void_p
        take.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]

        def fill() -> None:
            with open("/proc/self/maps") as file:
                ends = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in file]
            top = max(high for _, high in ends if high < 1 << 48)
            libraries = [(low, high) for low, high in ends if top - (1 << 42) < low < top]
            for (_, low), (high, _) in zip(libraries, libraries[1:]):
                if low < high:
                    assert take(low, high - low, NOTHING, FLAGS, -1, 0) == low
            start = libraries[0][0] - PAGE - HUGE
            assert take(start, HUGE, NOTHING, FLAGS, -1, 0) == start

        def text(number: float) -> str:
            module = Module()
            with module.function("answer", {}, F32) as f:
                f.give_back(f.value(number, F32))
            return module.text

        images = [jit.compile_object(text(0.1 + i), Target.host()) for i in range(4)]
        jit.load(images[0], ["answer"])
        fill()
        codes = [jit.load(image, ["answer"]) for image in images]
        call = ctypes.CFUNCTYPE(ctypes.c_float)
        print([round(call(code.address("answer"))(), 3) for code in codes])
    """)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "[0.1, 1.1, 2.1, 3.1]\n"), run.stderr


def test_threads_compile_and_load_at_once() -> None:
    results: dict[int, int] = {}

    def work(number: int) -> None:
        code = jit.load(jit.compile_object(answer(number), Target.host()), ["answer"])
        results[number] = call(code)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: number for number in range(8)}


@pytest.mark.parametrize("image", [b"", b"not an object", b"\x7fELF" + bytes(60)])
def test_what_is_no_object_is_refused(image: bytes) -> None:
    with pytest.raises(CodegenError, match="expected an object with"):
        jit.load(image, ["answer"])


def test_truncated_and_foreign_objects_are_refused() -> None:
    image = jit.compile_object(answer(7), Target.host())
    for size in (10, 64, len(image) // 2):
        with pytest.raises(CodegenError, match="expected an object with"):
            jit.load(image[:size], ["answer"])
    with pytest.raises(CodegenError, match="expected an object with"):
        jit.load(image, ["question"])
    with pytest.raises(CodegenError, match="expected one of"):
        jit.load(image, ["answer"]).address("question")


@pytest.mark.parametrize(
    "text",
    [
        "define void @f() {",
        "define i64 @f() {\n  ret float 0.0\n}",
        "define i64 @f(i1 %c) {\n  br i1 %c, label %a, label %b\na:\n  %x = add i64 1, 1\n"
        "  br label %b\nb:\n  ret i64 %x\n}",
    ],
)
def test_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(CodegenError, match="expected well-formed code"):
        jit.compile_object(text, Target.host())


def test_a_module_may_not_call_outside() -> None:
    text = "declare double @sin(double)\ndefine double @f(double %x) {\n"
    text += "  %y = call double @sin(double %x)\n  ret double %y\n}"
    with pytest.raises(CodegenError, match="expected a module on its own, got a call to sin"):
        jit.compile_object(text, Target.host())


def test_version() -> None:
    assert int(jit.llvm_version().split(".")[0]) >= 20
