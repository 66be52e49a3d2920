"""Modes, profilers and torch.export see one operator, quire::attention."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import quire
from quire import Dense, Ragged, attention
from quire.mods import LearnedDistanceBias, alibi, causal
from quire.operator.text import VERSION


def operands(**kind: Any) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 4, 24, 16, **kind) for _ in range(3)]


class Model(nn.Module):
    """Attention with a learned table, over dense and over ragged memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bias = LearnedDistanceBias(4, 16)
        nn.init.normal_(self.bias.table)
        self.register_buffer("offsets", torch.tensor([0, 9, 24]))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        dense = attention(query, Dense(key, value), score_mod=self.bias, mask=causal)
        packed = [x[0].transpose(0, 1) for x in (query, key, value)]
        memory = Ragged(packed[1], packed[2], self.offsets)
        return dense.sum(0) + attention(packed[0], memory, mask=causal).transpose(0, 1)


# torch.export


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("learns", [False, True])
def test_an_exported_program_gives_the_same_bits(strict: bool, learns: bool) -> None:
    model, tensors = Model().requires_grad_(learns), operands()
    program = torch.export.export(model, tuple(tensors), strict=strict)
    names = [str(node.target) for node in program.graph.nodes]
    assert sum("quire.attention" in name for name in names) == 2
    assert torch.equal(program.module()(*tensors), model(*tensors))


SCRIPT = """
import sys, torch, quire
tensors, expected = torch.load(sys.argv[2])
program = torch.export.load(sys.argv[1])
print(torch.equal(program.module()(*tensors), expected))
"""


def test_an_exported_program_is_loaded_by_another_process(tmp_path: Path) -> None:
    model, tensors = Model(), operands()
    with torch.no_grad():
        torch.save((tensors, model(*tensors)), tmp_path / "tensors.pt")
        program = torch.export.export(model, tuple(tensors))
    torch.export.save(program, tmp_path / "model.pt2")
    command = [sys.executable, "-c", SCRIPT, tmp_path / "model.pt2", tmp_path / "tensors.pt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.stdout == "True\n", done.stderr


# Modes and profilers


def test_the_profiler_shows_the_operator_and_the_names_of_mods() -> None:
    tensors = operands(requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        out = attention(tensors[0], Dense(*tensors[1:]), score_mod=alibi(4), mask=causal)
        out.sum().backward()
    rows = {row.key: row for row in profiled.key_averages(group_by_input_shape=True)}
    assert rows["quire::attention"].count == 1
    assert rows["quire::attention"].input_shapes[:3] == [[2, 4, 24, 16]] * 3
    assert rows["attention(alibi_4, causal)"].count == 1
    assert rows["backward of attention(alibi_4, causal)"].count == 1


def test_selective_checkpointing_can_name_the_operator() -> None:
    seen = []

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(operator)
        save = operator == torch.ops.quire.attention.default
        policies = torch.utils.checkpoint.CheckpointPolicy
        return policies.MUST_SAVE if save else policies.PREFER_RECOMPUTE

    def block(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query * 2, Dense(key, value), mask=causal).sin()

    tensors = operands(requires_grad=True)
    out = checkpoint(
        block,
        *tensors,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    found = torch.autograd.grad(out.sum(), tensors)
    expected = torch.autograd.grad(block(*tensors).sum(), tensors)
    assert torch.ops.quire.attention.default in seen
    assert all(map(torch.equal, found, expected))


def test_fake_tensors_have_the_shapes_and_strides_of_results() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in operands()]
    request = quire.AuxRequest(True, True, True, True, True)
    out, aux = attention(tensors[0], Dense(*tensors[1:]), mask=causal, return_aux=request)
    with FakeTensorMode() as mode:
        query, key, value = map(mode.from_tensor, tensors)
        fake, fake_aux = attention(query, Dense(key, value), mask=causal, return_aux=request)
    for real, other in zip((out, *aux[:-1]), (fake, *fake_aux[:-1]), strict=True):
        assert (real.shape, real.stride(), real.dtype) == (other.shape, other.stride(), other.dtype)


# It copies inputs, and since 2.14 asks the copies for .grad: torch hides that, but not from errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_torchs_own_check_of_operators() -> None:
    calls = []
    original = torch.ops.quire.attention.default

    class Keep(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func == original:
                calls.append(args)
            return func(*args, **(kwargs or {}))

    tensors = operands(requires_grad=True)
    with Keep():
        attention(tensors[0], Dense(*tensors[1:]), score_mod=Model().bias, mask=causal)
    torch.library.opcheck(original, calls[0])


def test_the_text_has_another_version_if_the_operators_take_other_arguments() -> None:
    """torch.compile keeps graphs on disk by this text: a graph with old arguments must not run."""
    call = (
        "Tensor query, Tensor key, Tensor value, Tensor[] captures, Tensor[] tables, "
        "SymInt[] numbers, str text"
    )
    above = "Tensor out, Tensor lse, Tensor? grad_out, Tensor? grad_lse, bool[] wanted"
    operators = torch.ops.quire
    assert (VERSION, str(operators.attention.default._schema)) == (
        2,
        f"quire::attention({call}) -> Tensor[]",
    )
    assert str(operators.attention_backward.default._schema) == (
        f"quire::attention_backward({call}, {above}) -> Tensor[]"
    )


@pytest.mark.parametrize("kind", ["dense", "ragged"])
def test_gradients_lie_as_the_kernel_writes_them_and_are_not_copied(kind: str) -> None:
    # as a projection gives them: [B, N, 3, H, D], and all heads of a token side by side
    query, key, value = torch.randn(2, 24, 3, 4, 64).permute(2, 0, 3, 1, 4)
    offsets = torch.tensor([0, 9, 24])
    if kind == "ragged":
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    tensors = [x.requires_grad_() for x in (query, key, value)]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        memory = Dense(key, value) if kind == "dense" else Ragged(key, value, offsets)
        return attention(query, memory, mask=causal)

    above = torch.randn_like(query)
    expected = torch.autograd.grad(attend(*tensors), tensors, above)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        found = torch.autograd.grad(attend(*tensors), tensors, above)
    assert all(map(torch.equal, found, expected))
    assert [x.stride() for x in found] == [x.stride() for x in expected]
    rows = {row.key: row.count for row in profiled.key_averages()}
    assert rows["quire::attention_backward"] == 1 and "aten::copy_" not in rows


# Counting


@pytest.mark.parametrize("mask", [None, causal])
def test_flops_are_those_of_what_the_mask_leaves(mask: Any) -> None:
    query, key, value = (torch.randn(2, 4, 512, 64, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        attention(query, Dense(key, value), mask=mask).sum().backward()
    counts = {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
    whole = 4 * 2 * 4 * 512 * 512 * 64
    said = quire.explain(query, Dense(key, value), mask=mask)
    if mask is None:
        assert counts == {"quire.attention": whole, "quire.attention_backward": whole * 5 // 2}
    else:
        share = counts["quire.attention"] / whole
        assert 0.5 < share < 0.65
        assert counts["quire.attention_backward"] == pytest.approx(whole * share * 2.5, rel=0.1)
        assert f"{100 * share:.1f} % of all scores" in said


def test_flops_of_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        query, key, value = (torch.randn(2, 4, 512, 64) for _ in range(3))
        attention(query, Dense(key, value), mask=causal)
    assert 0.5 < counter.get_total_flops() / (4 * 2 * 4 * 512 * 512 * 64) < 0.65
