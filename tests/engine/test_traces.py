"""Timed traces: requests arrive, are cancelled and fail, and nobody notices the others.

A trace is an engine with few pages, and requests with a time of arrival. After every step all pages
are counted. At the end, tokens and log-probabilities of each request are those of the same request
alone, bit for bit. `pytest tests/engine -m exhaustive` runs 10,000 traces.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import engine, packed
from tiny_tokenizers import letters

from quire.engine import Answer, Engine, Generation
from quire.engine.sampling import Grammar, Sampler
from quire.engine.speculation import DraftModel, DraftTree
from quire.errors import CapturedIndexError, RequestTooLong
from quire.mods import causal, prefix_lm, sliding_window

FEW = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MANY = settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))


class Broken(Exception):
    """What the sampler of a request raises that fails."""


class FailingSampler(Sampler):
    """A sampler that raises at the token `fails`, as its copies do."""

    fails = 0

    def accept(self, token: int) -> None:
        if len(self.tokens) == self.fails:
            raise Broken
        super().accept(token)


# Mods of requests. Some requests share a mod, others have tensors of their own.

BIASES = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(0))
SHORT = torch.zeros(14)


def bias(which: int) -> Callable[..., Any]:
    table = BIASES[which]
    return lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx]


def too_short(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A mod that raises once a sequence has more than 14 tokens."""
    return score + SHORT[q_idx]


MODS: dict[str, dict[str, Any]] = {
    "none": {},
    "window": {"mask": sliding_window(5)},
    "bias 0": {"score_mod": bias(0)},
    "bias 1": {"score_mod": bias(1)},
    "too short": {"score_mod": too_short},
    "causal of its own": {"mask": causal, "causal": False},
    "prefix": {"mask": prefix_lm(6), "causal": False},
}


# What else requests ask of their sampling.
RULES: dict[str, dict[str, Any]] = {
    "none": {},
    "penalties": {
        "repetition_penalty": 1.4,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.8,
    },
    "bias": {"logit_bias": {5: 3.0, 11: -torch.inf}},
    "few": {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "stop strings": {"stop": [*string.ascii_lowercase[:12], "QZ"]},
    "stop tokens": {"stop_tokens": range(12)},
    "no end": {"ignore_eos": True},
    "grammar": {"grammar": Grammar.regex("([a-m][0-7]?)+")},
}


@dataclass(frozen=True)
class Asked:
    """A request of a trace, and what happens to it."""

    arrival: int
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None
    priority: int
    n: int
    beams: int
    mods: str
    rules: str
    salt: bytes
    turn: bool  # once it is answered, prompt and answer are the beginning of another request
    cancelled: int | None  # so many steps after it has arrived
    fails: int | None  # the token at which its sampler raises
    drafts: str

    @property
    def alone(self) -> Asked:
        """The request without what happens to it."""
        none: Any = {"arrival": 0, "priority": 0, "cancelled": None, "fails": None}
        return replace(self, **none, drafts="none", salt=b"", turn=False)

    def after(self, answer: Sequence[int], now: int) -> Asked:
        """The next turn of a chat."""
        return replace(self, prompt=(*self.prompt, *answer, 3, 1), arrival=now, turn=False)

    @property
    def options(self) -> dict[str, Any]:
        sampled: dict[str, Any] = {} if self.seed is None else {"temperature": 1.0}
        if self.beams > 1:
            sampled = {"beams": self.beams}
        common = {"max_tokens": self.max_tokens, "logprobs": 2, "seed": self.seed}
        return {**common, **sampled, **MODS[self.mods], **RULES[self.rules]}


prompts = st.builds(
    lambda shared, length, own: tuple([*range(1, 40)][:shared]) + tuple(own) + (7,) * length,
    shared=st.sampled_from([0, 0, 5, 9, 16]),
    length=st.integers(1, 6),
    own=st.lists(st.integers(1, 60), max_size=6),
)
asked = st.builds(
    lambda n, beams, **rest: Asked(n=n if beams == 1 else min(n, beams), beams=beams, **rest),
    arrival=st.integers(0, 12),
    prompt=prompts,
    max_tokens=st.integers(1, 9),
    seed=st.none() | st.integers(0, 3),
    priority=st.sampled_from([0, 0, 0, 1, -1]),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    beams=st.sampled_from([1, 1, 1, 1, 1, 2, 3]),
    mods=st.sampled_from(["none"] * 6 + list(MODS)),
    rules=st.sampled_from(["none"] * 6 + list(RULES)),
    salt=st.sampled_from([b"", b"", b"", b"another tenant"]),
    turn=st.booleans(),
    cancelled=st.none() | st.none() | st.integers(0, 8),
    fails=st.none() | st.none() | st.none() | st.integers(0, 4),
    drafts=st.sampled_from(["none", "none", "right", "wrong", "mixed", "tree", "tree"]),
)


@dataclass(frozen=True)
class Trace:
    """An engine's sizes, and requests."""

    page_size: int
    n_pages: int
    chunk: int
    max_tokens: int
    max_requests: int
    prefix: bool
    saves: bool
    threads: int
    model: tuple[str, tuple[int, ...], int] | None  # that drafts: its family, widths and pages
    requests: tuple[Asked, ...]


traces = st.builds(
    lambda page_size, spare, **rest: Trace(page_size, -(-40 // page_size) + spare, **rest),
    page_size=st.sampled_from([1, 2, 4, 5]),
    spare=st.integers(0, 12),
    chunk=st.sampled_from([1, 2, 3, 7, 100]),
    max_tokens=st.sampled_from([1, 4, 9, 100]),
    max_requests=st.integers(1, 6),
    prefix=st.booleans(),
    saves=st.booleans(),
    model=st.none()
    | st.tuples(
        st.sampled_from(["llama", "qwen2"]),
        st.sampled_from([(1, 1, 1), (2, 1), (1, 3)]),
        st.sampled_from([12, 60]),
    ),
    threads=st.sampled_from([1, 2]),
    requests=st.lists(asked, min_size=1, max_size=6).map(tuple),
)


@functools.cache
def wanted(family: str, one: Asked) -> Any:
    """What the request gets alone: its tokens with all that comes with them, and an error."""
    with engine(family, tokenizer=letters(), n_pages=200, max_tokens=512, prefix=False) as served:
        request = served.submit(list(one.prompt), n=one.n, **one.options)
        return [read(answer) for answer in request.answers]


def read(answer: Answer) -> tuple[list[Any], type[BaseException] | None]:
    """All tokens of an answer with their probabilities, and the error that ended it."""
    tokens = []
    try:
        for token in answer:
            tokens.append(token)
    except (Broken, CapturedIndexError) as error:
        return tokens, type(error)
    return tokens, None


def drafter(one: Asked, answers: Any) -> Callable[[Sequence[int]], Any] | None:
    """Guesses of what the first answer says: right, wrong, right at first, or right among wrong."""
    right = [token.token for token in answers[0][0]]

    def guess(tokens: Sequence[int]) -> list[int] | DraftTree:
        said = len(tokens) - len(one.prompt)
        following = right[said : said + 3]
        wrong = [(token + 1) % 60 for token in following]
        if one.drafts == "tree" and len(following) == 3:
            nodes = [wrong[0], following[0], wrong[1], following[1], following[2], wrong[2]]
            return DraftTree(nodes, [-1, -1, 1, 1, 3, 0])
        if one.drafts == "wrong":
            return wrong
        return [*following[:1], 5] if one.drafts == "mixed" else following

    return None if one.drafts == "none" else guess


def submit(served: Engine, one: Asked, answers: Any) -> Generation:
    request = served.submit(
        list(one.prompt),
        n=one.n,
        priority=one.priority,
        salt=one.salt,
        drafter=drafter(one, answers),
        **one.options,
    )
    if one.fails is not None:
        sampler: Any = served._inbox[-one.n if one.beams == 1 else -1].sampler  # the first answer's
        sampler.__class__, sampler.fails = FailingSampler, one.fails
    return request


def check(family: str, trace: Trace) -> None:
    torch.set_num_threads(trace.threads)
    drafts = None
    if trace.model is not None:
        name, widths, n_pages = trace.model
        drafts = DraftModel(packed(name), widths=widths, page_size=2, n_pages=n_pages)
    served = Engine(
        packed(family),
        letters(),
        page_size=trace.page_size,
        n_pages=trace.n_pages,
        chunk=trace.chunk,
        max_tokens=trace.max_tokens,
        max_requests=trace.max_requests,
        prefix=None if trace.prefix else False,
        preemption="save" if trace.saves else "recompute",
        drafts=drafts,
        start=False,
    )
    waiting = sorted(trace.requests, key=lambda one: one.arrival)
    requests: list[tuple[Asked, Generation]] = []
    clock, busy = 0, False
    while waiting or busy:
        while waiting and waiting[0].arrival <= clock:
            one = waiting.pop(0)
            try:
                requests.append((one, submit(served, one, wanted(family, one.alone))))
            except RequestTooLong:  # all beams of a request must fit
                assert one.beams > 1
        for one, request in requests:
            if one.cancelled is not None and clock >= one.arrival + one.cancelled:
                request.cancel()
        busy = served.step()
        served.check_integrity()
        clock += 1
        assert clock < 3000, "an engine must come to an end"
        for place, (one, request) in enumerate(requests):
            if one.turn and request.finish_reason in ("stop", "length"):
                requests[place] = replace(one, turn=False), request
                said = [token.token for token in request.answers[0]]
                turn = one.after(said, clock)
                if len(turn.prompt) + turn.max_tokens <= trace.page_size * trace.n_pages:
                    waiting.insert(0, turn)
    for one, request in requests:
        for sample, answer in enumerate(request.answers):
            judge(one, sample, answer, wanted(family, one.alone)[sample])
    now = served.statistics()
    assert now.running == now.waiting == 0
    assert now.pages - now.free_pages == now.kept_pages
    assert now.finished == sum(one.n for one, _ in requests)
    if drafts is not None:
        assert drafts.runner.pages.statistics().sequences == 0
        drafts.runner.pages.check_integrity()


def judge(one: Asked, sample: int, answer: Answer, expected: Any) -> None:
    """A finished answer is the expected one; others are a beginning of it."""
    tokens, error = read(answer)
    right, right_error = expected
    plain = [token._replace(text="") for token in tokens]
    assert plain == [token._replace(text="") for token in right[: len(tokens)]]
    reason = answer.finish_reason
    if reason in ("stop", "length"):
        assert "".join(token.text for token in tokens) == "".join(token.text for token in right)
    if error is Broken:
        assert tokens == [] if one.beams > 1 else sample == 0 and len(tokens) == one.fails
    elif reason == "cancelled":
        assert one.cancelled is not None
    else:
        assert (error, len(tokens)) == (right_error, len(right))


@pytest.mark.timeout(600)
@given(traces)
@FEW
def test_nobody_notices_the_others(trace: Trace) -> None:
    check("llama", trace)


@pytest.mark.timeout(600)
@given(traces, st.sampled_from(["gpt2", "gpt_oss", "gemma3", "mistral", "qwen3"]))
@settings(FEW, max_examples=80)
def test_nobody_notices_the_others_in_other_families(trace: Trace, family: str) -> None:
    check(family, trace)


@pytest.mark.exhaustive
@pytest.mark.timeout(0)
@given(traces)
@MANY
def test_nobody_notices_the_others_in_ten_thousand_traces(trace: Trace) -> None:
    check("llama", trace)
