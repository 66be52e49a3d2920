"""What fits into the positions of a model and the pages of an engine: checked before it waits."""

from __future__ import annotations

from quire.engine.sampling import Sampling
from quire.engine.scheduler import Limits
from quire.errors import RequestTooLong
from quire.kv import PagedKVCache


def expect_positions(most: int | None, num_prompt: int, max_tokens: int) -> None:
    """Raise unless a prompt and its answer have at most so many tokens."""
    if most is not None and num_prompt + max_tokens > most:
        raise RequestTooLong(
            f"prompt and answer must have at most {most} tokens, but have {num_prompt} + "
            f"{max_tokens}. Shorten the prompt, or ask for fewer tokens."
        )


def expect_room(
    pages: PagedKVCache, limits: Limits, num_prompt: int, wanted: Sampling, *, whole: bool
) -> None:
    """Raise unless a request fits into the cache alone."""
    max_tokens, beams = wanted.max_tokens, wanted.beams
    total = num_prompt + max_tokens
    step = max(limits.tokens, num_prompt if whole else 1)
    if not pages.has_room([total - 1] * beams, step, alone=True):
        size = pages.shape.page_size
        raise RequestTooLong(
            f"a request must fit into the cache alone, but {num_prompt} + {max_tokens} tokens "
            f"{f'of {beams} beams ' if beams > 1 else ''}need "
            f"{beams * -(-(total - 1) // size)} pages of {size}, and the limit is "
            f"{pages.limits}. Shorten it, or give the engine more pages."
        )


def room_after(pages: PagedKVCache, limits: Limits, most: int | None, num_prompt: int) -> int:
    """Return how many tokens may follow a prompt of so many tokens, 1 at least."""
    low, high = num_prompt + 1, max(num_prompt + 1, most or 1 << 24)
    while low < high:  # the longest request that fits into the cache alone
        middle = (low + high + 1) // 2
        fits = pages.has_room([middle - 1], limits.tokens, alone=True)
        low, high = (middle, high) if fits else (low, middle - 1)
    return low - num_prompt
