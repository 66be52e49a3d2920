"""Derivatives against differences, in float64: of every op, of every ready-made mod, of a sink."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import quire
from quire import AuxRequest, create_block_mask, mods
from quire.ir.differentiate import RULES
from quire.ir.graph import walk
from quire.ir.trace import trace

B, HQ, HKV, S = 2, 4, 2, 19
LENGTHS = [3, 18]  # by rows, and by panels that 16 does not divide


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def operands(q_len: int) -> list[Tensor]:
    return [random(B, HQ, q_len, 5), random(B, HKV, S, 5), random(B, HKV, S, 3)]


def check(
    q_len: int,
    learned: list[Tensor],
    make: Callable[..., dict[str, Any]],
) -> None:
    """Output and log-sum-exp as functions of query, key, value and of what `make` is given."""

    def compute(query: Tensor, key: Tensor, value: Tensor, *learned: Tensor) -> Any:
        out, aux = quire.flex_attention(
            *(query, key, value),
            **make(*learned),
            enable_gqa=True,
            return_aux=AuxRequest(lse=True),
            backend="jit",
        )
        return out, torch.where(aux.lse.isinf(), 0.0, aux.lse)

    assert gradcheck(compute, [*operands(q_len), *learned], fast_mode=True)


# Ops

OPS: dict[str, str] = {
    "cast": "score + heads[h].to(torch.float64)",
    "add": "score + w",
    "sub": "w - score",
    "mul": "score * w",
    "div": "score / (abs(w) + 1) + 1 / (abs(score) + 2)",
    "floordiv": "score + (score // w) * w",
    "mod": "score % (abs(w) + 1.5)",
    "pow": "(abs(score) + 0.5) ** (abs(w) + 0.5) + score ** 3",
    "min": "torch.minimum(score, w)",
    "max": "torch.maximum(score, w)",
    "neg": "-score * w",
    "abs": "abs(score) + abs(w)",
    "sign": "score * torch.sign(w) + torch.sign(score)",
    "floor": "score * torch.floor(w * 3)",
    "ceil": "score * torch.ceil(w * 3)",
    "round": "score * torch.round(w * 3)",
    "trunc": "score * torch.trunc(w * 3)",
    "lt": "score * (score < w)",
    "le": "score * (score <= w)",
    "eq": "score + w * (q_idx == kv_idx)",
    "and": "torch.where((score > 0) & (w > 0), score, w)",
    "or": "torch.where((score > 0) | (w > 0), score, w)",
    "xor": "torch.where((score > 0) ^ (w > 0), score, w)",
    "not": "torch.where(~(score > 0), score, w)",
    "shl": "score + w * (kv_idx << 1) * 0.1",
    "shr": "score + w * (kv_idx >> 2) * 0.1",
    "where": "torch.where(score > w, score * 2, w * 3)",
    "exp": "torch.exp(score * 0.5) * w",
    "exp2": "torch.exp2(w * 0.5) + score",
    "log": "torch.log(abs(score) + abs(w) + 0.5)",
    "log2": "torch.log2(abs(score) + abs(w) + 0.5)",
    "sqrt": "torch.sqrt(abs(score) + abs(w) + 0.5)",
    "tanh": "torch.tanh(score * w) * 2",
    "sigmoid": "torch.sigmoid(score) * w",
    "erf": "torch.erf(score) * w",
    "sin": "torch.sin(score * w)",
    "cos": "torch.cos(score) + torch.cos(w)",
}
NARROW = torch.randn(HQ)


def body(text: str, w: Tensor) -> Callable[..., Any]:
    """A score_mod in which `w` is an entry of a table."""
    text = re.sub(r"\bw\b", "table[h, (q_idx - kv_idx) % 7]", text)
    scope = {"torch": torch, "heads": NARROW, "table": w}
    mod: Callable[..., Any] = eval(f"lambda score, b, h, q_idx, kv_idx: {text}", scope)
    return mod


def test_every_op_is_here() -> None:
    """`bits` is what only bounds write."""
    assert OPS.keys() == RULES.keys() - {"bits"}
    for op, text in OPS.items():
        graph = trace(body(text, random(HQ, 7)), "score", score_dtype=torch.float64)
        assert op in {node.op for node in walk(graph.output)}, text


@pytest.mark.parametrize("q_len", LENGTHS)
@pytest.mark.parametrize("op", OPS)
def test_ops(op: str, q_len: int) -> None:
    check(q_len, [random(HQ, 7)], lambda w: {"score_mod": body(OPS[op], w)})


# Ready-made mods

SCORES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Any]]] = {
    "alibi": ((HQ,), lambda w: mods.alibi(HQ, w)),
    "softcap": ((), lambda w: mods.softcap(1.5)),
    "relative_position_bias": ((8, HQ), lambda w: mods.relative_position_bias(w, max_distance=9)),
    "relative_position_bias, causal": (
        (4, HQ),
        lambda w: mods.relative_position_bias(w, bidirectional=False, max_distance=9),
    ),
    "table_bias of all": ((18, S), mods.table_bias),
    "table_bias of heads": ((HQ, 18, S), mods.table_bias),
    "table_bias of pairs": ((B, HQ, 18, S), mods.table_bias),
    "table_bias of keys": ((B, 1, 1, S), mods.table_bias),
    "distance_bias": ((9,), mods.distance_bias),
    "distance_bias of heads": ((HQ, 9), mods.distance_bias),
    "offset": ((HQ, 9), lambda w: mods.offset(mods.distance_bias(w), 4)),
}
MASKS: dict[str, Any] = {
    "causal": mods.causal,
    "sliding_window": mods.sliding_window(4),
    "dilated_sliding_window": mods.dilated_sliding_window(6, 2),
    "global_sliding_window": mods.global_sliding_window(2, torch.arange(S) % 7 == 0),
    "prefix_lm": mods.prefix_lm(5),
    "padding": mods.padding([4, 15]),
    "neighbourhood": mods.neighbourhood(S, 5),
    "block_diffusion": mods.block_diffusion(10, 3),
    "document": mods.document(lengths=[4, 1, 9, 5]),
    "shared_prefix": mods.shared_prefix([0, 6, 13, S], [0, 0, 0]),
    "tree": mods.tree(torch.tensor([-1, *(i // 2 for i in range(S - 1))])),
    "noop_mask": mods.noop_mask,
    "and_masks": mods.and_masks(mods.causal, mods.document(lengths=[10, 9])),
    "or_masks": mods.or_masks(mods.padding([3, 5]), mods.sliding_window(1)),
    "not_mask": mods.not_mask(mods.causal),
    "offset": mods.offset(mods.causal, -5),
}


def test_every_mod_is_here() -> None:
    named = {name.partition(" ")[0].rstrip(",") for name in (*SCORES, *MASKS)}
    # Types have capitals, and `in_turn` and what learns have tests of their own.
    assert named == {name for name in mods.__all__ if name.islower()} - {"in_turn"}


@pytest.mark.parametrize("q_len", LENGTHS)
@pytest.mark.parametrize("name", SCORES)
def test_ready_made_score_mods(name: str, q_len: int) -> None:
    shape, factory = SCORES[name]
    check(
        q_len,
        [random(*shape)] if shape else [],
        lambda w=None: {"score_mod": factory(w), "mask_mod": mods.sliding_window(11)},
    )


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_ready_made_masks(name: str, blocks: bool) -> None:
    mask, q_len = MASKS[name], 18
    given = {"mask_mod": mask}
    if blocks:
        given = {"block_mask": create_block_mask(mask, B, None, q_len, S, BLOCK_SIZE=(4, 8))}
    check(q_len, [random(HQ)], lambda sink: {**given, "sink": sink})


# What else has a derivative


@pytest.mark.parametrize("q_len", LENGTHS)
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_everything_at_once(q_len: int, dropout_p: float) -> None:
    """Every entry of every Jacobian, instead of a random direction."""

    def compute(query: Tensor, key: Tensor, value: Tensor, *learned: Tensor) -> Any:
        bias, factor, sink = learned
        out, aux = quire.flex_attention(
            *(query, key, value),
            lambda score, b, h, q, kv: score * factor + bias[q - kv] * torch.tanh(score),
            mask_mod=lambda b, h, q, kv: (q + 2 >= kv) & (b + h != 2),
            sink=sink,
            enable_gqa=True,
            dropout_p=dropout_p,
            generator=torch.Generator().manual_seed(0),
            return_aux=AuxRequest(lse=True),
            backend="jit",
        )
        return out, aux.lse

    query, key, value = random(2, 2, q_len, 1), random(1, 1, 5, 1), random(1, 1, 5, 2)
    assert gradcheck(compute, [query, key, value, random(q_len + 5), random(), random(2)])
