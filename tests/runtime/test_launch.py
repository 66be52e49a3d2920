"""Launchers: every thread runs the kernel once, whichever launcher it is."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest
import torch
from forking import forks

from quire.codegen import jit
from quire.codegen.builder import Module
from quire.codegen.target import Target
from quire.codegen.types import I64, PTR
from quire.runtime import launch as launching
from quire.runtime.launch import OpenMP, Pool, launch, openmp_library, run_inline


@pytest.fixture(scope="module")
def counting() -> jit.Code:
    """A kernel that adds 1 to the integer it is given."""
    module = Module()
    with module.function("count", {"at": PTR}) as f:
        f.atomic_add(f.parameters[0], 1)
        f.load(I64, f.parameters[0])
    return jit.load(jit.compile_object(module.text, Target.host()), ["count"])


LAUNCHERS = {"inline": lambda: run_inline, "pool": Pool}
if openmp_library() is not None:
    LAUNCHERS["openmp"] = lambda: OpenMP(openmp_library())


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
    assert isinstance(launching.launcher(), OpenMP)


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
    launch(counting.address("count"), ctypes.addressof(ctypes.c_int64(0)), 2)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        counter = ctypes.c_int64(0)
        launch(counting.address("count"), ctypes.addressof(counter), 2)
        os.write(write, bytes([counter.value, launching.num_threads()]))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 2) == bytes([1, 1])


def test_as_many_threads_as_torch() -> None:
    assert launching.num_threads() == torch.get_num_threads()
