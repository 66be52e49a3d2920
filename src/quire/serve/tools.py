"""Tools that a model may call, for templates that write them as Hermes and Qwen do.

<tool_call>
{"name": "weather", "arguments": {"city": "Berlin"}}
</tool_call>
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

from quire.engine.sampling import Grammar
from quire.errors import ApiError
from quire.serve.bodies import ChatBody, NamedTool, Tool

Json = dict[str, Any]
OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Toolbox:
    """The tools of a request. With `forced`, one of them must be called.

    Unless calls may be `parallel`, those after the first are left out.
    """

    tools: tuple[Tool, ...]
    forced: bool = False
    parallel: bool = True

    @classmethod
    def of(cls, body: ChatBody, template: str) -> Toolbox | None:
        """Return the tools that the model may call, or None."""
        choice, tools = body.tool_choice, tuple(body.tools or ())
        if isinstance(choice, NamedTool):
            tools = tuple(each for each in tools if each.function.name == choice.function.name)
        if not tools and choice not in (None, "none", "auto"):
            raise ApiError("tool_choice must name a tool of tools.", param="tool_choice")
        if not tools or choice == "none":
            return None
        if "tools" not in template or OPEN not in template:
            raise ApiError(
                f"tools must be left out, since the model's chat template has no place for them, "
                f"or not in the form {OPEN}.",
                param="tools",
                code="unsupported_value",
            )
        parallel = body.parallel_tool_calls is not False
        return cls(tools, forced=choice not in (None, "auto"), parallel=parallel)

    def shown(self) -> list[Json]:
        """Return the tools as templates read them."""
        return [
            tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})
            for tool in self.tools
        ]

    def grammar(self, tokenizer: Any) -> Grammar:
        """Return the grammar of one call."""
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.function.name},
                    "arguments": tool.function.parameters or {"type": "object"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for tool in self.tools
        ]
        schema = json.dumps({"anyOf": calls})
        begin, end = (_mark(tokenizer, mark) for mark in (OPEN, CLOSE))
        return Grammar.lark(f'start: {begin} "\\n" call "\\n" {end}\ncall: %json {schema}')

    def taken_apart(self, text: str) -> tuple[str | None, list[Json]]:
        """Return the text of an answer beside its calls, and the calls in OpenAI's shape."""
        parts = AnswerParts(self)
        said, calls = parts.read(text)
        return (said + parts.end()) or None, calls

    def call(self, written: str) -> Json | None:
        """Return a call in OpenAI's shape, or None if this is not a call of one of the tools."""
        try:
            value = json.loads(written)
            name, arguments = value["name"], value.get("arguments", {})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        if name not in {tool.function.name for tool in self.tools}:
            return None
        called = {"name": name, "arguments": json.dumps(arguments)}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": called}


class AnswerParts:
    """Takes an answer apart while it is written.

    What is not a call stays text, as the model has written it. Text that may be the beginning of a
    call waits, and so do spaces, which are left out at the end of an answer that has calls.
    """

    def __init__(self, toolbox: Toolbox) -> None:
        self._toolbox = toolbox
        self._spaces, self._waiting = "", ""
        self._num_calls = 0

    def read(self, text: str) -> tuple[str, list[Json]]:
        """Return the text that is certain after more of an answer, and the calls that it ends."""
        self._waiting += text
        said, calls = "", []
        while CLOSE in self._waiting:
            before, _, self._waiting = self._waiting.partition(CLOSE)
            text, opened, written = before.rpartition(OPEN)
            call = self._toolbox.call(written) if opened else None
            if call is None:
                said += f"{before}{CLOSE}"
                continue
            said += text
            if self._toolbox.parallel or not self._num_calls:
                calls.append(call)
                self._num_calls += 1
        certain = _certain(self._waiting)
        said, self._waiting = said + self._waiting[:certain], self._waiting[certain:]
        return self._without_last_spaces(said), calls

    def end(self) -> str:
        """Return the text that has waited."""
        rest, self._waiting = self._waiting, ""
        said = self._without_last_spaces(rest)
        return said if self._num_calls else said + self._spaces

    def _without_last_spaces(self, said: str) -> str:
        said = self._spaces + said
        kept = said.rstrip()
        self._spaces = said[len(kept) :]
        return kept


def _mark(tokenizer: Any, mark: str) -> str:
    """Return a mark for Lark: by its number if the tokenizer has a token for it, else as text."""
    added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}
    return f"<[{added[mark]}]>" if mark in added else json.dumps(mark)


def _certain(text: str) -> int:
    """Return how much of a text is not a part of a call, whatever follows."""
    opened = text.find(OPEN)
    if opened >= 0:
        return opened
    for length in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if OPEN.startswith(text[-length:]):
            return len(text) - length
    return len(text)
