"""PyTorch's private names: each is there, and one that is gone says so."""

from __future__ import annotations

import ast
import inspect
import types
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as torch_flex

from quire.errors import QuireError, TorchVersionError
from quire.support import torch_private
from quire.support.torch_private import tracing


def test_every_name_is_there() -> None:
    gone = [
        name
        for name, value in vars(torch_private).items()
        if isinstance(value, types.FunctionType)
        and value.__qualname__ == "_function.<locals>.found"
    ]
    assert not gone
    assert torch_private.compile_errors()
    assert issubclass(torch_private.no_compiler_error(), Exception)
    assert not torch_private.is_one_graph()
    assert torch_private.without_hooks is torch._C.DisableTorchFunctionSubclass
    assert torch_private.has_avx2() == torch.cpu._is_avx2_supported()
    assert torch_private.is_torch_slice(torch_flex._sliced_mask_mod_error)
    assert not torch_private.is_torch_slice(torch_flex.noop_mask)


FOLDER = Path(torch_private.__file__).parent
LATER = [
    (
        str(
            getattr(tracing, node.args[0].id)
            if isinstance(node.args[0], ast.Name)
            else ast.literal_eval(node.args[0])
        ),
        ast.literal_eval(node.args[1]),
    )
    for path in (FOLDER / "tracing.py", FOLDER / "transforms.py")
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "named"
]
"""The names of Dynamo and of torch.func that are looked up when they are needed."""


@pytest.mark.parametrize(("module", "name"), sorted(set(LATER)))
def test_every_name_that_is_looked_up_later_is_there(module: str, name: str) -> None:
    assert torch_private.named(module, name) is not None


def test_dynamo_has_the_rest_that_tracing_relies_on() -> None:
    effects = torch_private.named("torch._dynamo.side_effects", "SideEffects")
    assert hasattr(effects, "defer_side_effect_checks")
    speculate = torch_private.named(tracing._OPERATORS, "speculate_subgraph")
    parameters = inspect.signature(speculate).parameters
    assert {"restore_side_effects", "set_subgraph_inputs", "source_target"} <= parameters.keys()
    functions = torch_private.named("torch._dynamo.variables.functions", "UserFunctionVariable")
    assert "_torchdynamo_inline" in inspect.getsource(inspect.getmodule(functions))


def test_without_modes_tensors_have_values() -> None:
    with FakeTensorMode(), torch_private.without_modes():
        assert torch.arange(3).tolist() == [0, 1, 2]
    with torch_private.without_modes():
        assert torch.arange(3).tolist() == [0, 1, 2]


def test_a_name_that_is_gone_is_told_with_the_version() -> None:
    found = torch_private._function("torch", "_C._functorch.is_no_more")
    message = (
        rf"PyTorch must have torch\._C\._functorch\.is_no_more, which quire uses here, but "
        rf"torch {torch.__version__.replace('+', '[+]')} does not\. Install a version of torch"
    )
    with pytest.raises(TorchVersionError, match=message):
        found(torch.ones(1))
    with pytest.raises(ImportError, match=r"torch\._nowhere\.thing"):
        torch_private.named("torch._nowhere", "thing")


def test_an_attribute_that_is_gone_is_told() -> None:
    with pytest.raises(TorchVersionError, match=r"NestedTensor\._no_more"):
        torch_private._attribute("NestedTensor", "_no_more")(torch.ones(1))


def test_forward_mode_that_cannot_be_seen_is_not_taken_for_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert torch_private.is_transformed() is False
    monkeypatch.delattr(torch.autograd.forward_ad, "_current_level")
    with pytest.raises(QuireError, match=r"forward_ad\._current_level"):
        torch_private.is_transformed()


def test_nested_tensors_that_cannot_be_seen_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3)], layout=torch.jagged)
    assert torch_private.is_jagged(nested)
    assert not torch_private.is_jagged(torch.ones(1))
    gone = torch_private._function("torch.nested._internal.nested_tensor", "NoTensor")
    monkeypatch.setattr(torch_private, "_make_nested", gone)
    monkeypatch.setattr(torch_private, "_NESTED", "torch.nested._internal.nowhere")
    with pytest.raises(TorchVersionError, match=r"nowhere\.NestedTensor"):
        torch_private.is_jagged(nested)


@pytest.mark.parametrize(
    ("owner", "name", "ask"),
    [
        (torch_flex, "_sliced_mask_mod_error", lambda: not torch_private.is_torch_slice(None)),
        (torch.cpu, "_is_avx2_supported", torch_private.has_avx2),
    ],
)
def test_where_there_is_a_safe_answer_it_is_given(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, ask: types.FunctionType
) -> None:
    monkeypatch.delattr(owner, name)
    assert ask()
