"""SmolLM2 behind the engine: the answers of `generate`, and text that comes in pieces."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from quire.engine import Engine
from quire.integrations import smollm2

pytestmark = pytest.mark.skipif(bool(smollm2.missing()), reason="SmolLM2 is not installed")

CHATS = [
    [{"role": "user", "content": "Name three colours."}],
    [{"role": "user", "content": "What is the capital of France? Answer in one word."}],
]


@functools.cache
def served() -> Engine:
    name = "SmolLM2-135M-Instruct"
    return Engine.from_pretrained(name, weights="float32", max_bytes=1 << 28, start=False)


@functools.cache
def reference() -> Any:
    return smollm2.load(attention="sdpa")


def test_greedy_answers_are_those_of_generate() -> None:
    model, tokenizer = reference()
    requests = [served().submit(chat, max_tokens=12) for chat in CHATS]
    for chat, request in zip(CHATS, requests, strict=True):
        ids: Any = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        text = model.generate(
            **ids, do_sample=False, max_new_tokens=12, temperature=None, top_p=None
        )
        new = text[0, ids["input_ids"].shape[1] :].tolist()
        result = request.result()
        assert result.tokens == new
        assert result.text == tokenizer.decode(new, skip_special_tokens=True)
        assert "".join(token.text for token in request) == result.text


def test_beams_are_those_of_generate() -> None:
    model, tokenizer = reference()
    request = served().submit(CHATS[1], max_tokens=8, beams=3, n=3, length_penalty=0.5)
    ids: Any = tokenizer.apply_chat_template(
        CHATS[1], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    text = model.generate(
        **ids, do_sample=False, max_new_tokens=8, num_beams=3, num_return_sequences=3,
        length_penalty=0.5, temperature=None, top_p=None,
    )  # fmt: skip
    for result, row in zip(request.results(), text, strict=True):
        new = row[ids["input_ids"].shape[1] :].tolist()
        assert result.tokens == new[: len(result.tokens)]
        assert result.text == tokenizer.decode(new, skip_special_tokens=True)


def test_the_next_turn_reads_only_what_is_new() -> None:
    first = served().submit(CHATS[0], max_tokens=12).result()
    turn = [*CHATS[0], {"role": "assistant", "content": first.text}, *CHATS[1]]
    second = served().submit(turn, max_tokens=4, logprobs=1).result()
    assert second.num_cached >= 16
    fresh = Engine(served()._core.runner.model, served().vocabulary.tokenizer, start=False)
    again = fresh.submit(turn, max_tokens=4, logprobs=1).result()
    assert again.num_cached == 0
    assert (again.tokens, again.logprobs) == (second.tokens, second.logprobs)
