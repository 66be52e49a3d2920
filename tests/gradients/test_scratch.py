"""What working memory held before does not matter to any result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from guards import WatchedScratch
from torch import Tensor

from quire import AuxRequest, Dense, attention
from quire.aux_outputs import OF_KERNELS
from quire.mods import causal, softcap
from quire.runtime import launch as launcher

EVERYTHING = AuxRequest(*[True] * len(OF_KERNELS))


def results(q_len: int, kv_len: int, dtype: torch.dtype, options: dict[str, Any]) -> list[Tensor]:
    """The output, all that is known about it, and gradients."""
    torch.manual_seed(0)
    shapes = ((1, 4, q_len, 24), (1, 2, kv_len, 24), (1, 2, kv_len, 20))
    leaves = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    query, key, value = leaves
    out, aux = attention(query, Dense(key, value), return_aux=EVERYTHING, **options)
    return [out, *aux[:-1], *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.parametrize("content", ["nan", "inf", "3e38"])
@pytest.mark.parametrize(
    "options",
    [{}, {"mask": causal}, {"score_mod": softcap(2.0)}],
    ids=["plain", "causal", "softcap"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_old_numbers_do_not_matter(
    dtype: torch.dtype, options: dict[str, Any], content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [(7, 7), (5, 129), (130, 300), (20, 3), (1, 129), (3, 2)]
    expected = [results(*size, dtype, options) for size in sizes]
    enter = WatchedScratch.__enter__

    def enter_dirty(scratch: WatchedScratch) -> WatchedScratch:
        enter(scratch)
        scratch.fill(float(content), dtype)
        return scratch

    monkeypatch.setattr(WatchedScratch, "__enter__", enter_dirty)
    assert launcher.Scratch is WatchedScratch
    for size, wanted in zip(sizes, expected, strict=True):
        found = results(*size, dtype, options)
        assert all(map(torch.equal, found, wanted)), size
