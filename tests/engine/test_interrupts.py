"""A step that is interrupted ends all requests, and the engine answers new ones."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
from served import alone, assert_same, engine, packed, prompt, run

from quire.engine import Engine, core, job
from quire.engine.speculation import DraftModel, DraftTree

OPTIONS: dict[str, Any] = {"max_tokens": 8, "logprobs": 1}
FILES = (core.__file__, job.__file__)
OUTSIDE = {"enter", "end_all", "finish", "_leave", "_release", "_settle", "_keep"}


class Interrupt:
    """Raises KeyboardInterrupt before the `place`-th line that the core of an engine runs.

    With `only`, before that line of the functions of these names.
    """

    def __init__(self, place: int, only: frozenset[str] = frozenset()) -> None:
        self.left, self.only = place, only

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        counts = code.co_filename in FILES and code.co_name not in OUTSIDE
        if not (code.co_name in self.only if self.only else counts):
            return None
        self.left -= event == "line"
        if self.left == 0 and event == "line":
            raise KeyboardInterrupt
        return self


def guess(tokens: list[int]) -> DraftTree:
    return DraftTree([5, 6, 9, 6], parents=[-1, 0, 0, -1])


def interrupted(place: int, **options: Any) -> tuple[Engine, list[Any], bool]:
    """An engine, its requests, and whether one of its steps was interrupted at a place."""
    served = engine(**options)
    asked: list[dict[str, Any]] = [{"drafter": guess}, {"beams": 2}, {"n": 2}]
    requests = [served.submit(prompt(9), **OPTIONS, **each) for each in asked]
    before = sys.gettrace()
    try:
        sys.settrace(Interrupt(place))
        while served.step():
            pass
    except KeyboardInterrupt:
        return served, requests, True
    finally:
        sys.settrace(before)
    return served, requests, False


@pytest.mark.parametrize("first", range(3))
def test_a_step_may_be_interrupted_anywhere(first: int) -> None:
    place, found = 1 + first, True
    while found:
        served, requests, found = interrupted(place, n_pages=30)
        run(served)  # nothing is left, unless the step had not begun
        for each in requests:
            assert all(answer.finish_reason for answer in each.answers), place
        assert_same(
            served.submit(prompt(6), **OPTIONS).result(), alone("llama", prompt(6), **OPTIONS)
        )
        place += 3 * 101
    assert place > 10 * 101


def test_no_request_is_lost_if_a_step_is_interrupted_at_its_beginning() -> None:
    place, found = 0, True
    while found:
        place, found = place + 1, False
        served = engine()
        requests = [served.submit(prompt(5 + k), max_tokens=2, ignore_eos=True) for k in range(2)]
        before = sys.gettrace()
        try:
            sys.settrace(Interrupt(place, only=frozenset(["_take_in", "enter"])))
            served.step()
        except KeyboardInterrupt:
            found = True
        finally:
            sys.settrace(before)
        run(served)
        assert [each.finish_reason for each in requests] == ["length"] * 2, place
    assert place > 8


@pytest.mark.parametrize("name", ["reserve", "compute"])
@pytest.mark.parametrize("drafted", [False, True])
def test_no_page_is_lost_if_the_model_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, name: str, drafted: bool
) -> None:
    drafts = DraftModel(packed("llama"), widths=(2, 1), page_size=4, n_pages=64)
    served = engine(drafts=drafts)
    runner = drafts.runner if drafted else served._core.runner
    real, calls = getattr(runner, name), []

    def stops(given: Any) -> Any:
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(given)

    monkeypatch.setattr(runner, name, stops)
    requests = [served.submit(prompt(9), **OPTIONS, drafter=each) for each in (guess, None)]
    with pytest.raises(KeyboardInterrupt):
        run(served)
    assert [each.result().finish_reason for each in requests] == ["cancelled"] * 2
    for pages in (served._core.pages, drafts.runner.pages):
        pages.check_integrity()
        assert pages.statistics().sequences == 0
    assert_same(served.submit(prompt(6), **OPTIONS).result(), alone("llama", prompt(6), **OPTIONS))
