"""Which replica has the beginning of a prompt.

Prompts that begin alike go to the same replica, since its pages hold that beginning: the one with
the highest hash of the beginning and its own name (rendezvous hashing). If a replica comes or goes,
only the prompts that were its own move. Where the second in this order has much less to do, it is
chosen instead, and then has the beginning as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

BEGINNING = 64
"""How many characters of a prompt decide, about a page of 16 tokens. Of token ids, a page of them
does."""

UNEQUAL = 2
"""How many answers more the first choice must have than the second to be passed over."""

AnyReplica = TypeVar("AnyReplica")


class Demand(NamedTuple):
    """What a request wants of a replica: `start` stands for the first page of its prompt.

    It is None if there is no prompt.
    """

    start: bytes | None = None
    answers: int = 1


def demand_of(path: str, body: bytes, tenant: bytes) -> Demand:
    """Return what the body of a request wants.

    A tenant finds only pages of its own, so it is a part of the start.
    """
    if not path.endswith("/completions"):
        return Demand()
    try:
        given = json.loads(body)
        prompt = given["messages"] if "chat" in path else given["prompt"]
        answers = int(given.get("n") or 1)
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
            answers *= len(prompt)
            prompt = prompt[0]  # of several prompts, the first decides
        if isinstance(prompt, list) and isinstance(prompt[0], dict):
            prompt = "\0".join(f"{each['role']}\0{_text(each['content'])}" for each in prompt[:8])
        start = prompt[:BEGINNING] if isinstance(prompt, str) else prompt[: BEGINNING // 4]
        return Demand(hashlib.sha256(tenant + repr(start).encode()).digest(), max(1, answers))
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError):
        return Demand()  # a replica says what is wrong with it


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())


def in_order(
    start: bytes,
    replicas: Sequence[AnyReplica],
    name: Callable[[AnyReplica], str],
    load: Callable[[AnyReplica], int],
) -> list[AnyReplica]:
    """Return replicas, those that should have a prompt first."""

    def score(replica: AnyReplica) -> bytes:
        return hashlib.sha256(start + name(replica).encode()).digest()

    order = sorted(replicas, key=score, reverse=True)
    if len(order) > 1 and load(order[0]) > load(order[1]) + UNEQUAL:
        order[:2] = order[1], order[0]
    return order
