"""Random requests: whatever comes, the server answers in OpenAI's shape, and never with a 500."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx2 as httpx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import Served

from quire.integrations import minilm

NAMES = st.sampled_from(
    [
        *("model", "prompt", "messages", "max_tokens", "temperature", "top_p", "n", "stop", "seed"),
        *("stream", "stream_options", "logprobs", "top_logprobs", "logit_bias", "echo", "suffix"),
        *(
            "response_format",
            "tools",
            "tool_choice",
            "structured_outputs",
            "top_k",
            "min_p",
            "user",
        ),
        *("repetition_penalty", "presence_penalty", "ignore_eos", "stop_token_ids", "priority"),
        *("max_completion_tokens", "input", "encoding_format", "dimensions", "best_of", "unknown"),
    ]
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True)
    | st.text(max_size=20)
    | st.sampled_from(["tiny", "user", "text", "json_object", "json_schema", "function", "<|end|>"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            NAMES | st.text(max_size=8) | st.sampled_from(["role", "content", "type", "text"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
SMALL: dict[str, Any] = {
    "max_tokens": st.integers(-1, 6),
    "temperature": st.floats(0, 2) | st.integers(-1, 3),
    "top_p": st.floats(0, 1),
    "n": st.integers(0, 3),
    "seed": st.integers(),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "logit_bias": st.dictionaries(st.integers(-2, 400).map(str), st.floats(-100, 100), max_size=3),
    "top_k": st.integers(-2, 400),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.1, 4),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "ignore_eos": st.booleans(),
    "stop_token_ids": st.lists(st.integers(0, 400), max_size=2),
    "structured_outputs": st.fixed_dictionaries(
        {}, optional={"regex": st.text("ab()|*[", max_size=6), "json": VALUES, "grammar": st.text()}
    ),
}
PROMPT = (
    st.text(max_size=30)
    | st.lists(st.integers(0, 310), max_size=9)
    | st.lists(st.text(), max_size=3)
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "nobody"]),
        "content": st.text(max_size=20) | st.none(),
    }
)
COMPLETION = st.fixed_dictionaries(
    {"model": st.just("tiny"), "prompt": PROMPT},
    optional=SMALL | {"logprobs": st.integers(-1, 21), "echo": st.booleans()},
)
CHAT = st.fixed_dictionaries(
    {"model": st.just("tiny"), "messages": st.lists(MESSAGE, max_size=3)},
    optional=SMALL
    | {
        "logprobs": st.booleans(),
        "top_logprobs": st.integers(0, 5),
        "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}]),
    },
)
WILD = st.dictionaries(NAMES, VALUES, max_size=6) | VALUES


@pytest.fixture(scope="module")
def http(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def check(http: httpx.Client, path: str, content: bytes) -> int:
    response = http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404, 413), (response.status_code, content)
    if response.status_code != 200:
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"} and error["message"]
    elif response.headers["content-type"].startswith("text/event-stream"):
        lines = [line for line in response.text.split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        events = [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]
        # A stream ends as such, or with an error in OpenAI's shape, of its grammar for example.
        assert lines[-1] == "data: [DONE]" or "message" in events[-1]["error"]
    return response.status_code


def fuzz(examples: int) -> Any:
    return settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@fuzz(60)
@given(body=COMPLETION)
def test_completions(http: httpx.Client, body: dict[str, Any]) -> None:
    check(http, "/v1/completions", json.dumps(body).encode())


@fuzz(60)
@given(body=CHAT)
def test_chats(http: httpx.Client, body: dict[str, Any]) -> None:
    check(http, "/v1/chat/completions", json.dumps(body).encode())


TEXTS = st.text(min_size=1, max_size=30)
TOKENS = st.lists(st.integers(0, 30_000), min_size=1, max_size=20)
INPUT = TEXTS | TOKENS | st.lists(TEXTS, min_size=1, max_size=4) | st.lists(TOKENS, min_size=1)


@pytest.mark.skipif(bool(minilm.missing()), reason=f"not installed: {minilm.missing()}")
@fuzz(25)
@given(given=INPUT)
def test_embeddings(http: httpx.Client, given: Any) -> None:
    """As many vectors as texts, of length 1, the same in both encodings."""
    body = {"model": "all-MiniLM-L6-v2", "input": given}
    count = 1 if isinstance(given, str) or isinstance(given[0], int) else len(given)
    plain = http.post("/v1/embeddings", json=body).json()["data"]
    packed = http.post("/v1/embeddings", json=body | {"encoding_format": "base64"}).json()["data"]
    assert len(plain) == len(packed) == count
    for one, other in zip(plain, packed, strict=True):
        found = torch.tensor(one["embedding"])
        content = bytearray(base64.b64decode(other["embedding"]))
        assert torch.equal(found, torch.frombuffer(content, dtype=torch.float32))
        torch.testing.assert_close(found.norm(), torch.tensor(1.0))


KINDS: dict[str, Any] = {
    '{"type": "boolean"}': [True, False],
    '{"type": "null"}': [None],
    '{"const": 7}': [7],
    '{"enum": ["fox", "Grüße", 1.5]}': ["fox", "Grüße", 1.5],
    '{"type": "integer", "minimum": -1, "maximum": 2}': [-1, 0, 1, 2],
}
"""Schemas, each with all its values."""


@fuzz(25)
@given(
    kinds=st.dictionaries(
        st.text("abö ", min_size=1, max_size=4), st.sampled_from(sorted(KINDS)), max_size=4
    ),
    seed=st.integers(0, 99),
)
def test_answers_by_a_schema(http: httpx.Client, kinds: dict[str, str], seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {name: json.loads(kind) for name, kind in kinds.items()},
        "required": sorted(kinds),
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    messages = [{"role": "user", "content": "x"}]
    body = {"model": "tiny", "messages": messages, "response_format": form, "seed": seed}
    response = http.post("/v1/chat/completions", json=body | {"max_tokens": 400})
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    if choice["finish_reason"] == "length":  # of white space, for example
        return
    value = json.loads(choice["message"]["content"])
    assert value.keys() == kinds.keys()
    assert all(value[name] in KINDS[kind] for name, kind in kinds.items())


@fuzz(100)
@given(
    path=st.sampled_from(["/v1/completions", "/v1/chat/completions", "/v1/embeddings"]), body=WILD
)
def test_anything_that_is_json(http: httpx.Client, path: str, body: Any) -> None:
    check(http, path, json.dumps(body).encode())


@fuzz(60)
@given(
    path=st.sampled_from(["/v1/completions", "/v1/chat/completions", "/v1/embeddings"]),
    body=st.binary(max_size=200)
    | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")),
)
def test_anything(http: httpx.Client, path: str, body: bytes) -> None:
    assert check(http, path, body) in (400, 404)


@fuzz(60)
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"]),
    path=st.text(st.characters(codec="ascii", min_codepoint=32, max_codepoint=126), max_size=20),
)
def test_any_path(http: httpx.Client, method: str, path: str) -> None:
    response = http.request(method, f"{str(http.base_url).rstrip('/')}/{quote(path)}")
    assert response.status_code in (200, 400, 404, 405, 415, 421)


def test_the_server_is_well_after_all(http: httpx.Client, server: Served) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert "Traceback" not in server.log.read_text()
    text = http.get("/metrics").text
    assert "quire_engine_running 0.0" in text and "quire_ongoing_answers 0.0" in text
