"""The JSON of requests, as types. What has another type, or an unknown name, is refused.

Names and meanings are OpenAI's. `TextBody` has a few more that vLLM's server has as well: top_k,
min_p, repetition_penalty, ignore_eos, stop_token_ids and structured_outputs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quire.errors import ApiError

Text: TypeAlias = Annotated[str, Field(max_length=1 << 22)]
Token: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 31)]
Tokens: TypeAlias = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Word: TypeAlias = Annotated[str, Field(min_length=1, max_length=1024)]


class Body(BaseModel):
    """A JSON object whose names are all known."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool | None = None  # of OpenAI's servers; ignored


class Structure(Body):
    """What an answer must look like: one of these."""

    json_schema: dict[str, Any] | None = Field(default=None, alias="json")
    regex: Word | None = None
    grammar: Annotated[str, Field(min_length=1, max_length=1 << 16)] | None = None
    choice: Annotated[list[Word], Field(min_length=1, max_length=256)] | None = None


class TextBody(Body):
    """What requests for text have in common."""

    model: Annotated[str, Field(max_length=256)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Word | Annotated[list[Word], Field(max_length=16, fail_fast=True)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)]
        | None
    ) = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    user: Text | None = None  # ignored
    # not OpenAI's
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[Token], Field(max_length=64)] | None = None
    structured_outputs: Structure | None = None
    priority: Annotated[int, Field(ge=-8, le=8)] = 0


class CompletionBody(TextBody):
    """POST /v1/completions."""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, fail_fast=True)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, fail_fast=True)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: Text


class FunctionCall(Body):
    """The name of a function, and its arguments as JSON."""

    name: Word
    arguments: Text


class ToolCall(Body):
    """A call of a tool, as a model has asked for it."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    refusal: Text | None = None  # of earlier answers; ignored
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None


class ToolFunction(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may use."""

    type: Literal["function"]
    function: ToolFunction


class FunctionName(Body):
    """The name of a function."""

    name: Word


class NamedTool(Body):
    """The tool that must be used."""

    type: Literal["function"]
    function: FunctionName


class Schema(Body):
    """A JSON schema and its name."""

    name: Word
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What an answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


class ChatBody(TextBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    # What OpenAI's clients may send, and what changes nothing here:
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=4)] | None = None


class EmbeddingBody(Body):
    """POST /v1/embeddings."""

    model: Annotated[str, Field(max_length=256)]
    input: (
        Text
        | Annotated[list[Text], Field(min_length=1, fail_fast=True)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, fail_fast=True)]
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: Text | None = None


AnyBody = TypeVar("AnyBody", bound=Body)

# What pydantic writes behind the name of a field with several types, one of which is meant.
_IS_TYPE = re.compile(r"\[|^(constrained-|NamedTool$)")


MOST_VALUES = 1 << 18
"""The most commas of a body, and so of its values. More are no prompt that a model could read."""

MOST_NAMES = 1 << 15
"""The most colons of a body, and so of its names."""


def check_amount(raw: bytes) -> None:
    """Raise an ApiError if a body has so much in it that reading it would hold others up."""
    for sign, most in ((b",", MOST_VALUES), (b":", MOST_NAMES)):
        if (count := raw.count(sign)) > most:
            raise ApiError(
                f"the body must have at most {most} {sign.decode()!r}, but has {count}.",
                status=413,
                code="too_large",
            )


def parsed(kind: type[AnyBody], raw: bytes) -> AnyBody:
    """Return the body of a request. Raise an ApiError that names what is wrong."""
    try:
        body: AnyBody = kind.model_validate_json(raw)
        return body
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        places = _names(first["loc"])
        if first["type"] == "json_invalid":
            raise ApiError(
                f"the body must be JSON, but is not: {first['msg']}.", code="invalid_json"
            ) from None
        where = ".".join(places) or "the body"
        if kind is ChatBody and places[2:] == ["content"]:
            raise ApiError(
                f"{where} must be text, or a list of parts whose type is text, but is not. Leave "
                f"out images, sound and files: the model reads text alone.",
                code="invalid_value",
                param=places[0],
            ) from None
        raise ApiError(
            f"{where} is not what it must be: {first['msg']}.",
            code="unknown_parameter" if first["type"] == "extra_forbidden" else "invalid_value",
            param=places[0] if places else None,
        ) from None


def _names(places: Sequence[int | str]) -> list[str]:
    """Return where something is wrong: names of the body, up to one that may have several types."""
    names = [str(place) for place in places]
    inner = (at for at, name in enumerate(names) if at and _IS_TYPE.search(name))
    return names[: next(inner, None)]
