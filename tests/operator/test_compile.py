"""torch.compile runs quire's own kernels inside one graph: the same bits, forward and backward."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from graphs import Graphs
from torch import Tensor, nn
from torch.autograd import forward_ad

import quire
from quire import Dense, Paged, Ragged, attention, flex_attention, weights
from quire.mods import (
    LearnedDistanceBias,
    alibi,
    causal,
    distance_bias,
    document,
    prefix_lm,
    sliding_window,
    softcap,
)

SLOPES = torch.tensor([0.5, -0.25, 0.125, 1.0])
IDS = torch.arange(64) // 10


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def operands(length: int = 24, **kind: Any) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 4, length, 16).to(**kind).requires_grad_() for _ in range(3)]


def slope(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + SLOPES[h] * (q_idx - kv_idx)


def assert_same(
    function: Callable[..., Any], tensors: list[Tensor], *, backend: Any = "aot_eager"
) -> None:
    """The function gives the same results and gradients compiled as a whole and not compiled."""
    graphs = Graphs()
    torch.compile(function, backend=graphs, fullgraph=True)(*tensors)
    assert len(graphs.graphs) == 1
    names = [str(node.target) for node in graphs.graphs[0].graph.nodes]
    assert any("quire.attention" in name for name in names) and "flex_attention" not in names
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    found, expected = compiled(*tensors), function(*tensors)
    found, expected = (x if isinstance(x, tuple) else (x,) for x in (found, expected))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()
    learned = [x for x in tensors if x.requires_grad]
    losses = [sum(x.float().sum() for x in each if x.requires_grad) for each in (found, expected)]
    if learned:
        gradients = [torch.autograd.grad(loss, learned, allow_unused=True) for loss in losses]
        for one, other in zip(*gradients, strict=True):
            assert one is other is None or torch.equal(one, other)


def gated(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.sigmoid(score) * SLOPES[h]


def squared(prob: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return prob**2


@pytest.mark.parametrize(
    "options",
    [
        {"weight": weights.sigmoid(-3.0), "normalise": False},
        {"weight": weights.sigmoid(SLOPES)},
        {"weight": gated},
        {"prob_mod": squared},
        {"prob_mod": lambda prob, b, h, q, k: prob * SLOPES[h]},
        {"prob_mod": lambda prob, b, h, q, k: torch.where(q - k < 9, prob / 2, 0.0)},
    ],
)
def test_weights_and_mods_on_probabilities(options: dict[str, Any]) -> None:
    assert_same(lambda *tensors: flex_attention(*tensors, **options), operands())


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_mods_on_probabilities_in_packed_memory(kind: str) -> None:
    """One pass is a part of the graph. Two passes break it, since tables are read between them."""
    table, offsets = torch.arange(2, dtype=torch.int32).view(2, 1), torch.tensor([0, 11, 24])
    gate = SLOPES.clone().requires_grad_()

    def attend(mod: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        query, key, value = (2 * x for x in tensors)
        if kind == "paged":
            return attention(query, Paged(key, value, table, [24, 20]), prob_mod=mod) + 1
        rows = (x[0].transpose(0, 1) for x in (query, key, value))
        query, key, value = rows
        return attention(query, Ragged(key, value, offsets), prob_mod=mod) + 1

    def linear(prob: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return prob * gate[h]

    tensors = [*operands(), gate]
    assert_same(lambda q, k, v, _: attend(linear, q, k, v), tensors)
    torch._dynamo.reset()
    twice = functools.partial(attend, squared)
    given = [x.detach() for x in tensors[:3]]
    found = torch.compile(twice, backend="aot_eager")(*given)
    assert torch.equal(found, twice(*given))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="quire computes between graphs"):
        torch.compile(twice, backend="aot_eager", fullgraph=True)(*given)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_gives_the_bits_of_the_call_outside_of_the_graph(dtype: torch.dtype) -> None:
    """All else in this function is exact, so that the bits can only be those of attention."""

    def model(packed: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        def bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + doubled[h] * (q_idx - kv_idx)

        doubled = slopes * 2
        query, key, value = packed.unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        memory = Dense(key, value)
        out = attention(query, memory, score_mod=bias, mask=document(IDS) & causal)
        return out, attention(query, memory).transpose(1, 2).flatten(2)

    torch.manual_seed(0)
    packed = torch.randn(2, 40, 3 * 64, dtype=dtype, requires_grad=True)
    assert_same(model, [packed, SLOPES.clone().requires_grad_()], backend="inductor")


# Mods and masks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype(dtype: torch.dtype) -> None:
    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query * 2, Dense(key, value), score_mod=slope, mask=causal) + 1

    assert_same(model, operands(dtype=dtype))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": causal},
        {"mask": sliding_window(7) & ~causal},
        {"mask": prefix_lm(3) | document(IDS)},
        {"mask": document(lengths=[5, 3, 16])},
        {"score_mod": alibi(4)},
        {"score_mod": softcap(5.0) >> distance_bias(torch.rand(4, 63))},
        {"scale": 0.3, "q_start": 5},
        {"sink": torch.rand(4)},
        {"mask": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) | (IDS[kv_idx] == 2)},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_mods_of_the_library(options: dict[str, Any]) -> None:
    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, Dense(key, value), **options)

    assert_same(model, operands())


def test_a_learned_table_of_a_module() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = LearnedDistanceBias(4, 32)
            self.sink = nn.Parameter(torch.rand(4))

        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            out: Tensor = flex_attention(
                query, key, value, self.bias, mask_mod=causal, sink=self.sink
            )
            return out

    model = Model()
    nn.init.normal_(next(model.bias.parameters()))
    tensors = operands()
    expected = torch.autograd.grad(model(*tensors).sum(), list(model.parameters()))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(*tensors).sum(), list(model.parameters()))
    assert all(map(torch.equal, found, expected))


def test_a_mod_made_inside_of_what_the_graph_computes() -> None:
    def model(query: Tensor, key: Tensor, value: Tensor, weights: Tensor) -> Tensor:
        table, length = weights.exp(), query.shape[2]

        def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            near = torch.where(kv_idx < length - 2, 1.0, 2.0)
            return score * table[h, 0] + weights.sum(1)[h] + near

        return attention(query, Dense(key, value), score_mod=mod)

    assert_same(model, [*operands(), torch.rand(4, 3, requires_grad=True)])


def test_a_learned_tensor_that_only_a_mask_loads_has_no_gradient_and_moves_no_other() -> None:
    limits = torch.tensor([3.0, 9.0, 20.0, 1.0], requires_grad=True)

    def model(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Tensor:
        def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + slopes[h] * kv_idx

        def near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return kv_idx < limits[h]

        return attention(query, Dense(key, value), score_mod=mod, mask=near)

    tensors = [*operands(), SLOPES.clone().requires_grad_()]
    assert_same(model, tensors)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(*tensors).sum(), [limits, *tensors], allow_unused=True)
    assert found[0] is None or not found[0].any()
    expected = torch.autograd.grad(model(*tensors).sum(), tensors)
    assert all(map(torch.equal, found[1:], expected))


def test_captured_tensors_are_inputs_and_never_stale() -> None:
    table = torch.rand(4)

    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + table[h] * q_idx * kv_idx

        return attention(query, Dense(key, value), score_mod=mod)

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    tensors = operands()
    first = compiled(*tensors)
    table.add_(1)
    assert torch.equal(compiled(*tensors), model(*tensors))
    assert not torch.equal(first, model(*tensors))


@pytest.mark.parametrize("kind", [quire, torch.nn.attention.flex_attention], ids=["ours", "torch"])
def test_block_masks(kind: Any) -> None:
    blocks = kind.create_block_mask(causal, None, None, 48, 48, device="cpu", BLOCK_SIZE=16)

    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = flex_attention(query, key, value, slope, blocks, mask_mod=document(IDS))
        return out

    assert_same(model, operands(48))


def test_every_auxiliary_result() -> None:
    request = quire.AuxRequest(True, True, True, True, True)

    def model(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        out, aux = attention(query, Dense(key, value), mask=causal, return_aux=request)
        return out, *aux[:-1]  # no weights

    assert_same(model, operands())


def test_dropout_draws_from_torchs_generator() -> None:
    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, Dense(key, value), dropout_p=0.4)

    tensors = operands()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = []
    for function in (model, compiled):
        torch.manual_seed(7)
        out = function(*tensors)
        found.append((out, *torch.autograd.grad(out.sum(), tensors)))
    assert all(map(torch.equal, *found))
    assert not torch.equal(compiled(*tensors), compiled(*tensors))


# Memories


def test_ragged_memory() -> None:
    offsets, lengths = torch.tensor([0, 5, 5, 12]), torch.tensor([4, 0, 7])

    def model(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor) -> Tensor:
        memory = Ragged(key, value, offsets, lengths)
        return attention(query, memory, mask=causal, q_lengths=lengths)

    torch.manual_seed(0)
    packed = [torch.randn(12, 4, 16, requires_grad=True) for _ in range(3)]
    assert_same(model, [*packed, offsets])


def test_varlen() -> None:
    def model(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor) -> Tensor:
        out: Tensor = quire.varlen_attention(
            query, key, value, offsets, causal=True, window_size=(3, 0), softcap=4.0
        )
        return out

    torch.manual_seed(0)
    packed = [torch.randn(12, 4, 16, requires_grad=True) for _ in range(3)]
    assert_same(model, [*packed, torch.tensor([0, 5, 5, 12], dtype=torch.int32)])


@pytest.mark.parametrize("q_len", [1, 7])
def test_paged_memory(q_len: int) -> None:
    table, lengths = torch.tensor([[2, 0, -1], [1, 3, 4]], dtype=torch.int32), torch.tensor([9, 24])

    def model(query: Tensor, key: Tensor, value: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        return attention(query, Paged(key, value, table, lengths), mask=causal, score_mod=slope)

    torch.manual_seed(0)
    query = torch.randn(2, 4, q_len, 16)
    pages = [torch.randn(5, 2, 8, 16) for _ in range(2)]
    assert_same(model, [query, *pages, table, lengths])


# Lengths


def test_a_third_length_compiles_nothing() -> None:
    graphs = Graphs()

    def model(query: Tensor, key: Tensor, value: Tensor, ids: Tensor) -> Tensor:
        return attention(query, Dense(key, value), score_mod=slope, mask=document(ids) & causal)

    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for length in (24, 30, 41, 17, 64):
        tensors, ids = operands(length), IDS[:length]
        assert torch.equal(compiled(*tensors, ids), model(*tensors, ids))
    assert len(graphs.graphs) == 2


@pytest.mark.parametrize("kind", ["plain", "blocks", "pages"])
def test_every_size_and_number_may_be_a_symbol_from_the_first_call_on(kind: str) -> None:
    blocks = quire.create_block_mask(causal, None, None, 24, 24, device="cpu", BLOCK_SIZE=8)
    table = torch.arange(6).view(2, 3)

    def model(query: Tensor, key: Tensor, value: Tensor, scale: float, p: float) -> Tensor:
        if kind == "plain":
            return flex_attention(query, key, value, slope, scale=scale, dropout_p=p) + scale
        if kind == "blocks":
            return flex_attention(query, key, value, slope, blocks, scale=scale)
        pages = (x.view(2, 4, 3, 8, 16).transpose(1, 2).flatten(0, 1) for x in (key, value))
        return attention(query, Paged(*pages, table, [24, 20]), scale=scale, mask=causal)

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for scale, p in ((0.5, 0.0), (0.25, 0.0), (-1.5, 0.0)) + ((0.5, 0.25),) * (kind == "plain"):
        found, expected = ([], [])
        for function, results in ((compiled, found), (model, expected)):
            tensors = operands()
            torch.manual_seed(7)
            out = function(*tensors, scale, p)
            results += [out, *torch.autograd.grad(out.sum(), tensors)]
        assert all(map(torch.equal, found, expected))


# Objects that change


class Counter:
    """What a model may keep count in."""


def test_a_model_may_change_objects_before_and_after_a_call() -> None:
    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        counters = [Counter(), Counter()]
        for counter in counters:
            counter.__dict__.get("calls")  # Dynamo keeps a variable of this dictionary
        for counter in counters:
            counter.calls, counter.scale = 1, 2.0  # type: ignore[attr-defined]
            query = query * counter.scale * counter.calls  # type: ignore[attr-defined]
            query = attention(query, Dense(key, value), score_mod=slope)
        return query

    assert_same(model, operands())


def test_a_mod_may_not_change_objects() -> None:
    counter = Counter()

    def counted(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        counter.calls = 1  # type: ignore[attr-defined]
        return score * 2

    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, Dense(key, value), score_mod=counted)

    counter.calls = 0  # type: ignore[attr-defined]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"'calls'.* was changed from 0 to 1"):
        compiled(*operands())
    assert counter.calls == 0  # type: ignore[attr-defined]


# What cannot be part of a graph


def unsupported(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.special.bessel_j0(score)  # a line to be named


def test_a_mod_outside_of_the_table_breaks_the_graph() -> None:
    graphs = Graphs()

    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query + 1, Dense(key, value), score_mod=unsupported) * 2

    tensors = [x.detach() for x in operands()]
    with pytest.warns(quire.EagerModWarning):
        expected = model(*tensors)
    assert torch.equal(torch.compile(model, backend=graphs)(*tensors), expected)
    assert len(graphs.graphs) == 2


def test_a_mod_outside_of_the_table_is_named_if_a_graph_may_not_break() -> None:
    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query + 1, Dense(key, value), score_mod=unsupported) * 2

    compiled = torch.compile(model, backend="eager", fullgraph=True)
    line = r"test_compile.py:\d+: `return torch.special.bessel_j0\(score\)  # a line to be named`"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=line):
        compiled(*operands())


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is (deprecated|not supported)")
@pytest.mark.parametrize("way", ["torch.func", "forward_ad"])
def test_forward_mode_breaks_the_graph(way: str) -> None:
    query, key, value = (x.detach() for x in operands())
    tangent = torch.randn_like(query)

    def attend(query: Tensor) -> Tensor:
        return attention(query * 2, Dense(key, value), mask=causal)

    def model(query: Tensor) -> tuple[Tensor, Tensor]:
        if way == "torch.func":
            return torch.func.jvp(attend, (query,), (tangent,))
        with forward_ad.dual_level():
            primal, moved = forward_ad.unpack_dual(attend(forward_ad.make_dual(query, tangent)))
            return primal, moved

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"inside of torch\.func or forward_ad"):
        torch.compile(model, backend="eager", fullgraph=True)(query)
    compiled, expected = torch.compile(model, backend="eager")(query), model(query)
    assert expected[1].any() and all(map(torch.equal, compiled, expected))


def test_wrong_shapes_are_told_of_while_the_graph_is_made() -> None:
    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, Dense(key, value))

    query, key, value = (x.detach() for x in operands())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="same embedding dimension"):
        compiled(query, key[..., :8], value)
