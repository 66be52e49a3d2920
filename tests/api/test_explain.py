"""quire.explain, with the arguments of flex_attention and of attention, over all memories."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any, get_overloads

import pytest
import torch
from torch import Tensor

import quire
from quire import Dense, Paged, Ragged, errors, explain
from quire.mods import causal
from quire.request import Request, checked_call
from quire.runtime.work import flops_of

OFFSETS = [0, 5, 40, 140]


def powers(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.pow(q_idx, kv_idx) > 7


def untraceable(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.atan((q_idx - kv_idx).float()) >= 0


def dense() -> tuple[Tensor, Dense]:
    return torch.randn(1, 2, 24, 8), Dense(*torch.randn(2, 1, 2, 24, 8))


def ragged() -> tuple[Tensor, Ragged]:
    return torch.randn(140, 2, 8), Ragged(*torch.randn(2, 140, 2, 8), offsets=OFFSETS)


def paged() -> tuple[Tensor, Paged]:
    """Two sequences of 40 and 30 keys, with 20 queries each."""
    table = torch.tensor([[1, 0, 2], [4, 3, -1]])
    return torch.randn(2, 2, 20, 8), Paged(*torch.randn(2, 5, 2, 16, 8), table, [40, 30])


MEMORIES: dict[str, Callable[[], tuple[Tensor, Any]]] = {
    "dense": dense,
    "ragged": ragged,
    "paged": paged,
}
SCORES = {"dense": 2 * 24 * 24, "ragged": 2 * (25 + 35 * 35 + 10_000), "paged": 2 * 20 * 70}


# The arguments


@pytest.mark.parametrize("name", ["flex_attention", "attention"])
def test_it_takes_what_the_function_takes(name: str) -> None:
    def shape(function: Callable[..., Any]) -> tuple[list[tuple[Any, ...]], dict[str, Any]]:
        parameters = inspect.signature(function).parameters.values()
        in_order = [
            (each.name, each.kind, each.annotation, each.default is each.empty)
            for each in parameters
            if each.kind is each.POSITIONAL_OR_KEYWORD
        ]
        by_name = {
            each.name: (each.annotation, each.default is each.empty)
            for each in parameters
            if each.kind is each.KEYWORD_ONLY
        }
        for each in parameters:
            if each.kind is each.VAR_KEYWORD:  # Unpack of a TypedDict
                options = getattr(quire.api.explain, each.annotation.removeprefix("Unpack[")[:-1])
                for name, kind in options.__annotations__.items():
                    by_name[name] = (kind.__forward_arg__, name in options.__required_keys__)
        return in_order, by_name

    assert shape(getattr(quire, name)) in [shape(form) for form in get_overloads(explain)]


def test_what_is_left_out_is_what_the_functions_take_for_it() -> None:
    query, memory = dense()
    key, value = memory.key, memory.value
    assert explain(query, key, value) == explain(
        *(query, key, value, None, None, None, False, False, None),
        return_aux=None,
        mask_mod=None,
        dropout_p=0.0,
        generator=None,
        sink=None,
        backend="auto",
    )
    with pytest.raises(errors.HeadsError, match="enable_gqa=True"):
        explain(query, key[:, :1], value[:, :1])
    assert explain(query, key[:, :1], value[:, :1], enable_gqa=True)


def test_a_memory_may_be_named() -> None:
    query, memory = ragged()
    assert explain(query=query, memory=memory) == explain(query, memory)
    query, memory = dense()
    key, value = memory.key, memory.value
    assert explain(query=query, key=key, value=value) == explain(query, memory)


def test_no_keys_at_all() -> None:
    with pytest.raises(TypeError, match="key"):
        explain(torch.randn(1, 2, 8, 4))  # type: ignore[call-overload]


# The words


@pytest.mark.parametrize("name", MEMORIES)
def test_which_runs_and_why_not_the_others(name: str) -> None:
    query, memory = MEMORIES[name]()
    first, second, third, *others = explain(query, memory, mask=causal).splitlines()
    assert first == "backend='auto' uses jit."
    assert second.startswith("jit generates code for ")
    assert third.startswith("jit takes forward ")
    packed = "PyTorch's flex_attention takes no sequences that are packed into one tensor"
    assert others == [
        "eager not used because jit comes first; it could run this call.",
        f"inductor not used because {packed}."
        if name != "dense"
        else "inductor not used because jit comes first; it could run this call.",
    ]


@pytest.mark.parametrize("name", MEMORIES)
def test_how_many_operations_it_takes(name: str) -> None:
    query, memory = MEMORIES[name]()
    said = explain(query, memory).splitlines()
    forward = 2 * (8 + 8) * SCORES[name]
    line = f"forward {forward / 1000:.3g} kFLOP (100.0 % of all scores)"
    assert any(each.startswith(f"jit takes {line}, backward ") for each in said)
    assert flops_of(checked_call(Request(query, memory)))[:2] == (forward, 5 * forward // 2)
    assert "FLOP" not in explain(query, memory, backend="eager")


@pytest.mark.parametrize("name", MEMORIES)
def test_what_stands_in_the_way(name: str) -> None:
    query, memory = MEMORIES[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", quire.EagerModWarning)  # it comes once
        said = explain(query, memory, mask=untraceable)
    assert said.startswith("backend='auto' uses eager.\n")
    assert "jit not used because the mask_mod 'untraceable' cannot be traced." in said
    said = explain(query, memory, backend="inductor", sink=torch.zeros(2))
    assert said.startswith("backend='inductor' uses nothing: it raises a BackendError.")


@pytest.mark.parametrize("name", MEMORIES)
def test_what_could_not_be_bounded_and_what_that_costs(name: str) -> None:
    query, memory = MEMORIES[name]()
    assert "computes" not in explain(query, memory, mask=causal)
    (line,) = (
        each
        for each in explain(query, memory, mask=powers).splitlines()
        if each.startswith("jit computes")
    )
    assert f"computes every tile, {SCORES[name]:,} scores in all: in the mask_mod 'powers'" in line
    assert "nothing bounds 'pow' at test_explain.py:" in line
    assert line.endswith("create_block_mask, says which tiles no query reads.")


def test_a_block_mask_over_pages_needs_no_word() -> None:
    query, memory = paged()
    mask = quire.create_block_mask(powers, None, None, 20, 48, "cpu", 16)
    assert "computes" not in explain(query, memory, mask=mask)


# One path: what attention refuses is refused in the same words


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dense", {"q_offsets": [0, 24]}),
        ("ragged", {"q_offsets": [0, 140]}),
        ("ragged", {"mask": quire.create_block_mask(causal, None, None, 16, 16, "cpu")}),
        ("paged", {"q_start": -1}),
        ("paged", {"dropout_p": 2.0}),
        ("dense", {"generator": 3}),
        ("ragged", {"return_aux": True}),
        ("ragged", {"backend": "cuda"}),
    ],
)
def test_mistakes(name: str, options: dict[str, Any]) -> None:
    query, memory = MEMORIES[name]()
    messages = []
    for function in (quire.attention, explain):
        with pytest.raises(errors.QuireError) as caught:
            function(query, memory, **options)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_a_tensor_is_no_memory() -> None:
    query, memory = dense()
    with pytest.raises(errors.ArgumentError, match=r"memory must be a Dense, a Ragged or a Paged"):
        explain(query, memory=memory.key)  # type: ignore[call-overload]
