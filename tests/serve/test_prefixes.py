"""Which replica a prompt goes to."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from quire.serve.prefixes import UNEQUAL, demand_of, in_order

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
NAMES = ["a", "b", "c", "d"]


def start(path: str, tenant: bytes = b"", **body: Any) -> bytes | None:
    return demand_of(path, json.dumps(body).encode(), tenant).start


def order(key: bytes, names: list[str], loads: dict[str, int] | None = None) -> list[str]:
    return in_order(key, names, str, lambda name: (loads or {}).get(name, 0))


def test_prompts_that_begin_alike_are_alike() -> None:
    system = {"role": "system", "content": "You are a librarian. " * 5}
    first, second = ([system, {"role": "user", "content": each}] for each in ("why?", "how?"))
    assert start(CHAT, messages=first) == start(CHAT, messages=second)
    assert start(CHAT, messages=first) != start(CHAT, messages=first[1:])
    parts = [{"type": "text", "text": system["content"]}]
    assert start(CHAT, messages=[system | {"content": parts}]) == start(CHAT, messages=first)
    tokens = list(range(40))
    assert start(TEXT, prompt=tokens) == start(TEXT, prompt=[tokens[:30], [1]])
    assert start(TEXT, prompt=tokens) != start(TEXT, prompt=tokens[1:])
    assert start(TEXT, prompt="x") == start(TEXT, prompt=["x", "y"]) != start(TEXT, prompt="y")


def test_tenants_have_beginnings_of_their_own() -> None:
    assert start(TEXT, b"1", prompt="x") != start(TEXT, b"2", prompt="x")


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"null", b"[" * 10**5, b'{"prompt": null}'])
def test_what_has_no_beginning_goes_anywhere(body: bytes) -> None:
    for path in (TEXT, CHAT, "/v1/embeddings", "/health"):
        assert demand_of(path, body, b"") == (None, 1)
    for messages in (b"[]", b"[1]", b"{}", b'"x"', b'[{"role": "user"}]', b'[{"content": [1]}]'):
        demand_of(CHAT, b'{"messages": ' + messages + b"}", b"")  # and none of them raises


@pytest.mark.parametrize(
    ("path", "body", "answers"),
    [
        (TEXT, {"prompt": "x"}, 1),
        (TEXT, {"prompt": "x", "n": 3}, 3),
        (TEXT, {"prompt": ["x", "y"], "n": 3}, 6),
        (TEXT, {"prompt": [[1, 2], [3]]}, 2),
        (TEXT, {"prompt": [1, 2, 3], "n": None}, 1),
        (CHAT, {"messages": [{"role": "user", "content": "x"}] * 2, "n": 2}, 2),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "n": -4}, 1),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "n": [1]}, 1),
        ("/v1/embeddings", {"input": ["x", "y"]}, 1),
    ],
)
def test_each_answer_to_each_prompt_takes_a_place(
    path: str, body: dict[str, Any], answers: int
) -> None:
    assert demand_of(path, json.dumps(body).encode(), b"").answers == answers


def test_prompts_are_spread_and_stay() -> None:
    keys = [str(each).encode() for each in range(2000)]
    homes = {key: order(key, NAMES)[0] for key in keys}
    assert all(400 < count < 600 for count in Counter(homes.values()).values())
    # If one goes, only its own prompts move; each goes where it went second.
    for key in keys:
        moved = order(key, NAMES[:-1])[0]
        assert moved == (homes[key] if homes[key] != "d" else order(key, NAMES)[1])
        assert order(key, NAMES[::-1])[0] == homes[key]


def test_of_two_the_one_with_much_less_to_do_is_chosen() -> None:
    first, second, *_ = order(b"key", NAMES)
    assert order(b"key", NAMES, {first: UNEQUAL})[:2] == [first, second]
    assert order(b"key", NAMES, {first: UNEQUAL + 1})[:2] == [second, first]
    assert order(b"key", NAMES, {first: 9, second: 9 - UNEQUAL})[0] == first
