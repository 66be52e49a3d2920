"""Derivatives against autograd, which differentiates the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quire import mods
from quire.ir.differentiate import RULES, differentiate
from quire.ir.graph import text
from quire.ir.interpret import LEAVES, interpret
from quire.ir.ops import OPS
from quire.ir.trace import Traced, trace

INDICES = ("b", "h", "q_idx", "kv_idx")


def test_every_op_has_a_rule() -> None:
    assert RULES.keys() == OPS.keys() - (LEAVES - {"cast"})


def points(seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    indices = {name: torch.randint(0, 6, (40,), generator=random) for name in INDICES}
    score = torch.randn(40, generator=random, dtype=torch.float64) * 2
    score[::7] = score[::7].round()
    return {"score": score, **indices}


def by_autograd(mod: Traced, env: dict[str, Tensor]) -> list[Tensor]:
    """d out / d score, and d sum(out) / d each captured tensor."""
    score = env["score"].clone().requires_grad_()
    captures = [t.clone().requires_grad_(t.dtype.is_floating_point) for t in mod.captures]
    out = interpret(mod.output, {**env, "score": score}, captures).expand(score.shape)
    leaves = [score, *(t for t in captures if t.requires_grad)]
    if not out.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    return list(torch.autograd.grad(out.sum(), leaves, materialize_grads=True))


def by_graph(mod: Traced, env: dict[str, Tensor]) -> list[Tensor]:
    found = differentiate(mod.output)
    floats = {slot: t for slot, t in enumerate(mod.captures) if t.dtype.is_floating_point}
    grads = {slot: torch.zeros_like(tensor) for slot, tensor in floats.items()}
    for load, slope in found.loads.items():
        assert isinstance(load.payload, int)
        indices = tuple(interpret(arg, env, mod.captures).expand(40) for arg in load.args)
        values = interpret(slope, env, mod.captures).expand(40).to(grads[load.payload].dtype)
        if indices:
            grads[load.payload].index_put_(indices, values, accumulate=True)
        else:
            grads[load.payload] += values.sum()
    score = torch.zeros(40, dtype=torch.float64)
    if found.score is not None:
        score = interpret(found.score, env, mod.captures).expand(40)
    return [score, *grads.values()]


def check(mod: Any, seed: int = 0) -> None:
    traced, env = trace(mod, "score", score_dtype=torch.float64), points(seed)
    for actual, expected in zip(by_graph(traced, env), by_autograd(traced, env), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


TABLE = torch.randn(6, 11, dtype=torch.float64)
ONE = torch.tensor(0.7, dtype=torch.float64)
READY_MADE = {
    "alibi": mods.alibi(6),
    "softcap": mods.softcap(3.0),
    "distance_bias": mods.distance_bias(torch.randn(6, 11)),
    "table": lambda s, b, h, q, kv: s + TABLE[h, q - kv + 5] * TABLE[h, kv],
    "scalar": lambda s, b, h, q, kv: s * ONE + ONE,
    "twice": lambda s, b, h, q, kv: s * torch.exp(s * 0.1) + s,
    "constant": lambda s, b, h, q, kv: ONE * (q - kv),
    "indices": lambda s, b, h, q, kv: (q - kv) * 0.5,
}


@pytest.mark.parametrize("name", READY_MADE)
def test_mods(name: str) -> None:
    check(READY_MADE[name])


_FORMS = (
    "s",
    "TABLE[h, kv]",
    "ONE",
    "(q - kv)",
    "{} + {}",
    "({}) - ({})",
    "({}) * ({})",
    "({}) / (abs({}) + 1)",
    "torch.minimum({}, {})",
    "torch.maximum({}, {})",
    "torch.where(({}) > 0.5, {}, {})",
    "torch.tanh({})",
    "torch.sigmoid({})",
    "torch.exp(-abs({}))",
    "torch.exp2(-abs({}))",
    "torch.log(abs({}) + 0.5)",
    "torch.log2(abs({}) + 0.5)",
    "torch.sqrt(abs({}) + 0.5)",
    "torch.erf({})",
    "torch.sin({})",
    "torch.cos({})",
    "(abs({}) + 0.5) ** 3",
    "(abs({}) + 0.5) ** ({})",
    "torch.floor({})",
    "torch.sign({})",
    "torch.remainder({}, 1.5)",
    "-({})",
    "({}).float()",
)


@st.composite
def expressions(draw: st.DrawFn) -> str:
    def write(depth: int) -> str:
        form = draw(st.sampled_from(_FORMS if depth else _FORMS[:3]))
        while "{}" in form:
            form = form.replace("{}", write(depth - 1), 1)
        return form

    return write(2)


@given(expressions(), st.integers(0, 1000))
def test_any_mod(source: str, seed: int) -> None:
    scope = {"torch": torch, "TABLE": TABLE, "ONE": ONE}
    mod = eval(f"lambda s, b, h, q, kv: {source}", scope)
    if ".float()" in source:  # float32 in the middle: autograd rounds at other places
        differentiate(trace(mod, "score", score_dtype=torch.float64).output)
        return
    check(mod, seed)


def test_a_derivative_is_a_small_graph() -> None:
    traced = trace(lambda s, b, h, q, kv: s * 0.5 + (q - kv), "score")
    slope = differentiate(traced.output).score
    assert slope is not None and text(slope) == "%0 = const 0.5 : float32"
