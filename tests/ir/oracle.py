"""What a mod means to PyTorch: the same function, run by `torch.vmap` on every element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from quire.ir.trace import Kind, trace
from quire.ir.vectorise import AsOnTensors, evaluate

Sizes: TypeAlias = tuple[int, int, int, int]

SIZES: Sizes = (2, 3, 5, 7)  # B, H, L, S: no two alike, so that no axis can be taken for another


class Outcome(NamedTuple):
    """The dtype a mod returned before anything converted it, and its values [B, H, L, S]."""

    dtype: torch.dtype
    values: Tensor


def scores(sizes: Sizes = SIZES, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same scores every time, with the special ones among them."""
    values = 3 * torch.randn(sizes, generator=torch.Generator().manual_seed(1))
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, -1.5])
    values.view(-1)[: len(special)] = special[: values.numel()]
    return values.to(dtype)


def by_vmap(mod: Callable[..., Any], kind: Kind, score: Tensor | None, sizes: Sizes) -> Outcome:
    """Run `mod` as PyTorch would."""
    spy = Spy(mod)
    grid = [index.flatten() for index in torch.meshgrid(*map(torch.arange, sizes), indexing="ij")]
    prefix = [] if score is None else [score.flatten()]
    with AsOnTensors():
        values: Tensor = torch.vmap(spy)(*prefix, *grid)
    values = values if kind == "mask" else values.to(score.dtype if score is not None else None)
    return Outcome(spy.dtype, values.view(sizes))


def by_trace(mod: Callable[..., Any], kind: Kind, score: Tensor | None, sizes: Sizes) -> Outcome:
    """Trace `mod` and interpret its graph."""
    spy = Spy(mod)
    traced = trace(spy, kind, score_dtype=torch.float32 if score is None else score.dtype)
    values = evaluate(traced, kind, *map(torch.arange, sizes), score=score)
    return Outcome(spy.dtype, values.expand(sizes))


class Spy:
    """Calls a mod and remembers the dtype of its result."""

    dtype = torch.bool

    def __init__(self, mod: Callable[..., Any]) -> None:
        self.mod = mod

    def __call__(self, *args: Any) -> Any:
        result = self.mod(*args)
        self.dtype = result.dtype
        return result


def assert_same(ours: Outcome, theirs: Outcome, label: str = "") -> None:
    """The same dtype and the same values, NaN included."""
    assert ours.dtype == theirs.dtype, f"{label}: {ours.dtype}, PyTorch has {theirs.dtype}"
    assert ours.values.shape == theirs.values.shape
    mine, other = ours.values, theirs.values
    different = (mine != other) & ~(mine.isnan() & other.isnan())
    if bool(different.any()):
        at = tuple(different.nonzero()[0].tolist())
        raise AssertionError(
            f"{label}: {mine[at].item()!r} at {at}, PyTorch has {other[at].item()!r}; "
            f"{int(different.sum())} of {different.numel()} differ"
        )


def assert_traces_to_torch(
    mod: Callable[..., Any],
    kind: Kind,
    score: Tensor | None = None,
    sizes: Sizes = SIZES,
    label: str = "",
) -> None:
    """The trace of `mod` is what PyTorch makes of it: the same dtype, the same values."""
    if kind == "score" and score is None:
        score = scores(sizes)
    assert_same(by_trace(mod, kind, score, sizes), by_vmap(mod, kind, score, sizes), label)
