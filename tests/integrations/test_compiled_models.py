"""Models on quire, compiled whole: the same bits, and no graph for every length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

hf = pytest.importorskip("transformers")

from graphs import Graphs  # noqa: E402
from tiny_models import (  # noqa: E402
    BERT,
    GENERATE,
    LENGTHS,
    Batch,
    decoder,
    padded,
    pair,
    tokens,
)

from quire.errors import MissingModelError  # noqa: E402
from quire.integrations import smollm2  # noqa: E402
from quire.integrations.transformers import PagedCache, enable  # noqa: E402

MANY_LENGTHS = [[17, 17], [5, 17], [5, 23], [9, 31], [3, 40]]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(model: Any, call: Any, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients of a training step."""
    model.zero_grad()
    found = call(**inputs)
    found.loss.backward()
    return found.logits, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same_steps(model: Any, batches: list[dict[str, Any]]) -> None:
    """A compiled model trains as the model does, bit for bit, with two graphs for all lengths."""
    graphs = Graphs("aot_eager")
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for inputs in batches:
        found, expected = step(model, compiled, **inputs), step(model, model, **inputs)
        assert torch.equal(found[0], expected[0])
        assert found[1].keys() == expected[1].keys() and found[1]
        for name, gradient in expected[1].items():
            assert torch.equal(found[1][name], gradient), name
    assert len(graphs.graphs) <= 2  # the second one has a symbol for the length


@pytest.mark.parametrize(
    ("family", "side"),
    [
        ("llama", None),
        ("llama", "left"),
        ("llama", "right"),
        ("mistral", "left"),
        ("gemma2", "right"),
        ("llama4", "left"),
    ],
)
def test_training_steps(family: str, side: str | None) -> None:
    batches = []
    for lengths in MANY_LENGTHS:
        batch = padded(lengths, side or "left")
        inputs = {"input_ids": batch.input_ids, "labels": batch.input_ids}
        batches.append(inputs | ({} if side is None else {"attention_mask": batch.attention_mask}))
    assert_same_steps(decoder(family).ours, batches)


def test_an_encoder() -> None:
    batches = [padded(lengths, "right") for lengths in MANY_LENGTHS]
    model = pair(hf.BertForMaskedLM, BERT).ours
    assert_same_steps(model, [batch._asdict() | {"labels": batch.input_ids} for batch in batches])


@pytest.mark.parametrize("family", ["gpt_oss", "gpt2"])
def test_logits(family: str) -> None:
    """The loss of these families cannot be compiled whole, whatever their attention is."""
    model, graphs = decoder(family).ours, Graphs("aot_eager")
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    for lengths in MANY_LENGTHS:
        inputs = padded(lengths, "left")._asdict()
        with torch.no_grad():
            assert torch.equal(compiled(**inputs).logits, model(**inputs).logits)
    assert len(graphs.graphs) <= 2


def test_padding_in_the_middle() -> None:
    batch = padded([20, 12], "left")
    batch.attention_mask[0, 4:7] = 0
    assert_same_steps(decoder("llama").ours, [batch._asdict() | {"labels": batch.input_ids}])


def test_packed_documents() -> None:
    text = tokens(1, 30)
    positions = torch.cat([torch.arange(11), torch.arange(19)])[None]
    inputs = {"input_ids": text, "position_ids": positions, "labels": text, "use_cache": False}
    assert_same_steps(decoder("llama").ours, [inputs])


def test_mods_of_the_user_count_from_the_first_token() -> None:
    def near_or_first(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx < 4) | (kv_idx < 2)

    def nearer(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - 0.1 * (q_idx - kv_idx)

    model = enable(decoder("llama").ours, mask=near_or_first, score_mod=nearer)
    batches = [padded(lengths, "left") for lengths in MANY_LENGTHS]
    assert_same_steps(model, [batch._asdict() | {"labels": batch.input_ids} for batch in batches])


def test_a_mask_of_four_dimensions() -> None:
    text, seen = tokens(2, 18), torch.rand(2, 1, 18, 18) < 0.6
    seen |= torch.eye(18, dtype=torch.bool)
    inputs = {"input_ids": text, "labels": text, "use_cache": False}
    model = decoder("llama").ours
    assert_same_steps(model, [inputs | {"attention_mask": seen}])
    torch._dynamo.reset()
    bias = torch.zeros(2, 1, 18, 18).masked_fill(~seen, -1e9)
    assert_same_steps(model, [inputs | {"attention_mask": bias}])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_inductor() -> None:
    model, batch = decoder("llama").ours, padded(LENGTHS, "left")
    inputs = batch._asdict() | {"labels": batch.input_ids}
    expected, gradients = step(model, model, **inputs)
    found, others = step(model, torch.compile(model, fullgraph=True), **inputs)
    real = batch.attention_mask.bool()
    torch.testing.assert_close(found[real], expected[real], rtol=0, atol=2e-5)
    for name, gradient in gradients.items():
        atol = 1e-4 * float(gradient.abs().max()) + 1e-6
        torch.testing.assert_close(others[name], gradient, rtol=0, atol=atol, msg=name)


def test_export() -> None:
    model, batch = decoder("mistral").ours, padded([5, 17], "left")
    lengths = {1: torch.export.Dim("length", min=2, max=100)}
    inputs = batch._asdict() | {"use_cache": False}
    shapes = {"input_ids": lengths, "attention_mask": lengths, "use_cache": None}
    program = torch.export.export(model, (), inputs, dynamic_shapes=shapes)
    for other in ([5, 17], [31, 20]):
        inputs = padded(other, "left")._asdict() | {"use_cache": False}
        assert torch.equal(program.module()(**inputs).logits, model(**inputs).logits)
    assert "quire.attention" in str(program.graph)


# --- generate ------------------------------------------------------------------------------------


def text_of(model: Any, batch: Batch, **options: Any) -> Any:
    return model.generate(**batch._asdict(), **GENERATE, **options)


def assert_same_text(found: Any, expected: Any) -> None:
    assert torch.equal(found.sequences, expected.sequences)
    for one, other in zip(found.scores, expected.scores, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_text(family: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = decoder(family).ours, padded(LENGTHS, "left")
    options = {} if cache == "dynamic" else {"cache_implementation": cache}
    expected = text_of(model, batch, **options)
    graphs = Graphs("aot_eager")
    forward = torch.compile(model.forward, backend=graphs, fullgraph=True)
    monkeypatch.setattr(model, "forward", forward)
    assert_same_text(text_of(model, batch, **options), expected)
    made = len(graphs.graphs)
    assert made <= 3  # the prompt, the first new token, and all others
    assert_same_text(text_of(model, batch, **options), expected)
    assert len(graphs.graphs) == made


def test_generate_compiles_by_itself() -> None:
    """It makes the masks of a static cache outside of the graph, where padding is known."""
    model, batch = decoder("llama").ours, padded(LENGTHS, "left")
    options = {"cache_implementation": "static"}
    expected = text_of(model, batch, **options)
    graphs = Graphs("aot_eager")

    def keep(*graph: Any) -> Any:  # transformers copies the config, but not a function
        return graphs(*graph)

    how = hf.CompileConfig(fullgraph=True, backend=keep, mode=None)
    how._compile_all_devices = True  # transformers leaves processors out unless told so
    assert_same_text(text_of(model, batch, **options, compile_config=how), expected)
    assert 1 <= len(graphs.graphs) <= 2


def test_pages_are_read_between_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = decoder("llama").ours, padded(LENGTHS, "left")
    expected = text_of(model, batch, past_key_values=PagedCache(model.config))
    graphs = Graphs("aot_eager")
    monkeypatch.setattr(model, "forward", torch.compile(model.forward, backend=graphs))
    found = text_of(model, batch, past_key_values=PagedCache(model.config))
    assert_same_text(found, expected)
    made = len(graphs.graphs)
    assert_same_text(text_of(model, batch, past_key_values=PagedCache(model.config)), expected)
    assert len(graphs.graphs) == made


@pytest.mark.slow
def test_smollm2() -> None:
    try:
        model, _ = smollm2.load()
    except MissingModelError as absent:
        pytest.skip(str(absent))
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    with torch.no_grad():
        for length in (17, 40, 33, 100):
            text = torch.randint(0, 1000, (2, length))
            real = torch.ones_like(text)
            real[0, : length // 3] = 0
            found = compiled(input_ids=text, attention_mask=real).logits
            assert torch.equal(found, model(input_ids=text, attention_mask=real).logits)
    assert len(graphs.graphs) == 2
