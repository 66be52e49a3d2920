"""Which backend computes a call, why, and how messages say so."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import quire
from quire import config
from quire.api.explain import explain_call
from quire.errors import ArgumentError, BackendError
from quire.memory import Dense, One, Placed
from quire.plans import OBSTACLES, choose
from quire.request import Call, Problem, Request, checked_call


@pytest.fixture(autouse=True)
def _two_backends() -> Iterator[None]:
    """Leave out the compiled backend, so that the messages below are about the other two."""
    every = dict(OBSTACLES)  # restored whole, since its order is what `auto` goes by
    for name in every.keys() - {"eager", "inductor"}:
        del OBSTACLES[name]
    yield
    OBSTACLES.clear()
    OBSTACLES.update(every)


def qkv() -> list[torch.Tensor]:
    return [torch.randn(1, 2, 8, 4) for _ in range(3)]


def cpu_call(**options: Any) -> Call:
    query, key, value = qkv()
    return checked_call(Request(query, Dense(key, value), **options))


def call_on(device: str, **options: Any) -> Call:
    """Return a call that nothing has checked, on stand-ins of which only attributes are read."""
    tensor: Any = SimpleNamespace(
        device=torch.device(device),
        dtype=torch.float16,
        shape=torch.Size((1, 2, 8, 4)),
        requires_grad=False,
    )
    request = Request(tensor, Dense(tensor, tensor), **options)
    return Call(request, Placed(tensor, tensor, tensor, One(8, 0, 0, 8)), Problem(scale=1.0), ())


# The choice


def test_the_first_that_can() -> None:
    assert choose(cpu_call()) == "eager"


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "xpu", "mps"])
def test_other_devices_go_to_pytorch(device: str) -> None:
    assert choose(call_on(device)) == "inductor"


def test_by_name() -> None:
    assert choose(cpu_call(backend="inductor")) == "inductor"


def test_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_BACKEND", "inductor")
    config.config.cache_clear()
    assert choose(cpu_call()) == "inductor"
    assert choose(cpu_call(backend="eager")) == "eager"


def test_every_backend_has_a_name_that_can_be_asked_for() -> None:
    assert OBSTACLES.keys() < set(config.BACKENDS)


def test_no_backend_for_a_device_that_holds_no_data() -> None:
    with pytest.raises(BackendError) as caught:
        choose(call_on("meta"))
    assert str(caught.value) == (
        "backend='auto' cannot run this call:\n"
        "  eager: the tensors are on meta, and quire's own paths run on the CPU.\n"
        "  inductor: PyTorch's flex_attention does not run on meta.\n"
        "Call quire.explain(...) to see what could, or change the call."
    )


def test_the_backend_that_was_asked_for_cannot() -> None:
    with pytest.raises(BackendError, match=r"backend='inductor' cannot run .*\n.*has no dropout"):
        choose(cpu_call(dropout_p=0.5, backend="inductor"))
    with pytest.raises(NotImplementedError):  # as PyTorch raises
        choose(call_on("cuda", backend="eager"))


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
        assert f"uses {choose(call)}." in explain_call(call)
