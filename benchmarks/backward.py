"""Forward and backward passes against PyTorch: `make bench`, or python benchmarks/backward.py.

A time includes the forward pass, and the gradients of query, key, value and of tensors that a mod
learns. Memory is measured in new processes. It includes the gradients, but not the inputs.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from _race import Table, race, run_parts

import quire
from quire.mods import alibi, and_masks, causal, distance_bias, document, sliding_window
from quire.tools import measure

HEADS = 8


def step(attend, *learned, n: int, d: int, heads: int = HEADS, dtype=torch.float32):
    """Return a function that computes attention [1, heads, n, d] and all gradients."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, n, d).to(dtype).requires_grad_() for _ in range(3))
    above = torch.randn(1, heads, n, d).to(dtype)

    def run() -> None:
        torch.autograd.grad(attend(q, k, v), (q, k, v, *learned), above)

    return run


def against_sdpa(
    seconds: float, ours: dict[str, object], theirs: dict[str, object], **sizes: object
) -> float:
    """Return SDPA's time for a step divided by quire's. `ours` and `theirs` are their options."""
    times = race(
        {
            "ours": step(functools.partial(quire.flex_attention, **ours), **sizes),
            "peer": step(functools.partial(F.scaled_dot_product_attention, **theirs), **sizes),
        },
        seconds,
    )
    return times["peer"] / times["ours"]


def after_a_small_one(make, n: int):
    """Call `make(256)()` first, which compiles and starts threads, and return `make(n)`."""
    make(256)()
    return make(n)


def block_mask(mask, n: int):
    return quire.create_block_mask(mask, None, None, n, n)


def dense(table: Table, seconds: float, threads: int) -> None:
    """Attention without a mask."""
    for d, wanted in ((64, ">= 1.25"), (128, ">= 1.15")):
        for n in (512, 1024, 2048, 4096):
            ratio = against_sdpa(seconds, {}, {}, n=n, d=d)
            table.add(f"dense N {n} D {d} threads {threads}", ratio, "x as fast as SDPA", wanted)


def masked(table: Table, seconds: float, threads: int) -> None:
    """Causal attention, with a block mask."""
    for d, long in ((64, ">= 1.4"), (128, ">= 1.3")):
        for n, wanted in ((512, ">= 2.0"), (2048, long), (4096, long)):
            ours = {"block_mask": block_mask(causal, n)}
            ratio = against_sdpa(seconds, ours, {"is_causal": True}, n=n, d=d)
            table.add(f"causal N {n} D {d} threads {threads}", ratio, "x as fast as SDPA", wanted)


def narrow(table: Table, seconds: float, threads: int) -> None:
    """Dense and causal attention in bfloat16."""
    n, dtype = 2048, torch.bfloat16
    for d in (64, 128):
        cases = {
            "dense": ({}, {}),
            "causal": ({"block_mask": block_mask(causal, n)}, {"is_causal": True}),
        }
        for name, (ours, theirs) in cases.items():
            ratio = against_sdpa(seconds, ours, theirs, n=n, d=d, dtype=dtype)
            table.add(
                f"{name} bfloat16 N {n} D {d} threads {threads}",
                ratio,
                "x as fast as SDPA",
                ">= 1.2",
            )


def sparse(table: Table, seconds: float, threads: int) -> None:
    """Documents, and a window. SDPA gets them as a dense mask."""
    n = 8192
    masks = {
        "documents of 1024": and_masks(causal, document(lengths=[1024] * 8)),
        "window 256": sliding_window(256),
    }
    for name, mask in masks.items():
        whole = quire.create_mask(mask, 1, 1, n, n)
        ours = {"block_mask": block_mask(mask, n)}
        ratio = against_sdpa(seconds, ours, {"attn_mask": whole}, n=n, d=64, heads=4)
        table.add(f"{name}, N {n} H 4 D 64 threads {threads}", ratio, "x as fast as SDPA", ">= 5")


# --- score mods ----------------------------------------------------------------------------------


def learned_by_quire(n: int):
    bias = torch.randn(HEADS, 2 * n - 1, requires_grad=True)
    mod, mask = distance_bias(bias), block_mask(causal, n)
    attend = functools.partial(quire.flex_attention, score_mod=mod, block_mask=mask)
    return step(attend, bias, n=n, d=64)


def learned_by_torch(n: int):
    bias = torch.randn(HEADS, 2 * n - 1, requires_grad=True)
    positions = torch.arange(n)
    distance = positions[:, None] - positions
    hidden = torch.where(distance >= 0, 0.0, -torch.inf)

    def attend(q, k, v):
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        return (scores + bias[:, distance + n - 1] + hidden).softmax(-1) @ v

    return step(attend, bias, n=n, d=64)


def bias(table: Table, seconds: float, threads: int) -> None:
    """A learned bias for each distance, against the same attention in torch operations."""
    n = 2048
    times = race({"ours": learned_by_quire(n), "peer": learned_by_torch(n)}, seconds)
    case = f"learned relative bias, causal N {n} D 64 threads {threads}"
    table.add(case, times["peer"] / times["ours"], "x as fast as eager torch", ">= 5")


def bias_memory(table: Table, seconds: float, threads: int) -> None:
    """The memory that this learned bias takes."""
    n = 2048
    ours, peer = measure.race(
        functools.partial(after_a_small_one, learned_by_quire, n),
        functools.partial(after_a_small_one, learned_by_torch, n),
        seconds=0.1,
        threads=threads,
    )
    used, theirs = ours.peak_bytes or 0, peer.peak_bytes or 1
    case, share = f"learned relative bias, extra memory at N {n}", 100 * used / theirs
    table.add(case, share, "% of eager torch's", "< 5", ours=f"{used / 1e6:.0f} MB")


def mods(table: Table, seconds: float, threads: int) -> None:
    """The time of causal attention with ALiBi, as a multiple of the time without."""
    n = 2048
    for d in (64, 128):
        attend = functools.partial(quire.flex_attention, block_mask=block_mask(causal, n))
        times = race(
            {
                "ours": step(functools.partial(attend, score_mod=alibi(HEADS)), n=n, d=d),
                "plain": step(attend, n=n, d=d),
            },
            seconds,
        )
        cost = times["ours"] / times["plain"]
        table.add(
            f"alibi, causal N {n} D {d} threads {threads}", cost, "x the time without", "< 1.25"
        )


def training_step(n: int):
    return step(functools.partial(quire.flex_attention, mask_mod=causal), n=n, d=64, heads=4)


def memory(table: Table, seconds: float, threads: int) -> None:
    """The memory of a training step besides its inputs. It should grow as the number of tokens."""
    for n, wanted in ((8192, ""), (16384, "< 150")):
        (reading,) = measure.race(
            functools.partial(after_a_small_one, training_step, n), seconds=0.1, threads=threads
        )
        extra = (reading.peak_bytes or 0) / 1e6
        table.add(f"extra memory at N {n}, H 4, D 64, causal", extra, "MB", wanted)


PARTS = (dense, masked, narrow, sparse, bias, bias_memory, mods, memory)
WITH_ONE_THREAD = (dense, masked, narrow, mods)


if __name__ == "__main__":
    run_parts("backward", __doc__, PARTS, WITH_ONE_THREAD)
