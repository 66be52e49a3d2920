"""The language model of the demo: SmolLM2 if it is installed, else a random model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from quire.integrations import smollm2

LETTERS = " abcdefghijklmnopqrstuvwxyz.,"

Asked: TypeAlias = str | Sequence[dict[str, str]]
"""A question, or a conversation that ends with a question."""


class Talker(NamedTuple):
    """A model that uses quire, and its tokenizer."""

    model: Any
    tokenizer: Any
    name: str
    missing: tuple[str, ...] = ()

    def batch(self, questions: Sequence[Asked]) -> dict[str, Tensor]:
        """Return the tokens of questions, padded on the left: [B, S]."""
        asked = [
            [{"role": "user", "content": question}] if isinstance(question, str) else question
            for question in questions
        ]
        found = self.tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        return {name: found[name] for name in ("input_ids", "attention_mask")}

    def text(self, tokens: Tensor) -> str:
        """Return the text of one answer's tokens."""
        found: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return " ".join(found.split())


def talker() -> Talker:
    """Return SmolLM2 if its packages are installed, else a random model."""
    if absent := smollm2.missing():
        return Talker(_random_model(), Spelling(), "a small random model", tuple(absent))
    model, tokenizer = smollm2.load()
    return Talker(model, tokenizer, "SmolLM2-135M-Instruct")


def _random_model() -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    import quire.integrations.transformers  # noqa: F401  registers the name

    config = LlamaConfig(
        vocab_size=len(LETTERS) + 1,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=len(LETTERS),
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="quire").eval()


class Spelling:
    """A tokenizer of single letters, with the methods that the demo calls."""

    def apply_chat_template(
        self, asked: Sequence[Sequence[dict[str, str]]], **_: object
    ) -> dict[str, Tensor]:
        """Return the letters of questions as tokens, padded on the left."""
        texts = ["".join(each["content"] for each in turn).lower() for turn in asked]
        rows = [[max(0, LETTERS.find(letter)) for letter in text] for text in texts]
        width = max(map(len, rows))
        padded = [[len(LETTERS)] * (width - len(row)) + row for row in rows]
        tokens = torch.tensor(padded)
        return {"input_ids": tokens, "attention_mask": (tokens < len(LETTERS)).long()}

    def decode(self, tokens: Tensor, **_: object) -> str:
        """Return the letters of tokens."""
        return "".join(LETTERS[token] for token in tokens.tolist() if token < len(LETTERS))
