"""The limits of this machine: how fast it reads memory, and how fast it multiplies."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from quire.codegen.llvm import jit
from quire.codegen.llvm.builder import Module
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import F32, I64, PTR
from quire.runtime.launch import launch

CHUNK = 1 << 16  # floats that a thread reads before it takes the next chunk
TURNS, CHAINS = 1 << 20, 12
FLOPS = 2 * TURNS * CHAINS * Target.host().lanes(F32)  # operations of `multiply` in each thread


@functools.cache
def _reader() -> jit.Code:
    """Compile a function `read(i64[16])` that adds up runs of floats.

    Its argument holds the address of a list of addresses of runs, the number of runs, the number of
    floats in each, a counter from which threads take the next run, and a place for the sum. Without
    the sum, LLVM would remove the loads.
    """
    target, module = Target.host(), Module()
    lanes = target.lanes(F32)
    vector = target.vector(F32)
    with module.function("read", {"args": PTR}) as f:
        args = f.parameters[0]
        runs, count, length = f.load(PTR, args, 0), f.load(I64, args, 1), f.load(I64, args, 2)
        with f.forever() as leave:
            number = f.atomic_add(f.offset(args, 3, I64), 1)
            leave(number >= count)
            start = f.load(PTR, runs, number)

            def add(at, sums):
                loads = [f.load(vector, start, at + k * lanes) for k in range(8)]
                return [s + x for s, x in zip(sums, loads, strict=True)]

            nothing = [f.value(0.0, vector)] * 8
            sums = f.loop(0, length, add, carry=nothing, step=8 * lanes)
            f.store(functools.reduce(lambda a, b: a + b, sums), f.offset(args, 4, I64))
    return jit.load(jit.compile_object(str(module.text), target), ["read"])


def reading_runs(length: int, *addresses: Tensor) -> Callable[[], None]:
    """Return a function that reads runs of `length` floats as fast as this machine can.

    `addresses` are int64 tensors with the address of each run.
    """

    def read() -> None:
        for runs in addresses:
            record = (ctypes.c_int64 * 16)(runs.data_ptr(), runs.numel(), length)
            launch(_reader().address("read"), ctypes.addressof(record), torch.get_num_threads())

    return read


def reading(*tensors: Tensor) -> Callable[[], None]:
    """Return a function that reads tensors from beginning to end, as fast as this machine can."""
    chunks = [torch.arange(tensor.nbytes // (4 * CHUNK)) for tensor in tensors]
    starts = zip(tensors, chunks, strict=True)
    return reading_runs(CHUNK, *(x.data_ptr() + 4 * CHUNK * places for x, places in starts))


@functools.cache
def _multiplier() -> jit.Code:
    """Compile a function `multiply(ptr)`: a loop of multiply-adds in registers, without loads."""
    target, module = Target.host(), Module()
    vector = target.vector(F32)
    with module.function("multiply", {"unused": PTR}) as f:
        factor = f.value(0.999, vector)
        sums = f.loop(
            0,
            f.value(TURNS, I64),
            lambda i, sums: [f.fma(x, factor, 0.001) for x in sums],
            carry=[f.value(float(chain), vector) for chain in range(CHAINS)],
        )
        total = functools.reduce(lambda a, b: a + b, sums)
        with f.when(
            f.any_lane(total.equals(1.5))
        ):  # never true, but LLVM does not know, so it keeps the loop
            f.store(total, f.parameters[0])
    return jit.load(jit.compile_object(module.text, target), ["multiply"])


def multiply(threads: int) -> None:
    """Do `FLOPS` floating-point operations in each thread."""
    launch(_multiplier().address("multiply"), 0, threads)
