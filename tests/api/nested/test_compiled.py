"""Nested attention inside torch.compile runs quire's kernel in one graph, with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import quire
from quire import jagged_scaled_dot_product_attention as jagged

LENGTHS = [5, 9, 0, 3]
DENSE_MASKS = {
    "bool": torch.rand(4, 1, 12, 12, generator=torch.Generator().manual_seed(0)) < 0.8,
    "bias": torch.randn(2, 12, 12, generator=torch.Generator().manual_seed(1)),
    "one row": torch.randn(1, 12, generator=torch.Generator().manual_seed(2)),
}


@pytest.fixture(autouse=True)
def _patched() -> Iterator[None]:
    torch._dynamo.reset()
    with quire.patch_torch():
        yield
    torch._dynamo.reset()


def nested(lengths: list[int], width: int = 32, *, learn: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(sum(lengths) + width)
    rows = [torch.randn(n, width, generator=generator) for n in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=learn)


def split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, [heads, -1]).transpose(1, 2)


def model(function: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    """A function of one nested tensor [B, j, 32], with operations around the attention."""

    def run(x: Tensor) -> Tensor:
        q = split(x, 2)
        return function(q * 2, q, q.sin(), **options) + 1

    return run


def assert_same(
    run: Callable[..., Tensor], *tensors: Tensor, backend: Any = "aot_eager", fullgraph: bool = True
) -> None:
    compiled = torch.compile(run, backend=backend, fullgraph=fullgraph)
    found, expected = compiled(*tensors), run(*tensors)
    assert torch.equal(found.offsets(), expected.offsets())
    assert found.dim() == expected.dim()
    assert torch.equal(found.values(), expected.values())
    learned = [x for x in tensors if x.requires_grad]
    if learned:
        weights = torch.linspace(-1, 1, expected.values().numel()).view_as(expected.values())
        one, other = (
            torch.autograd.grad((each.values() * weights).sum(), learned)
            for each in (found, expected)
        )
        for here, there in zip(one, other, strict=True):
            assert torch.equal(here.values(), there.values())


FUNCTIONS = pytest.mark.parametrize(
    "function", [F.scaled_dot_product_attention, jagged], ids=["patched", "ours"]
)


@FUNCTIONS
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_same_bits(function: Any, backend: str, learn: bool, is_causal: bool) -> None:
    run = model(function, is_causal=is_causal)
    assert_same(run, nested(LENGTHS, learn=learn), backend=backend)


@FUNCTIONS
def test_the_graph_holds_our_operator(function: Any) -> None:
    seen: list[str] = []

    def record(graph: torch.fx.GraphModule, inputs: object) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=record, bw_compiler=record)
    compiled = torch.compile(model(function), backend=backend, fullgraph=True)
    compiled(nested(LENGTHS)).values().sum().backward()
    assert "quire.attention.default" in seen and "quire.attention_backward.default" in seen


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_inductor() -> None:
    run, x = model(F.scaled_dot_product_attention, is_causal=True), nested(LENGTHS)
    found, expected = torch.compile(run, fullgraph=True)(x), run(x)
    torch.testing.assert_close(found.values(), expected.values())
    one, other = (torch.autograd.grad(y.values().sum(), x)[0] for y in (found, expected))
    torch.testing.assert_close(one.values(), other.values())


@FUNCTIONS
def test_other_lengths_compile_no_more_than_without_attention(function: Any) -> None:
    """PyTorch compiles again for a shortest sequence of 1 and for other batches, and we do not."""
    every = ([5, 9, 3], [4, 2, 11], [30, 8, 7], [1, 1, 200], [2, 5, 9, 6], [8, 8], [3, 1, 4, 1])
    counts = []
    for attend in (function, lambda q, k, v, is_causal: q + k + v):
        counter, run = CompileCounterWithBackend("aot_eager"), model(attend, is_causal=True)
        compiled = torch.compile(run, backend=counter, fullgraph=True)
        counts.append([])
        for x in map(nested, every):
            assert torch.equal(compiled(x).values(), run(x).values())
            counts[-1].append(counter.frame_count)
        torch._dynamo.reset()
    assert counts[0] == counts[1] and counts[0][2] == 1


@FUNCTIONS
@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (1, 4)])
def test_groups_and_single_heads(function: Any, heads: tuple[int, int]) -> None:
    q_heads, kv_heads = heads

    def run(x: Tensor, y: Tensor) -> Tensor:
        key = split(y, kv_heads)
        grouped = q_heads >= kv_heads
        return function(split(x, q_heads), key, key * 2, enable_gqa=grouped, is_causal=True)

    x = nested(LENGTHS, 8 * q_heads)
    y = torch.nested.nested_tensor_from_jagged(torch.randn(17, 8 * kv_heads), x.offsets())
    assert_same(run, x, y.detach().requires_grad_())


@FUNCTIONS
@pytest.mark.parametrize("name", DENSE_MASKS)
def test_dense_masks(function: Any, name: str) -> None:
    mask = DENSE_MASKS[name]
    assert_same(model(function, attn_mask=mask), nested(LENGTHS))


@FUNCTIONS
def test_keys_of_other_lengths(function: Any) -> None:
    def run(x: Tensor, y: Tensor) -> Tensor:
        return function(split(x, 2), split(y, 2), split(y, 2), scale=0.3)

    assert_same(run, nested(LENGTHS), nested([7, 2, 4, 1]))


@FUNCTIONS
def test_three_dimensions(function: Any) -> None:
    assert_same(lambda x: function(x, x, x, is_causal=True), nested(LENGTHS))


@FUNCTIONS
def test_a_dense_sequence(function: Any) -> None:
    """The ragged dimension is a part of the batch, and PyTorch's operator computes."""
    values = torch.randn(17, 2, 6, 8)
    x = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 5, 14, 17]))
    assert_same(lambda x: function(x, x * 2, x), x.requires_grad_())


@FUNCTIONS
def test_dropout(function: Any) -> None:
    run, x = model(function, dropout_p=0.5), nested(LENGTHS, learn=False)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    compiled(x)
    found = []
    for call in (compiled, compiled, run):
        torch.manual_seed(0)
        found.append(call(x).values())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@FUNCTIONS
def test_holes_between_sequences(function: Any) -> None:
    def run(x: Tensor) -> Tensor:
        return function(x, x, x, is_causal=True)

    x = torch.nested.nested_tensor_from_jagged(
        torch.randn(17, 2, 8), torch.tensor([0, 5, 9, 17]), torch.tensor([5, 2, 0])
    )
    x = x.transpose(1, 2)
    found, expected = torch.compile(run, backend="aot_eager", fullgraph=True)(x), run(x)
    assert torch.equal(found.values(), expected.values())
    assert torch.equal(found.lengths(), x.lengths())


@FUNCTIONS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(function: Any, dtype: torch.dtype) -> None:
    assert_same(model(function), nested(LENGTHS).detach().to(dtype).requires_grad_())


@FUNCTIONS
def test_what_depends_on_lengths_breaks_the_graph(function: Any) -> None:
    """Keys and values with different offsets are compared when lengths are known."""
    values = torch.randn(17, 32)

    def run(x: Tensor, y: Tensor) -> Tensor:
        return function(split(x, 2), split(x, 2), split(y, 2))

    x = nested(LENGTHS, learn=False)
    y = torch.nested.nested_tensor_from_jagged(values, x.offsets().clone())
    assert_same(run, x, y, fullgraph=False)
    torch._dynamo.reset()
    with pytest.raises(Unsupported):
        torch.compile(run, backend="aot_eager", fullgraph=True)(x, y)
