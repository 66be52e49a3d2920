"""What packed weights change in a real model: its logits, its answers and its perplexity.

    python benchmarks/answers.py

SmolLM2-135M, in every format of weights, beside transformers' own float32 with SDPA.

`answers`: transformers answers 50 prompts greedily, with 20 tokens at most. A packed model then
reads each prompt with that answer, and says at each place of the answer which token it would
choose. A token counts as the same if that is transformers' token. So every token of an answer, with
the one that ends it, counts once, and a difference does not change the text that later tokens are
read after.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
import torch.nn.functional as F
from _race import Table, run_parts
from torch import Tensor

from quire.integrations import smollm2
from quire.linear import Weights, pack

FORMATS: tuple[Weights, ...] = get_args(Weights)
PAGE = Path(__file__).parent.parent / "docs" / "kv.md"
NEW = 20
_TOPICS = (
    "the moon", "bread", "a violin", "rain", "the Roman Empire", "photosynthesis", "chess",
    "a bicycle", "the heart", "gold", "a volcano", "the ocean", "an owl", "coffee", "the internet",
    "gravity", "a bridge", "winter", "a library", "the number pi", "honey", "a clock", "Paris",
    "an atom", "silk",
)  # fmt: skip
PROMPTS = [
    form.format(topic)
    for topic in _TOPICS
    for form in ("What is the most important thing about {}?", "Here is a short story about {}:")
]


class Answer(NamedTuple):
    """A prompt and its answer as one row of ids, and how many of them are the prompt."""

    ids: Tensor
    prompt: int


def packed_models(plain: Any) -> Iterator[tuple[str, Any]]:
    """Yield the model in every format, and with the blocks of its own file, by name."""
    for weights in FORMATS:
        yield weights, pack(copy.deepcopy(plain), weights)
    yield "gguf", pack(copy.deepcopy(plain), gguf=smollm2.weights())


@torch.no_grad()
def greedy(model: Any, tokenizer: Any, prompts: Sequence[str], new: int = NEW) -> list[Answer]:
    """Return what a model answers, token by token the most likely one."""
    answers = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        whole = model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=2)
        answers.append(Answer(whole, ids.shape[1]))
    return answers


@torch.no_grad()
def agreement(model: Any, answers: Sequence[Answer]) -> float:
    """Return the share of places at which a model goes on as the answers do."""
    same = total = 0
    for ids, prompt in answers:
        found = model(ids[:, :-1]).logits[0, prompt - 1 :].argmax(-1)
        same += int((found == ids[0, prompt:]).sum())
        total += len(found)
    return same / total


@torch.no_grad()
def perplexity_of(model: Any, ids: Tensor) -> float:
    """Return the perplexity of some tokens, in pieces of 512."""
    losses = [
        F.cross_entropy(model(piece[:, :-1]).logits[0], piece[0, 1:], reduction="sum")
        for piece in ids.split(512, 1)
    ]
    return math.exp(float(sum(losses)) / (ids.shape[1] - len(losses)))


def _model() -> tuple[Any, Any] | None:
    if smollm2.missing():
        print(f"  nothing: {smollm2.HOW_TO_INSTALL}")
        return None
    return smollm2.load("sdpa")


@torch.no_grad()
def logits(table: Table, seconds: float, threads: int) -> None:
    """Print the largest difference of a logit, over the first five prompts."""
    if (found := _model()) is None:
        return
    plain, tokenizer = found
    rows = [tokenizer(prompt, return_tensors="pt").input_ids for prompt in PROMPTS[:5]]
    expected = [plain(ids).logits for ids in rows]
    largest = max(float(each.abs().max()) for each in expected)
    for name, model in packed_models(plain):
        apart = max(
            float((model(ids).logits - each).abs().max())
            for ids, each in zip(rows, expected, strict=True)
        )
        wanted = "<= 1" if name == "float32" else ""
        case = f"{name}, largest difference of a logit"
        table.add(case, apart * 1e4, "x 1e-4", wanted, largest_logit=f"{largest:.1f}")


def answers(table: Table, seconds: float, threads: int) -> None:
    """Print how many tokens of 50 greedy answers are those of transformers in float32."""
    if (found := _model()) is None:
        return
    plain, tokenizer = found
    expected = greedy(plain, tokenizer, PROMPTS)
    tokens = sum(ids.shape[1] - prompt for ids, prompt in expected)
    for name, model in packed_models(plain):
        wanted = ">= 0.95" if name in ("float32", "bfloat16", "int8") else ""
        table.add(
            f"{name}, tokens as in float32", agreement(model, expected), "", wanted, tokens=tokens
        )


def perplexity(table: Table, seconds: float, threads: int) -> None:
    """Print the perplexity of a page of the documentation, for each format."""
    if (found := _model()) is None:
        return
    plain, tokenizer = found
    ids = tokenizer(PAGE.read_text(), return_tensors="pt").input_ids[:, :2048]
    before = perplexity_of(plain, ids)
    table.add("transformers, perplexity", before, "", tokens=ids.shape[1])
    for name, model in packed_models(plain):
        after = perplexity_of(model, ids)
        table.add(f"{name}, perplexity", after, "", more=f"{after / before - 1:+.2%}")


PARTS = [logits, answers, perplexity]

if __name__ == "__main__":
    run_parts("answers", __doc__, PARTS)
