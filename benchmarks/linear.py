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
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from _race import Table, race, run_parts
from torch import Tensor, nn

from quire.codegen.llvm.target import Target
from quire.integrations import smollm2
from quire.linear import PackedLinear, Weights, pack
from quire.linear.large_pages import empty_panels

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
"""What we want for ROWS on vectors of 512 bits."""
MUST_OF_AVX2 = {"float32": (1.0, 1.5, 1.5, 1.05), "w8a8": (3.5, 6.0, 3.0, 1.2)}
"""What differs from that on vectors of 256 bits, as with QUIRE_TARGET=x86-64-v3."""

Call = Callable[[Tensor], Tensor]


def copies(shape: tuple[int, int], weights: Weights | None) -> list[Call]:
    """Return layers with different memory, ours or PyTorch's; most share their numbers."""
    depth, width = shape
    count = max(2, math.ceil(COLD / (depth * width * BYTES[weights or "float32"])))
    weight = torch.randn(width, depth) / depth**0.5
    if weights is None:
        return [functools.partial(F.linear, weight=weight.clone()) for _ in range(count)]
    first = PackedLinear.from_weight(weight, weights=weights)
    others = [empty_panels(1, first.packed.nbytes).copy_(first.packed) for _ in range(count - 1)]
    return [first, *(PackedLinear(first.shape, {"packed": other[0]}) for other in others)]


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
    wanted = MUST if Target.host().vector_bits >= 512 else MUST | MUST_OF_AVX2
    for (name, rows), found in sorted(ratios.items(), key=lambda item: item[0][1]):
        must = f">= {wanted[name][ROWS.index(rows)]}" if name in wanted else ""
        each = " ".join(f"{ratio:.2f}" for ratio in found)
        table.add(f"{name}, {rows} rows, 1 thread", mean(found), "x", must, each=each)


def memory_to_read() -> list[Tensor]:
    """Return floats in large pages that do not stay in the cache when they take turns."""
    return [empty_panels(1, COLD // 4).view(torch.float32).fill_(1) for _ in range(4)]


def reading(table: Table, seconds: float, threads: int) -> None:
    """Print the share of the speed of reading memory that one row reaches."""
    torch.set_num_threads(1)
    many = memory_to_read()
    following = itertools.cycle(many)
    for shape, weights in itertools.product(SHAPES[3:], FORMATS):
        calls, x = copies(shape, weights), torch.randn(1, shape[0])
        best = race({"sum": lambda: next(following).sum(), "ours": in_turns(calls, x)}, seconds)
        size = calls[0].packed.nbytes  # type: ignore[attr-defined]
        speed, limit = size / best["ours"], many[0].nbytes / best["sum"]
        details = {"GB/s": f"{speed / 1e9:.1f}", "torch.sum": f"{limit / 1e9:.1f}"}
        table.add(f"{weights}, reading {shape}, 1 row", speed / limit, "x", ">= 0.85", **details)


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
    """Print two threads against one, and the same for two threads that only read the weights."""
    for shape, weights, rows in itertools.product(SHAPES[:4], ("float32", "int8"), (1, 64)):
        calls, x = copies(shape, weights), torch.randn(rows, shape[0])
        runs = {"ours": in_turns(calls, x)}
        if rows == 1:
            packed = itertools.cycle([call.packed.view(torch.float32) for call in calls])  # type: ignore[attr-defined]
            runs["reading"] = lambda packed=packed: next(packed).sum()
        times = []
        for count in (1, 2):
            torch.set_num_threads(count)
            times.append(race(runs, seconds / 4))
        gains = {name: times[0][name] / times[1][name] for name in runs}
        name = f"{weights}, {rows} rows of {shape}, 2 threads over 1"
        more = {"reading": f"{gains['reading']:.2f}"} if rows == 1 else {}
        table.add(name, gains["ours"], "x", ">= 1.7", **more)
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

    def add(case: str, call: Call, x: Tensor) -> None:
        alone = call(x[:1])
        same = sum(torch.equal(call(x[:count])[:1], alone) for count in counts)
        table.add(f"{case}, batches of {len(counts)} with the same first row", same, "batches")

    for shape in SHAPES[:3]:
        weight, x = torch.randn(shape[1], shape[0]), torch.randn(64, shape[0])
        for name, call in {
            "torch": lambda x, w=weight: F.linear(x, w),
            "ours": PackedLinear.from_weight(weight),
        }.items():
            add(f"{name}, {shape}", call, x)
    for kind in (nn.SiLU, nn.Sigmoid):
        x, ours = torch.randn(64, ODD), kind()
        pack(nn.ModuleList([ours]))
        for name, call in {"torch": kind(), "ours": ours}.items():
            whole = call(x)
            same = sum(torch.equal(call(x[row : row + 1])[0], whole[row]) for row in range(64))
            case = f"{name}, {kind.__name__} of {ODD} numbers, rows of 64 that are so alone"
            table.add(case, same, "rows")


ODD = 591  # numbers of a row, no multiple of a vector
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
    packed = {name: pack(copy.deepcopy(plain), name) for name in weights}
    packed["gguf"] = pack(copy.deepcopy(plain), gguf=smollm2.weights())
    for rows in (1, 16):
        steps = {"transformers": next_step(plain, "sdpa", rows)}
        steps |= {name: next_step(each, "quire", rows) for name, each in packed.items()}
        best = race(steps, seconds)
        for name in best:
            must = ""
            if name in weights[:3]:
                must = f">= {MODEL_MUST[rows][weights.index(name)]}"
            time_of = f"{best[name] * 1e3:.1f} ms"
            ratio = best["transformers"] / best[name]
            table.add(f"{name}, a step of {rows} rows", ratio, "x", must, step=time_of)


def next_step(found: Any, attention: str, rows: int) -> Callable[[], object]:
    """Return a function that computes one more token for each of `rows` sequences."""
    from transformers import DynamicCache

    from quire.integrations.transformers import PagedCache

    found.set_attn_implementation(attention)
    cache = DynamicCache() if attention == "sdpa" else PagedCache(found.config)
    ids = torch.randint(100, 40_000, (rows, CONTEXT), generator=torch.Generator().manual_seed(0))
    step = torch.no_grad()(functools.partial(found, past_key_values=cache))
    step(ids, logits_to_keep=1)
    return lambda: step(ids[:, :1])


PARTS = [layers, reading, prefill, scaling, overhead, bits, model]

if __name__ == "__main__":
    run_parts("linear", __doc__, PARTS)
