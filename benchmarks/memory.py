"""Peak memory of attention, beside PyTorch's: python benchmarks/memory.py.

4 heads, D 64, float32, causal with ALiBi. Each row is measured in a new process, by its peak over
the memory before the call. Inputs do not count, also not what makes a mask: PyTorch's SDPA takes a
bias [4, N, N], whose size is named beside its rows. PyTorch's eager flex_attention computes whole
matrices of scores, and has no backward pass on a CPU. A row is left out if it would need more than
a third of the free memory.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from _race import Table, run_parts
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from quire import flex_attention, mods
from quire.tools.measure import race

HEADS, HEAD_DIM = 4, 64
LENGTHS = (2048, 4096, 8192, 16384)
LIMITS = {
    ("quire", "forward"): "< 50",
    ("quire, eager", "forward"): "< 200",
    ("quire", "backward"): "< 150",
    ("quire, eager", "backward"): "< 400",
}
"""The most megabytes at the longest length."""

Call = Callable[[list[Tensor]], Tensor]
Contestant = Callable[[int], Call]


def quire_attention(length: int, backend: str = "jit") -> Call:
    alibi = mods.alibi(HEADS)
    return lambda qkv: flex_attention(*qkv, alibi, mask_mod=mods.causal, backend=backend)


def sdpa(length: int) -> Call:
    """SDPA with a tensor that has the bias, and -inf where a key is hidden."""
    places = torch.arange(length, dtype=torch.float32)
    distance = places - places[:, None]
    distance.masked_fill_(distance > 0, float("-inf"))
    slopes = 2.0 ** (-8.0 / HEADS * torch.arange(1, HEADS + 1))
    bias = slopes[:, None, None] * distance
    return lambda qkv: F.scaled_dot_product_attention(*qkv, attn_mask=bias[None])


def flex_eager(length: int) -> Call:
    torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True  # run without torch.compile
    return functools.partial(_flex, torch_flex.flex_attention, length)


def flex_compiled(length: int) -> Call:
    return functools.partial(_flex, torch.compile(torch_flex.flex_attention), length)


def _flex(call: Callable[..., Tensor], length: int, qkv: list[Tensor]) -> Tensor:
    mask = torch_flex.BlockMask.from_kv_blocks(
        torch.ones(1, 1, 1, dtype=torch.int32),
        torch.zeros(1, 1, 1, 1, dtype=torch.int32),
        BLOCK_SIZE=length,
        mask_mod=mods.causal,
        seq_lengths=(length, length),
    )
    return call(*qkv, mods.alibi(HEADS), block_mask=mask)


QUIRE: dict[str, Contestant] = {
    "quire": quire_attention,
    "quire, eager": functools.partial(quire_attention, backend="eager"),
}
FORWARD: dict[str, Contestant] = {
    **QUIRE,
    "SDPA with a bias": sdpa,
    "PyTorch's flex_attention, eager": flex_eager,
    "PyTorch's flex_attention, compiled": flex_compiled,
}
BACKWARD: dict[str, Contestant] = {**QUIRE, "SDPA with a bias": sdpa}
MATRICES = {"SDPA with a bias": 3, "PyTorch's flex_attention, eager": 6}
"""About how many matrices of scores PyTorch holds at once, with what makes them."""


def prepared(make: Contestant, length: int, gradients: bool) -> Callable[[], object]:
    """Return a call whose inputs are made, and whose code is compiled."""
    small, large = (_inputs(n, gradients) for n in (256, length))
    grad = torch.ones(1, HEADS, length, HEAD_DIM)
    if make is flex_compiled:
        make(length)(large)  # it is compiled for one length
    else:
        _run(make(256), small, grad[:, :, :256] if gradients else None)
    return functools.partial(_run, make(length), large, grad if gradients else None)


def _inputs(length: int, gradients: bool) -> list[Tensor]:
    shape = (1, HEADS, length, HEAD_DIM)
    return [torch.randn(shape, requires_grad=gradients) for _ in range(3)]


def _run(call: Call, inputs: list[Tensor], grad: Tensor | None) -> None:
    out = call(inputs)
    if grad is not None:
        out.backward(grad)


def _measure(table: Table, contestants: dict[str, Contestant], part: str, threads: int) -> None:
    for name, make in contestants.items():
        for length in LENGTHS:
            matrices = MATRICES.get(name, 0) * HEADS * length**2 * 4
            if matrices > free_memory() / 3:
                print(f"  {name} N {length}: needs more than a third of the free memory")
                continue
            call = functools.partial(prepared, make, length, part == "backward")
            (reading,) = race(call, seconds=0.1, threads=threads)
            if reading.refusal or reading.peak_bytes is None:
                print(f"  {name} N {length}: {reading.refusal or 'the system reports no peak'}")
                continue
            wanted = LIMITS.get((name, part), "") if length == LENGTHS[-1] else ""
            more = {"bias_mb": round(HEADS * length**2 * 4e-6)} if make is sdpa else {}
            table.add(f"{name}, N {length}", reading.peak_bytes / 1e6, "MB", wanted, **more)


def forward(table: Table, seconds: float, threads: int) -> None:
    """The forward pass, and with it the output."""
    _measure(table, FORWARD, "forward", threads)


def backward(table: Table, seconds: float, threads: int) -> None:
    """Forward and backward, and with them the output and gradients."""
    _measure(table, BACKWARD, "backward", threads)


def free_memory() -> int:
    """Return the free memory in bytes, or 0 if the system does not report it."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0


PARTS = (forward, backward)


if __name__ == "__main__":
    run_parts("memory", __doc__, PARTS)
