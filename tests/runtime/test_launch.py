"""Launchers: every thread runs the kernel once, whichever launcher it is."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from forking import forks

from quire.codegen.llvm import jit
from quire.codegen.llvm.builder import Module
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import I64, PTR
from quire.runtime import launch as launching
from quire.runtime.launch import (
    GnuOpenMP,
    LlvmOpenMP,
    Pool,
    launch,
    openmp_library,
    ready,
    run_inline,
)


@pytest.fixture(scope="module")
def counting() -> jit.Code:
    """A kernel that adds 1 to the integer it is given."""
    module = Module()
    with module.function("count", {"at": PTR}) as f:
        f.atomic_add(f.parameters[0], 1)
        f.load(I64, f.parameters[0])
    return jit.load(jit.compile_object(module.text, Target.host()), ["count"])


def llvm_openmp() -> str | None:
    """LLVM's OpenMP or Intel's, as a package of the system or of Python installs it."""
    beside = sorted(Path(sys.prefix, "lib").glob("libiomp5.*"))
    found = ctypes.util.find_library("omp") or ctypes.util.find_library("iomp5")
    return os.fspath(beside[0]) if beside else found


LAUNCHERS = {"inline": lambda: run_inline, "pool": Pool}
if openmp_library() is not None:
    LAUNCHERS["openmp"] = lambda: GnuOpenMP(openmp_library())


if llvm_openmp() is not None:
    LAUNCHERS["llvm openmp"] = lambda: LlvmOpenMP(llvm_openmp())
    LAUNCHERS["llvm openmp by gnu's entry"] = lambda: GnuOpenMP(llvm_openmp())


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_thread_runs_the_kernel(counting: jit.Code, name: str) -> None:
    run = LAUNCHERS[name]()
    threads = 1 if name == "inline" else 3
    for _ in range(50):
        counter = ctypes.c_int64(0)
        run(counting.address("count"), ctypes.addressof(counter), threads)
        assert counter.value == threads


def test_torch_on_linux_brings_its_own_openmp() -> None:
    assert openmp_library() is not None
    assert isinstance(launching.torch_threads(), GnuOpenMP)


@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("libgomp.so.1", True),
        ("libgomp-a34b3233.so.1", True),
        ("libomp.so.5", True),
        ("libomp-14.so.5", True),
        ("libomp.dylib", True),
        ("libiomp5.so", True),
        ("libiomp5md.dll", True),
        ("libomptarget.so", False),
        ("libompositor.so", False),
        ("libiompstubs5md.dll", False),
        ("libtorch_cpu.so", False),
    ],
)
def test_names_of_openmp_libraries(name: str, holds: bool) -> None:
    assert launching._is_openmp(os.path.join("lib", name)) == holds


@pytest.mark.parametrize("name", ["libomp.dylib", "libiomp5md.dll"])
def test_the_library_beside_torch_comes_first(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    for each in ("libc10.dylib", name, "torch.dll"):
        (tmp_path / "lib" / each).touch()
    monkeypatch.setattr(torch, "__file__", os.fspath(tmp_path / "__init__.py"))
    assert openmp_library.__wrapped__() == os.fspath(tmp_path / "lib" / name)


def test_a_torch_that_brings_none_uses_the_one_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__file__", os.fspath(tmp_path / "__init__.py"))
    found = openmp_library.__wrapped__()
    assert found is not None and launching._is_openmp(found)
    monkeypatch.setattr(launching, "_loaded_files", list)
    assert openmp_library.__wrapped__() is None


def test_a_library_that_we_cannot_call_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ctypes.util.find_library("c"), "/no/such/libomp.so", None):
        monkeypatch.setattr(launching, "openmp_library", lambda name=name: name)
        assert isinstance(launching.torch_threads.__wrapped__(), Pool)


@pytest.mark.skipif(llvm_openmp() is None, reason="neither libomp nor libiomp5 is installed")
def test_llvms_openmp_in_many_threads_and_after_a_fork(
    counting: jit.Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LlvmOpenMP(llvm_openmp())
    monkeypatch.setattr(launching, "torch_threads", lambda: run)
    test_many_python_threads_launch_at_once(counting)
    test_a_forked_child_runs_alone(counting)


@pytest.mark.parametrize("name", ["inline", "pool", "openmp"])
def test_what_is_ready_runs_again_and_again(
    counting: jit.Code, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in ("pool", "openmp"):
        if name not in LAUNCHERS:
            pytest.skip("torch brings no libgomp here")
        there = LAUNCHERS[name]()
        monkeypatch.setattr(launching, "torch_threads", lambda: there)
    threads = 1 if name == "inline" else 3
    counter = ctypes.c_int64(0)
    run = ready(counting.address("count"), ctypes.addressof(counter), threads)
    for times in range(1, 50):
        run()
        assert counter.value == times * threads


def test_many_python_threads_launch_at_once(counting: jit.Code) -> None:
    counters = [ctypes.c_int64(0) for _ in range(8)]

    def work(counter: ctypes.c_int64) -> None:
        for _ in range(100):
            launch(counting.address("count"), ctypes.addressof(counter), 2)

    workers = [threading.Thread(target=work, args=(counter,)) for counter in counters]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [counter.value for counter in counters] == [200] * 8


@forks
def test_a_forked_child_runs_alone(counting: jit.Code) -> None:
    torch.ones(1 << 16).sum()  # torch's threads exist in the parent
    counter = ctypes.c_int64(0)
    launch(counting.address("count"), ctypes.addressof(ctypes.c_int64(0)), 2)
    run = ready(counting.address("count"), ctypes.addressof(counter), 2)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        launch(counting.address("count"), ctypes.addressof(counter), 2)
        run()
        os.write(write, bytes([counter.value, launching.num_threads()]))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 2) == bytes([2, 1])


def test_as_many_threads_as_torch() -> None:
    assert launching.num_threads() == torch.get_num_threads()
