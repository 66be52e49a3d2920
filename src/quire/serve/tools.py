"""Tools that a model may call, for templates that write them as Hermes and Qwen do.

<tool_call>
{"name": "weather", "arguments": {"city": "Berlin"}}
</tool_call>
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from typing import Any

from quire.engine.sampling import Grammar
from quire.errors import ApiError
from quire.serve.bodies import ChatBody, NamedTool, Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(rf"{OPEN}\s*(.*?)\s*{CLOSE}", re.DOTALL)


@dataclass(frozen=True)
class Toolbox:
    """The tools of a request. With `forced`, one of them must be called."""

    tools: tuple[Tool, ...]
    forced: bool = False

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
        return cls(tools, forced=choice not in (None, "auto"))

    def shown(self) -> list[dict[str, Any]]:
        """Return the tools as templates read them."""
        return [
            tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})
            for tool in self.tools
        ]

    def grammar(self) -> Grammar:
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
        return Grammar.lark(f'start: "{OPEN}\\n" call "\\n{CLOSE}"\ncall: %json {schema}')

    def taken_apart(self, text: str) -> tuple[str | None, list[dict[str, Any]]]:
        """Return the text of an answer beside its calls, and the calls in OpenAI's shape."""
        calls = []
        names = {tool.function.name for tool in self.tools}
        for found in _CALL.findall(text):
            try:
                value = json.loads(found)
                name, arguments = value["name"], value.get("arguments", {})
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                return text, []  # not a call: the text stays as the model has written it
            if name not in names:
                return text, []
            called = {"name": name, "arguments": json.dumps(arguments)}
            identity = f"call_{secrets.token_hex(12)}"
            calls.append({"id": identity, "type": "function", "function": called})
        beside = _CALL.sub("", text).strip() if calls else text
        return beside or None, calls
