"""Mods of one request: checked at submit, computed beside requests with others or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from served import alone, assert_same, engine, packed, prompt, run

from quire.engine import Engine
from quire.engine.request_mods import hides_later_keys
from quire.errors import CapturedIndexError, ModError
from quire.integrations.transformers import enable
from quire.mods import alibi, causal, document, prefix_lm, sliding_window

OPTIONS: dict[str, Any] = {"max_tokens": 8, "logprobs": 2}


def test_mods_change_their_own_request_alone() -> None:
    served = engine(max_tokens=9)
    mods: list[dict[str, Any]] = [
        {}, {"mask": sliding_window(3)}, {"score_mod": alibi(4)}, {"mask": sliding_window(3)},
        {"mask": sliding_window(5), "score_mod": alibi(4)},
    ]  # fmt: skip
    requests = [served.submit(prompt(20), **OPTIONS, **each) for each in mods]
    run(served)
    results = [request.result() for request in requests]
    for result, each in zip(results, mods, strict=True):
        assert_same(result, alone("llama", prompt(20), **OPTIONS, **each))
    assert_same(results[1], results[3])
    assert len({tuple(result.logprobs or ()) for result in results}) == 4


def test_a_mask_is_that_of_enable() -> None:
    model = packed("llama")
    wanted = alone("llama", prompt(20), **OPTIONS, mask=sliding_window(3))
    whole = Engine(model, page_size=4, n_pages=64, mask=sliding_window(3), start=False)
    assert_same(whole.submit(prompt(20), **OPTIONS).result(), wanted)
    enable(model, mask=sliding_window(3))
    ids = torch.tensor([prompt(20)])
    text = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8
    )
    enable(model)
    assert wanted.tokens == text[0, 20:].tolist()


def test_a_prompt_that_sees_all_of_itself_is_read_whole() -> None:
    served = engine(chunk=3, max_tokens=5)
    before = served.submit(prompt(14), **OPTIONS)  # whose pages are of no use to the next
    run(served)
    request = served.submit(prompt(14), mask=prefix_lm(14), causal=False, **OPTIONS)
    run(served)
    result = request.result()
    assert result.num_cached == 0
    assert_same(result, alone("llama", prompt(14), mask=prefix_lm(14), causal=False, **OPTIONS))
    assert result.logprobs != before.result().logprobs
    model = packed("llama")
    with torch.no_grad():
        ids = torch.tensor([prompt(14)])
        seen = model(ids, attention_mask=torch.ones(1, 1, 14, 14, dtype=torch.bool)).logits[0, -1]
    assert result.tokens[0] == int(seen.argmax())


@pytest.mark.parametrize(
    ("mask", "is_causal"),
    [
        (causal, True),
        (sliding_window(7), True),
        (document(torch.arange(200) // 30) & causal, True),
        (document(torch.arange(200) // 30), False),
        (prefix_lm(9), False),
        (lambda b, h, q_idx, kv_idx: q_idx + 1 >= kv_idx, False),
    ],
)
def test_bounds_show_whether_a_mask_hides_later_keys(mask: Any, is_causal: bool) -> None:
    assert hides_later_keys(mask, heads=4, length=200) == is_causal


def test_a_mod_that_is_wrong_is_refused_at_submit() -> None:
    served = engine()
    with pytest.raises(ModError, match=r"branch|if"):
        served.submit(prompt(5), mask=lambda b, h, q, k: q > 3 and k > 3)
    with pytest.raises(ModError):
        served.submit(prompt(5), score_mod=lambda score, b: score)
    assert served.statistics().submitted == 0


def test_engines_of_one_model_have_mods_of_their_own() -> None:
    model, wide = packed("llama"), sliding_window(5)
    enable(model, mask=wide)
    mods: list[dict[str, Any]] = [{"mask": sliding_window(3)}, {}, {"score_mod": alibi(4)}]
    sizes: dict[str, Any] = {"page_size": 4, "n_pages": 64, "start": False}
    served = [Engine(model, **sizes, **each) for each in mods]
    requests = [each.submit(prompt(20), **OPTIONS) for each in served]
    for _ in range(12):
        for each in served:
            each.step()
    for request, own in zip(requests, mods, strict=True):
        assert_same(request.result(), alone("llama", prompt(20), **OPTIONS, **own))
    ids = torch.tensor([prompt(20)])
    with torch.no_grad():
        seen = model(ids).logits[0, -1]
    found = Engine(model, **sizes, mask=wide).submit(prompt(20), max_tokens=1).result().tokens
    enable(model)
    assert found == [int(seen.argmax())]  # the model keeps the mods that enable gave it


@pytest.mark.parametrize("mask", [prefix_lm(14), causal, None])
def test_mods_of_an_engine_may_take_the_models_place(mask: Any) -> None:
    served = engine(chunk=3, max_tokens=5, mask=mask, causal=False)
    for _ in range(2):  # the second finds pages only if no token has seen a later one
        result = served.submit(prompt(14), **OPTIONS).result()
        assert_same(result, alone("llama", prompt(14), **OPTIONS, mask=mask, causal=False))
    assert result.num_cached == (12 if mask is causal else 0)


def test_mods_of_an_engine_are_checked_when_it_is_made() -> None:
    with pytest.raises(ModError, match=r"branch|if"):
        engine(mask=lambda b, h, q, k: q > 3 and k > 3)
    with pytest.raises(ModError):
        engine(score_mod=lambda score, b: score)


def test_a_mod_that_raises_ends_its_own_request() -> None:
    short = torch.zeros(12)

    def failing(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + short[q_idx]

    served = engine()
    good = served.submit(prompt(9), **OPTIONS)
    long = served.submit(prompt(9), score_mod=failing, **OPTIONS)
    options: dict[str, Any] = {"score_mod": failing, "max_tokens": 3, "logprobs": 2}
    brief = served.submit(prompt(6), **options)
    run(served)
    with pytest.raises(CapturedIndexError):
        long.result()
    assert long.finish_reason == "error"
    assert_same(good.result(), alone("llama", prompt(9), **OPTIONS))
    assert_same(brief.result(), alone("llama", prompt(6), **options))
