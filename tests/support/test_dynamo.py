"""torch.compile and torch.export of code that calls quire's functions.

Nothing here is lowered to machine code: Dynamo's tracing is all that matters.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compare import assert_as_good_as
from graphs import BLOCKS, Graphs, Model, causal, qkv, slope
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import quire
from quire.support import dynamo
from quire.support.dynamo import OneGraphWarning


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Nothing compiled, nothing warned of."""
    torch._dynamo.reset()
    dynamo._warn_once.cache_clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def graphs() -> Graphs:
    return Graphs()


def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return quire.flex_attention(query + 1, key, value, slope, BLOCKS) * 2


def assert_same(actual: Tensor, operands: list[Tensor]) -> None:
    truth = model(*(x.double() for x in operands))
    assert_as_good_as(actual, model(*operands), truth)


# No break


@pytest.mark.parametrize("fullgraph", [False, True])
def test_no_break_and_the_same_bits(graphs: Graphs, fullgraph: bool) -> None:
    operands = qkv()
    compiled = torch.compile(model, backend=graphs, fullgraph=fullgraph)
    assert torch.equal(compiled(*operands), model(*operands))
    assert len(graphs.graphs) == 1
    assert graphs.uses_quire and not graphs.uses_torch


def test_gradients_pass_the_graph() -> None:
    plain = qkv(requires_grad=True)
    compiled = [x.detach().clone().requires_grad_() for x in plain]
    model(*plain).sum().backward()
    torch.compile(model, backend="aot_eager")(*compiled).sum().backward()
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(plain, compiled, strict=True))


def test_none_of_our_code_is_compiled() -> None:
    """A graph of ours would be tied by guards to each mod that it is called with."""
    compiled: list[str] = []
    hook = torch._dynamo.convert_frame.register_bytecode_hook(
        lambda old, new: compiled.append(old.co_filename)
    )
    try:
        torch.compile(model, backend="eager")(*qkv())
    finally:
        hook.remove()
    assert set(compiled) == {__file__}


@pytest.mark.parametrize("fullgraph", [False, True])
def test_the_function_itself_compiled(graphs: Graphs, fullgraph: bool) -> None:
    operands = qkv()
    compiled = torch.compile(quire.flex_attention, backend=graphs, fullgraph=fullgraph)
    assert torch.equal(compiled(*operands, slope), quire.flex_attention(*operands, slope))
    assert graphs.uses_quire


@pytest.mark.parametrize(
    "options",
    [
        {"sink": torch.zeros(2)},
        {"dropout_p": 0.5, "generator": torch.Generator()},
        {"return_aux": quire.AuxRequest(lse=True)},
        {"return_aux": quire.AuxRequest(argmax=True, entropy=True)},
        {"mask_mod": causal, "kernel_options": {"BLOCK_M": 64}, "scale": 0.5},
    ],
)
def test_every_argument_passes(options: dict[str, Any]) -> None:
    def run(*operands: Tensor) -> Any:
        if "generator" in options:
            options["generator"].manual_seed(0)
        return quire.flex_attention(*operands, **options)

    operands = qkv()
    actual, expected = torch.compile(run, backend="eager")(*operands), run(*operands)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_what_makes_masks_breaks(graphs: Graphs) -> None:
    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        blocks = quire.create_block_mask(causal, None, None, 32, 32, BLOCK_SIZE=16)
        mask = quire.create_mask(causal, 1, 1, 32, 32)
        out = quire.attention(query, quire.Dense(key, value), mask=blocks)
        return out * mask.sum()

    operands = qkv()
    assert torch.equal(torch.compile(run, backend=graphs)(*operands), run(*operands))
    assert len(graphs.graphs) == 1  # after the masks
    assert graphs.uses_quire


# One graph


def said(caught: pytest.WarningsRecorder) -> list[str]:
    """The warnings, but for those with which Dynamo greets Python 3.13.0."""
    messages = [str(warning.message) for warning in caught]
    return [each for each in messages if not each.startswith("Guards may run slower on Python")]


def test_in_one_graph_masks_are_made_by_torch_with_one_warning(graphs: Graphs) -> None:
    def run() -> torch_flex.BlockMask:
        return quire.create_block_mask(causal, None, None, 64, 64, "cpu", BLOCK_SIZE=16)

    with pytest.warns(OneGraphWarning) as caught:
        torch.compile(run, backend=graphs, fullgraph=True)()
    assert said(caught) == [
        "quire makes block masks and writes pages between graphs, but fullgraph=True and "
        "torch.export allow only one graph: PyTorch's own functions take their place. Make masks "
        "before the graph, or compile without fullgraph=True."
    ]
    assert caught[0].filename == __file__
    torch._dynamo.reset()
    torch.compile(run, backend=graphs, fullgraph=True)()  # no further warning


@pytest.mark.filterwarnings("ignore::quire.OneGraphWarning")
def test_in_one_graph_block_masks_are_made(graphs: Graphs) -> None:
    def run() -> torch_flex.BlockMask:
        return quire.create_block_mask(causal, None, None, 64, 64, "cpu", BLOCK_SIZE=16)

    compiled = torch.compile(run, backend=graphs, fullgraph=True)()
    assert torch.equal(compiled.to_dense(), run().to_dense())
    assert len(graphs.graphs) == 1


@pytest.mark.parametrize("kind", ["quire", "torch"])
def test_in_one_graph_a_request_is_answered_in_its_class(graphs: Graphs, kind: str) -> None:
    owner: Any = quire if kind == "quire" else torch_flex

    def run(*operands: Tensor) -> Any:
        return quire.flex_attention(*operands, return_aux=owner.AuxRequest())

    _, aux = torch.compile(run, backend=graphs, fullgraph=True)(*qkv())
    assert type(aux) is owner.AuxOutput
    assert not any(aux)
    assert graphs.uses_quire


@pytest.mark.parametrize(
    ("options", "lacking"),
    [
        ({"sink": torch.zeros(2)}, "sink"),
        ({"dropout_p": 0.1}, "dropout"),
        ({"return_aux": quire.AuxRequest(argmax=True)}, "argmax"),
        ({"return_aux": quire.AuxRequest(entropy=True)}, "entropy"),
        ({"return_aux": quire.AuxRequest(key_mass=True)}, "key_mass"),
    ],
)
def test_what_pytorchs_operator_lacks_is_said(options: dict[str, Any], lacking: str) -> None:
    def run(*operands: Tensor) -> Tensor:
        return quire.flex_attention(*operands, **options, backend="inductor")

    with pytest.raises(torch._dynamo.exc.Unsupported, match=rf"BackendError.*has no {lacking}"):
        torch.compile(run, backend="eager", fullgraph=True)(*qkv())


def test_pytorchs_operator_is_in_the_graph_if_it_is_asked_for(graphs: Graphs) -> None:
    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        options: dict[str, Any] = {"mask_mod": causal, "backend": "inductor"}
        return quire.flex_attention(query + 1, key, value, slope, **options) * 2

    operands = qkv()
    assert_same(torch.compile(run, backend=graphs, fullgraph=True)(*operands), operands)
    assert graphs.uses_torch and not graphs.uses_quire


def test_a_region_that_may_not_break(graphs: Graphs) -> None:
    @torch._dynamo.error_on_graph_break(True)
    def region(*operands: Tensor) -> Tensor:
        return model(*operands)

    operands = qkv()
    assert torch.equal(torch.compile(region, backend=graphs)(*operands), model(*operands))
    assert graphs.uses_quire


@pytest.mark.parametrize("strict", [False, True])
def test_export_has_our_operator(strict: bool) -> None:
    operands = qkv()
    program = torch.export.export(Model(quire.flex_attention), tuple(operands), strict=strict)
    assert "quire.attention" in str(program.graph)
    assert torch.equal(program.module()(*operands), model(*operands))


# No graph at all


def test_compilation_in_another_thread_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    operands, found = qkv(), []
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)  # a flag for all threads
    thread = threading.Thread(target=lambda: found.append(model(*operands)))
    thread.start()
    thread.join()
    monkeypatch.undo()
    assert torch.equal(found[0], model(*operands))


def test_the_signature_is_that_of_the_function() -> None:
    assert quire.flex_attention.__name__ == "flex_attention"
    assert quire.flex_attention.__module__ == "quire.api.flex"


@pytest.mark.slow
def test_importing_quire_does_not_import_dynamo() -> None:
    program = "import sys, quire; print([m for m in sys.modules if m.startswith('torch._dynamo.')])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr
