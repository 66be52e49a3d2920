"""Models of transformers on quire say what they say with eager attention."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

hf = pytest.importorskip("transformers")

from tiny_models import (  # noqa: E402
    BERT,
    CLOSE,
    DECODERS,
    GENERATE,
    LENGTHS,
    T5,
    VOCABULARY,
    WHISPER,
    WINDOW,
    WINDOWED,
    Pair,
    assert_same_text,
    decoder,
    padded,
    pair,
    tokens,
)

from quire.errors import ArgumentError  # noqa: E402
from quire.integrations.transformers import (  # noqa: E402
    AttentionWeightsWarning,
    PagedCache,
    TokenMask,
    enable,
    register,
)
from quire.integrations.transformers.attention import attend  # noqa: E402
from quire.integrations.transformers.cache import LayerStates  # noqa: E402
from quire.mods import and_masks, causal, distance_bias, sliding_window  # noqa: E402

families = pytest.mark.parametrize("family", DECODERS)
sides = pytest.mark.parametrize("side", ["left", "right"])


@torch.no_grad()
def logits(model: Any, **inputs: Any) -> Tensor:
    return model(**inputs).logits  # type: ignore[no-any-return]


def assert_same_logits(models: Pair, real: Tensor | None = None, **inputs: Any) -> None:
    wanted, got = (logits(model, **inputs) for model in models)
    if real is not None:
        wanted, got = wanted[real.bool()], got[real.bool()]
    assert wanted.std() > 0.1
    torch.testing.assert_close(got, wanted, **CLOSE)


# One step


@families
def test_logits(family: str) -> None:
    assert_same_logits(decoder(family), input_ids=tokens(2, 19))


@families
@sides
def test_logits_of_a_padded_batch(family: str, side: str) -> None:
    batch = padded(LENGTHS, side)
    assert_same_logits(decoder(family), batch.attention_mask, **batch._asdict())


def test_logits_where_a_mask_has_holes() -> None:
    real = torch.ones(2, 12)
    real[0, [0, 3, 4]] = real[1, [7, 11]] = 0
    assert_same_logits(decoder("llama"), real, input_ids=tokens(2, 12), attention_mask=real)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("heads", [1, 4])
def test_a_mask_of_four_dimensions(kind: str, heads: int) -> None:
    shown = (torch.rand(2, heads, 10, 10) < 0.5) | torch.eye(10, dtype=torch.bool)
    added = torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(torch.float32).min)
    models, ids = decoder("llama"), tokens(2, 10)
    wanted = logits(models.eager, input_ids=ids, attention_mask=added)
    got = logits(models.ours, input_ids=ids, attention_mask=shown if kind == "bool" else added)
    torch.testing.assert_close(got, wanted, **CLOSE)


def test_no_matrix_of_queries_by_keys() -> None:
    length = 1000
    model, ids, real = decoder("gemma2").ours, tokens(2, length), torch.ones(2, length)
    real[0, :300] = 0

    class Largest(TorchDispatchMode):
        """The size of the largest tensor that an operation returns."""

        size = 0

        def __torch_dispatch__(
            self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = function(*args, **kwargs or {})
            sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            self.size = max([self.size, *sizes])
            return result

    with Largest() as largest:
        logits(model, input_ids=ids, attention_mask=real)
    assert 2 * length * VOCABULARY <= largest.size < length * length / 4


def test_a_sink_and_a_softcap_matter() -> None:
    for family, name in (("gpt_oss", "sinks"), ("gemma2", "attn_logit_softcapping")):
        model, ids = decoder(family).ours, tokens(1, 9)
        before = logits(model, input_ids=ids)
        for layer in model.model.layers:
            value = getattr(layer.self_attn, name)
            changed = torch.nn.Parameter(value + 2) if isinstance(value, Tensor) else None
            setattr(layer.self_attn, name, changed)
        assert (logits(model, input_ids=ids) - before).abs().max() > 0.01


# Text


@families
def test_greedy_text_of_a_padded_batch(family: str) -> None:
    models, batch = decoder(family), padded(LENGTHS, "left")
    eager, ours = (model.generate(**batch._asdict(), **GENERATE) for model in models)
    assert_same_text(ours, eager, prompt=max(LENGTHS))


@pytest.mark.parametrize("family", WINDOWED)
def test_greedy_text_far_beyond_the_window(family: str) -> None:
    models, batch = decoder(family), padded([4 * WINDOW, 2 * WINDOW + 1], "left")
    eager, ours = (model.generate(**batch._asdict(), **GENERATE) for model in models)
    assert_same_text(ours, eager, prompt=4 * WINDOW)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_static_cache_longer_than_its_text(family: str) -> None:
    models, batch = decoder(family), padded(LENGTHS, "left")
    options = {**GENERATE, "cache_implementation": "static"}
    eager, ours = (model.generate(**batch._asdict(), **options) for model in models)
    assert_same_text(ours, eager, prompt=max(LENGTHS))


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_beams(family: str) -> None:
    models, batch = decoder(family), padded(LENGTHS, "left")
    options = {**GENERATE, "num_beams": 3, "num_return_sequences": 2}
    eager, ours = (model.generate(**batch._asdict(), **options) for model in models)
    assert torch.equal(ours.sequences, eager.sequences)
    torch.testing.assert_close(ours.sequences_scores, eager.sequences_scores, **CLOSE)


def test_samples_of_one_seed() -> None:
    found = []
    for model in decoder("qwen3"):
        torch.manual_seed(3)
        options = {**GENERATE, "do_sample": True, "num_return_sequences": 4}
        found.append(model.generate(**padded(LENGTHS, "left")._asdict(), **options).sequences)
    assert torch.equal(*found)
    assert len(found[0].unique(dim=0)) > len(LENGTHS)


def test_a_prompt_in_two_steps() -> None:
    models, ids = decoder("gemma3"), tokens(2, 4 * WINDOW)
    found = []
    for model in models:
        first = model(ids[:, : 3 * WINDOW], use_cache=True)
        second = model(ids[:, 3 * WINDOW :], past_key_values=first.past_key_values)
        found.append(torch.cat([first.logits, second.logits], 1).detach())
    torch.testing.assert_close(*found, **CLOSE)
    torch.testing.assert_close(found[1], logits(models.ours, input_ids=ids), **CLOSE)


# Encoders, and decoders that look at one


@sides
def test_bert(side: str) -> None:
    batch = padded(LENGTHS, side)
    models = pair(hf.BertForMaskedLM, BERT)
    assert_same_logits(models, batch.attention_mask, **batch._asdict())


def test_whisper() -> None:
    models = pair(hf.WhisperForConditionalGeneration, WHISPER)
    sound = torch.randn(2, 8, 60)
    assert_same_logits(models, input_features=sound, decoder_input_ids=tokens(2, 7))
    eager, ours = (
        hf.GenerationMixin.generate(model, input_features=sound, **GENERATE) for model in models
    )
    assert_same_text(ours, eager, prompt=1)


def test_t5() -> None:
    models, batch = pair(hf.T5ForConditionalGeneration, T5), padded(LENGTHS, "right")
    assert_same_logits(models, **batch._asdict(), decoder_input_ids=tokens(3, 7))
    eager, ours = (model.generate(**batch._asdict(), **GENERATE) for model in models)
    assert_same_text(ours, eager, prompt=1)


# Training


def gradients(model: Any, **inputs: Any) -> dict[str, Tensor]:
    """Of one step, by parameter."""
    model.train()
    model(**inputs).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(models: Pair, **inputs: Any) -> None:
    wanted, got = (gradients(model, **inputs) for model in models)
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        scale = float(gradient.abs().max())
        assert scale > 0, name
        torch.testing.assert_close(got[name], gradient, rtol=0, atol=1e-4 * scale, msg=name)


@families
def test_gradients_of_a_step(family: str) -> None:
    batch = padded(LENGTHS, "right")
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    assert_same_gradients(decoder(family), **batch._asdict(), labels=labels)


def test_gradients_of_a_learned_bias() -> None:
    batch, models = padded(LENGTHS, "right"), pair(hf.T5ForConditionalGeneration, T5)
    assert_same_gradients(models, **batch._asdict(), labels=tokens(3, 7))
    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert models.ours.get_parameter(name).grad.abs().max() > 0


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_packed_documents_do_not_see_each_other(family: str) -> None:
    models, ids = decoder(family), tokens(1, sum(LENGTHS))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    packed = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    alone = [logits(models.ours, input_ids=part) for part in ids.split(LENGTHS, 1)]
    torch.testing.assert_close(logits(models.ours, **packed), torch.cat(alone, 1), **CLOSE)
    assert_same_gradients(models, **packed, labels=ids)


def test_dropout_is_drawn_from_torchs_generator_and_only_in_training() -> None:
    config = copy.deepcopy(DECODERS["llama"])
    config.attention_dropout = 0.3
    model, ids = pair(hf.AutoModelForCausalLM, config).ours, tokens(2, 9)
    plain = logits(model, input_ids=ids)
    model.train()
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(logits(model, input_ids=ids))
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])
    model.eval()
    assert torch.equal(logits(model, input_ids=ids), plain)


# Mods of the user's


def test_a_mask_that_a_user_adds_counts_from_the_first_token() -> None:
    model, batch = decoder("llama").ours, padded([7, 15], "left")
    enable(model, mask=lambda b, h, q_idx, kv_idx: (kv_idx < 2) | (q_idx - kv_idx < 4))
    together = logits(model, **batch._asdict())
    alone = logits(model, input_ids=batch.input_ids[:1, 8:])
    torch.testing.assert_close(together[:1, 8:], alone, **CLOSE)
    enable(model)
    assert not torch.allclose(logits(model, input_ids=batch.input_ids[:1, 8:]), alone, atol=1e-3)


def test_mods_that_a_user_adds_are_what_they_say() -> None:
    eager, ours = decoder("llama")
    ids, places = tokens(2, 12), torch.arange(12)
    bias = torch.linspace(-1, 1, 23)
    enable(ours, mask=sliding_window(3), score_mod=distance_bias(bias))
    seen = and_masks(causal, sliding_window(3))(
        torch.zeros(1), torch.zeros(1), places[:, None], places
    )
    added = bias[places[:, None] - places + 11]
    mask = torch.where(seen, added, torch.finfo(torch.float32).min)
    wanted = logits(eager, input_ids=ids, attention_mask=mask.expand(2, 1, 12, 12))
    torch.testing.assert_close(logits(ours, input_ids=ids), wanted, **CLOSE)


# What is refused, and what is said


def test_loading_by_name() -> None:
    register()
    model = hf.AutoModelForCausalLM.from_config(
        copy.deepcopy(DECODERS["llama"]), attn_implementation="quire"
    )
    assert model.config._attn_implementation == "quire"


def test_weights_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    models = pair(hf.WhisperForConditionalGeneration, WHISPER)
    ours, theirs = (each.model.encoder.layers[0].self_attn for each in (models.ours, models.eager))
    states = torch.randn(2, 5, 32)
    out, weights = ours(states, output_attentions=True)
    wanted_out, wanted = theirs(states, output_attentions=True)
    torch.testing.assert_close(out, wanted_out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights, wanted, rtol=1e-4, atol=1e-6)
    monkeypatch.setattr("quire.integrations.transformers.attention.MOST_WEIGHTS", 10)
    with pytest.warns(AttentionWeightsWarning, match=r"weights of a layer are more than 10\. Give"):
        assert ours(states, output_attentions=True)[1] is None


@pytest.mark.parametrize("where", ["in continuous batching", "in an engine"])
def test_who_gives_no_weights_says_so(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class OfEngine(LayerStates):
        def attend(self, *_: Any, **__: Any) -> torch.Tensor:
            return states

    states = torch.randn(1, 2, 3, 4)
    place = "quire.integrations.transformers.attention"
    monkeypatch.setattr(f"{place}.attend_to_cache", lambda *_, **__: states)
    given = OfEngine() if where == "in an engine" else states
    cache = None if where == "in an engine" else object()
    run = functools.partial(attend, torch.nn.Linear(1, 1), states, given, given, None, cache=cache)
    with pytest.warns(AttentionWeightsWarning, match=f"returns None {where}. Call the model"):
        out, weights = run(output_attentions=True)
    assert out is states and weights is None
    assert run()[1] is None  # warnings are errors here


def test_weights_of_a_model_with_padding() -> None:
    models = decoder("llama")
    batch = padded([2, 6], "left")._asdict()
    found, wanted = (
        model(**batch, output_attentions=True).attentions for model in (models.ours, models.eager)
    )
    assert len(found) == len(wanted) > 0
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        real = batch["attention_mask"][:, None, :, None].bool()  # eager spreads those of padding
        torch.testing.assert_close(ours, theirs.where(real, 0.0) + ours.where(~real, 0.0))


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss", "deepseek_v3"])
def test_weights_over_pages(family: str) -> None:
    """Of a prompt with padding, and of a step after it, where transformers has them."""
    models, batch = decoder(family), padded([2, 9, 14], "left")
    caches = PagedCache(models.ours.config, page_size=4), hf.DynamicCache()
    ids = [batch.input_ids, tokens(3, 1), tokens(3, 2)]
    mask = torch.nn.functional.pad(batch.attention_mask, (0, 3), value=1)
    end = 0
    for each in ids:
        end += each.shape[1]
        ours, theirs = (
            model(each, attention_mask=mask[:, :end], past_key_values=cache, output_attentions=True)
            for model, cache in zip((models.ours, models.eager), caches, strict=True)
        )
        real = mask[:, None, end - each.shape[1] : end, None].bool()
        assert len(ours.attentions) == len(theirs.attentions) == 2
        for mine, wanted in zip(ours.attentions, theirs.attentions, strict=True):
            assert mine.shape == (3, 4, each.shape[1], end)
            torch.testing.assert_close(mine, wanted.where(real, 0.0), rtol=1e-4, atol=1e-5)


def test_a_mask_that_is_none() -> None:
    model = decoder("llama").ours
    layer = model.model.layers[0].self_attn
    states, position = torch.randn(1, 3, 32), model.model.rotary_emb
    embeddings = position(states, torch.arange(3)[None])
    with pytest.raises(ArgumentError, match=r"must be .* but is str in a layer.*Leave it"):
        layer(states, position_embeddings=embeddings, attention_mask="causal")
    with pytest.raises(ArgumentError, match="in a layer"):
        layer(states, position_embeddings=embeddings, attention_mask=torch.ones(1, 3))


def test_what_layers_are_given() -> None:
    seen = []
    model = decoder("llama").ours
    model.model.layers[1].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    logits(model, **padded([2, 4], "left")._asdict())
    (mask,) = seen
    assert isinstance(mask, TokenMask)
    assert mask.shape == (2, 1, 4, 4)
    assert mask.origins is not None and mask.origins.tolist() == [2, 0]
