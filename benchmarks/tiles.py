"""Which shape of tiles is fastest on this processor: python benchmarks/tiles.py

Each figure is a percentage of the peak of one thread. A loop that only multiplies measures the peak
in turns with the code in question, and the best of several rounds counts. `keys` and `values` are
the two products of a tile alone, with all operands in the L1 cache. `forward` is dense attention,
and `both` is a forward and a backward pass. `codegen/llvm/target.py` has the shapes that these
figures led to.

    --vectors 256    widths of vectors in bits, in place of the processor's own
    --shapes 6x4     rows x vectors, in place of all shapes that fit into the registers
    --blocks         try blocks of 64, 128 and 256 keys for each shape
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator

import torch
from _limits import FLOPS, multiply

import quire
from quire import plans
from quire.codegen.llvm import jit
from quire.codegen.llvm.builder import Function, Module
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import F32, F64, I64, PTR
from quire.codegen.phases.tiles import TileShape, write_multiply_keys, write_multiply_values

HEADS, LENGTH = 8, 2048
KEYS = 120  # of a product alone: a multiple of 4, 5, 6, 8, 10 and 12 rows
TURNS = 200


def shapes(target: Target) -> Iterator[Target]:
    """Yield every shape whose sums, vectors and one broadcast number fit into the registers."""
    for vectors in (
        2,
        4,
    ):  # so that a block of queries, a power of two, has a whole number of panels
        for rows in range(4, 13):
            if rows * vectors + vectors + 1 <= target.registers:
                yield dataclasses.replace(target, rows=rows, vectors=vectors)


@functools.cache
def product(target: Target, dtype: torch.dtype, phase: str, d: int) -> tuple[jit.Code, float]:
    """Return code that repeats one product of a tile, `phase`, and its number of operations."""
    tile, module = TileShape(target, F32 if dtype == torch.float32 else F64), Module()
    write: Callable[[Module, TileShape], Function]
    write = write_multiply_keys if phase == "keys" else write_multiply_values
    inner = write(module, tile)
    size = KEYS * (d + tile.width)
    with module.function("run", {"memory": PTR}) as f:
        (rows,) = f.parameters
        panel = f.offset(rows, size, tile.element)
        scores = f.offset(panel, (d + 16) * tile.width, tile.element)
        more = f.offset(scores, 2 * size, tile.element)
        stride, depth, count = (f.value(x, I64) for x in (d + 16, d, KEYS))
        with f.range(0, f.value(TURNS, I64)):
            if phase == "keys":
                places = {"keys": rows, "queries": panel, "scores": scores, "maxima": more}
                f.call(inner, **places, stride=stride, depth=depth, count=count)
            else:
                places = {"values": rows, "weights": scores, "out": panel, "alpha": more}
                f.call(inner, **places, stride=stride, columns=depth, count=count)
    code = jit.load(jit.compile_object(module.text, target), ["run"])
    return code, 2.0 * TURNS * KEYS * d * tile.width


def share(run: Callable[[], object], work: float, per_lane: float = 1.0) -> float:
    """Return the percentage of the peak that `run` reaches with `work` operations.

    `per_lane` is 1 for float32, and 0.5 for float64, whose vectors hold half as many numbers.
    """
    run()
    best, peak = float("inf"), float("inf")
    for _ in range(4):
        for what, is_peak in ((run, False), (functools.partial(multiply, 1), True)):
            start = time.perf_counter()
            what()
            passed = time.perf_counter() - start
            best, peak = (best, min(peak, passed)) if is_peak else (min(best, passed), peak)
    return 100 * (work / best) / (FLOPS * per_lane / peak)


def figures(target: Target, dtype: torch.dtype, d: int) -> list[float]:
    """Return the figures of the columns keys, values, forward and both, for head dim `d`."""
    half = 1.0 if dtype == torch.float32 else 0.5
    memory = torch.randn(1 << 18, dtype=dtype)  # more than the operands of a product take
    result = []
    for phase in ("keys", "values"):
        code, work = product(target, dtype, phase, d)
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address("run"))
        address = (memory.data_ptr() + 63) & ~63
        result.append(share(functools.partial(function, address), work, half))
        memory.normal_()
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, LENGTH, d, dtype=dtype) for _ in range(3))
    work = 4.0 * HEADS * LENGTH * LENGTH * d
    result.append(share(functools.partial(quire.flex_attention, q, k, v), work, half))
    learned = [x.clone().requires_grad_() for x in (q, k, v)]

    def both() -> None:
        out = quire.flex_attention(*learned)
        torch.autograd.grad(out, learned, q)

    result.append(share(both, 3.5 * work, half))
    return result


def use(target: Target) -> None:
    """Make quire generate code for `target` from now on."""
    Target.host = staticmethod(lambda: target)  # type: ignore[method-assign]
    plans.known.clear()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vectors", type=int, nargs="*", default=[], help="widths of vectors in bits"
    )
    parser.add_argument("--shapes", nargs="*", default=[], help="rows x vectors, such as 6x4")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument(
        "--blocks", action="store_true", help="also try several numbers of keys per block"
    )
    parser.add_argument("--rounds", type=int, default=2, help="the best of so many rounds counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    host, dtype = Target.host(), getattr(torch, options.dtype)
    wanted = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
    candidates = [
        dataclasses.replace(shape, block_kv=block)
        for bits in options.vectors or [host.vector_bits]
        for shape in shapes(host.widened(bits))
        if not wanted or (shape.rows, shape.vectors) in wanted
        for block in ((64, 128, 256) if options.blocks else (128,))
    ]
    print(f"tiles: {host.cpu}, {options.dtype}, one thread, {host.registers} registers")
    print("  bits  rows x vectors block   D        keys  values forward    both   % of the peak")
    best: dict[tuple[Target, int], list[float]] = {}
    for _ in range(options.rounds):
        for target in candidates:
            use(target)
            for d in (64, 128):
                seen = best.setdefault((target, d), [0.0] * 4)
                seen[:] = map(max, seen, figures(target, dtype, d))
    for (target, d), row in best.items():
        shape = f"{target.rows} x {target.vectors}"
        numbers = " ".join(f"{number:7.1f}" for number in row)
        print(f"  {target.vector_bits:4}  {shape:>14}  {target.block_kv:4} {d:3}     {numbers}")


if __name__ == "__main__":
    main()
