"""Who computes: the choice, its reasons, and the words for both."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import quire
from quire import backends, config
from quire.attention import prepare
from quire.backends import BACKENDS, choose, explain_call
from quire.errors import ArgumentError, BackendError
from quire.memory import Dense, Queries
from quire.problem import Call, Problem


@pytest.fixture(autouse=True)
def _two_backends() -> Iterator[None]:
    """The compiled one has tests of its own; the words below are about these two."""
    every = dict(BACKENDS)  # restored whole, since its order is what `auto` goes by
    for name in every.keys() - {"eager", "inductor"}:
        del BACKENDS[name]
    yield
    BACKENDS.clear()
    BACKENDS.update(every)


def qkv() -> list[torch.Tensor]:
    return [torch.randn(1, 2, 8, 4) for _ in range(3)]


def cpu_call(**options: Any) -> Call:
    query, key, value = qkv()
    defaults: dict[str, Any] = dict.fromkeys(("score_mod", "scale", "sink"))
    defaults |= {"masks": (), "dropout_p": 0.0, "queries": Queries()}
    return prepare(query, Dense(key, value), **(defaults | options))


def call_on(device: str, *, requires_grad: bool = False) -> Call:
    """A call below all checks, on tensors that do not exist: only attributes are looked at."""
    tensor: Any = SimpleNamespace(
        device=torch.device(device),
        dtype=torch.float16,
        shape=torch.Size((1, 2, 8, 4)),
        requires_grad=requires_grad,
    )
    return Call(Problem(scale=1.0), tensor, tensor, tensor)


# The choice


def test_the_first_that_can() -> None:
    assert choose("auto", cpu_call()) is BACKENDS["eager"]


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "xpu", "mps"])
def test_other_devices_go_to_pytorch(device: str) -> None:
    assert choose("auto", call_on(device)) is BACKENDS["inductor"]


def test_by_name() -> None:
    assert choose("inductor", cpu_call()) is BACKENDS["inductor"]


def test_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_BACKEND", "inductor")
    config.config.cache_clear()
    assert choose("auto", cpu_call()) is BACKENDS["inductor"]
    assert choose("eager", cpu_call()) is BACKENDS["eager"]


def test_every_backend_has_a_name_that_can_be_asked_for() -> None:
    assert BACKENDS.keys() < set(config.BACKENDS)


def test_no_backend_for_a_device_that_holds_no_data() -> None:
    with pytest.raises(BackendError) as caught:
        choose("auto", call_on("meta"))
    assert str(caught.value) == (
        "backend='auto' cannot run this call:\n"
        "  eager: the tensors are on meta, and quire's own paths run on the CPU.\n"
        "  inductor: PyTorch's flex_attention does not run on meta.\n"
        "Ask quire.explain(...) what could, or change what stands in the way."
    )


def test_the_backend_that_was_asked_for_cannot() -> None:
    with pytest.raises(BackendError, match=r"backend='inductor' cannot run .*\n.*has no dropout"):
        choose("inductor", cpu_call(dropout_p=0.5))
    with pytest.raises(NotImplementedError):  # as PyTorch raises
        choose("eager", call_on("cuda"))


def test_a_name_that_is_none() -> None:
    with pytest.raises(ArgumentError) as caught:
        quire.flex_attention(*qkv(), backend="cuda")  # type: ignore[call-overload]
    assert str(caught.value) == (
        "backend must be one of auto, eager, inductor, but is 'cuda'. Leave it out to let quire "
        "choose."
    )


def test_a_backend_that_this_version_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match=r"^backend must be one of .* but is 'jit'. Leave it"):
        quire.flex_attention(*qkv(), backend="jit")
    monkeypatch.setenv("QUIRE_BACKEND", "jit")
    config.config.cache_clear()
    with pytest.raises(ArgumentError) as caught:
        quire.flex_attention(*qkv())
    assert str(caught.value) == (
        "QUIRE_BACKEND must be one of auto, eager, inductor, but is 'jit'. Unset it to let quire "
        "choose."
    )


# The words


def test_both_could() -> None:
    assert quire.explain(*qkv()) == (
        "backend='auto' uses eager.\n"
        "inductor not used because eager comes first; it could run this call."
    )


def test_one_cannot() -> None:
    query, key, value = qkv()
    assert quire.explain(query.requires_grad_(), key, value.requires_grad_()) == (
        "backend='auto' uses eager.\n"
        "inductor not used because PyTorch's flex_attention on cpu has no backward pass, and "
        "these require grad: query, value."
    )


def test_one_was_asked_for() -> None:
    assert quire.explain(*qkv(), backend="inductor") == (
        "backend='inductor' uses inductor.\n"
        "eager not used because inductor was asked for; it could run this call."
    )


def test_the_one_asked_for_cannot() -> None:
    request = quire.AuxRequest(lse=True)
    assert quire.explain(*qkv(), return_aux=request, backend="inductor") == (
        "backend='inductor' uses nothing: it raises a BackendError.\n"
        "eager not used because inductor was asked for; it could run this call.\n"
        "inductor not used because PyTorch's flex_attention on cpu does not return lse."
    )


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_BACKEND", "inductor")
    config.config.cache_clear()
    assert quire.explain(*qkv()).startswith("QUIRE_BACKEND=inductor uses inductor.\n")


def test_another_device() -> None:
    assert explain_call(call_on("cuda:0")) == (
        "backend='auto' uses inductor.\n"
        "eager not used because the tensors are on cuda:0, and quire's own paths run on the CPU."
    )


def test_nobody_can() -> None:
    assert explain_call(call_on("meta")).startswith("backend='auto' uses nothing: it raises")


def test_asking_draws_no_random_number() -> None:
    before = torch.get_rng_state()
    quire.explain(*(x.detach() for x in [torch.ones(1, 2, 8, 4)] * 3), dropout_p=0.5)
    assert torch.equal(before, torch.get_rng_state())


def test_explain_and_choose_agree() -> None:
    for call in (cpu_call(), cpu_call(dropout_p=0.5), call_on("cuda"), call_on("mps")):
        name = next(n for n, backend in BACKENDS.items() if backend is choose("auto", call))
        assert f"uses {name}." in backends.explain_call(call)
