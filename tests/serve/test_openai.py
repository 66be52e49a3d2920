"""The server as OpenAI's own client meets it: every endpoint, streams, parallel calls, errors."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from serving import Served

from quire.engine import Engine
from quire.integrations import minilm

MODEL = "tiny"
DOCS = Path(__file__).parent.parent.parent / "docs"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as opened:
        yield opened


@pytest.fixture(scope="module")
def engine(model: Any) -> Engine:
    """The same model without a server."""
    return Engine.from_pretrained(model, n_pages=400, start=False)


def ask(client: openai.OpenAI, **options: Any) -> Any:
    given: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "the fox"}]}
    return client.chat.completions.create(**given | {"max_tokens": 8, "seed": 1} | options)


def test_models(client: openai.OpenAI) -> None:
    names = [card.id for card in client.models.list()]
    assert names[0] == MODEL
    assert client.models.retrieve(MODEL).owned_by == "quire"
    with pytest.raises(openai.NotFoundError, match="model must be tiny"):
        client.models.retrieve("gpt-4")


def test_completions_are_those_of_the_engine(client: openai.OpenAI, engine: Engine) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.9, "seed": 5, "top_p": 0.95}
    prompts = ["the quick brown fox", "lazy", "Grüße"]
    found = client.completions.create(model=MODEL, prompt=prompts, logprobs=2, **options)
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    for prompt, choice in zip(prompts, found.choices, strict=True):
        wanted = engine.submit(prompt, logprobs=2, **options).result()
        assert choice.text == wanted.text and choice.finish_reason == wanted.finish_reason
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == wanted.logprobs  # bit for bit
    assert found.usage is not None and found.usage.completion_tokens <= 36
    tokens = engine.vocabulary.encode("lazy")
    by_tokens = client.completions.create(model=MODEL, prompt=[tokens, tokens], **options)
    assert {choice.text for choice in by_tokens.choices} == {found.choices[1].text}
    echoed = client.completions.create(model=MODEL, prompt="lazy", echo=True, **options)
    assert echoed.choices[0].text == "lazy" + found.choices[1].text


def test_a_stream_has_the_text_of_the_whole_answer(client: openai.OpenAI) -> None:
    whole = ask(client, temperature=1.0, n=3, max_tokens=20, logprobs=True, top_logprobs=2)
    texts, reasons, entries = [""] * 3, [None] * 3, [[], [], []]  # type: ignore[var-annotated]
    usage = None
    for chunk in ask(
        client,
        temperature=1.0,
        n=3,
        max_tokens=20,
        logprobs=True,
        top_logprobs=2,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            if choice.logprobs:
                entries[choice.index] += choice.logprobs.content
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert entries == [choice.logprobs.content for choice in whole.choices]
    assert len(set(texts)) > 1  # samples of one seed differ
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_text_completions_stream(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": "the", "max_tokens": 9, "temperature": 0}
    whole = client.completions.create(**options).choices[0]
    chunks = list(client.completions.create(stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason


def test_a_seed_repeats_an_answer_and_others_do_not_change_it(client: openai.OpenAI) -> None:
    alone = ask(client, temperature=1.3, max_tokens=24, logprobs=True)
    with ThreadPoolExecutor(12) as pool:
        together = list(
            pool.map(
                lambda seed: ask(client, temperature=1.3, max_tokens=24, seed=seed, logprobs=True),
                [1, 2, 3, 4, 5, 1, 6, 7, 8, 9, 10, 1],
            )
        )
    for place in (0, 5, 11):
        assert together[place].choices == alone.choices
    assert len({each.choices[0].message.content for each in together}) > 5


def test_stop_strings_and_bias(client: openai.OpenAI, engine: Engine) -> None:
    text = ask(client, temperature=0, max_tokens=30).choices[0].message.content
    stop = text[len(text) // 2 :][:3]
    cut = ask(client, temperature=0, max_tokens=30, stop=[stop]).choices[0]
    assert cut.message.content == text[: text.find(stop)] and cut.finish_reason == "stop"
    token = engine.vocabulary.encode("x")[0]
    forced = ask(client, temperature=0, logit_bias={str(token): 100}).choices[0]
    assert forced.message.content == "x" * 8 and forced.finish_reason == "length"


def test_structured_output(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["fox", "dog"]}, "old": {"type": "boolean"}},
        "required": ["name", "old"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}}
    for seed in range(3):
        found = ask(client, response_format=form, max_tokens=100, seed=seed, temperature=1.0)
        value = json.loads(found.choices[0].message.content)
        assert value["name"] in ("fox", "dog") and isinstance(value["old"], bool)
    chosen = ask(client, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert chosen.choices[0].message.content in ("yes", "no")
    with pytest.raises(openai.BadRequestError, match="that llguidance can compile"):
        ask(client, extra_body={"structured_outputs": {"regex": "(("}})
    large = {"properties": {f"name {number}": {"type": "string"} for number in range(4000)}}
    with pytest.raises(openai.BadRequestError, match="must have at most 65536 characters"):
        ask(client, extra_body={"structured_outputs": {"json": large}})


def test_prefixes_are_reused(client: openai.OpenAI) -> None:
    long = {"role": "system", "content": "the quick brown fox jumps over the lazy dog " * 6}
    question = {"role": "user", "content": "why?"}
    first = ask(client, messages=[long, question], temperature=0)
    second = ask(client, messages=[long, question], temperature=0)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens >= 64
    assert second.choices == first.choices


def test_names_without_an_effect(client: openai.OpenAI) -> None:
    """They are those that docs/serve.md lists."""
    names: dict[str, Any] = {
        "user": "me",
        "safety_identifier": "x",
        "prompt_cache_key": "x",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "reasoning_effort": "low",
        "verbosity": "low",
    }
    first, last = {"role": "user", "content": "the fox"}, {"role": "user", "content": "x"}
    earlier = {"role": "assistant", "content": "dog"}
    wanted = ask(client, messages=[first, earlier, last]).choices
    said = earlier | {"refusal": None, "annotations": []}
    assert ask(client, messages=[first, said, last], extra_body=names).choices == wanted
    text = (DOCS / "serve.md").read_text()
    assert all(f"`{name}`" in text for name in (*names, "refusal", "annotations"))


def test_parts_of_a_message_are_joined(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "fox"}]
    split = ask(client, messages=[{"role": "user", "content": parts}], temperature=0)
    assert split.choices == ask(client, temperature=0).choices


@pytest.mark.skipif(bool(minilm.missing()), reason=f"not installed: {minilm.missing()}")
def test_embeddings(client: openai.OpenAI) -> None:
    texts = ["Compress a file.", "Make data smaller with gzip.", "The cat sat on the mat."]
    found = client.embeddings.create(model="all-MiniLM-L6-v2", input=texts)
    vectors = [each.embedding for each in found.data]
    assert [len(vector) for vector in vectors] == [384] * 3
    near, far = (
        sum(a * b for a, b in zip(vectors[0], other, strict=True)) for other in vectors[1:]
    )
    assert near > 0.5 > far + 0.3
    alone = client.embeddings.create(
        model="all-MiniLM-L6-v2", input=texts[1], encoding_format="float"
    )
    assert alone.data[0].embedding == vectors[1]  # the bits do not depend on the other texts
    with pytest.raises(openai.BadRequestError, match="dimensions must be 384, but is 100"):
        client.embeddings.create(model="all-MiniLM-L6-v2", input="x", dimensions=100)
    with pytest.raises(openai.BadRequestError, match="a text must have at most 512 tokens"):
        client.embeddings.create(model="all-MiniLM-L6-v2", input="a " * 600)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 17}, "n must be at most 16, but is 17"),
        ({"temperature": 3}, "temperature is not what it must be"),
        ({"top_logprobs": 2}, "logprobs must be true if top_logprobs is given"),
        ({"messages": []}, "messages is not what it must be"),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            r"\.content must be text, or a list",
        ),
        ({"stop": 5}, "^[^.]*stop is not what it must be"),
        ({"extra_body": {"colour": "red"}}, "colour is not what it must be"),
        ({"logit_bias": {"x": 1}}, "logit_bias must have ids of tokens as names"),
        ({"logit_bias": {"100000": 1}}, "must be below"),
        (
            {"max_tokens": 5000},
            r"prompt and answer must have at most 1024 tokens, but have \d+ \+ 5000",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format must have json_schema"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "has no place for them"),
        ({"tool_choice": "required"}, "tool_choice must name a tool"),
    ],
)
def test_what_cannot_be_is_refused(
    client: openai.OpenAI, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        ask(client, **options)
    body = caught.value.body
    assert isinstance(body, dict) and body["type"] == "invalid_request_error"


def test_completions_that_cannot_be_are_refused(client: openai.OpenAI) -> None:
    for options, message in [
        ({"prompt": "x", "suffix": "y"}, "suffix must be left out"),
        ({"prompt": "x", "best_of": 3}, "best_of must be n"),
        ({"prompt": "x", "echo": True, "logprobs": 1}, "echo must not be asked for with logprobs"),
        ({"prompt": ["x"] * 65}, "prompt must be at most 64 prompts, but is 65"),
        ({"prompt": [400_000]}, "tokens must be from 0 to"),
        ({"prompt": ""}, "prompt must have a token at least"),
    ]:
        with pytest.raises(openai.BadRequestError, match=message):
            client.completions.create(model=MODEL, **options)  # type: ignore[call-overload]


def test_a_cancelled_stream_frees_its_request(server: Served, client: openai.OpenAI) -> None:
    stream = ask(client, stream=True, max_tokens=900, extra_body={"ignore_eos": True})
    for count, _ in enumerate(stream):
        if count == 3:
            break
    stream.close()
    wait_idle(server)


def test_a_client_that_waits_too_long_frees_its_request(
    server: Served, client: openai.OpenAI
) -> None:
    before = metrics(server)["quire_engine_output_tokens_total"]
    with pytest.raises(openai.APITimeoutError):  # it would take seconds
        ask(client.with_options(timeout=0.3), max_tokens=900, n=16, extra_body={"ignore_eos": True})
    wait_idle(server)
    assert metrics(server)["quire_engine_output_tokens_total"] - before < 16 * 900


def test_cancels_among_others_leave_them_alone(server: Served, client: openai.OpenAI) -> None:
    wanted = ask(client, temperature=1.0, max_tokens=40).choices
    stop = threading.Event()

    def come_and_go() -> None:
        while not stop.is_set():
            stream = ask(client, stream=True, max_tokens=500, extra_body={"ignore_eos": True})
            next(iter(stream))
            stream.close()

    others = [threading.Thread(target=come_and_go) for _ in range(3)]
    for thread in others:
        thread.start()
    try:
        for _ in range(5):
            assert ask(client, temperature=1.0, max_tokens=40).choices == wanted
    finally:
        stop.set()
        for thread in others:
            thread.join()
    wait_idle(server)


def wait_idle(server: Served) -> None:
    """Wait until the engine has nothing to do."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        numbers = metrics(server)
        if numbers["quire_engine_running"] == numbers["quire_ongoing_answers"] == 0:
            return
        time.sleep(0.1)
    raise AssertionError(numbers)


def metrics(server: Served) -> dict[str, float]:
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def test_metrics_add_up(server: Served, client: openai.OpenAI) -> None:
    wait_idle(server)
    before = metrics(server)
    found = ask(client, n=2, max_tokens=5)
    after = metrics(server)
    assert after["quire_engine_output_tokens_total"] - before[
        "quire_engine_output_tokens_total"
    ] == (found.usage.completion_tokens)
    assert after["quire_engine_submitted_total"] - before["quire_engine_submitted_total"] == 2
    assert after["quire_engine_submitted_total"] == after["quire_engine_finished_total"]
    pages = {name: after[f"quire_engine_{name}"] for name in ("pages", "free_pages", "kept_pages")}
    assert pages["pages"] == pages["free_pages"] + pages["kept_pages"]  # nobody runs
