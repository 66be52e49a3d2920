"""Packed linear layers, beside PyTorch's.

    python benchmarks/linear.py --only layers

Each figure is the time of PyTorch's `F.linear` in float32 over ours, so above 1 ours is faster.
Weights are cold: copies of a layer take turns, 150 MB or more together, as in a model that reads
all its weights at every step. `layers` prints the geometric mean over five shapes of layers.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from _race import Table, race, run_parts
from torch import Tensor, nn

from quire.integrations import smollm2
from quire.linear import PackedLinear, Weights, pack

SHAPES = ((576, 1536), (1536, 576), (576, 960), (2048, 8192), (576, 49152))  # K, N
FORMATS: tuple[Weights, ...] = ("float32", "bfloat16", "float16", "int8", "int4", "w8a8", "w4a8")
BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1.1,
    "int4": 0.65,
    "w8a8": 1.1,
    "w4a8": 0.65,
}
ROWS = (1, 4, 16, 64)
COLD = 150 << 20  # bytes
MUST = {
    "float32": (1.0, 1.7, 1.6, 1.2),
    "bfloat16": (2.0, 3.0, 2.0, 1.2),
    "int8": (3.3, 4.0, 2.0, 1.1),
    "w8a8": (3.5, 6.0, 5.0, 3.0),
}

Call = Callable[[Tensor], Tensor]


def copies(shape: tuple[int, int], weights: Weights | None) -> list[Call]:
    """Return layers with different memory, ours or PyTorch's; most share their numbers."""
    depth, width = shape
    count = max(2, math.ceil(COLD / (depth * width * BYTES[weights or "float32"])))
    weight = torch.randn(width, depth) / depth**0.5
    if weights is None:
        return [functools.partial(F.linear, weight=weight.clone()) for _ in range(count)]
    first = PackedLinear.from_weight(weight, weights=weights)
    others = [PackedLinear(first.shape, {"packed": first.packed.clone()}) for _ in range(count - 1)]
    return [first, *others]


def packed_by_torch(name: str, shape: tuple[int, int], rows: int) -> list[Call]:
    """Return layers that MKL or oneDNN packed for a number of rows, by PyTorch's private operators.

    There are none if this build of PyTorch has no such operator.
    """
    depth, width = shape
    weight = torch.randn(width, depth) / depth**0.5
    count = max(2, COLD // (4 * depth * width))
    try:
        if name == "mkl":
            reorder, linear = torch.ops.mkl._mkl_reorder_linear_weight, torch.ops.mkl._mkl_linear
            packed = [reorder(weight, rows) for _ in range(count)]
            return [lambda x, p=p: linear(x, p, weight, None, rows) for p in packed]
        reorder, pointwise = (
            torch.ops.mkldnn._reorder_linear_weight,
            torch.ops.mkldnn._linear_pointwise,
        )
        packed = [reorder(weight, rows) for _ in range(count)]
        after = (None, "none", [], "")  # no bias, and nothing that follows
        return [lambda x, p=p: pointwise(x, p, *after) for p in packed]
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        print(f"  {name}: this build of PyTorch does not pack: {str(error).splitlines()[0][:70]}")
        return []


def in_turns(calls: Sequence[Call], x: Tensor) -> Callable[[], object]:
    """Return a function that calls the next of some layers at each call."""
    following = itertools.cycle(calls)
    for call in calls:
        call(x)
    return lambda: next(following)(x)


def mean(numbers: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, numbers)) / len(numbers))


def layers(table: Table, seconds: float, threads: int) -> None:
    """Print every format, and MKL's and oneDNN's packed layers, at few and many rows."""
    torch.set_num_threads(1)
    ratios: dict[tuple[str, int], list[float]] = {}
    for shape in SHAPES:
        contestants = {weights: copies(shape, weights) for weights in FORMATS}
        plain = copies(shape, None)
        for rows in ROWS:
            x = torch.randn(rows, shape[0])
            runs = {name: in_turns(calls, x) for name, calls in contestants.items()}
            packed = {name: packed_by_torch(name, shape, rows) for name in ("mkl", "onednn")}
            runs |= {name: in_turns(calls, x) for name, calls in packed.items() if calls}
            best = race({"torch": in_turns(plain, x), **runs}, seconds / 4)
            for name in runs:
                ratios.setdefault((name, rows), []).append(best["torch"] / best[name])
    for (name, rows), found in sorted(ratios.items(), key=lambda item: item[0][1]):
        must = f">= {MUST[name][ROWS.index(rows)]}" if name in MUST else ""
        each = " ".join(f"{ratio:.2f}" for ratio in found)
        table.add(f"{name}, {rows} rows, 1 thread", mean(found), "x", must, each=each)


def reading(table: Table, seconds: float, threads: int) -> None:
    """Print the share of the speed of reading memory that one row reaches."""
    torch.set_num_threads(1)
    many = [torch.randn(COLD // 16) for _ in range(4)]
    following = itertools.cycle(many)
    for weights in FORMATS:
        shape = (576, 49152)
        calls, x = copies(shape, weights), torch.randn(1, shape[0])
        best = race({"sum": lambda: next(following).sum(), "ours": in_turns(calls, x)}, seconds)
        size = calls[0].packed.nbytes  # type: ignore[attr-defined]
        speed, limit = size / best["ours"], many[0].nbytes / best["sum"]
        details = {"GB/s": f"{speed / 1e9:.1f}", "torch.sum": f"{limit / 1e9:.1f}"}
        table.add(f"{weights}, reading, 1 row", speed / limit, "x", ">= 0.85", **details)


def prefill(table: Table, seconds: float, threads: int) -> None:
    """Print many rows."""
    torch.set_num_threads(1)
    for shape in SHAPES[:4]:
        for rows in (512, 2048):
            linear, x = (
                nn.Linear(*shape, bias=False).requires_grad_(False),
                torch.randn(rows, shape[0]),
            )
            runs: dict[str, Callable[[], object]] = {"torch": functools.partial(linear, x)}
            for weights in ("float32", "int8", "w8a8"):
                layer = PackedLinear.from_linear(linear, weights)
                runs[weights] = functools.partial(layer, x)
            best = race(runs, seconds / 2)
            for name in ("float32", "int8", "w8a8"):
                speed = f"{2 * rows * shape[0] * shape[1] / best[name] / 1e9:.0f} GF/s"
                must = ">= 0.9" if name == "float32" else ""
                table.add(
                    f"{name}, {rows} rows of {shape}",
                    best["torch"] / best[name],
                    "x",
                    must,
                    ours=speed,
                )


def scaling(table: Table, seconds: float, threads: int) -> None:
    """Print two threads against one."""
    for shape, weights, rows in itertools.product(SHAPES[:4], ("float32", "int8"), (1, 64)):
        calls, x, times = copies(shape, weights), torch.randn(rows, shape[0]), {}
        for count in (1, 2):
            torch.set_num_threads(count)
            times[count] = race({"ours": in_turns(calls, x)}, seconds / 4)["ours"]
        name = f"{weights}, {rows} rows of {shape}, 2 threads over 1"
        table.add(name, times[1] / times[2], "x", ">= 1.7")
    torch.set_num_threads(threads)


def overhead(table: Table, seconds: float, threads: int) -> None:
    """Print what a call of a tiny layer costs."""
    torch.set_num_threads(1)
    linear, x = nn.Linear(16, 16).requires_grad_(False), torch.randn(1, 16)
    layer = PackedLinear.from_linear(linear)
    best = race({"torch": lambda: linear(x), "ours": lambda: layer(x)}, seconds)
    more = (best["ours"] - best["torch"]) * 1e6
    table.add("a call, more than nn.Linear", more, "us", "<= 5", ours=f"{best['ours'] * 1e6:.1f}")


def bits(table: Table, seconds: float, threads: int) -> None:
    """Print in how many numbers of rows the first row has the bits that it has alone."""
    counts = (2, 4, 8, 16, 64)
    for shape in SHAPES[:3]:
        weight, x = torch.randn(shape[1], shape[0]), torch.randn(64, shape[0])
        for name, call in {
            "torch": lambda x, w=weight: F.linear(x, w),
            "ours": PackedLinear.from_weight(weight),
        }.items():
            alone = call(x[:1])
            same = sum(torch.equal(call(x[:count])[:1], alone) for count in counts)
            table.add(
                f"{name}, {shape}, batches of {len(counts)} with the same first row",
                same,
                "batches",
            )


CONTEXT = 256
MODEL_MUST = {1: (1.4, 2.3, 3.2), 16: (2.4, 2.8, 2.7)}


def model(table: Table, seconds: float, threads: int) -> None:
    """Print whole steps of SmolLM2 at a context of 256, against transformers' with SDPA."""
    if smollm2.missing():
        print(f"  model: {smollm2.HOW_TO_INSTALL}")
        return
    torch.set_num_threads(1)
    plain, _ = smollm2.load("sdpa")
    weights: tuple[Weights, ...] = ("float32", "bfloat16", "int8", "w8a8")
    for rows in (1, 16):
        best = {"transformers": step(plain, "sdpa", rows)}
        for name in weights:
            best[name] = step(pack(copy.deepcopy(plain), name), "quire", rows)
        best["gguf"] = step(pack(copy.deepcopy(plain), gguf=smollm2.weights()), "quire", rows)
        for name in best:
            must = ""
            if name in weights[:3]:
                must = f">= {MODEL_MUST[rows][weights.index(name)]}"
            time_of = f"{best[name] * 1e3:.1f} ms"
            ratio = best["transformers"] / best[name]
            table.add(f"{name}, a step of {rows} rows", ratio, "x", must, step=time_of)


@torch.no_grad()
def step(found: Any, attention: str, rows: int) -> float:
    """Return the seconds of the best of some steps of one token for each of `rows` sequences."""
    found.set_attn_implementation(attention)
    from transformers import DynamicCache

    from quire.integrations.transformers import PagedCache

    cache = DynamicCache() if attention == "sdpa" else PagedCache(found.config)
    ids = torch.randint(100, 40_000, (rows, CONTEXT), generator=torch.Generator().manual_seed(0))
    found(ids, past_key_values=cache, logits_to_keep=1)
    times = []
    for _ in range(8):
        start = time.perf_counter()
        found(ids[:, :1], past_key_values=cache)
        times.append(time.perf_counter() - start)
    return min(times)


PARTS = [layers, reading, prefill, scaling, overhead, bits, model]

if __name__ == "__main__":
    run_parts("linear", __doc__, PARTS)
