"""From the body of a request to prompts of tokens and sampling options."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from quire.engine import Engine
from quire.engine.sampling import Grammar, Sampling
from quire.errors import ApiError
from quire.serve.bodies import ChatBody, CompletionBody, Message, TextBody
from quire.serve.settings import Settings
from quire.serve.tools import Toolbox

MOST_GRAMMAR = 1 << 16
"""The most characters of a grammar: what one answer may begin with is computed for all others."""


@dataclass(frozen=True)
class Asked:
    """What a request asks of the engine: `n` answers to each of the prompts [tokens]."""

    prompts: list[list[int]]
    sampling: Sampling
    n: int = 1
    priority: int = 0
    toolbox: Toolbox | None = None


def completion(body: CompletionBody, engine: Engine, settings: Settings) -> Asked:
    """Return what a request for completions asks for."""
    n = _check_counts(body, settings)
    if body.suffix:
        raise ApiError(
            "suffix must be left out, since the model only continues a text.", param="suffix"
        )
    if body.best_of not in (None, n):
        raise ApiError(
            f"best_of must be n, {n}, or left out, but is {body.best_of}.", param="best_of"
        )
    if body.echo and body.logprobs is not None:
        raise ApiError("echo must not be asked for with logprobs.", param="echo")
    prompts = _prompts(body, engine)
    if len(prompts) > settings.max_prompts:
        raise ApiError(
            f"prompt must be at most {settings.max_prompts} prompts, but is {len(prompts)}.",
            param="prompt",
        )
    longest = max(map(len, prompts))
    sampling = _sampling(
        body, engine, 16, longest=longest, logprobs=body.logprobs, grammar=_grammar(body)
    )
    return Asked(prompts, sampling, n, body.priority)


def chat(body: ChatBody, engine: Engine, settings: Settings) -> Asked:
    """Return what a request for an answer in a chat asks for."""
    n = _check_counts(body, settings)
    tokenizer = engine.vocabulary.tokenizer
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise ApiError(
            "the model must have a chat template, but has none. Use /v1/completions.",
            param="messages",
        )
    toolbox = Toolbox.of(body, str(template))
    tokens = _rendered(tokenizer, body.messages, toolbox)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError("logprobs must be true if top_logprobs is given.", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    grammar = _grammar(body) or _response_format(body)
    if toolbox is not None and toolbox.forced:
        if grammar is not None:
            raise ApiError(
                "response_format must be left out if a tool must be called.", param="tool_choice"
            )
        grammar = toolbox.grammar(tokenizer)
    sampling = _sampling(
        body, engine, None, longest=len(tokens), logprobs=logprobs, grammar=grammar
    )
    return Asked([tokens], sampling, n, body.priority, toolbox)


def _check_counts(body: TextBody, settings: Settings) -> int:
    """Return the number of answers to a prompt."""
    n = 1 if body.n is None else body.n
    if n > settings.max_answers:
        raise ApiError(f"n must be at most {settings.max_answers}, but is {n}.", param="n")
    return n


def _prompts(body: CompletionBody, engine: Engine) -> list[list[int]]:
    """Return the prompts as tokens."""
    given = body.prompt
    if isinstance(given, str):
        return [engine.vocabulary.encode(given)]
    if isinstance(given[0], int):
        return [given]
    return [engine.vocabulary.encode(each) if isinstance(each, str) else each for each in given]


def _rendered(tokenizer: Any, messages: list[Message], toolbox: Toolbox | None) -> list[int]:
    """Return the tokens of a chat, up to where the model is to answer."""
    import jinja2

    plain = [_plain(message) for message in messages]
    tools = None if toolbox is None else toolbox.shown()
    try:
        text = tokenizer.apply_chat_template(
            plain, tools=tools, add_generation_prompt=True, tokenize=False
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else "it fails"
        raise ApiError(
            f"messages must be a chat that the model's template can write, but it says: {reason}",
            param="messages",
        ) from None
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _plain(message: Message) -> dict[str, Any]:
    """Return a message as templates read it."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": content or ""}
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call.model_dump()) for call in message.tool_calls]
    for name in ("name", "tool_call_id"):
        if value := getattr(message, name):
            plain[name] = value
    return plain


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call whose arguments are an object, as templates read it."""
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (ValueError, RecursionError):
        arguments = call["function"]["arguments"]
    return call | {"function": call["function"] | {"arguments": arguments}}


def _grammar(body: TextBody) -> Grammar | None:
    wanted = body.structured_outputs
    if wanted is None:
        return None
    given = {
        name: value
        for name in ("json_schema", "regex", "grammar", "choice")
        if (value := getattr(wanted, name)) is not None
    }
    if len(given) != 1:
        raise ApiError(
            f"structured_outputs must have one of json, regex, grammar and choice, but has "
            f"{len(given)}.",
            param="structured_outputs",
        )
    if wanted.choice is not None:
        return Grammar.regex("|".join(map(re.escape, wanted.choice)))
    if wanted.regex is not None:
        return Grammar.regex(wanted.regex)
    if wanted.grammar is not None:
        return Grammar.lark(wanted.grammar)
    return Grammar.json_schema(wanted.json_schema or {})


def _response_format(body: ChatBody) -> Grammar | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar.json()
    if wanted.json_schema is None:
        raise ApiError(
            "response_format must have json_schema if its type is json_schema.",
            param="response_format",
        )
    return Grammar.json_schema(wanted.json_schema.schema_ or {})


def _sampling(
    body: TextBody,
    engine: Engine,
    default: int | None,
    *,
    longest: int,
    logprobs: int | None,
    grammar: Grammar | None,
) -> Sampling:
    """Return the options. Without a limit on the answer, it may be as long as the engine allows."""
    most = getattr(body, "max_completion_tokens", None) or body.max_tokens or default
    if most is None:
        most = engine.room_after(longest)
    if grammar is not None and len(grammar.text) > MOST_GRAMMAR:
        raise ApiError(
            f"a schema or grammar must have at most {MOST_GRAMMAR} characters, but has "
            f"{len(grammar.text)}.",
            code="too_large",
        )
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return Sampling(
        max_tokens=most,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=None if body.top_k in (None, 0, -1) else body.top_k,
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_bias(body),
        logprobs=logprobs,
        seed=body.seed,
        stop=stop,
        stop_tokens=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        grammar=grammar,
    )


def _bias(body: TextBody) -> dict[int, float]:
    """Return what is added to the logits of tokens. JSON has their ids as strings."""
    try:
        return {int(token): bias for token, bias in (body.logit_bias or {}).items()}
    except ValueError:
        raise ApiError(
            'logit_bias must have ids of tokens as names, such as {"42": -100}.', param="logit_bias"
        ) from None
