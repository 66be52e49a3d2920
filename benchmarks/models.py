"""A whole language model with quire, beside the same model with PyTorch's attention and cache.

    python benchmarks/models.py --only prefill

The model is SmolLM2-135M (30 layers, 9 query and 3 key heads of 64) in float32, called through
`generate` of transformers. It is compared with attn_implementation="sdpa" and a DynamicCache, which
holds padding. A run takes many seconds, so each takes two turns, of which the best counts.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from _race import Table, run_parts
from torch import Tensor

from quire.integrations import smollm2

BATCH = 8
SHORTEST, LONGEST = 32, 512
NEW = 128
PROMPT = 2048
SHARED_PROMPT, SAMPLES, SAMPLED = 1024, 8, 32
TURNS = 2
PEERS = ("ours", "sdpa")


class Batch(NamedTuple):
    """Random prompts [B, S], padded on the left, and a mask [B, S] with 0 for padding."""

    input_ids: Tensor
    attention_mask: Tensor

    @staticmethod
    def of(lengths: Sequence[int]) -> Batch:
        """Return prompts of these lengths."""
        generator = torch.Generator().manual_seed(0)
        real = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
        tokens = torch.randint(100, 40_000, real.shape, generator=generator)
        return Batch(torch.where(real, tokens, 2), real.long())


def unequal_lengths() -> list[int]:
    """Return lengths that grow by a constant factor, from the shortest to the longest."""
    return torch.logspace(5, 9, BATCH, base=2).round().int().tolist()


@functools.cache
def model() -> Any:
    """Return the model. It is loaded once. Ask `absent` first whether it is installed."""
    found, _ = smollm2.load()
    found.generation_config.eos_token_id = None
    return found


def absent(case: str) -> bool:
    """Return whether packages are missing. If so, print their names and how to install them."""
    if missing := smollm2.missing():
        print(f"  {case}: needs {' and '.join(missing)}: {smollm2.HOW_TO_INSTALL}")
    return bool(missing)


def new_cache(ours: bool) -> Any:
    from transformers import DynamicCache

    from quire.integrations.transformers import PagedCache

    return PagedCache(model().config) if ours else DynamicCache(config=model().config)


def generate(batch: Batch, ours: bool, new: int = NEW, **options: Any) -> Any:
    """Generate `new` tokens for each prompt, and return the cache."""
    model().set_attn_implementation("quire" if ours else "sdpa")
    cache = new_cache(ours)
    options = {"do_sample": False, "max_new_tokens": new, **options}
    model().generate(**batch._asdict(), past_key_values=cache, **options)
    return cache


def num_bytes(cache: Any) -> int:
    """Return the memory of a cache in bytes, including memory that is not used yet."""
    pages = getattr(cache, "pages", None)
    if pages is not None:
        return int(pages.statistics().num_bytes)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def best_of_turns(contestants: dict[str, Callable[[], Any]]) -> dict[str, tuple[float, Any]]:
    """Return the seconds of the best turn of each function, and what it returned."""
    found: dict[str, tuple[float, Any]] = {}
    for _ in range(TURNS):
        for name, run in contestants.items():
            start = time.perf_counter()
            result = run()
            seconds = time.perf_counter() - start
            found[name] = min(found.get(name, (float("inf"), None)), (seconds, result), key=_first)
    return found


def _first(pair: tuple[float, Any]) -> float:
    return pair[0]


def _generation(table: Table, case: str, lengths: list[int], wanted: str) -> None:
    batch = Batch.of(lengths)
    for ours in (True, False):  # compiles kernels, and loads the weights into memory
        generate(Batch(*(x[:, -16:] for x in batch)), ours, new=2)
    found = best_of_turns(
        {name: functools.partial(generate, batch, name == "ours") for name in PEERS}
    )
    (ours, our_cache), (peer, peer_cache) = (found[name] for name in PEERS)
    rate = round(BATCH * NEW / ours, 1)
    table.add(
        case, peer / ours, "x as fast as SDPA", wanted, ours_s=round(ours, 1), tokens_per_s=rate
    )
    if len(set(lengths)) > 1:
        share = 100 * num_bytes(our_cache) / num_bytes(peer_cache)
        table.add("memory of the cache in this batch", share, "% of SDPA's cache", "< 60")


def unequal(table: Table, seconds: float, threads: int) -> None:
    """Prompts of unequal lengths. transformers pads them, and its cache keeps the padding."""
    case = f"generate, {BATCH} prompts of {SHORTEST} to {LONGEST}, {NEW} new"
    if not absent(case):
        _generation(table, case, unequal_lengths(), ">= 1.3")


def equal(table: Table, seconds: float, threads: int) -> None:
    """Prompts of equal lengths, so that nothing is padded."""
    case = f"generate, {BATCH} prompts of {LONGEST}, {NEW} new"
    if not absent(case):
        _generation(table, case, [LONGEST] * BATCH, ">= 1.0")


@torch.inference_mode()
def prefill(table: Table, seconds: float, threads: int) -> None:
    """The time to read one long prompt, up to its first new token."""
    case = f"prefill of {PROMPT} tokens"
    if absent(case):
        return
    batch = Batch.of([PROMPT])

    def read(ours: bool) -> None:
        model().set_attn_implementation("quire" if ours else "sdpa")
        model()(**batch._asdict(), past_key_values=new_cache(ours), logits_to_keep=1)

    read(True)
    found = best_of_turns({name: functools.partial(read, name == "ours") for name in PEERS})
    ours, peer = (found[name][0] for name in PEERS)
    table.add(case, peer / ours, "x as fast as SDPA", ">= 1.1", ours_s=round(ours, 2))


def samples(table: Table, seconds: float, threads: int) -> None:
    """The memory of several answers to one prompt, which share its pages."""
    case = f"memory of {SAMPLES} samples of a prompt of {SHARED_PROMPT}, {SAMPLED} new"
    if absent(case):
        return
    cache = generate(
        Batch.of([SHARED_PROMPT]), True, SAMPLED, do_sample=True, num_return_sequences=SAMPLES
    )
    pages = cache.pages
    apart = SAMPLES * -(-(SHARED_PROMPT + SAMPLED - 1) // pages.shape.page_size)
    alone = apart * pages.shape.num_bytes * pages.num_layers
    table.add(case, 100 * num_bytes(cache) / alone, "% of the memory unshared", "< 25")


PARTS = (unequal, equal, prefill, samples)


if __name__ == "__main__":
    run_parts("models", __doc__, PARTS)
