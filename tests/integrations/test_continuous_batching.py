"""transformers' own continuous batching, whose scheduler attends with quire over its own pages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import decoder, tokens
from torch import nn
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager

from quire.errors import ArgumentError
from quire.integrations.transformers import enable
from quire.integrations.transformers.attention import attend
from quire.mods import sliding_window

LENGTHS = (5, 17, 11, 40)
SIZES = ContinuousBatchingConfig(page_size=4, num_blocks=64, max_batch_tokens=24)


def answers(model: Any) -> list[list[int]]:
    config = GenerationConfig(
        max_new_tokens=9, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cuda_graph=False
    )
    prompts = [tokens(length, seed=length).tolist() for length in LENGTHS]
    results = model.generate_batch(
        prompts, generation_config=config, continuous_batching_config=SIZES, progress_bar=False
    )
    return [result.generated_tokens for result in results.values()]


def allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ContinuousBatchingManager, "switch_to_cb_friendly_attn", lambda *_, **__: None
    )


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2"])
def test_answers_are_those_of_generate(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch)
    eager, ours = decoder(family)
    found = answers(ours)
    for length, answer in zip(LENGTHS, found, strict=True):
        ids = tokens(length, seed=length)[None]
        text = eager.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=9
        )
        assert answer == text[0, length:].tolist()


def test_mods_hold_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch)
    model = copy.deepcopy(decoder("llama").ours)
    before = answers(model)
    enable(model, mask=sliding_window(3))
    changed = answers(model)
    assert before != changed
    ids = tokens(17, seed=17)[None]
    text = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=9
    )
    assert changed[1] == text[0, 17:].tolist()


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_mods_of_a_window_know_absolute_positions(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once its window is full, a layer has a few keys only, and they have other positions."""
    allow(monkeypatch)
    model = copy.deepcopy(decoder(family).ours)
    table = 3 * torch.randn(64, generator=torch.Generator().manual_seed(0))
    enable(
        model,
        mask=lambda b, h, q_idx, kv_idx: (kv_idx % 3 != 1) | (q_idx == kv_idx),
        score_mod=lambda score, b, h, q_idx, kv_idx: score + table[kv_idx],
    )
    for length, answer in zip(LENGTHS, answers(model), strict=True):
        ids = tokens(length, seed=length)[None]
        text = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=9
        )
        assert answer == text[0, length:].tolist()


def test_another_cache_is_not_ignored() -> None:
    query = torch.randn(1, 4, 3, 8)
    with pytest.raises(ArgumentError, match="continuous batching, but is object"):
        attend(
            nn.Module(), query, query, query, None, cache=object(),
            cu_seq_lens_q=None, cu_seq_lens_k={}, read_index=[], write_index=[],
        )  # fmt: skip
