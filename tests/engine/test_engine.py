"""Requests that come and go: answers, refusals, threads, the end of an engine."""

from __future__ import annotations

import asyncio
import copy
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers as hf
from forking import forks
from served import alone, assert_same, engine, packed, prompt, run
from tiny_models import DECODERS, OTHERS, WINDOWED, decoder

from quire.engine import Completion, Engine, Event, Token
from quire.errors import ArgumentError, EngineClosed, RequestTooLong
from quire.linear import pack

LENGTHS = (5, 17, 11, 30, 1)


@pytest.mark.parametrize("family", [*DECODERS, *OTHERS])
def test_greedy_answers_are_those_of_generate(family: str) -> None:
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


@pytest.mark.filterwarnings("ignore:attn_implementation")  # it says the same
@pytest.mark.parametrize("family", ["Bloom", "Falcon", "GPTJ", "Mpt", "CodeGen"])
def test_models_with_attention_of_their_own_are_refused(family: str) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    ends = {"bos_token_id": None, "eos_token_id": None}
    config = getattr(hf, f"{family}Config")(vocab_size=61, **sizes, **ends)
    if hasattr(config, "rotary_dim"):
        config.rotary_dim = 4
    model = hf.AutoModelForCausalLM.from_config(config)
    message = f"interface of transformers, but {family}ForCausalLM computes it itself. Use generate"
    with pytest.raises(ArgumentError, match=message):
        Engine(model, n_pages=8, prefix=False, start=False)


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_a_request_does_not_notice_others_or_chunks(family: str, chunk: int) -> None:
    options: dict[str, Any] = {"max_tokens": 7, "logprobs": 3, "temperature": 0.9, "seed": 11}
    served = engine(family, chunk=chunk, max_tokens=max(8, chunk))
    requests = [served.submit(prompt(length), **options) for length in LENGTHS]
    run(served)
    for length, request in zip(LENGTHS, requests, strict=True):
        assert_same(request.result(), alone(family, prompt(length), **options))


def test_a_request_does_not_notice_others_in_bfloat16() -> None:
    model = pack(copy.deepcopy(decoder("llama").ours).bfloat16())
    options: dict[str, Any] = {"max_tokens": 7, "logprobs": 3}
    results = []
    for sizes in ({"chunk": 3, "max_tokens": 8}, {"max_tokens": 200, "max_requests": 1}):
        served = Engine(model, page_size=4, n_pages=64, start=False, **sizes)
        requests = [served.submit(prompt(length), **options) for length in LENGTHS]
        run(served)
        results.append([request.result() for request in requests])
    for one, other in zip(*results, strict=True):
        assert_same(one, other)


def test_reading_an_answer_computes_its_steps() -> None:
    served = engine()
    request = served.submit(prompt(9), max_tokens=5)
    tokens = [token.token for token in request]
    assert tokens == request.result().tokens and len(tokens) == 5
    assert [token.token for token in request] == tokens  # again, from the first on


def test_a_thread_serves_requests_from_several_places() -> None:
    with Engine(packed("llama"), page_size=4, n_pages=64) as served:
        first = served.submit(prompt(9), max_tokens=5)

        async def read() -> list[Token]:
            other = served.submit(prompt(12), max_tokens=6)
            return [token async for token in other]

        tokens = asyncio.run(read())
        assert [each.token for each in tokens] == alone("llama", prompt(12), max_tokens=6).tokens
        assert first.result(timeout=60).tokens == alone("llama", prompt(9), max_tokens=5).tokens


def test_async_reading_computes_steps_where_no_thread_does() -> None:
    served = engine()

    async def read() -> list[int]:
        return [token.token async for token in served.submit(prompt(9), max_tokens=5)]

    assert asyncio.run(read()) == alone("llama", prompt(9), max_tokens=5).tokens


def test_pages_that_an_answer_wrote_serve_the_next_turn() -> None:
    served = engine()
    first = served.submit(prompt(10), max_tokens=12).result()
    turn = [*prompt(10), *first.tokens, *prompt(6)]
    second = served.submit(turn, max_tokens=6, logprobs=1).result()
    assert second.num_cached == 20  # of 21 tokens that are in pages
    assert_same(second, alone("llama", turn, max_tokens=6, logprobs=1))
    other = served.submit(turn, max_tokens=6, salt=b"another tenant").result()
    assert other.num_cached == 0 and other.tokens == second.tokens


def test_preempted_requests_get_the_same_bits() -> None:
    served = engine(n_pages=16, prefix=False)
    requests = [served.submit(prompt(12 + n), max_tokens=30, logprobs=1) for n in range(4)]
    run(served)
    assert served.statistics().preempted > 0
    for n, request in enumerate(requests):
        assert_same(request.result(), alone("llama", prompt(12 + n), max_tokens=30, logprobs=1))


def test_samples_share_their_prompt() -> None:
    served = engine()
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 1.0, "seed": 3, "logprobs": 0}
    request = served.submit(prompt(13), n=4, **options)
    results = request.results()
    assert served.statistics().prompt_tokens == 13
    assert len({tuple(result.tokens) for result in results}) > 1
    assert_same(results[0], alone("llama", prompt(13), **options))
    again = engine(n_pages=12, prefix=False).submit(prompt(13), n=4, **options)
    for one, other in zip(results, again.results(), strict=True):
        assert_same(one, other)


def test_a_cancelled_request_ends_and_gives_its_pages_back() -> None:
    served = engine(prefix=False)
    request, other = (served.submit(prompt(9), max_tokens=40) for _ in range(2))
    for _ in range(5):
        served.step()
    request.cancel()
    run(served)
    assert request.result().finish_reason == "cancelled"
    assert other.result().finish_reason == "length"
    now = served.statistics()
    assert now.pages == now.free_pages and now.running == now.waiting == 0


def test_a_higher_priority_goes_first() -> None:
    served = engine(max_requests=1)
    events: list[Event] = []
    served.listen(events.append)
    for priority in (0, 0, 1):
        served.submit(prompt(6), max_tokens=2, priority=priority)
    run(served)
    assert [event.answer for event in events if event.kind == "finish"] == [2, 0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": prompt(100), "max_tokens": 50}, "at most 128 tokens, but have 100 \\+ 50"),
        ({"prompt": prompt(60), "max_tokens": 20}, "need 20 pages of 4, and the limit is 16 pages"),
    ],
)
def test_what_never_fits_is_refused_with_numbers(arguments: Any, message: str) -> None:
    served = engine(n_pages=16)
    with pytest.raises(RequestTooLong, match=message):
        served.submit(**arguments)
    assert served.statistics().submitted == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "must have a token at least"),
        ([61], "must be from 0 to 60, but one is 61"),
        ("text", "since the engine has no tokenizer"),
        (torch.zeros(2, 3).long(), "must be 1-D integers"),
        (7, "must be text or tokens"),
    ],
)
def test_a_prompt_must_be_tokens_of_the_model(given: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        engine().submit(given)


def test_closing_cancels_what_is_not_finished() -> None:
    with Engine(packed("llama"), page_size=4, n_pages=64) as served:
        requests = [served.submit(prompt(9), max_tokens=100) for _ in range(3)]
    assert {request.result().finish_reason for request in requests} <= {"cancelled", "length"}
    with pytest.raises(EngineClosed, match="must be open"):
        served.submit(prompt(3))


def test_a_question_is_answered_if_the_engine_closes_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Engine(packed("llama"), page_size=4, n_pages=64)
    served.submit(prompt(3), max_tokens=2).result()

    class Late(deque[Any]):
        def append(self, question: Any) -> None:
            served.close()
            super().append(question)

    monkeypatch.setattr(served._gap, "questions", Late())
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(served.statistics).result(timeout=30)
    assert (found.running, found.finished) == (0, 1)


async def first(request: Any) -> Token:
    return await anext(aiter(request))


@forks
@pytest.mark.parametrize("start", [True, False])
def test_a_forked_process_is_refused(start: bool) -> None:
    """There is neither the engine's thread, nor anybody who would free a lock that it holds."""
    with Engine(packed("llama"), page_size=4, n_pages=64, start=start) as served:
        read = served.submit(prompt(9), max_tokens=4)
        read.result(timeout=60)
        request = served.submit(prompt(17), max_tokens=40)
        child = os.fork()
        if child == 0:
            calls = (
                lambda: served.submit(prompt(9)), served.step, served.statistics, served.look,
                served.check_integrity, request.result, lambda: list(request),
                lambda: asyncio.run(first(request)),
            )  # fmt: skip
            for number, call in enumerate(calls):
                try:
                    call()
                except EngineClosed as error:
                    if "process that made it" in str(error):
                        continue
                os._exit(10 + number)
            served.close()  # ends at once: the thread is not here
            os._exit(0 if len(read.result().tokens) == 4 else 1)  # what was read stays
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        request.cancel()
        served.submit(prompt(9), max_tokens=4).result(timeout=60)


@pytest.mark.parametrize("family", WINDOWED)
def test_prompts_of_windowed_models_are_read_again(family: str) -> None:
    """Layers with windows give back pages that a later prompt would need."""
    served = engine(family)
    assert served.submit(prompt(20), max_tokens=4).result().num_cached == 0
    assert served.submit(prompt(20), max_tokens=4).result().num_cached == 0
    now = served.statistics()
    assert now.kept_pages == 0 and now.free_pages == now.pages
    with pytest.raises(ArgumentError, match="prefix must be None or False for a model with slid"):
        engine(family, prefix=True)


def test_an_error_in_sampling_ends_one_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    served = engine()
    good, bad = (served.submit(prompt(9), max_tokens=8, logprobs=1) for _ in range(2))
    job = served._core.waiting or served._inbox
    sampler = job[1].sampler

    def broken(token: int) -> None:
        raise ZeroDivisionError("in a grammar")

    monkeypatch.setattr(sampler, "accept", broken)
    run(served)
    with pytest.raises(ZeroDivisionError, match="in a grammar"):
        bad.result()
    assert_same(good.result(), alone("llama", prompt(9), max_tokens=8, logprobs=1))


def test_many_prompts_have_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [prompt(length) for length in LENGTHS]
    results = engine().generate(prompts, progress=True, max_tokens=4)
    assert [result.tokens for result in results] == [
        alone("llama", each, max_tokens=4).tokens for each in prompts
    ]
    assert "5/5" in capsys.readouterr().out


def test_completions_have_their_parts() -> None:
    result = engine().submit(prompt(9), max_tokens=3, logprobs=2).result()
    assert isinstance(result, Completion)
    assert result.logprobs is not None and result.top_logprobs is not None
    assert len(result.tokens) == len(result.logprobs) == len(result.top_logprobs) == 3
    assert result.num_prompt == 9 and result.finish_reason == "length"


def test_a_timeout_holds_where_answers_compute_steps() -> None:
    served = engine()
    request = served.submit(prompt(9), max_tokens=100)
    for timeout in (0, 1e-6):
        with pytest.raises(TimeoutError, match=f"must end in {timeout} s, but is still written"):
            request.result(timeout)
    assert len(request.result(timeout=600).tokens) == 100


def test_an_error_does_not_grow() -> None:
    def drafter(tokens: Any) -> Any:
        raise ZeroDivisionError("on purpose")

    served, depths = engine(), []
    request = served.submit(prompt(9), max_tokens=4, drafter=drafter)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError) as caught:
            request.result()
        names = [entry.name for entry in caught.traceback]
        depths.append(len(names))
        assert names[-1] == "drafter"
    assert len(set(depths)) == 1


def test_an_answer_without_tokens_has_no_probabilities_but_a_list() -> None:
    for logprobs, wanted in ((None, None), (0, [])):
        request = engine().submit(prompt(9), logprobs=logprobs)
        request.cancel()
        found = request.result()
        assert (found.logprobs, found.top_logprobs) == (wanted, wanted)
