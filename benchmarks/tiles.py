"""Shapes of tiles on this processor: python benchmarks/tiles.py

Each figure is a share of what the multipliers can do on one thread, in percent, by a loop that does
nothing else and takes turns with what is measured; best of several rounds. `keys` and `values` are
the two products of a tile alone, out of the nearest cache, `forward` is dense attention and `both`
a forward and a backward pass. `codegen/llvm/target.py` says which shapes follow.

    --vectors 256    other widths than the processor's own, in bits
    --shapes 6x4     rows x vectors, in place of all that fit the registers
    --blocks         block sizes of keys for each shape, too
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
KEYS = 120  # of a product alone: all rows that are tried divide it
TURNS = 200


def shapes(target: Target) -> Iterator[Target]:
    """Every shape whose accumulators, vectors and broadcast number fit the registers."""
    for vectors in (2, 4):  # a panel divides blocks of queries, which are powers of two
        for rows in range(4, 13):
            if rows * vectors + vectors + 1 <= target.registers:
                yield dataclasses.replace(target, rows=rows, vectors=vectors)


@functools.cache
def product(target: Target, dtype: torch.dtype, phase: str, d: int) -> tuple[jit.Code, float]:
    """One of the two products of a tile, repeated; and how many operations that is."""
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
        numbers = {"stride": d + 16, "count": KEYS, "depth": d, "columns": d}
        given = {name: f.value(number, I64) for name, number in numbers.items()}
        given |= {"keys": rows, "queries": panel, "scores": scores, "maxima": more}
        given |= {"values": rows, "weights": scores, "out": panel, "alpha": more}
        with f.range(0, f.value(TURNS, I64)):
            f.call(inner, **{name: given[name] for name in inner.signature.parameters})
    code = jit.load(jit.compile_object(module.text, target), ["run"])
    return code, 2.0 * TURNS * KEYS * d * tile.width


def share(run: Callable[[], object], work: float, per_lane: float = 1.0) -> float:
    """The share of the peak that `run` reaches, in percent."""
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
    """keys, values, forward and both."""
    half = 1.0 if dtype == torch.float32 else 0.5
    memory = torch.randn(1 << 18, dtype=dtype)  # more than all regions of a product take
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
    """Have quire generate code for a target from now on."""
    Target.host = staticmethod(lambda: target)  # type: ignore[method-assign]
    plans.known.clear()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vectors", type=int, nargs="*", default=[], help="widths, in bits")
    parser.add_argument("--shapes", nargs="*", default=[], help="such as 6x4")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--blocks", action="store_true", help="sweep blocks of keys as well")
    parser.add_argument("--rounds", type=int, default=2)
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
    print("  bits  rows x vectors  keys   D        keys  values forward    both")
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
