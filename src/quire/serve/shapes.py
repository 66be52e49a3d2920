"""The JSON of answers: a shape for completions and one for chats, each whole or in chunks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

from quire.engine import Completion, Token
from quire.engine.sampling import Vocabulary
from quire.serve.tools import AnswerParts, Json, Toolbox

compact = json.JSONEncoder(separators=(",", ":")).encode
"""Returns something as JSON. For a text alone this is many times faster than for an object."""


class AnswerShape(Protocol):
    """How answers are written: in a stream as the members of a JSON object, without its braces."""

    whole: str
    chunk: str
    prefix: str

    def opening(self) -> str | None:
        """Return what a stream of an answer begins with."""

    def piece(self, token: Token) -> str | None:
        """Return what a stream says of a token."""

    def closing(self, completion: Completion) -> list[str]:
        """Return what a stream of an answer ends with."""

    def choice(self, completion: Completion) -> Json:
        """Return an answer as a whole."""


class TextShape:
    """Answers of /v1/completions. `echoed` comes before each of them."""

    whole = chunk = "text_completion"
    prefix = "cmpl"

    def __init__(self, vocabulary: Vocabulary, echoed: str = "") -> None:
        self._vocabulary = vocabulary
        self._echoed = echoed
        self._length = 0

    def opening(self) -> str | None:
        """Return the prompt, if it was to be repeated."""
        return self._members(self._echoed) if self._echoed else None

    def piece(self, token: Token) -> str | None:
        """Return the text that a token adds."""
        if not token.text and token.logprob is None:
            return None
        logprobs = self._logprobs([token], self._length) if token.logprob is not None else None
        self._length += len(token.text)
        return self._members(token.text, logprobs)

    def closing(self, completion: Completion) -> list[str]:
        """Return the reason of the end."""
        return [self._members("", reason=completion.finish_reason)]

    def _members(self, text: str, logprobs: Json | None = None, reason: str | None = None) -> str:
        return f'"text":{compact(text)},{_rest(logprobs, reason)}'

    def choice(self, completion: Completion) -> Json:
        """Return the text of an answer."""
        tokens = scored(completion)
        return {
            "text": self._echoed + completion.text,
            "logprobs": self._logprobs(tokens, 0) if tokens else None,
            "finish_reason": completion.finish_reason,
        }

    def _logprobs(self, tokens: Sequence[Token], start: int) -> Json:
        names = [spelled(self._vocabulary, each.token) for each in tokens]
        offsets, at = [], start
        for each, name in zip(tokens, names, strict=True):
            offsets.append(at)
            at += len(each.text or name)
        return {
            "tokens": names,
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": [
                {spelled(self._vocabulary, other): logprob for other, logprob in each.top_logprobs}
                for each in tokens
            ],
            "text_offset": offsets,
        }


class ChatShape:
    """Answers of /v1/chat/completions."""

    whole, chunk, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, vocabulary: Vocabulary, toolbox: Toolbox | None = None) -> None:
        self._vocabulary = vocabulary
        self._toolbox = toolbox
        self._parts = None if toolbox is None else AnswerParts(toolbox)
        self._num_calls = 0

    def opening(self) -> str | None:
        """Return who speaks."""
        return f'"delta":{{"role":"assistant","content":""}},{_rest()}'

    def piece(self, token: Token) -> str | None:
        """Return the text that a token adds, or the call of a tool that it ends."""
        logprobs = self._logprobs([token]) if token.logprob is not None else None
        text, calls = token.text, list[Json]()
        if self._parts is not None:
            text, calls = self._parts.read(text)
        if not text and not calls and logprobs is None:
            return None
        return f'"delta":{self._delta(text, calls)},{_rest(logprobs)}'

    def closing(self, completion: Completion) -> list[str]:
        """Return the text that has waited, and the reason of the end."""
        pieces = []
        if self._parts is not None and (rest := self._parts.end()):
            pieces.append(f'"delta":{self._delta(rest, [])},{_rest()}')
        reason = "tool_calls" if self._num_calls else completion.finish_reason
        return [*pieces, f'"delta":{{}},{_rest(None, reason)}']

    def _delta(self, text: str, calls: list[Json]) -> str:
        if not calls:
            return f'{{"content":{compact(text)}}}' if text else "{}"
        numbers = range(self._num_calls, self._num_calls + len(calls))
        self._num_calls += len(calls)
        called = [{"index": number, **call} for number, call in zip(numbers, calls, strict=True)]
        return compact(({"content": text} if text else {}) | {"tool_calls": called})

    def choice(self, completion: Completion) -> Json:
        """Return the message of an answer."""
        message, reason = self._message(completion)
        tokens = scored(completion)
        logprobs = self._logprobs(tokens) if tokens else None
        return {"message": message, "logprobs": logprobs, "finish_reason": reason}

    def _message(self, completion: Completion) -> tuple[Json, str]:
        message: Json = {"role": "assistant", "content": completion.text, "refusal": None}
        if self._toolbox is None:
            return message, completion.finish_reason
        content, calls = self._toolbox.taken_apart(completion.text)
        if not calls:
            return message, completion.finish_reason
        return message | {"content": content, "tool_calls": calls}, "tool_calls"

    def _logprobs(self, tokens: Sequence[Token]) -> Json:
        entries = [
            self._entry(each.token, each.logprob)
            | {"top_logprobs": [self._entry(*other) for other in each.top_logprobs]}
            for each in tokens
        ]
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> Json:
        content = self._vocabulary.spelling(token)
        name = content.decode("utf-8", "replace")
        return {"token": name, "logprob": logprob, "bytes": list(content)}


def _rest(logprobs: Json | None = None, reason: str | None = None) -> str:
    """Return what ends the members of a piece."""
    scores = "null" if logprobs is None else compact(logprobs)
    return f'"logprobs":{scores},"finish_reason":{"null" if reason is None else compact(reason)}'


def spelled(vocabulary: Vocabulary, token: int) -> str:
    """Return a token as text; bytes that are no character as OpenAI writes them."""
    content = vocabulary.spelling(token)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def scored(completion: Completion) -> list[Token]:
    """Return the tokens of an answer with their probabilities, if they were asked for."""
    if completion.logprobs is None or completion.top_logprobs is None:
        return []
    parts = zip(completion.tokens, completion.logprobs, completion.top_logprobs, strict=True)
    return [Token(token, "", logprob, top) for token, logprob, top in parts]


def usage(completions: Sequence[Completion], n: int) -> Json:
    """Return how many tokens a request took. Its n answers share a prompt."""
    prompts = completions[::n]
    read = sum(each.num_prompt for each in prompts)
    written = sum(len(each.tokens) for each in completions)
    cached = sum(each.num_cached for each in prompts)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
