"""Text from a cache of pages is the text from transformers' own, and takes fewer rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

hf = pytest.importorskip("transformers")

from tiny_models import (  # noqa: E402
    CLOSE,
    DECODERS,
    GENERATE,
    LENGTHS,
    NEW,
    T5,
    WHISPER,
    WINDOW,
    WINDOWED,
    assert_same_text,
    decoder,
    padded,
    pair,
    tokens,
)

from quire.errors import ArgumentError, OutOfPages, ReleasedRowsError  # noqa: E402
from quire.integrations.transformers import PagedCache, enable  # noqa: E402
from quire.kv import PagedKVCache  # noqa: E402

PAGE = 4

families = pytest.mark.parametrize("family", DECODERS)


def paged(model: Any, **options: Any) -> PagedCache:
    return PagedCache(model.config, page_size=PAGE, **options)


def pages(cache: PagedCache) -> PagedKVCache:
    """What is behind it, in order."""
    found = cache.pages
    assert found is not None
    found.check_integrity()
    return found


@torch.no_grad()
def step(model: Any, cache: Any, **inputs: Any) -> Tensor:
    return model(past_key_values=cache, use_cache=True, **inputs).logits  # type: ignore[no-any-return]


# Text


@families
def test_greedy_text_of_a_padded_batch(family: str) -> None:
    (eager, ours), batch = decoder(family), padded(LENGTHS, "left")._asdict()
    cache = paged(ours)
    wanted = eager.generate(**batch, **GENERATE)
    assert_same_text(ours.generate(**batch, **GENERATE, past_key_values=cache), wanted, 17)
    assert pages(cache).statistics().tokens == sum(LENGTHS) + len(LENGTHS) * (NEW - 1)


@pytest.mark.parametrize("family", WINDOWED)
def test_pages_behind_a_window_are_given_back(family: str) -> None:
    (eager, ours), batch = decoder(family), padded([40, 25], "left")._asdict()
    cache = paged(ours)
    wanted = eager.generate(**batch, **GENERATE)
    assert_same_text(ours.generate(**batch, **GENERATE, past_key_values=cache), wanted, 40)
    held = pages(cache)
    for layer, each in enumerate(cache.layers):
        for sequence in cache._rows.sequences:
            left = held.length(sequence) - held.start(layer, sequence)
            assert left <= WINDOW + 2 * PAGE if each.is_sliding else left > 30


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_beams_share_what_they_have_in_common(family: str) -> None:
    (eager, ours), batch = decoder(family), padded(LENGTHS, "left")._asdict()
    options = {**GENERATE, "num_beams": 4, "num_return_sequences": 2}
    cache = paged(ours)
    wanted = eager.generate(**batch, **options)
    found = ours.generate(**batch, **options, past_key_values=cache)
    assert torch.equal(found.sequences, wanted.sequences)
    torch.testing.assert_close(found.sequences_scores, wanted.sequences_scores, **CLOSE)
    now = pages(cache).statistics()
    assert now.shared > 0
    kinds = len(set(cache.is_sliding))  # of layers, each of which has pages of its own
    assert now.pages - now.free < kinds * now.tokens / PAGE


def test_samples_share_their_prompt() -> None:
    ids, found, caches = tokens(1, 41), [], []
    eager, ours = decoder("llama")
    for model, options in ((eager, {}), (ours, {"past_key_values": paged(ours)})):
        torch.manual_seed(5)
        options |= {**GENERATE, "do_sample": True, "num_return_sequences": 8}
        found.append(model.generate(ids, attention_mask=torch.ones_like(ids), **options).sequences)
        caches.append(options.get("past_key_values"))
    assert torch.equal(*found)
    assert len(found[0].unique(dim=0)) == 8
    now = pages(caches[1]).statistics()
    assert now.sequences == 8
    # The prompt once, but for the page that its last token and new ones share; and new tokens.
    assert now.pages - now.free == 10 + 8 * (1 + (1 + NEW - 1 - PAGE + PAGE - 1) // PAGE)


def test_prompts_that_happen_to_be_equal() -> None:
    eager, ours = decoder("qwen3")
    batch = padded([7, 9, 9, 7], "left")
    batch.input_ids[2] = batch.input_ids[1]
    wanted = eager.generate(**batch._asdict(), **GENERATE)
    cache = paged(ours)
    found = ours.generate(**batch._asdict(), **GENERATE, past_key_values=cache)
    assert_same_text(found, wanted, 9)
    assert pages(cache).statistics().shared == 9 // PAGE


@pytest.mark.parametrize("kind", ["whisper", "t5"])
def test_rows_that_a_later_layer_tells_apart(kind: str) -> None:
    """Decoders begin alike in every row, and look at different inputs."""
    if kind == "whisper":
        eager, ours = pair(hf.WhisperForConditionalGeneration, WHISPER)
        inputs = {"input_features": torch.randn(3, 8, 60)}
        inputs["input_features"][1] = inputs["input_features"][0]
    else:
        eager, ours = pair(hf.T5ForConditionalGeneration, T5)
        inputs = padded([9, 4, 9], "right")._asdict()
    generate = hf.GenerationMixin.generate
    cache = hf.EncoderDecoderCache(paged(ours), hf.DynamicCache(config=ours.config))
    wanted = generate(eager, **inputs, **GENERATE)
    assert_same_text(generate(ours, **inputs, **GENERATE, past_key_values=cache), wanted, 1)
    assert pages(cache.self_attention_cache).statistics().sequences == 3


# Steps


def test_one_prompt_read_once_and_continued_many_times() -> None:
    eager, ours = decoder("llama")
    ids, cache = tokens(2, 10), paged(ours)
    step(ours, cache, input_ids=ids)
    more = tokens(6, 3, seed=1)
    got = step(ours, cache, input_ids=more)
    with torch.no_grad():
        whole = torch.cat([ids.repeat_interleave(3, 0), more], 1)
        wanted = eager(whole).logits[:, 10:]
    torch.testing.assert_close(got, wanted, **CLOSE)
    assert pages(cache).statistics().shared == 2 * (10 // PAGE)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_prompt_in_pieces_the_first_of_which_is_padding(family: str) -> None:
    (eager, ours), batch = decoder(family), padded([3, 14], "left")._asdict()
    cache, options = paged(ours), {**GENERATE, "prefill_chunk_size": 5}
    wanted = eager.generate(**batch, **GENERATE)
    assert_same_text(ours.generate(**batch, **options, past_key_values=cache), wanted, 14)
    assert pages(cache).statistics().tokens == 3 + 14 + 2 * (NEW - 1)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("holes", [False, True])
def test_padding_elsewhere_is_kept_and_hidden(family: str, holes: bool) -> None:
    (eager, ours), batch = decoder(family), padded(LENGTHS, "right")
    real = batch.attention_mask
    if holes:
        real[1, [0, 1, 4]] = 0
    caches = hf.DynamicCache(config=eager.config), paged(ours)
    whole = torch.cat([real, torch.ones(3, 4)], 1)
    for ids, seen in (
        (batch.input_ids, real),
        (tokens(3, 1, seed=8), whole[:, :18]),
        (tokens(3, 3, seed=9), whole),
    ):
        wanted, got = (
            step(model, cache, input_ids=ids, attention_mask=seen)
            for model, cache in zip((eager, ours), caches, strict=True)
        )
        shown = seen[:, -ids.shape[1] :].bool()
        torch.testing.assert_close(got[shown], wanted[shown], **CLOSE)
    pages(caches[1])


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_a_mask_of_four_dimensions(kind: torch.dtype) -> None:
    eager, ours = decoder("llama")
    first, second = tokens(2, 6), tokens(2, 3, seed=1)
    shown = (torch.rand(2, 1, 3, 9) < 0.5) | torch.eye(9, dtype=torch.bool)[6:]
    added = torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(torch.float32).min)
    caches = hf.DynamicCache(config=eager.config), paged(ours)
    step(eager, caches[0], input_ids=first)
    step(ours, caches[1], input_ids=first)
    wanted = step(eager, caches[0], input_ids=second, attention_mask=added)
    mask = shown if kind == torch.bool else added
    got = step(ours, caches[1], input_ids=second, attention_mask=mask)
    torch.testing.assert_close(got, wanted, **CLOSE)


def test_mods_that_a_user_adds_count_from_the_first_token() -> None:
    model, batch = decoder("llama").ours, padded([7, 15], "left")
    bias = torch.linspace(-1, 1, 40)
    enable(
        model,
        mask=lambda b, h, q_idx, kv_idx: (kv_idx < 2) | (q_idx - kv_idx < 4),
        score_mod=lambda score, b, h, q_idx, kv_idx: score + bias[q_idx] * bias[kv_idx + 3],
    )
    plain = model.generate(**batch._asdict(), **GENERATE)
    found = model.generate(**batch._asdict(), **GENERATE, past_key_values=paged(model))
    assert_same_text(found, plain, 15)
    alone = model.generate(input_ids=batch.input_ids[:1, 8:], **GENERATE)
    assert torch.equal(alone.sequences[0], plain.sequences[0, 8:])


# Going back


def test_crop_and_go_on() -> None:
    (eager, ours), batch = decoder("llama"), padded([4, 9], "left")
    cache, more = paged(ours), tokens(2, 2, seed=3)
    step(ours, cache, **batch._asdict())
    step(ours, cache, input_ids=tokens(2, 5, seed=2))
    cache.crop(-5)
    assert cache.get_seq_length() == 9
    assert pages(cache).statistics().tokens == 13
    real = torch.cat([batch.attention_mask, torch.ones(2, 2)], 1)
    got = step(ours, cache, input_ids=more, attention_mask=real)
    with torch.no_grad():
        wanted = eager(torch.cat([batch.input_ids, more], 1), attention_mask=real).logits[:, 9:]
    torch.testing.assert_close(got, wanted, **CLOSE)


def test_reset_and_another_batch() -> None:
    eager, ours = decoder("gemma3")
    cache = paged(ours)
    for lengths in ([3, 8], [12, 2, 5]):
        batch = padded(lengths, "left")._asdict()
        wanted = eager.generate(**batch, **GENERATE)
        found = ours.generate(**batch, **GENERATE, past_key_values=cache)
        assert_same_text(found, wanted, max(lengths))
        cache.reset()
        assert cache.get_seq_length() == 0
        assert pages(cache).statistics().sequences == 0
    cache.batch_select_indices(torch.tensor([], dtype=torch.long))


def test_rows_that_are_chosen() -> None:
    ours, ids = decoder("llama").ours, tokens(3, 9)
    cache, other = paged(ours), paged(ours)
    step(ours, cache, input_ids=ids)
    cache.batch_select_indices(torch.tensor([True, False, True]))
    cache.batch_repeat_interleave(2)
    step(ours, other, input_ids=ids[[0, 0, 2, 2]])
    more = tokens(4, 2, seed=4)
    torch.testing.assert_close(
        step(ours, cache, input_ids=more), step(ours, other, input_ids=more), **CLOSE
    )
    assert pages(cache).statistics().sequences == 4


# Memory


def test_unequal_prompts_take_pages_for_their_own_tokens() -> None:
    ours = decoder("llama").ours
    lengths = [8, 11, 16, 22, 31, 44, 62, 88]
    cache, usual = paged(ours), hf.DynamicCache(config=ours.config)
    for each in (cache, usual):
        step(ours, each, **padded(lengths, "left")._asdict())
    held = pages(cache).statistics()
    page = pages(cache).shape.num_bytes * 2
    rows = sum(layer.keys.nbytes + layer.values.nbytes for layer in usual.layers)
    assert (held.pages - held.free) * page < 0.45 * rows


# What is refused


def test_another_attention_says_what_to_do() -> None:
    eager, ours = decoder("llama")
    with pytest.raises(
        ArgumentError, match=r"must be read by quire only.*attn_implementation=.quire"
    ):
        step(eager, paged(ours), input_ids=tokens(1, 4))


def test_gradients_are_refused() -> None:
    ours = decoder("llama").ours
    with pytest.raises(ArgumentError, match=r"no gradient passes through a cache.*torch.no_grad"):
        ours(tokens(1, 4), past_key_values=paged(ours))


def test_rows_that_do_not_fit() -> None:
    ours = decoder("llama").ours
    cache = paged(ours)
    step(ours, cache, input_ids=tokens(2, 4))
    with pytest.raises(ArgumentError, match=r"a step must have 2 rows.* but has 3"):
        step(ours, cache, input_ids=tokens(3, 1))


def test_padding_that_was_dropped_cannot_be_shown() -> None:
    ours = decoder("llama").ours
    cache = paged(ours)
    step(ours, cache, **padded([3, 6], "left")._asdict())
    real = torch.ones(2, 7)
    real[0, 0] = 0
    with pytest.raises(
        ArgumentError, match=r"at the start of row 0, its first 3 .* shows position 1"
    ):
        step(ours, cache, input_ids=tokens(2, 1), attention_mask=real)


def test_no_more_memory_than_allowed() -> None:
    ours = decoder("llama").ours
    with pytest.raises(OutOfPages):
        step(ours, paged(ours, max_bytes=4096), input_ids=tokens(1, 60))


def test_what_a_window_left_behind_does_not_come_back() -> None:
    ours = decoder("mistral").ours
    cache = paged(ours)
    for seed in range(3):
        step(ours, cache, input_ids=tokens(1, 20, seed=seed))
    with pytest.raises(ReleasedRowsError):
        cache.crop(-45)


def test_crop_takes_a_number_of_tokens() -> None:
    with pytest.raises(ArgumentError, match=r"negative or 0, but is 3. Give -3"):
        paged(decoder("llama").ours).crop(3)


def test_layers_that_keep_something_else() -> None:
    config = copy.deepcopy(DECODERS["qwen3"])
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ArgumentError, match="but one is 'linear_attention'"):
        PagedCache(config)
