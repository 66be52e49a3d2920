"""Training of models on quire: encoders, checkpoints, and packed documents."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

hf = pytest.importorskip("transformers")

from tiny_models import BERT, WHISPER, Pair, decoder, padded, pair, tokens  # noqa: E402

CLOSE = {"rtol": 0.0, "atol": 2e-5}
LENGTHS = [5, 17, 11]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # the fastest for small models, and on a busy machine


def gradients(model: Any, **inputs: Any) -> dict[str, Tensor]:
    """Of one step, by parameter."""
    model.train()
    model.zero_grad()
    model(**inputs).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(models: Pair, **inputs: Any) -> None:
    wanted, got = (gradients(model, **inputs) for model in models)
    assert got.keys() == wanted.keys()
    assert max(float(gradient.abs().max()) for gradient in wanted.values()) > 0
    for name, gradient in wanted.items():
        # A bias of keys adds the same to all scores of a query: its gradient is 0 but for rounding.
        atol = 1e-4 * float(gradient.abs().max()) + 1e-6
        torch.testing.assert_close(got[name], gradient, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("side", ["left", "right"])
def test_bert(side: str) -> None:
    batch = padded(LENGTHS, side)
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    assert_same_gradients(pair(hf.BertForMaskedLM, BERT), **batch._asdict(), labels=labels)


def without_dropout() -> Any:
    config = copy.deepcopy(WHISPER)
    config.dropout = config.attention_dropout = config.activation_dropout = 0.0
    return config


def test_whisper() -> None:
    models = pair(hf.WhisperForConditionalGeneration, without_dropout())
    assert_same_gradients(models, input_features=torch.randn(2, 8, 60), labels=tokens(2, 7))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_gradient_checkpointing(family: str, reentrant: bool) -> None:
    models, batch = decoder(family), padded(LENGTHS, "right")
    inputs = {**batch._asdict(), "use_cache": False}
    inputs["labels"] = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    runs: list[object] = []
    layer = models.ours.model.layers[0].self_attn
    layer.register_forward_pre_hook(lambda *_: runs.append(None))
    wanted = {name: each.clone() for name, each in gradients(models.ours, **inputs).items()}
    for model in models:
        options = {"use_reentrant": reentrant}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    runs.clear()
    assert_same_gradients(models, **inputs)
    assert len(runs) == 2  # forward, and once more for the backward pass
    found = {name: p.grad for name, p in models.ours.named_parameters() if p.grad is not None}
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_packed_documents_in_two_rows(family: str) -> None:
    """Rows are cut in different places."""
    models, ids = decoder(family), tokens(2, 24)
    cuts = [[5, 12, 7], [15, 9]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in cuts])
    packed = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    with torch.no_grad():
        together = models.ours(**packed).logits
        for row, lengths in enumerate(cuts):
            parts = ids[row : row + 1].split(lengths, 1)
            alone = torch.cat([models.ours(part).logits for part in parts], 1)
            torch.testing.assert_close(together[row : row + 1], alone, **CLOSE)
    assert_same_gradients(models, **packed, labels=ids)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_flattened_batch(family: str) -> None:
    """transformers' collator puts documents one behind the other and starts positions anew."""
    models = decoder(family)
    texts = [tokens(length, seed=length) for length in LENGTHS]
    collate = hf.DataCollatorWithFlattening(return_tensors="pt")
    batch = dict(collate([{"input_ids": text.tolist()} for text in texts]))
    assert batch["input_ids"].shape == (1, sum(LENGTHS)) and "attention_mask" not in batch
    with torch.no_grad():
        together = models.ours(**batch, use_cache=False).logits
        alone = torch.cat([models.ours(text[None]).logits for text in texts], 1)
    torch.testing.assert_close(together, alone, **CLOSE)
    assert_same_gradients(models, **batch, use_cache=False)
