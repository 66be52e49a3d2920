"""Beam search: the texts that `generate(num_beams=...)` of transformers finds, whoever else is
served, and with pages so few that beams are preempted.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from served import engine, packed, prompt, run
from tiny_models import DECODERS, VOCABULARY, decoder
from tiny_tokenizers import byte_level

from quire.engine import Engine, Grammar
from quire.errors import ArgumentError, RequestTooLong, SamplingError

LENGTHS = (5, 17, 1)
SEARCHES: list[dict[str, Any]] = [
    {"beams": 2},
    {"beams": 4, "length_penalty": 0.0},
    {"beams": 3, "length_penalty": 2.0, "early_stopping": True},
    {"beams": 4, "length_penalty": -1.0, "early_stopping": "never"},
    {"beams": 3, "length_penalty": 1.5, "early_stopping": "never"},
]


def searched(family: str, length: int, search: dict[str, Any], **options: Any) -> Any:
    """What transformers finds: tokens and scores of all beams, best first."""
    ids = torch.tensor([prompt(length)])
    own = {name: value for name, value in search.items() if name != "beams"}
    found = decoder(family).eager.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=9,
        num_beams=search["beams"],
        num_return_sequences=search["beams"],
        return_dict_in_generate=True,
        output_scores=True,
        **own,
        **options,
    )
    return [row[length:].tolist() for row in found.sequences], found.sequences_scores.tolist()


def ended(tokens: list[int], ends: tuple[int, ...]) -> list[int]:
    """The tokens up to the first that ends a text: transformers fills the rest."""
    return next((tokens[: at + 1] for at, token in enumerate(tokens) if token in ends), tokens)


@pytest.mark.parametrize("family", DECODERS)
def test_beams_are_those_of_transformers(family: str) -> None:
    served = engine(family, n_pages=200)
    asked = {
        (length, place): served.submit(prompt(length), max_tokens=9, n=search["beams"], **search)
        for length in LENGTHS
        for place, search in enumerate(SEARCHES[:3])
    }
    run(served)
    for (length, place), request in asked.items():
        wanted, _ = searched(family, length, SEARCHES[place])
        assert [each.tokens for each in request.results()] == wanted


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("ends", [(3,), (3, 8, 20)])
def test_texts_that_end_are_found(search: dict[str, Any], ends: tuple[int, ...]) -> None:
    """A bias makes ends likely enough to come in the middle of a search."""
    bias: dict[int, float] = dict.fromkeys(ends, 2.0)
    served = engine(n_pages=200)
    served.vocabulary.ends = frozenset(ends)
    biased: Any = {(token,): number for token, number in bias.items()}
    requests = [
        served.submit(prompt(length), max_tokens=9, n=search["beams"], logit_bias=bias, **search)
        for length in LENGTHS
    ]
    run(served)
    finished = []
    for length, request in zip(LENGTHS, requests, strict=True):
        wanted, _ = searched(
            "llama", length, search, eos_token_id=list(ends), pad_token_id=0, sequence_bias=biased
        )
        results = request.results()
        assert [each.tokens for each in results] == [ended(each, ends) for each in wanted]
        finished += [each.finish_reason for each in results]
    assert "stop" in finished


@functools.cache
def alone(length: int, place: int) -> Any:
    with engine("llama", n_pages=400, max_tokens=512, prefix=False) as served:
        request = served.submit(prompt(length), max_tokens=20, n=2, logprobs=2, **SEARCHES[place])
        return request.results()


@pytest.mark.parametrize("preemption", ["recompute", "save"])
@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("sizes", [{"n_pages": 44}, {"n_pages": 37, "chunk": 2, "max_tokens": 5}])
def test_beams_do_not_notice_others(prefix: bool, sizes: dict[str, int], preemption: str) -> None:
    """Also where all beams of a request are computed again, or were saved."""
    served = engine(prefix=prefix, preemption=preemption, **sizes)
    requests = []
    for length in LENGTHS:
        for place in range(3):
            options = {"max_tokens": 20, "n": 2, "logprobs": 2, **SEARCHES[place]}
            requests.append((length, place, served.submit(prompt(length), **options)))
        served.submit(prompt(length), max_tokens=7)
    core = served._core
    while served.step():
        if core.counts.steps % 4 == 0 and core.counts.preempted < 30 and core.running:
            core.preempt(core.running[-1])  # who has beams shares pages, so they last long
        served.check_integrity()
    for length, place, request in requests:
        for one, other in zip(request.results(), alone(length, place), strict=True):
            assert (one.tokens, one.logprobs, one.top_logprobs) == (
                other.tokens,
                other.logprobs,
                other.top_logprobs,
            )
    now = served.statistics()
    assert now.preempted >= 10 and now.finished == now.submitted == 21
    assert now.pages - now.free_pages == now.kept_pages


def test_a_search_is_refused_that_can_never_end_well() -> None:
    served = engine(n_pages=10)
    with pytest.raises(RequestTooLong, match=r"of 4 beams need 12 pages of 4, and the limit is 10"):
        served.submit(prompt(5), max_tokens=8, beams=4)
    with pytest.raises(ArgumentError, match="n must be at most 2, the number of beams, but is 3"):
        served.submit(prompt(5), max_tokens=2, beams=2, n=3)
    with pytest.raises(ArgumentError, match="temperature must be 0 with beams"):
        served.submit(prompt(5), max_tokens=2, beams=2, temperature=0.5)
    with pytest.raises(ArgumentError, match=f"beams must be at most {VOCABULARY // 2} for"):
        engine(n_pages=100).submit(prompt(1), max_tokens=1, beams=VOCABULARY)
    with pytest.raises(ArgumentError, match='early_stopping must be True, False or "never"'):
        served.submit(prompt(5), beams=2, early_stopping="soon")
    assert served.statistics().submitted == 0


def test_a_search_can_be_cancelled() -> None:
    served = engine()
    request = served.submit(prompt(9), max_tokens=8, beams=3, n=2)
    for _ in range(3):
        served.step()
    assert served.look().answers[0].num_tokens == 0 and served.look().answers[0].state == "writes"
    request.cancel()
    run(served)
    assert [each.finish_reason for each in request.answers] == ["cancelled"] * 2
    now = served.statistics()
    assert now.pages - now.free_pages == now.kept_pages


def test_a_grammar_may_allow_fewer_texts() -> None:
    tokenizer = byte_level()
    model = packed("llama")
    del model  # its vocabulary is smaller than the tokenizer's
    from transformers import LlamaConfig, LlamaForCausalLM

    from quire.linear import pack

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    served = Engine(pack(LlamaForCausalLM(config)), tokenizer, n_pages=60, start=False)
    request = served.submit("the", max_tokens=12, beams=3, n=3, grammar=Grammar.regex("yes|no"))
    run(served)
    texts = [answer.result().text for answer in request.answers[:2]]
    assert sorted(texts) == ["no", "yes"]
    assert "".join(token.text for token in request.answers[0]) == texts[0]
    with pytest.raises(SamplingError, match=r"must find 3 texts, but .* allows only 2"):
        request.answers[2].result()


@pytest.mark.parametrize("place", [0, 1])
def test_one_answer_of_a_search_may_be_cancelled(place: int) -> None:
    options: dict[str, Any] = {"max_tokens": 5, "beams": 3, "n": 2}
    served = engine()
    request = served.submit(prompt(9), **options)
    served.step()
    request.answers[place].cancel()
    served.step()
    assert [each.finish_reason for each in request.answers].count("cancelled") == 1
    run(served)
    wanted = engine().submit(prompt(9), **options).results()
    cancelled, other = request.answers[place].result(), request.answers[1 - place].result()
    assert (cancelled.tokens, cancelled.finish_reason) == ([], "cancelled")
    assert other.tokens == wanted[1 - place].tokens
    both = served.submit(prompt(9), **options)
    both.cancel()
    assert [each.finish_reason for each in both.results()] == ["cancelled"] * 2
    assert not served.step()
