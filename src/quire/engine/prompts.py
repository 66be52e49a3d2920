"""Prompts as token ids: from text, from a chat, or from ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from quire.checks.arguments import whole_number
from quire.engine.sampling import Vocabulary
from quire.errors import ArgumentError

Prompt: TypeAlias = str | Sequence[Mapping[str, Any]] | Sequence[int] | Tensor
"""A text, a chat of messages such as {"role": "user", "content": "..."}, or ids of tokens [n]."""

_BYTES = (bytes, bytearray, memoryview)  # sequences of numbers, but of text

_ADVICE = "Give a text, a list of messages, or ids of tokens."


def tokens_of(prompt: Prompt, vocabulary: Vocabulary) -> list[int]:
    """Return the ids of a prompt. A chat ends where the model is to answer."""
    if isinstance(prompt, str):
        tokens = list(_tokenizer(vocabulary)(prompt)["input_ids"])
    elif isinstance(prompt, Tensor):
        if prompt.dim() != 1 or prompt.dtype not in (torch.int64, torch.int32):
            raise ArgumentError(
                f"a prompt of ids must be 1-D integers, but is {list(prompt.shape)} of "
                f"{prompt.dtype}. {_ADVICE}"
            )
        tokens = prompt.tolist()
    elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        tokens = _tokenizer(vocabulary).apply_chat_template(
            list(prompt), add_generation_prompt=True, tokenize=True, return_dict=False
        )
    elif isinstance(prompt, Sequence) and not isinstance(prompt, _BYTES):
        advice = "Give the ids of tokens."
        tokens = [whole_number("a token", each, minimum=0, advice=advice) for each in prompt]
    else:
        raise ArgumentError(f"prompt must be text or tokens, but is {prompt!r}. {_ADVICE}")
    if not tokens:
        raise ArgumentError(f"prompt must have a token at least, but has none. {_ADVICE}")
    if min(tokens) < 0 or max(tokens) >= vocabulary.size:
        wrong = min(tokens) if min(tokens) < 0 else max(tokens)
        raise ArgumentError(
            f"tokens must be from 0 to {vocabulary.size - 1}, but one is {wrong}. Use the "
            f"tokenizer of this model."
        )
    return tokens


def _tokenizer(vocabulary: Vocabulary) -> Any:
    if vocabulary.tokenizer is None:
        raise ArgumentError(
            "a prompt must be ids of tokens, since the engine has no tokenizer, but is text. Give "
            "the engine a tokenizer."
        )
    return vocabulary.tokenizer
