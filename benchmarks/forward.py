"""The forward pass against PyTorch: `make bench`, or python benchmarks/forward.py.

The part `inductor` compiles with torch.compile, which takes a minute for each row. `--only sdpa`
runs one part without it.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F
from _limits import FLOPS, multiply
from _race import Table, race, run_parts

import quire
from quire import Dense
from quire.checks.arguments import dtype_name
from quire.mods import alibi, causal, distance_bias, document, sliding_window, softcap


def operands(n: int, d: int, *, b: int = 1, hq: int = 8, hkv: int = 8, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = ((b, hq, n, d), (b, hkv, n, d), (b, hkv, n, d))
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


def block_mask(mask, n: int):
    return quire.create_block_mask(mask, None, None, n, n)


SIZES = [(n, d) for d in (64, 128) for n in (512, 2048, 8192)]


def sdpa(table: Table, seconds: float, threads: int) -> None:
    """Dense and causal attention against F.scaled_dot_product_attention."""
    for n, d in SIZES:
        q, k, v = operands(n, d)
        mask = block_mask(causal, n)
        dense = race(
            {
                "ours": functools.partial(quire.flex_attention, q, k, v),
                "peer": functools.partial(F.scaled_dot_product_attention, q, k, v),
            },
            seconds,
        )
        wanted = ">= 1.2" if d == 64 else ">= 1.1"
        table.add(
            f"dense N {n} D {d} threads {threads}", _ratio(dense), "x as fast as SDPA", wanted
        )
        masked = race(
            {
                "ours": functools.partial(quire.flex_attention, q, k, v, block_mask=mask),
                "peer": functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=True),
            },
            seconds,
        )
        wanted = ">= 2.0" if n == 512 else ">= 1.4" if d == 64 else ">= 1.35"
        table.add(
            f"causal N {n} D {d} threads {threads}", _ratio(masked), "x as fast as SDPA", wanted
        )
    q, k, v = operands(1024, 128, b=4, hq=32, hkv=8)
    times = race(
        {
            "ours": functools.partial(quire.flex_attention, q, k, v, enable_gqa=True),
            "peer": functools.partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=True),
        },
        seconds,
    )
    case = f"dense B 4 Hq 32 Hkv 8 N 1024 D 128 threads {threads}"
    table.add(case, _ratio(times), "x as fast as SDPA", ">= 1.1")


def dtypes(table: Table, seconds: float, threads: int) -> None:
    """bfloat16, float16 and transposed tensors against F.scaled_dot_product_attention."""
    for dtype, wanted in ((torch.bfloat16, ">= 1.15"), (torch.float16, ">= 1.6")):
        for d in (64, 128):
            q, k, v = operands(2048, d, dtype=dtype)
            times = race(
                {
                    "ours": functools.partial(quire.flex_attention, q, k, v),
                    "peer": functools.partial(F.scaled_dot_product_attention, q, k, v),
                },
                seconds,
            )
            name = dtype_name(dtype)
            table.add(
                f"dense {name} N 2048 D {d} threads {threads}",
                _ratio(times),
                "x as fast as SDPA",
                wanted,
            )
    for d in (64, 128):
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in operands(2048, d))
        times = race(
            {
                "ours": functools.partial(quire.flex_attention, q, k, v),
                "peer": functools.partial(F.scaled_dot_product_attention, q, k, v),
            },
            seconds,
        )
        table.add(
            f"[B, N, H, D] N 2048 D {d} threads {threads}",
            _ratio(times),
            "x as fast as SDPA",
            ">= 1.05",
        )


def score_mods(n: int) -> dict[str, tuple[object, str]]:
    return {
        "alibi": (alibi(8), "< 1.08"),
        "relative table": (distance_bias(torch.randn(8, 2 * n - 1)), "< 1.15"),
        "softcap": (softcap(20.0), "< 1.20"),
    }


def mods(table: Table, seconds: float, threads: int) -> None:
    """The time of causal attention with a score_mod, as a multiple of the time without."""
    for d in (64, 128):
        q, k, v = operands(2048, d)
        mask = block_mask(causal, 2048)
        for name, (mod, wanted) in score_mods(2048).items():
            times = race(
                {
                    "ours": functools.partial(quire.flex_attention, q, k, v, mod, block_mask=mask),
                    "plain": functools.partial(quire.flex_attention, q, k, v, block_mask=mask),
                },
                seconds,
            )
            cost = times["ours"] / times["plain"]
            table.add(
                f"{name}, causal N 2048 D {d} threads {threads}", cost, "x the time without", wanted
            )


def inductor(table: Table, seconds: float, threads: int) -> None:
    """Mods and masks, against torch.compile(flex_attention)."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    n, d = 2048, 64
    q, k, v = operands(n, d)
    lengths = [200, 700, 148, 512, 488]
    capped = lambda score, b, h, q_idx, kv_idx: torch.tanh(score / 20.0) * 20.0  # noqa: E731
    mods = {name: mod for name, (mod, _) in score_mods(n).items()} | {"softcap": capped}
    cases = {
        **{name: (mod, causal, ">= 3") for name, mod in mods.items()},
        "window 256": (None, sliding_window(256), ">= 2.5"),
        "documents": (None, document(lengths=lengths), ">= 2.5"),
    }
    compiled = torch.compile(flex_attention)
    for name, (mod, mask, wanted) in cases.items():
        ours = block_mask(mask, n)
        theirs = create_block_mask(mask, None, None, n, n, device="cpu")
        times = race(
            {
                "ours": functools.partial(quire.flex_attention, q, k, v, mod, block_mask=ours),
                "peer": functools.partial(compiled, q, k, v, mod, block_mask=theirs),
            },
            seconds,
        )
        table.add(
            f"{name} N {n} D {d} threads {threads}", _ratio(times), "x as fast as inductor", wanted
        )


def peak(table: Table, seconds: float, threads: int) -> None:
    """The share of this machine's peak, which a loop that only multiplies measures."""
    for d in (64, 128):
        for n, mask, wanted in ((4096, None, ">= 83"), (8192, causal, "")):
            q, k, v = operands(n, d)
            times = race(
                {
                    "ours": functools.partial(quire.flex_attention, q, k, v, mask_mod=mask),
                    "peak": functools.partial(multiply, threads),
                },
                seconds,
            )
            ours = (4 if mask is None else 2) * 8 * n * n * d / times["ours"]
            share = 100 * ours / (FLOPS * threads / times["peak"])
            name = "dense" if mask is None else "causal"
            table.add(
                f"share of peak, {name} N {n} D {d} threads {threads}",
                share,
                "% of the peak",
                wanted,
            )


COLD_START = """
import sys, time, torch
torch.randn(8, 8) @ torch.randn(8, 8)
q = torch.randn(1, 8, 512, 64)
start = time.perf_counter()
import quire
w = int(sys.argv[1])
first = lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < w)
quire.flex_attention(q, q, q, mask_mod=first)
one = time.perf_counter()
second = lambda s, b, h, q_idx, kv_idx: s * 0.5 + (q_idx - kv_idx) * 0.25
quire.flex_attention(q, q, q, score_mod=second)
two = time.perf_counter()
print(one - start, two - one)
"""


def start(table: Table, seconds: float, threads: int) -> None:
    """The time from `import quire` to the first result, in new processes with torch imported."""
    with tempfile.TemporaryDirectory() as directory:
        cold, warm, further = [], [], []
        for turn in range(5):
            cache = os.path.join(directory, str(turn))
            first, second = _cold_start(cache)
            cold.append(first)
            further.append(second)
            warm.append(_cold_start(cache)[0])
    table.add("first call of a new mod, empty disk cache", min(cold), "s", "< 0.35")
    table.add("the same in a new process, from the disk cache", min(warm), "s", "< 0.10")
    table.add("first call of another new mod, same process", min(further), "s", "< 0.05")


def _cold_start(cache: str) -> tuple[float, float]:
    environment = {**os.environ, "QUIRE_CACHE_DIR": cache}
    environment.pop(
        "PYTHONDONTWRITEBYTECODE", None
    )  # Python may write bytecode, as for an installed package
    command = [sys.executable, "-c", COLD_START, "128"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    first, second = map(float, done.stdout.split())
    return first, second


def overhead(table: Table, seconds: float, threads: int) -> None:
    """One query over 128 keys, where the time around the kernel counts most."""
    q, k, v = torch.randn(1, 8, 1, 64), torch.randn(1, 8, 128, 64), torch.randn(1, 8, 128, 64)
    slopes = torch.rand(8)

    def mod(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * kv_idx

    times = race(
        {
            "peer": functools.partial(F.scaled_dot_product_attention, q, k, v),
            "none": functools.partial(quire.flex_attention, q, k, v),
            "mod": functools.partial(quire.flex_attention, q, k, v, mod),
            "plan": functools.partial(quire.plan(q, Dense(k, v), score_mod=mod), q, Dense(k, v)),
        },
        seconds,
    )
    peer = times["peer"]
    for name, wanted in (("none", "< 3"), ("mod", "< 5"), ("plan", "< 2")):
        case = f"q 1, kv 128, H 8, mod: {name}, threads {threads}"
        table.add(
            case, times[name] / peer, "x the time of SDPA", wanted, sdpa_us=round(peer * 1e6, 1)
        )


def memory(table: Table, seconds: float, threads: int) -> None:
    """The memory that 32,768 tokens take besides inputs and output."""
    from quire.tools.measure import race as measure

    (reading,) = measure(_long_call, seconds=0.1)
    extra = (reading.peak_bytes or 0) - 32768 * 64 * 4
    table.add("extra memory at N 32,768, H 1, D 64, causal", extra / 2**20, "MiB", "< 50")


def _long_call():
    q = torch.randn(1, 1, 32768, 64)
    quire.flex_attention(
        *(q[:, :, :256],) * 3, mask_mod=causal
    )  # compiles, so that this takes no memory later
    return functools.partial(quire.flex_attention, q, q, q, mask_mod=causal)


def _ratio(times: dict[str, float]) -> float:
    return times["peer"] / times["ours"]


PARTS = (sdpa, dtypes, mods, peak, overhead, start, memory, inductor)
WITH_ONE_THREAD = (sdpa, dtypes, mods, peak)


if __name__ == "__main__":
    run_parts("forward", __doc__, PARTS, WITH_ONE_THREAD)
