"""Ways of generate over a cache of pages: speech, beams, drafts, turns of a chat, samples."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

hf = pytest.importorskip("transformers")

from tiny_models import (  # noqa: E402
    CHUNK,
    CLOSE,
    GENERATE,
    LENGTHS,
    NEW,
    T5,
    WHISPER,
    Pair,
    assert_same_text,
    decoder,
    padded,
    pair,
    tokens,
)

from quire.integrations.transformers import PagedCache  # noqa: E402

PAGE = 4


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # the fastest for small models, and on a busy machine


def paged(model: Any) -> PagedCache:
    return PagedCache(model.config, page_size=PAGE)


def beside_an_encoder(model: Any) -> Any:
    return hf.EncoderDecoderCache(paged(model), hf.DynamicCache(config=model.config))


def check(cache: PagedCache) -> None:
    assert cache.pages is not None
    cache.pages.check_integrity()


def assert_same_beams(found: Any, wanted: Any) -> None:
    assert torch.equal(found.sequences, wanted.sequences)
    torch.testing.assert_close(found.sequences_scores, wanted.sequences_scores, **CLOSE)


# Speech, and decoders that look at an encoder


@pytest.fixture
def speech() -> Pair:
    return pair(hf.WhisperForConditionalGeneration, WHISPER)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_whispers_own_generate(speech: Pair, options: dict[str, Any]) -> None:
    inputs = {"input_features": torch.randn(2, 8, 60), **GENERATE, **options}
    wanted, plain = (model.generate(**inputs) for model in speech)
    cache = beside_an_encoder(speech.ours)
    found = speech.ours.generate(**inputs, past_key_values=cache)
    assert wanted.sequences.shape[1] > 8
    assert torch.equal(plain.sequences, wanted.sequences)
    assert torch.equal(found.sequences, wanted.sequences)
    check(cache.self_attention_cache)
    for one, other in zip(
        found.past_key_values.self_attention_cache.layers,
        wanted.past_key_values.self_attention_cache.layers,
        strict=True,
    ):
        torch.testing.assert_close(one.keys, other.keys, **CLOSE)
        torch.testing.assert_close(one.values, other.values, **CLOSE)


def test_whispers_own_generate_of_a_long_recording(speech: Pair) -> None:
    sound, found = torch.randn(2, 8, 150), []
    for model in speech:
        model.generation_config.no_timestamps_token_id = 20
        found.append(
            model.generate(
                input_features=sound,
                attention_mask=torch.ones(2, 150),
                return_timestamps=True,
                max_new_tokens=8,
                do_sample=False,
            )
        )
    assert found[0].shape[1] > 8  # several pieces
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", ["whisper", "t5"])
def test_beams_beside_an_encoder(kind: str, speech: Pair) -> None:
    if kind == "whisper":
        eager, ours = speech
        inputs = {"input_features": torch.randn(3, 8, 60)}
    else:
        eager, ours = pair(hf.T5ForConditionalGeneration, T5)
        inputs = padded([9, 4, 9], "right")._asdict()
    inputs |= {**GENERATE, "num_beams": 3, "num_return_sequences": 2}
    generate, cache = hf.GenerationMixin.generate, beside_an_encoder(ours)
    wanted = generate(eager, **inputs)
    assert_same_beams(generate(ours, **inputs), wanted)
    assert_same_beams(generate(ours, **inputs, past_key_values=cache), wanted)
    check(cache.self_attention_cache)


# Drafts


def calls(model: Any) -> list[int]:
    """A list that grows by the number of tokens of each step that the model makes."""
    found: list[int] = []
    model.register_forward_hook(lambda _, __, out: found.append(out.logits.shape[1]))
    return found


def assert_drafts_are_checked(family: str, draft: int, **options: Any) -> None:
    """The text is what it is without drafts, some of which were rejected."""
    (eager, ours), ids = decoder(family), tokens(1, 20)
    ids = torch.cat([ids, ids[:, :3]], 1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **GENERATE}
    wanted, cache, steps = eager.generate(**inputs), paged(ours), calls(ours)
    found = ours.generate(**inputs, **options, past_key_values=cache)
    assert_same_text(found, wanted, 23)
    assert max(steps) == draft + 1 and sum(steps) > NEW
    assert cache.get_seq_length() == 23 + NEW - 1
    check(cache)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss", "gpt2"])
def test_drafts_from_the_prompt(family: str) -> None:
    # Longer than a window: what is behind it must not be given back before the draft is accepted.
    assert_drafts_are_checked(family, 10, prompt_lookup_num_tokens=10, max_matching_ngram_size=1)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_drafts_of_an_assistant(family: str) -> None:
    assistant = copy.deepcopy(decoder(family).ours)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    assistant.generation_config.num_assistant_tokens = 9
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0
    assert_drafts_are_checked(family, 9, assistant_model=assistant)


# Turns


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "llama4"])
def test_turns_of_a_chat_on_one_cache(family: str) -> None:
    (eager, ours), (ids, real) = decoder(family), padded(LENGTHS, "left")
    caches = hf.DynamicCache(config=eager.config), paged(ours)
    steps = calls(ours)
    for turn in range(2):
        wanted, found = (
            model.generate(ids, attention_mask=real, **GENERATE, past_key_values=cache)
            for model, cache in zip((eager, ours), caches, strict=True)
        )
        assert_same_text(found, wanted, ids.shape[1])
        assert torch.equal(found.sequences, wanted.sequences)  # else the next turn is another
        ids = torch.cat([wanted.sequences, tokens(3, 6, seed=7 + turn)], 1)
        real = torch.cat([real, torch.ones(3, NEW + 6)], 1)
    assert caches[1].get_seq_length() == 17 + NEW + 6 + NEW - 1
    assert len(steps) == 2 * NEW
    check(caches[1])


def test_chunks_count_from_the_first_token_of_a_row() -> None:
    eager, ours = decoder("llama4")
    lengths = [4 * CHUNK + 1, 2 * CHUNK + 5]
    batch, cache = padded(lengths, "left"), paged(ours)
    wanted = eager.generate(**batch._asdict(), **GENERATE)
    assert_same_text(ours.generate(**batch._asdict(), **GENERATE), wanted, max(lengths))
    found = ours.generate(**batch._asdict(), **GENERATE, past_key_values=cache)
    assert_same_text(found, wanted, max(lengths))
    alone = ours.generate(batch.input_ids[1:, -lengths[1] :], **GENERATE)
    assert torch.equal(alone.sequences[0], found.sequences[1, -lengths[1] - NEW :])


# Reading a cache


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_layers_give_copies_of_what_they_hold(family: str) -> None:
    (eager, ours), batch = decoder(family), padded(LENGTHS, "left")
    caches = hf.DynamicCache(config=eager.config), paged(ours)
    assert caches[1].layers[0].keys is None and caches[1].layers[0].values is None
    with torch.no_grad():
        for ids, real in ((batch.input_ids, batch.attention_mask), (tokens(3, 1), None)):
            if real is None:
                real = torch.cat([batch.attention_mask, torch.ones(3, 1)], 1)
            for model, cache in zip((eager, ours), caches, strict=True):
                model(ids, attention_mask=real, past_key_values=cache)
    for wanted, found in zip(caches[0].layers, caches[1].layers, strict=True):
        held = real[:, -wanted.keys.shape[2] :].bool()
        for theirs, copied in ((wanted.keys, found.keys), (wanted.values, found.values)):
            assert copied.shape == theirs.shape
            copied, theirs = copied.transpose(1, 2), theirs.transpose(1, 2)
            torch.testing.assert_close(copied[held], theirs[held], **CLOSE)
            assert not copied[~held].any()
    caches[1].reset()
    assert caches[1].layers[0].keys is None


# Rows that share


@pytest.mark.parametrize("family", ["gpt_oss", "gpt2", "qwen2", "qwen3", "gemma3", "llama4"])
def test_beams(family: str) -> None:
    (eager, ours), batch = decoder(family), padded(LENGTHS, "left")._asdict()
    options, cache = {**GENERATE, "num_beams": 3, "num_return_sequences": 2}, paged(ours)
    wanted = eager.generate(**batch, **options)
    assert_same_beams(ours.generate(**batch, **options, past_key_values=cache), wanted)
    assert cache.pages is not None and cache.pages.statistics().shared > 0
    check(cache)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gpt2"])
def test_samples_of_unequal_prompts(family: str) -> None:
    (eager, ours), batch = decoder(family), padded(LENGTHS, "left")._asdict()
    options = {**GENERATE, "do_sample": True, "num_return_sequences": 3}
    found: list[Tensor] = []
    cache = paged(ours)
    for model, given in ((eager, None), (ours, cache)):
        torch.manual_seed(4)
        text = model.generate(**batch, **options, past_key_values=given)
        found.append(text.sequences)
    assert torch.equal(*found)
    assert len(found[0].unique(dim=0)) == 9
    assert cache.pages is not None
    now = cache.pages.statistics()
    assert now.sequences == 9
    assert now.shared >= sum(length // PAGE for length in LENGTHS) - len(LENGTHS)
    check(cache)
