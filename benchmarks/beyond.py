"""Beyond softmax, single numbers and blocks: other weights, vectors, chosen keys, fewer bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import _chosen
import _narrow
import torch
from _race import Table, race, run_parts
from torch import Tensor

from quire import flex_attention, weights
from quire.mods import causal

HEADS, LENGTH, WIDTH = 8, 2048, 64


def distance(table: Table, seconds: float, threads: int) -> None:
    """The distance of points in space, forward."""
    _distances(table, seconds, threads, backward=False, learned=False)


def distance_gradients(table: Table, seconds: float, threads: int) -> None:
    """The same, forward and backward: gradients of query, key and value."""
    _distances(table, seconds, threads, backward=True, learned=False)


def distance_learned(table: Table, seconds: float, threads: int) -> None:
    """The same with gradients of the points, or of the matrix of distances."""
    _distances(table, seconds, threads, backward=True, learned=True)


def products(table: Table, seconds: float, threads: int) -> None:
    """A score that adds a product of rows, of more and more numbers."""
    for length in (4, 16, 64):
        u, w = (torch.randn(HEADS, LENGTH, length) / length for _ in range(2))
        measure = functools.partial(_row, table, seconds, threads)
        measure(f"product of rows of {length}", _product(u, w), _plain)


Mod = Callable[..., Tensor]


def _distances(
    table: Table, seconds: float, threads: int, *, backward: bool, learned: bool
) -> None:
    points = torch.randn(1, LENGTH, 3)
    bias = torch.cdist(points, points)[0]
    points.requires_grad_(learned)
    bias.requires_grad_(learned)
    passes = "forward and backward" if backward else "forward"
    case = f"3-D distance, {passes}" + (", learned" if learned else "")
    memory = f"{points.nbytes / bias.nbytes:.4f}"
    for heads in (8, 1):
        measure = functools.partial(_row, table, seconds, threads, case, heads=heads)
        measure = functools.partial(measure, _near(points), backward=backward)
        measure(_table(bias), peer="matrix", must=">= 0.6", memory=memory)
        measure(_untraced(points), peer="eager", must=">= 20")
        measure(_plain, peer="no mod")  # what is left of the time is products and softmax
        most = functools.partial(_row, table, seconds, threads, f"no mod instead of {case}")
        most(_plain, _untraced(points), heads=heads, backward=backward, peer="eager")


def _row(
    table: Table,
    seconds: float,
    threads: int,
    case: str,
    ours: Mod,
    theirs: Mod,
    *,
    heads: int = HEADS,
    backward: bool = False,
    peer: str = "no mod",
    must: str = "",
    **details: object,
) -> None:
    tensors = [torch.randn(1, heads, LENGTH, WIDTH, requires_grad=backward) for _ in range(3)]

    def run(mod: Mod) -> object:
        out = flex_attention(*tensors, score_mod=mod)
        if not backward:
            return out
        return out.backward(torch.ones_like(out))

    times = race({"ours": lambda: run(ours), "theirs": lambda: run(theirs)}, seconds)
    table.add(
        f"{case}, [1, {heads}, {LENGTH}, {WIDTH}]",
        times["theirs"] / times["ours"],
        f"x {peer}",
        must,
        threads=threads,
        ours_ms=round(times["ours"] * 1e3, 2),
        **details,
    )


def _near(points: Tensor) -> Mod:
    return lambda score, b, h, q_idx, kv_idx: score - (points[b, q_idx] - points[b, kv_idx]).norm()


def _untraced(points: Tensor) -> Mod:
    """The same with a function that the tracer does not know and that costs nothing."""
    return lambda score, b, h, q_idx, kv_idx: (
        score - (points[b, q_idx] - points[b, kv_idx]).view(3).norm()
    )


def _table(bias: Tensor) -> Mod:
    return lambda score, b, h, q_idx, kv_idx: score - bias[q_idx, kv_idx]


def _product(u: Tensor, w: Tensor) -> Mod:
    return lambda score, b, h, q_idx, kv_idx: score + u[h, q_idx] @ w[h, kv_idx]


def _plain(score: Tensor, *unused: Tensor) -> Tensor:
    return score


def sigmoid(table: Table, seconds: float, threads: int) -> None:
    """Sigmoid attention, dense and causal, forward and both passes, against our softmax."""
    bias = -math.log(LENGTH)
    weight = weights.sigmoid(bias)
    for name, mask in (("dense", None), ("causal", causal)):
        seen = 1.0 if mask is None else torch.ones(LENGTH, LENGTH).tril()
        for backward in (False, True):
            tensors = [torch.randn(1, 4, LENGTH, WIDTH, requires_grad=backward) for _ in range(3)]
            query, key, value = tensors

            def ops(query=query, key=key, value=value, seen=seen):
                scores = query @ key.transpose(-2, -1) / WIDTH**0.5 + bias
                return (torch.sigmoid(scores) * seen) @ value

            calls = {
                "sigmoid": functools.partial(
                    flex_attention, *tensors, mask_mod=mask, weight=weight, normalise=False
                ),
                "softmax": functools.partial(flex_attention, *tensors, mask_mod=mask),
                "torch ops": ops,
            }

            def run(call, backward=backward):
                out = call()
                return out.backward(torch.ones_like(out)) if backward else out

            passes = "forward and backward" if backward else "forward"
            case = f"sigmoid attention, {name}, {passes}, [1, 4, {LENGTH}, {WIDTH}]"
            for peer, wanted in (("softmax", ">= 0.95"), ("torch ops", ">= 4")):
                # One race for each: whoever runs after the torch ops finds empty caches.
                both = {x: functools.partial(run, calls[x]) for x in ("sigmoid", peer)}
                times = race(both, seconds)
                ratio = times[peer] / times["sigmoid"]
                table.add(case, ratio, f"x as fast as {peer}", wanted, threads=threads)


def prob_mods(table: Table, seconds: float, threads: int) -> None:
    """A mod on probabilities that multiplies them, and one that does not, against none."""
    gate = torch.rand(4)
    mods = {
        "prob * gate[h]": lambda prob, b, h, q_idx, kv_idx: prob * gate[h],
        "prob ** 2": lambda prob, b, h, q_idx, kv_idx: prob**2,
    }
    for backward in (False, True):
        tensors = [torch.randn(1, 4, LENGTH, WIDTH, requires_grad=backward) for _ in range(3)]

        def run(prob_mod, tensors=tensors, backward=backward):
            out = flex_attention(*tensors, mask_mod=causal, prob_mod=prob_mod)
            return out.backward(torch.ones_like(out)) if backward else out

        calls = {x: functools.partial(run, mod) for x, mod in {"none": None, **mods}.items()}
        times = race(calls, seconds)
        passes = "forward and backward" if backward else "forward"
        for name in mods:
            case = f"{name}, causal, {passes}, [1, 4, {LENGTH}, {WIDTH}]"
            table.add(case, times["none"] / times[name], "x as fast as none", threads=threads)


PARTS = (
    sigmoid,
    prob_mods,
    distance,
    distance_gradients,
    distance_learned,
    products,
    _chosen.tokens,
    _chosen.tokens_backward,
    _chosen.blocks,
    _chosen.pages,
    _chosen.pages_anew,
    _narrow.float8,
    _narrow.latent,
    _narrow.errors,
)

if __name__ == "__main__":
    run_parts("beyond", __doc__, PARTS)
