"""Calls of tools, for a chat template that has them: parsed, streamed, and forced by a grammar."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import Served, save_model, served
from tiny_tokenizers import TOOL_TEMPLATE

from quire.engine import Engine
from quire.serve import asking
from quire.serve.bodies import ChatBody, Tool, parsed
from quire.serve.settings import Settings
from quire.serve.tools import CLOSE, OPEN, AnswerParts, Toolbox

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
CALL = OPEN + '\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n' + CLOSE
OTHER = OPEN + '{"name": "time"}' + CLOSE


def toolbox(**options: Any) -> Toolbox:
    return Toolbox(tuple(Tool.model_validate(each) for each in (WEATHER, TIME)), **options)


def without_ids(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [call["function"] for call in calls]


# What an answer says


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("", None, []),
        ("hello ", "hello ", []),
        (CALL, None, ["weather"]),
        (f"Let me see.\n{CALL}\n", "Let me see.", ["weather"]),
        (f" {CALL}\n{OTHER}\n", None, ["weather", "time"]),
        (f"{CALL} and {OTHER}.", " and .", ["weather", "time"]),
        (f"{OPEN}nonsense{CLOSE}", f"{OPEN}nonsense{CLOSE}", []),
        (f"{OPEN}nonsense{CLOSE}{CALL}", f"{OPEN}nonsense{CLOSE}", ["weather"]),
        (OPEN + '{"name": "rm", "arguments": {}}' + CLOSE, None, None),
        (f"{OPEN}[1]{CLOSE}{OPEN}{CALL}", f"{OPEN}[1]{CLOSE}{OPEN}", ["weather"]),
        (f"{CLOSE}{CALL}{OPEN}", f"{CLOSE}{OPEN}", ["weather"]),
        (f"{OPEN}{'[' * 100_000}{CLOSE}", None, None),
        (f"{OPEN}{' ' * 100_000}{{", None, None),
    ],
)
def test_calls_are_taken_out_of_the_text(
    text: str, content: str | None, names: list[str] | None
) -> None:
    said, calls = toolbox().taken_apart(text)
    if names is None:  # no call: the text stays
        assert said == text and not calls
        return
    assert said == content
    assert [call["function"]["name"] for call in calls] == names
    assert len({call["id"] for call in calls}) == len(calls)


def test_arguments_are_json() -> None:
    _, (call, other) = toolbox().taken_apart(CALL + OTHER)
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome", "days": 2}
    assert other["function"]["arguments"] == "{}" and other["type"] == "function"


def test_without_parallel_calls_there_is_one() -> None:
    said, calls = toolbox(parallel=False).taken_apart(f"a {CALL}{OTHER} b")
    assert said == "a  b" and without_ids(calls)[0]["name"] == "weather" and len(calls) == 1


PIECES = st.lists(
    st.sampled_from([CALL, OTHER, OPEN, CLOSE, "<", "<tool", "\n", " ", "text", "{}", "é"])
)


@given(pieces=PIECES, cuts=st.lists(st.integers(0, 300)), parallel=st.booleans())
def test_in_pieces_an_answer_says_the_same(
    pieces: list[str], cuts: list[int], parallel: bool
) -> None:
    text = "".join(pieces)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts, said, calls = AnswerParts(toolbox(parallel=parallel)), "", []
    for begin, end in itertools.pairwise(bounds):
        more, found = parts.read(text[begin:end])
        said, calls = said + more, calls + found
    said += parts.end()
    whole, wanted = toolbox(parallel=parallel).taken_apart(text)
    assert (said or None) == whole and without_ids(calls) == without_ids(wanted)


def test_a_tokenizer_may_have_no_tokens_for_the_marks(model: Path) -> None:
    engine = Engine.from_pretrained(model, n_pages=64, start=False)
    grammar = toolbox().grammar(engine.vocabulary.tokenizer)
    text = (
        engine.submit("x", max_tokens=300, seed=1, temperature=1.0, grammar=grammar).result().text
    )
    assert (text.startswith(OPEN) and toolbox().taken_apart(text)[1]) or len(text) > 200


# What a server answers


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose model has a template with tools."""
    folder = save_model(tmp_path_factory.mktemp("tools") / "tiny", TOOL_TEMPLATE, (OPEN, CLOSE))
    with served(folder) as running:
        yield running


@pytest.fixture(scope="module")
def client(speaker: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{speaker.url}/v1", api_key="none", max_retries=0, timeout=100
    ) as opened:
        yield opened


def ask(client: openai.OpenAI, **options: Any) -> Any:
    given: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Is it warm in Rome?"}],
        "tools": [WEATHER, TIME],
        "max_tokens": 200,
        "temperature": 1.0,
    }
    return client.chat.completions.create(**given | options)


@pytest.mark.parametrize("seed", range(3))
def test_a_named_tool_is_called(client: openai.OpenAI, seed: int) -> None:
    chosen = {"type": "function", "function": {"name": "weather"}}
    (choice,) = ask(client, tool_choice=chosen, seed=seed).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert call.function.name == "weather" and call.type == "function"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Rome", "Oslo") and arguments["days"] in (1, 2, 3)


def test_a_required_call_is_a_call_of_one_of_them(client: openai.OpenAI) -> None:
    nothing = {**TIME["function"], "parameters": {"type": "object", "additionalProperties": False}}  # type: ignore[dict-item]
    tools = [WEATHER, {"type": "function", "function": nothing}]
    found = ask(client, tool_choice="required", tools=tools, n=8, seed=1).choices
    names = [choice.message.tool_calls[0].function.name for choice in found]
    assert set(names) == {"weather", "time"}


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    names=st.lists(st.from_regex(r"\A[a-zA-Z0-9_.-]{1,8}\Z"), min_size=1, max_size=2, unique=True),
    fields=st.lists(st.text("abö ", min_size=1, max_size=4), max_size=2, unique=True),
    chosen=st.none() | st.integers(0, 1),
    seed=st.integers(0, 99),
)
def test_any_tools_are_called(
    client: openai.OpenAI, names: list[str], fields: list[str], chosen: int | None, seed: int
) -> None:
    """One of them, or the one that is named, with arguments by its schema."""
    schema = {
        "type": "object",
        "properties": {field: {"type": "boolean"} for field in fields},
        "required": fields,
        "additionalProperties": False,
    }
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}} for name in names
    ]
    wanted = names if chosen is None else [names[chosen % len(names)]]
    named = {"type": "function", "function": {"name": wanted[0]}}
    choice = "required" if chosen is None else named
    (answer,) = ask(client, tools=tools, tool_choice=choice, seed=seed, max_tokens=150).choices
    if answer.finish_reason == "length":  # of white space, for example
        return
    (call, *_) = answer.message.tool_calls
    assert call.function.name in wanted
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == set(fields)
    assert all(isinstance(value, bool) for value in arguments.values())


def test_a_call_in_a_stream(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "seed": 2,
    }
    whole = ask(client, **options).choices[0]
    chunks = [chunk.choices[0] for chunk in ask(client, stream=True, **options)]
    (call,) = (each for chunk in chunks for each in chunk.delta.tool_calls or ())
    assert call.index == 0 and call.id
    assert call.function.model_dump() == whole.message.tool_calls[0].function.model_dump()
    assert not any(chunk.delta.content for chunk in chunks)
    assert chunks[-1].finish_reason == "tool_calls"


def test_text_streams_although_there_are_tools(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"seed": 3, "max_tokens": 40}
    whole = ask(client, **options).choices[0]
    chunks = [chunk.choices[0] for chunk in ask(client, stream=True, **options)]
    texts = [chunk.delta.content for chunk in chunks if chunk.delta.content]
    assert "".join(texts) == whole.message.content and len(texts) > 5
    assert chunks[-1].finish_reason == whole.finish_reason
    assert ask(client, tool_choice="none", seed=3).choices[0].message.tool_calls is None


def test_the_model_sees_tools_and_results(speaker: Served) -> None:
    """The template writes tools, the calls of earlier answers, and their results."""
    folder = speaker.log.parent / "tiny"
    engine = Engine.from_pretrained(folder, n_pages=64, start=False)
    body = {
        "model": "tiny",
        "tools": [WEATHER],
        "max_tokens": 9,
        "messages": [
            {"role": "user", "content": "Is it warm?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "31 degrees"},
        ],
    }
    asked = asking.chat(parsed(ChatBody, json.dumps(body).encode()), engine, Settings(model="tiny"))
    text = engine.vocabulary.tokenizer.decode(asked.prompts[0])
    for written in ("The weather of a city", '"city": "Rome"', "31 degrees", "Is it warm?", OPEN):
        assert written in text


def test_what_cannot_be_is_refused(client: openai.OpenAI) -> None:
    unknown = {"type": "function", "function": {"name": "other"}}
    with pytest.raises(openai.BadRequestError, match="tool_choice must name a tool"):
        ask(client, tool_choice=unknown)
    with pytest.raises(openai.BadRequestError, match="response_format must be left out"):
        ask(client, tool_choice="required", response_format={"type": "json_object"})
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError, match="llguidance"):
        ask(client, tools=[bad], tool_choice="required")
