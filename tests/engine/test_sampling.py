"""Sampling: what options mean, that bits do not depend on others, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import byte_level

from quire.engine.sampling import Sampled, Sampler, Sampling, Vocabulary
from quire.engine.sampling.distribution import candidates, draw, largest_first, uniform
from quire.errors import ArgumentError, SamplingError, ShapeError

SIZE = 400
PLAIN = Vocabulary(size=SIZE)


def sampler(prompt: list[int] | None = None, **options: Any) -> Sampler:
    return Sampler(Sampling(**{"max_tokens": 1000} | options), prompt or [], PLAIN)


def kept(logits: torch.Tensor, **options: Any) -> list[int]:
    found = candidates(logits.numpy(), Sampling(**options))
    ids = np.arange(len(logits)) if found.ids is None else found.ids
    return ids[found.weights > 0].tolist()


def left_by(warpers: list[Any], logits: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    scores = logits[None]
    for warper in warpers:
        scores = warper(torch.zeros(1, 1, dtype=torch.long), scores)
    return (scores[0] > -math.inf).nonzero()[:, 0].tolist(), scores[0].softmax(0)


@given(
    seed=st.integers(0, 2**32),
    temperature=st.floats(0.2, 3.0),
    top_k=st.none() | st.integers(1, 2 * SIZE),
    top_p=st.just(1.0) | st.floats(0.05, 0.999),
    min_p=st.just(0.0) | st.floats(0.001, 0.9),
)
def test_candidates_are_those_of_transformers(
    seed: int, temperature: float, top_k: int | None, top_p: float, min_p: float
) -> None:
    logits = 4 * torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))
    warpers: list[Any] = [hf.TemperatureLogitsWarper(temperature)]
    warpers += [] if top_k is None else [hf.TopKLogitsWarper(top_k)]
    warpers += [hf.TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [hf.MinPLogitsWarper(min_p)] if min_p > 0 else []
    wanted, probabilities = left_by(warpers, logits)
    options = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    found = candidates(logits.numpy(), options)
    ids = np.arange(SIZE) if found.ids is None else found.ids
    # At a border, the sums of transformers are rounded otherwise than ours: one token may differ.
    assert len(set(ids.tolist()) ^ set(wanted)) <= 1
    both = sorted(set(ids.tolist()) & set(wanted))
    ours = torch.zeros(SIZE)
    ours[torch.from_numpy(ids)] = torch.from_numpy(found.weights / found.weights.sum())
    if ids.tolist() == wanted:
        torch.testing.assert_close(ours[both], probabilities[both], rtol=1e-4, atol=1e-6)


def test_ties() -> None:
    logits = torch.zeros(6)
    logits[4] = -1
    assert kept(logits, temperature=1.0, top_k=2) == [0, 1, 2, 3, 5]  # as in transformers
    assert kept(logits, temperature=1.0, top_p=0.3) == [0, 1]
    assert kept(logits, temperature=1.0, top_k=1, top_p=1e-9) == [0]
    assert sampler().sample(torch.zeros(SIZE)).token == 0
    assert largest_first(logits.numpy(), 3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("penalty", [0.5, 1.3, 8.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits, prompt, answer = torch.randn(SIZE), [3, 3, 9], [11, 3, 200]
    wanted = hf.RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([prompt + answer]), logits[None].clone()
    )[0]
    mine = sampler(prompt, repetition_penalty=penalty)
    for token in answer:
        mine.accept(token)
    assert torch.equal(torch.from_numpy(mine.changed(logits.numpy())), wanted)


def test_penalties_of_openai_count_the_answer_alone() -> None:
    logits = torch.randn(SIZE)
    mine = sampler([7, 7], presence_penalty=0.5, frequency_penalty=0.25)
    for token in [11, 3, 11]:
        mine.accept(token)
    wanted = logits.clone()
    wanted[3] -= 0.25 + 0.5
    wanted[11] -= 0.5 + 0.5
    changed = torch.from_numpy(mine.changed(logits.numpy()))
    torch.testing.assert_close(changed, wanted, rtol=0, atol=1e-6)


def test_bias() -> None:
    logits = torch.zeros(SIZE)
    logits[5] = 3.0
    before = logits.clone()
    assert sampler(logit_bias={9: 4.0}).sample(logits).token == 9
    assert sampler(logit_bias={5: -math.inf}).sample(logits).token == 0
    assert torch.equal(logits, before)  # the row of the model is not written to


def test_logprobs_are_those_of_the_model() -> None:
    logits = 3 * torch.randn(SIZE)
    wanted = logits.double().log_softmax(0)
    mine = sampler(logprobs=5, temperature=0.5, top_k=3, logit_bias={1: 50.0}, seed=1)
    found = mine.sample(logits)
    assert found.token == 1 and found.logprob == pytest.approx(float(wanted[1]), abs=1e-6)
    values, ids = wanted.topk(5)
    assert [token for token, _ in found.top_logprobs] == ids.tolist()
    assert [value for _, value in found.top_logprobs] == pytest.approx(values.tolist(), abs=1e-6)
    assert sampler(logprobs=0).sample(logits).top_logprobs == ()
    assert sampler().sample(logits) == Sampled(int(logits.argmax()))


def test_draws_have_their_probabilities() -> None:
    logits = torch.full((SIZE,), -math.inf)
    logits[[2, 40, 41, 399]] = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    found = candidates(logits.numpy(), Sampling(temperature=1.0))
    draws = [draw(found, uniform(7, 0, place)) for place in range(20_000)]
    counts = np.bincount(draws, minlength=SIZE)
    assert counts.sum() == counts[[2, 40, 41, 399]].sum()
    share = counts[[2, 40, 41, 399]] / len(draws)
    assert np.abs(share - [0.1, 0.2, 0.3, 0.4]).max() < 5 * math.sqrt(0.25 / len(draws))


def test_draws_at_the_ends_are_tokens_with_a_weight() -> None:
    logits = torch.full((SIZE,), -math.inf)
    logits[[3, 5]] = 0.0
    found = candidates(logits.numpy(), Sampling(temperature=1.0))
    assert draw(found, 0.0) == 3
    assert draw(found, math.nextafter(1.0, 0.0)) == 5
    assert draw(found, 1.0) == 5


def test_random_numbers_only_count() -> None:
    """They are the same in every process and version, so their values stand here."""
    places = [(0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 1, 0), (-1, 0, 0)]
    numbers = [uniform(*place) for place in places]
    assert len({*numbers}) == 5 and all(0 <= number < 1 for number in numbers)
    assert numbers[0] == 0.011546754286331562
    assert numbers[::-1] == [uniform(*place) for place in places[::-1]]


def test_a_token_depends_on_its_row_seed_and_place_alone() -> None:
    rows = 2 * torch.randn(16, SIZE)
    options: dict[str, Any] = {"temperature": 1.1, "top_p": 0.9, "seed": 11, "logprobs": 2}
    alone = sampler(**options)
    tokens = []
    for row in rows:
        found = alone.sample(row.clone())
        assert alone.sample(row) == found  # nothing changed
        alone.accept(found.token)
        tokens.append(found)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        again = sampler(**options)
        others = [sampler(**options | {"seed": seed}) for seed in range(3)]
        for row, wanted in zip(rows.flip(0).contiguous().flip(0), tokens, strict=True):
            for other in others:
                other.accept(other.sample(-row).token)
            assert again.sample(row) == wanted
            again.accept(wanted.token)


def test_samples_of_one_seed_differ_by_their_stream() -> None:
    rows = torch.randn(32, SIZE)
    first = sampler(temperature=1.0, seed=3, presence_penalty=1.0)
    second = first.fork(1)
    for each in (first, second):
        for row in rows:
            each.accept(each.sample(row).token)
    assert first.tokens != second.tokens and len(second.tokens) == 32
    direct = Sampler(first.options, [], PLAIN, stream=1)
    for row in rows:
        direct.accept(direct.sample(row).token)
    assert direct.tokens == second.tokens


def test_without_a_seed_one_is_drawn() -> None:
    assert sampler(temperature=1.0).seed != sampler(temperature=1.0).seed


def test_an_answer_ends() -> None:
    vocabulary = Vocabulary(size=SIZE, ends=[9])
    mine = Sampler(Sampling(max_tokens=2), [], vocabulary)
    mine.accept(1)
    assert mine.finished is None
    mine.accept(1)
    assert mine.finished == "length"
    for options, token, wanted in [
        ({}, 9, "stop"),
        ({"ignore_eos": True}, 9, None),
        ({"stop_tokens": [4]}, 4, "stop"),
        ({"max_tokens": 1}, 9, "stop"),
    ]:
        mine = Sampler(Sampling(**{"max_tokens": 5} | options), [], vocabulary)  # type: ignore[arg-type]
        mine.accept(token)
        assert mine.finished == wanted and mine.tokens == [token]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_raise(value: float, temperature: float) -> None:
    logits = torch.zeros(SIZE)
    logits[100] = value
    with pytest.raises(SamplingError, match=r"none NaN or \+inf, but the largest is"):
        sampler(temperature=temperature).sample(logits)
    with pytest.raises(SamplingError, match="one logit at least must be finite"):
        sampler(temperature=temperature).sample(torch.full((SIZE,), -math.inf))


def test_a_tiny_temperature_takes_the_likeliest() -> None:
    logits = 30 * torch.randn(SIZE)
    logits[0] = torch.finfo(torch.float32).min  # as masks of models have it
    for temperature in (1e-38, 1e-5, 1e-3):
        found = sampler(temperature=temperature).sample(logits)
        assert found.token == int(logits.argmax())


def test_what_is_forbidden_is_not_drawn_at_any_temperature() -> None:
    logits = torch.randn(SIZE)
    for temperature in (1e-5, 1.0, 3e38):
        options: dict[str, Any] = {"temperature": temperature, "top_k": 50, "top_p": 0.9}
        forbidden = dict.fromkeys(range(2, SIZE), -math.inf)
        for seed in range(20):
            drawn = sampler(logit_bias=forbidden, seed=seed, **options).sample(logits)
            assert drawn.token < 2


def test_logits_of_another_shape_raise() -> None:
    right = torch.zeros(SIZE)
    for logits in (right[1:], right[None], right.double(), right.bfloat16()):
        with pytest.raises(ShapeError, match=r"logits must be \[400\] of float32, but are"):
            sampler().sample(logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1, but is 0"),
        ({"temperature": -0.1}, "temperature must be a finite number of at least 0, but is -0.1"),
        ({"temperature": math.nan}, "temperature must be a finite number"),
        ({"temperature": True}, "temperature must be a finite number"),
        ({"temperature": 1e39}, r"temperature must be at most 3.4e\+38, the largest float32"),
        ({"temperature": 10**400}, "temperature must be at most"),
        ({"repetition_penalty": 1e39}, "repetition_penalty must be at most"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty must be a finite number above 0"),
        ({"top_k": 0}, "top_k must be a whole number of at least 1"),
        ({"top_p": 0}, "top_p must be a finite number above 0 and at most 1, but is 0"),
        ({"top_p": 1.1}, "top_p must be"),
        ({"min_p": -1}, "min_p must be a finite number of at least 0 and at most 1, but is -1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be a finite number above 0"),
        ({"presence_penalty": 2.5}, "presence_penalty must be a finite number of at least -2"),
        ({"frequency_penalty": "1"}, "frequency_penalty must be"),
        ({"logprobs": 21}, "logprobs must be at most 20, but is 21"),
        ({"logprobs": -1}, "logprobs must be a whole number of at least 0"),
        ({"seed": 1.5}, "seed must be a whole number, but is 1.5"),
        ({"logit_bias": [1]}, r"logit_bias must be a dict, but is \[1\]"),
        ({"logit_bias": {-1: 1.0}}, "a token of logit_bias must be a whole number of at least 0"),
        ({"logit_bias": {1: math.inf}}, "a number of logit_bias must be finite or -inf"),
        ({"logit_bias": {1: 1e39}}, r"finite or -inf in float32, but is 1e\+39\. Give token ids"),
        ({"logit_bias": {1: -(10**400)}}, "a number of logit_bias must be finite or -inf"),
        ({"logit_bias": {1: math.nan}}, "a number of logit_bias must be finite or -inf"),
        ({"stop": ""}, "stop must be up to 64 strings that are not empty"),
        ({"stop": ["a"] * 65}, "stop must be up to 64 strings"),
        ({"stop": [3]}, "stop must be up to 64 strings"),
        ({"stop": 5}, "stop must be a list, but is 5. Put it into one"),
        ({"stop_tokens": 5}, "stop_tokens must be a list, but is 5. Put it into one"),
        ({"grammar": "abc"}, "grammar must be a Grammar, but is 'abc'. Use Grammar.json_schema"),
        ({"early_stopping": 1}, 'early_stopping must be True, False or "never", but is 1'),
        ({"stop_tokens": [-3]}, "a stop token must be a whole number of at least 0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Sampling(**options)


def test_stops_may_be_none() -> None:
    assert Sampling(stop=None, stop_tokens=None) == Sampling()  # type: ignore[arg-type]


def test_options_are_checked_against_the_vocabulary() -> None:
    for options in ({"logit_bias": {SIZE: 1.0}}, {"stop_tokens": [SIZE]}):
        with pytest.raises(ArgumentError, match="must be below 400, the number of tokens, but is"):
            sampler(**options)
    with pytest.raises(ArgumentError, match="must have a tokenizer that spells tokens"):
        sampler(stop="x")
    tokenizer = byte_level()
    with pytest.raises(ArgumentError, match="have at most 20 of them, but llguidance says"):
        Vocabulary(tokenizer, size=20).spelling(3)
