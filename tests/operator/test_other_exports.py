"""torch.jit.trace, ONNX and AOTInductor: what they record of a call, and what is refused."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quire
from quire import Dense, Ragged, attention
from quire.mods import LearnedDistanceBias, causal
from quire.operator.arguments import CallArguments
from quire.operator.text import Form, write

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """torch.jit.trace and the export to ONNX add to the filters of warnings."""
    with warnings.catch_warnings():
        yield


def operands(length: int = 24, **kind: Any) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 4, length, 16, **kind) for _ in range(3)]


class Model(nn.Module):
    """Attention with a learned table, without mods, and over ragged memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bias = LearnedDistanceBias(4, 16)
        nn.init.normal_(self.bias.table)
        self.register_buffer("offsets", torch.tensor([0, 9, 24]))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        dense = attention(query * 2, Dense(key, value), score_mod=self.bias, mask=causal)
        plain = attention(query, Dense(key, value))
        packed = [x[0].transpose(0, 1) for x in (query, key, value)]
        memory = Ragged(packed[1], packed[2], self.offsets)
        return dense + plain + attention(packed[0], memory, mask=causal).transpose(0, 1)


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attention(query, Dense(key, value), mask=causal) + 1


# torch.jit.trace


def test_a_traced_model_computes_what_the_model_computes(tmp_path: Path) -> None:
    model, tensors = Model(), operands()
    traced = torch.jit.trace(model, tensors)
    assert "quire::attention" in str(traced.graph)
    assert torch.equal(traced(*tensors), model(*tensors))
    traced.save(tmp_path / "model.pt")
    assert torch.equal(torch.jit.load(tmp_path / "model.pt")(*tensors), model(*tensors))


def test_a_traced_function_takes_other_lengths_and_has_gradients() -> None:
    traced = torch.jit.trace(causal_attention, operands(requires_grad=True))
    tensors = operands(40, requires_grad=True)
    out, expected = traced(*tensors), causal_attention(*tensors)
    assert torch.equal(out, expected)
    gradients = [torch.autograd.grad(x.square().sum(), tensors) for x in (out, expected)]
    assert all(map(torch.equal, *gradients))


def of_a_plan() -> Callable[..., Tensor]:
    query, key, value = operands()
    step = quire.plan(query, Dense(key, value), mask=causal)
    step(query, Dense(key, value))  # the plan is known: its kernel must not run unseen
    return lambda query, key, value: step(query, Dense(key, value))


def of_a_generator() -> Callable[..., Tensor]:
    generator = torch.Generator()
    return lambda query, key, value: attention(
        query, Dense(key, value), dropout_p=0.5, generator=generator
    )


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (of_a_plan, "a plan must be called outside of torch.jit.trace"),
        (of_a_generator, "generator must be None where a graph is made"),
    ],
)
def test_what_a_trace_cannot_see_is_refused(made: Callable[[], Any], says: str) -> None:
    with pytest.raises(quire.errors.BackendError, match=says):
        torch.jit.trace(made(), operands())


@pytest.mark.parametrize("make", [torch.jit.trace, torch.export.export])
def test_a_mod_outside_of_the_table_is_refused_with_its_line(make: Any) -> None:
    def odd(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + torch.special.bessel_j0(score)

    class Odd(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attention(query, Dense(key, value), score_mod=odd)

    says = r"'odd' must be made of.*test_other_exports.py:\d+: `return score \+ torch.special"
    with pytest.raises(quire.errors.UnsupportedOpError, match=says):
        make(Odd(), tuple(operands()))


# ONNX


def test_onnx_is_refused_with_what_to_do_instead() -> None:
    class Attention(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return causal_attention(query, key, value)

    with pytest.raises(quire.errors.BackendError, match=r"exported to ONNX.*attn_implementation"):
        torch.onnx.export(Attention(), tuple(operands()), "never-written.onnx", dynamo=False)


def test_onnx_is_refused_where_dynamo_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    compiled = torch.compile(causal_attention, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="exported to ONNX"):
        compiled(*operands())


# AOTInductor


def test_aotinductor_passes_none_for_an_empty_list() -> None:
    query, key, value = operands()
    text = write(Form("dense"))
    given = CallArguments(query, key, value, None, None, numbers=None, text=text)  # type: ignore[arg-type]
    request = given.request()
    assert request.memory.key is key and request.masks == () and request.sink is None


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
def test_a_package_of_aotinductor_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    model, tensors = Model(), tuple(operands())
    with torch.no_grad():
        expected, program = model(*tensors), torch.export.export(model, tensors)
    from torch import _inductor as inductor

    where = inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    assert torch.equal(inductor.aoti_load_package(where)(*tensors), expected)
