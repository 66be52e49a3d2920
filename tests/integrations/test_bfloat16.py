"""Models in bfloat16: as near to float32 as eager attention, and the same from pages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

hf = pytest.importorskip("transformers")

from tiny_models import BERT, WHISPER, Pair, decoder, padded, pair, tokens  # noqa: E402

from quire.integrations.transformers import PagedCache  # noqa: E402

LENGTHS = [5, 17, 11]
WORSE = 1.5  # the same sums in another order round to another error

families = pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gpt_oss"])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # the fastest for small models, and on a busy machine


@torch.no_grad()
def logits(model: Any, real: Tensor, **inputs: Any) -> Tensor:
    return model(**inputs).logits.float()[real.bool()]  # type: ignore[no-any-return]


def assert_as_near_as_eager(models: Pair, real: Tensor, **inputs: Any) -> None:
    exact = logits(models.eager, real, **inputs)
    narrow = {
        name: value.bfloat16() if value.is_floating_point() else value
        for name, value in inputs.items()
    }
    theirs, ours = (
        float((logits(copy.deepcopy(model).bfloat16(), real, **narrow) - exact).square().mean())
        for model in models
    )
    assert 0 < ours**0.5 <= WORSE * theirs**0.5


@families
def test_the_error_of_logits(family: str) -> None:
    batch = padded(LENGTHS, "left")
    assert_as_near_as_eager(decoder(family), batch.attention_mask, **batch._asdict())


def test_the_error_of_encoders() -> None:
    batch = padded(LENGTHS, "right")
    models = pair(hf.BertForMaskedLM, BERT)
    assert_as_near_as_eager(models, batch.attention_mask, **batch._asdict())
    ids = tokens(2, 7)
    assert_as_near_as_eager(
        pair(hf.WhisperForConditionalGeneration, WHISPER),
        torch.ones_like(ids),
        input_features=torch.randn(2, 8, 60),
        decoder_input_ids=ids,
    )


@families
def test_greedy_text_is_the_same_from_pages(family: str) -> None:
    model, batch = decoder(family).ours.bfloat16(), padded(LENGTHS, "left")._asdict()
    options = {"max_new_tokens": 8, "do_sample": False}
    cache = PagedCache(model.config, page_size=4)
    found = model.generate(**batch, **options, past_key_values=cache)
    assert torch.equal(found, model.generate(**batch, **options))
    assert cache.pages is not None and cache.pages.shape.dtype == torch.bfloat16
