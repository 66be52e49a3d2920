"""Structured output: random logits, and answers that still follow their grammar."""

from __future__ import annotations

import json
import re

import pytest
import torch
from tiny_tokenizers import byte_level

from quire.engine.sampling import Grammar, Sampler, Sampling, Vocabulary
from quire.errors import ArgumentError, GrammarError

TOKENIZER = byte_level()
VOCABULARY = Vocabulary(TOKENIZER, size=len(TOKENIZER) + 13)  # more logits than tokens
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["fox", "dog"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def answer(grammar: Grammar, seed: int, **options: float) -> Sampler:
    mine = Sampler(
        Sampling(max_tokens=200, temperature=1.0, seed=seed, grammar=grammar, **options),  # type: ignore[arg-type]
        [],
        VOCABULARY,
    )
    generator = torch.Generator().manual_seed(seed)
    while mine.finished is None:
        mine.accept(mine.sample(3 * torch.randn(VOCABULARY.size, generator=generator)).token)
    return mine


@pytest.mark.parametrize("seed", range(5))
def test_answers_follow_a_json_schema(seed: int) -> None:
    found = answer(Grammar.json_schema(SCHEMA), seed)
    assert found.finished == "stop"
    value = json.loads(found.text)
    assert value.keys() == {"name", "age"} and value["name"] in ("fox", "dog")
    assert isinstance(value["age"], int) and value["age"] <= 99


@pytest.mark.parametrize("seed", range(5))
def test_answers_follow_a_regex_and_a_grammar(seed: int) -> None:
    assert re.fullmatch(
        r"[0-9]{3} (fox|dog)es?", answer(Grammar.regex(r"[0-9]{3} (fox|dog)es?"), seed).text
    )
    lark = 'start: pair ("," pair)*\npair: "(" /[a-c]/ ")"'
    assert re.fullmatch(r"\([a-c]\)(,\([a-c]\))*", answer(Grammar.lark(lark), seed).text)


def test_any_json() -> None:
    mine = Sampler(Sampling(grammar=Grammar.json()), [], VOCABULARY)
    allowed = mine._grammar.allowed()  # type: ignore[union-attr]
    assert {bytes([each]) for each in b"{ \n"} >= {
        VOCABULARY.spelling(int(token))[:1] for token in allowed.nonzero()[0]
    }


def test_a_sample_and_a_fork_leave_the_grammar_where_it_is() -> None:
    mine = Sampler(Sampling(max_tokens=50, grammar=Grammar.regex("(fox|dog)")), [], VOCABULARY)
    logits = torch.zeros(VOCABULARY.size)
    first = mine.sample(logits)
    assert mine.sample(logits) == first
    copied = mine.fork(1)
    for token in VOCABULARY.encode("dog"):
        copied.accept(token)
    assert (copied.finished, copied.text) == ("stop", "dog")
    for token in VOCABULARY.encode("fox"):
        mine.accept(token)
    assert (mine.finished, mine.text) == ("stop", "fox")


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.json_schema('{"type": '),
        Grammar.json_schema({"type": "unheard-of"}),
        Grammar.regex("(unclosed"),
        Grammar.lark("start: missing_rule"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_refused(grammar: Grammar) -> None:
    with pytest.raises(GrammarError, match="that llguidance can compile, but it says: "):
        Sampler(Sampling(grammar=grammar), [], VOCABULARY)


def test_a_token_outside_of_the_grammar_raises() -> None:
    mine = Sampler(Sampling(grammar=Grammar.regex("dog")), [], VOCABULARY)
    with pytest.raises(GrammarError, match="the answer must follow its grammar"):
        mine.accept(VOCABULARY.encode("fox")[0])


def test_a_grammar_needs_a_tokenizer() -> None:
    with pytest.raises(ArgumentError, match="stop strings and grammars must have a tokenizer"):
        Sampler(Sampling(grammar=Grammar.json()), [], Vocabulary(size=10))
