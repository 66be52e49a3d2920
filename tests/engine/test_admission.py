"""Who is admitted, who waits, and who gives pages up: limits hold, and nobody waits for ever."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from served import alone, assert_same, engine, packed, prompt, run

from quire.engine import Engine, Event
from quire.engine.scheduler import PATIENCE
from quire.errors import RequestTooLong
from quire.mods import prefix_lm


def test_samples_that_wait_for_their_leader_have_places() -> None:
    """The leader reads its prompt for several steps, and then its samples run, too."""
    served = engine(max_requests=5, chunk=3)
    first, second = (served.submit(prompt(14), max_tokens=6, n=3, temperature=1.0) for _ in "ab")
    third = served.submit(prompt(5), max_tokens=2)
    most = 0
    while served.step():
        most = max(most, served.statistics().running)
    assert most <= 5
    assert all(each.result().tokens for each in (first, second, third))


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("preemption", ["save", "recompute"])
def test_more_samples_than_places_wait(prefix: bool, preemption: Any) -> None:
    options: dict[str, Any] = {"max_tokens": 6, "n": 7, "temperature": 1.0, "seed": 3}
    served = engine(max_requests=2, prefix=prefix, preemption=preemption, chunk=3)
    many = served.submit(prompt(14), **options)
    other = served.submit(prompt(5), max_tokens=2)
    while served.step():
        served.check_integrity()
        assert served.statistics().running <= 2
    wanted = engine(n_pages=400).submit(prompt(14), **options)
    assert [each.tokens for each in many.results()] == [each.tokens for each in wanted.results()]
    assert other.result().tokens == alone("llama", prompt(5), max_tokens=2).tokens
    assert served._core.pages.statistics().sequences == 0


def test_samples_that_wait_for_their_leader_have_pages() -> None:
    served = engine(n_pages=12, chunk=3, prefix=False)
    served.submit(prompt(14), max_tokens=4, n=4, temperature=1.0)
    served.step()
    served.submit(prompt(18), max_tokens=2)
    served.step()
    assert (served.statistics().running, served.statistics().waiting) == (1, 4)
    run(served)
    assert served.statistics().preempted == 0


@pytest.mark.parametrize("preemption", ["save", "recompute"])
def test_what_a_request_has_written_itself_was_not_found(preemption: Any) -> None:
    served = engine(chunk=4, preemption=preemption)
    served.submit(prompt(20), max_tokens=4)
    reading = served.submit(prompt(24), max_tokens=6, logprobs=1)
    for _ in range(3):
        served.step()
    served._core.preempt(served._core.running[-1])
    run(served)
    assert served.statistics().preempted == 1
    assert reading.result().num_cached == 0
    assert_same(reading.result(), alone("llama", prompt(24), max_tokens=6, logprobs=1))


def test_a_whole_prompt_must_fit_into_windowed_layers() -> None:
    """It is read in one piece, so a window gives no page back before its end."""
    whole: dict[str, Any] = {"mask": prefix_lm(60), "causal": False}
    served = engine("mistral", n_pages=10, max_tokens=8)
    assert len(served.submit(prompt(60), max_tokens=3).result().tokens) == 3
    with pytest.raises(RequestTooLong, match="the limit is 10 pages"):
        served.submit(prompt(60), max_tokens=3, **whole)
    wide = engine("mistral", n_pages=20, max_tokens=8)
    other = wide.submit(prompt(20), max_tokens=9)
    wide.step()
    result = wide.submit(prompt(60), max_tokens=3, logprobs=1, **whole).result()
    assert_same(result, alone("mistral", prompt(60), max_tokens=3, logprobs=1, **whole))
    assert len(other.result().tokens) == 9 and wide.statistics().preempted == 0


# --- order


def test_nobody_starves() -> None:
    """Requests with a priority come all the time, and one without is answered nevertheless."""
    served = engine(max_requests=1)
    finished: list[int] = []
    served.listen(lambda event: finished.append(event.answer) if event.kind == "finish" else None)
    patient = served.submit(prompt(5), max_tokens=2)
    served.submit(prompt(5), max_tokens=1, priority=1)
    steps = 0
    while patient.finish_reason is None:
        while served.statistics().waiting < 3:
            served.submit(prompt(5), max_tokens=1, priority=1)
        served.step()
        steps += 1
        assert steps < 2 * PATIENCE, "a request must move up"
    assert steps > PATIENCE // 2 and len(finished) > PATIENCE // 2


def test_the_last_gives_its_pages_up() -> None:
    served = engine(n_pages=16, prefix=False)
    events: list[Event] = []
    served.listen(events.append)
    requests = [served.submit(prompt(12 + n), max_tokens=30) for n in range(4)]
    run(served)
    preempted = [event.answer for event in events if event.kind == "preempt"]
    assert preempted and 0 not in preempted
    running: set[int] = set()
    for event in events:
        if event.kind == "admit":
            running.add(event.answer)
        if event.kind == "preempt":
            assert event.answer == max(running), "the oldest stay"
        if event.kind in ("preempt", "finish"):
            running.discard(event.answer)
    ends = [event.answer for event in events if event.kind == "finish"]
    assert ends == sorted(ends) and len(requests) == len(ends)


def test_events_tell_what_happens() -> None:
    served = engine(chunk=4, prefix=False)
    events: list[Event] = []
    served.listen(events.append)
    served.submit(prompt(10), max_tokens=3)
    for _ in range(4):
        served.step()
    served._core.preempt(served._core.running[0])
    run(served)
    assert [(event.kind, event.size) for event in events] == [
        ("submit", 10), ("admit", 0), ("chunk", 4), ("chunk", 4), ("chunk", 2), ("token", 1),
        ("token", 2), ("preempt", 11),
        ("admit", 0), ("chunk", 4), ("chunk", 4), ("chunk", 4), ("token", 3), ("finish", 3),
    ]  # fmt: skip
    assert events[-1].detail == "length"
    assert all(one.step <= other.step for one, other in pairwise(events))


@pytest.mark.parametrize("budget", [4, 7, 16])
def test_a_step_keeps_to_its_budget(budget: int) -> None:
    """Prompts get what answers leave of it, one token at least."""
    served = Engine(packed("llama"), page_size=4, n_pages=200, max_tokens=budget, start=False)
    runner, sizes = served._core.runner, []
    real = runner.compute

    def compute(reserved: Any) -> Any:
        sizes.append(sum(len(chunk.tokens) for chunk in reserved.chunks))
        return real(reserved)

    runner.compute = compute  # type: ignore[method-assign]
    guess = {"drafter": lambda tokens: [5, 6, 7]}
    for length in (5, 17, 11, 30):
        options: dict[str, Any] = guess if length % 2 else {}
        served.submit(prompt(length), max_tokens=6, **options)
    run(served)
    assert budget <= max(sizes) <= budget + 1
