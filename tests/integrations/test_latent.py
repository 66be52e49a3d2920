"""Models that cache latents (MLA): pages hold each token once, and nothing is expanded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

hf = pytest.importorskip("transformers")

from served import assert_same, engine, prompt, run  # noqa: E402
from tiny_models import (  # noqa: E402
    CLOSE,
    GENERATE,
    LATENT,
    LENGTHS,
    NEW,
    assert_same_text,
    decoder,
    padded,
    tokens,
)

from quire.engine import Engine  # noqa: E402
from quire.errors import ArgumentError  # noqa: E402
from quire.integrations.transformers import PagedCache, enable  # noqa: E402
from quire.integrations.transformers.latent import Absorbed  # noqa: E402
from quire.linear import pack  # noqa: E402
from quire.mods import sliding_window  # noqa: E402

families = pytest.mark.parametrize("family", LATENT)


def paged(model: Any, **options: Any) -> PagedCache:
    return PagedCache(model.config, page_size=4, **options)


@families
def test_text_of_a_padded_batch(family: str) -> None:
    (eager, ours), batch = decoder(family), padded(LENGTHS, "left")._asdict()
    cache = paged(ours)
    wanted = eager.generate(**batch, **GENERATE)
    assert_same_text(ours.generate(**batch, **GENERATE, past_key_values=cache), wanted, 17)
    pages, config = cache.pages, LATENT[family]
    assert pages is not None
    pages.check_integrity()
    assert pages.statistics().tokens == sum(LENGTHS) + len(LENGTHS) * (NEW - 1)
    width = config.kv_lora_rank + config.qk_rope_head_dim
    assert (pages.shape.heads, pages.shape.head_dim) == (1, width)
    assert pages.shape.num_bytes == 4 * width * 4  # rows of a page, numbers of a row, bytes


@families
def test_logits_of_chunks(family: str) -> None:
    eager, ours = decoder(family)
    ids, cache = tokens(2, 21), paged(ours)
    with torch.no_grad():
        wanted = eager(ids, use_cache=False).logits
        found = [
            ours(part, past_key_values=cache, use_cache=True).logits
            for part in ids.split((9, 1, 1, 10), dim=1)
        ]
    torch.testing.assert_close(torch.cat(found, 1), wanted, **CLOSE)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_the_cache_shows_what_that_of_transformers_has(family: str) -> None:
    eager, ours = decoder(family)
    ids, cache, theirs = tokens(2, 7), paged(ours), hf.DynamicCache(config=eager.config)
    with torch.no_grad():
        ours(ids, past_key_values=cache, use_cache=True)
        eager(ids, past_key_values=theirs, use_cache=True)
    for mine, other in zip(cache.layers, theirs.layers, strict=True):
        torch.testing.assert_close(mine.keys, other.keys, **CLOSE)
        torch.testing.assert_close(mine.values, other.values, **CLOSE)


def test_beams_samples_and_tokens_that_are_taken_back() -> None:
    eager, ours = decoder("deepseek_v3")
    ids = tokens(1, 9)
    beams = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False}
    wanted = eager.generate(ids, **beams)
    assert torch.equal(ours.generate(ids, **beams, past_key_values=paged(ours)), wanted)
    cache, more = paged(ours), tokens(1, 5, seed=3)
    with torch.no_grad():
        ours(ids, past_key_values=cache, use_cache=True)
        ours(tokens(1, 4, seed=2), past_key_values=cache, use_cache=True)
        cache.crop(-4)
        found = ours(more, past_key_values=cache, use_cache=True).logits
        wanted = eager(torch.cat((ids, more), 1), use_cache=False).logits[:, 9:]
    torch.testing.assert_close(found, wanted, **CLOSE)


def test_mods_of_the_user_see_the_scores_of_the_model() -> None:
    window = sliding_window(3)

    def halved(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * 0.5 + h

    ours = enable(decoder("deepseek_v3").ours, mask=window, score_mod=halved)
    ids = tokens(2, 15)
    with torch.no_grad():
        wanted = ours(ids, use_cache=False).logits
        found = ours(ids, past_key_values=paged(ours), use_cache=True).logits
    torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("family", ["deepseek_v2", "llama"])
def test_pages_of_another_dtype(family: str, dtype: torch.dtype) -> None:
    """Logits are near; a second step reads what the first has written."""
    eager, ours = decoder(family)
    ids, cache = tokens(2, 12), paged(ours, dtype=dtype)
    with torch.no_grad():
        wanted = eager(ids, use_cache=False).logits
        found = [
            ours(part, past_key_values=cache, use_cache=True).logits for part in ids.split(6, 1)
        ]
    assert cache.pages is not None and cache.pages.shape.dtype == dtype
    error = (torch.cat(found, 1) - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
    assert 0 < error < {torch.bfloat16: 0.02, torch.int8: 0.03, torch.float8_e4m3fn: 0.12}[dtype]


def test_a_layer_that_hides_its_weights() -> None:
    """Packed weights, and weights that change after a call."""
    eager, ours = decoder("deepseek_v3")
    ids = tokens(1, 9)
    with torch.no_grad():
        wanted = eager(ids, use_cache=False).logits
        packed = pack(ours, weights="float32")
        found = packed(ids, past_key_values=paged(ours), use_cache=True).logits
        torch.testing.assert_close(found, wanted, **CLOSE)
        eager, ours = decoder("deepseek_v3")
        ours(ids, past_key_values=paged(ours), use_cache=True)
        for model in (eager, ours):
            for layer in model.model.layers:
                layer.self_attn.kv_b_proj.weight.mul_(1.5)
        wanted = eager(ids, use_cache=False).logits
        found = ours(ids, past_key_values=paged(ours), use_cache=True).logits
    torch.testing.assert_close(found, wanted, **CLOSE)


def test_a_layer_that_expands_latents_otherwise_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = decoder("deepseek_v3").ours
    kind: Any = type(ours.model.layers[0].self_attn)
    made = kind.expand_kv

    def otherwise(self: nn.Module, latent: Any, rotated: Any) -> Any:
        found = made(self, latent, rotated)
        return (found[0] * 2, found[1]) if isinstance(latent, Tensor) else found

    monkeypatch.setattr(kind, "expand_kv", otherwise)
    with torch.no_grad(), pytest.raises(ArgumentError, match="DeepseekV3Attention does something"):
        ours(tokens(1, 5), past_key_values=paged(ours), use_cache=True)


def test_a_model_that_was_not_prepared_is_told_how() -> None:
    eager = decoder("deepseek_v2").eager
    cache = PagedCache(eager.config)
    with torch.no_grad(), pytest.raises(ArgumentError, match=r"call enable\(model\)"):
        eager(tokens(1, 5), past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_answers_of_an_engine(family: str) -> None:
    eager = decoder(family).eager
    served = engine(family, n_pages=100)
    requests = [served.submit(prompt(length), max_tokens=8) for length in LENGTHS]
    run(served)
    for length, request in zip(LENGTHS, requests, strict=True):
        ids = torch.tensor([prompt(length)])
        text = eager.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8
        )
        assert request.result().tokens == text[0, length:].tolist()


@families
def test_a_packed_layer_computes_each_row_by_itself(family: str) -> None:
    """So requests share pages, and nobody notices the others."""
    model = pack(copy.deepcopy(decoder(family).ours))
    options: dict[str, Any] = {"max_tokens": 5, "logprobs": 2}

    def served(**sizes: Any) -> Engine:
        return Engine(model, page_size=4, n_pages=100, start=False, **sizes)

    wanted = {
        length: served(max_tokens=512, prefix=False).submit(prompt(length), **options).result()
        for length in (5, 17, 30)
    }
    for sizes in ({"chunk": 3, "max_tokens": 9}, {"max_tokens": 64}):
        together = served(**sizes)
        for _ in range(2):  # the second time, pages are found
            requests = [together.submit(prompt(length), **options) for length in wanted]
            run(together)
            for request, expected in zip(requests, wanted.values(), strict=True):
                assert_same(request.result(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_heads_do_not_know_other_rows(dtype: torch.dtype) -> None:
    model = pack(copy.deepcopy(decoder("youtu").ours).to(dtype))
    (module, *_) = [each for each in model.modules() if hasattr(each, "kv_b_proj")]
    width = model.config.qk_nope_head_dim + model.config.qk_rope_head_dim
    query, out = torch.randn(3, 4, 65, width).to(dtype), torch.randn(3, 65, 4, 16).to(dtype)
    with torch.no_grad():
        absorbed = Absorbed(module, query, 16, 4)
        plain = query[..., : model.config.qk_nope_head_dim].float() @ absorbed.keys.float()
        assert torch.allclose(absorbed.query(query)[..., :16].float(), plain, atol=0.1, rtol=0.02)
        for first, last in ((0, 1), (3, 20), (64, 65)):
            one = absorbed.query(query[1:2, :, first:last])
            assert torch.equal(one, absorbed.query(query)[1:2, :, first:last])
            one = absorbed.out(out[1:2, first:last])
            assert torch.equal(one, absorbed.out(out)[1:2, first:last])
