"""Drafts of a model, and trees of drafts: answers have the bits that they have without guesses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from served import alone, assert_same, engine, packed, prompt, run
from tiny_models import decoder

from quire.engine import Event
from quire.engine.scheduler import fitting
from quire.engine.speculation import DraftModel, DraftTree
from quire.errors import ArgumentError

OPTIONS: dict[str, Any] = {"max_tokens": 9, "logprobs": 2}
LENGTHS = (5, 17, 1)


# Trees


def test_a_tree_has_a_path_to_each_leaf() -> None:
    assert DraftTree([5, 6, 9, 6], [-1, 0, 0, -1]).paths == [[5, 6], [5, 9], [6]]
    assert DraftTree([], []).paths == []
    for parents in ([-1, 1], [-1], [0, 0], [-2, 0]):
        with pytest.raises(ArgumentError, match="parents must have an earlier place or -1"):
            DraftTree([1, 2], parents)


def test_a_budget_cuts_a_tree() -> None:
    paths = [[1, 2, 3], [4, 5], [6]]
    assert fitting(paths, 20) == (paths, 12)
    assert fitting(paths, 6) == ([[1, 2, 3], [4, 5]], 0)
    assert fitting(paths, 5) == ([[1, 2, 3], [4]], 0)
    assert fitting(paths, 4) == ([[1, 2, 3]], 1)
    assert fitting(paths, 2) == ([[1, 2]], 0)
    assert fitting(paths, -3) == ([], -3)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3", "gpt_oss", "qwen3"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_tree_is_verified_in_one_call(family: str, temperature: float) -> None:
    """The tree has the right path, wrong ones beside it, and leaves that share their beginning."""
    options = {**OPTIONS, "temperature": temperature, "seed": 3}
    expected = alone(family, prompt(9), **options)

    def tree(tokens: Sequence[int]) -> DraftTree:
        right = expected.tokens[len(tokens) - 9 :][:3]
        wrong = [(token + 1) % 60 for token in right]
        if len(right) < 3:
            return DraftTree(wrong[:1], [-1] * len(wrong[:1]))
        return DraftTree(
            [wrong[0], right[0], wrong[1], right[1], wrong[2], right[2]], [-1, -1, 1, 1, 3, 3]
        )

    served = engine(family, n_pages=100, max_tokens=64)
    events: list[Event] = []
    served.listen(events.append)
    other = served.submit(prompt(17), **options)
    request = served.submit(prompt(9), **options, drafter=tree)
    run(served)
    assert_same(request.result(), expected)
    assert_same(other.result(), alone(family, prompt(17), **options))
    steps = [event.step for event in events if event.kind == "token" and event.answer == 1]
    assert len(set(steps)) == 3  # the first token, and twice four of which three were guessed
    now = served.statistics()
    assert now.pages - now.free_pages == now.kept_pages


def test_guesses_cost_nobody_pages() -> None:
    served = engine(n_pages=10, max_tokens=64)
    expected = alone("llama", prompt(9), **OPTIONS)

    def tree(tokens: Sequence[int]) -> DraftTree:
        return DraftTree([7] * 12, [-1, *range(5), -1, *range(6, 11)])

    requests = [served.submit(prompt(9), **OPTIONS, drafter=tree) for _ in range(2)]
    run(served)
    for request in requests:
        assert_same(request.result(), expected)
    assert served.statistics().preempted == 0


def test_a_drafter_that_fails_ends_its_own_request() -> None:
    served = engine()

    def broken(tokens: Sequence[int]) -> list[int]:
        raise ZeroDivisionError("in a drafter")

    good = served.submit(prompt(9), **OPTIONS)
    bad = served.submit(prompt(9), **OPTIONS, drafter=broken)
    foreign = served.submit(prompt(9), **OPTIONS, drafter=lambda tokens: [5, 61])
    run(served)
    with pytest.raises(ZeroDivisionError, match="in a drafter"):
        bad.result()
    with pytest.raises(ArgumentError, match="drafts must be tokens from 0 to 60, but one is 61"):
        foreign.result()
    assert_same(good.result(), alone("llama", prompt(9), **OPTIONS))


# Draft models


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("widths", [(1, 1, 1), (3, 1), (2, 2, 1)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_drafts_for_itself_is_right(
    family: str, widths: tuple[int, ...], temperature: float
) -> None:
    """Its guesses all come true, at any temperature: they have the same random numbers."""
    options = {**OPTIONS, "temperature": temperature, "seed": 3}
    drafts = DraftModel(packed(family), widths=widths, page_size=4, n_pages=100)
    served = engine(family, n_pages=100, max_tokens=64, drafts=drafts)
    events: list[Event] = []
    served.listen(events.append)
    requests = [served.submit(prompt(length), **options) for length in LENGTHS]
    run(served)
    for length, request in zip(LENGTHS, requests, strict=True):
        assert_same(request.result(), alone(family, prompt(length), **options))
    for request in requests:
        steps = {e.step for e in events if e.kind == "token" and e.answer == request.number}
        assert len(steps) <= 2 + -(-8 // (1 + len(widths)))
    assert drafts.runner.pages.statistics().sequences == 0
    drafts.runner.pages.check_integrity()


@pytest.mark.parametrize(
    "sizes", [{"n_pages": 40}, {"n_pages": 7}, {"n_pages": 40, "max_tokens": 3}]
)
def test_another_model_drafts(sizes: dict[str, int]) -> None:
    """Its guesses are wrong mostly; its pages may run out, and it reads prompts in pieces."""
    drafts = DraftModel(decoder("qwen2").ours, widths=(2, 1), page_size=4, **sizes)
    served = engine(n_pages=24, chunk=5, drafts=drafts)
    options = {**OPTIONS, "repetition_penalty": 1.2}
    requests = [served.submit(prompt(length), **options, n=2) for length in LENGTHS]
    beams = served.submit(prompt(9), max_tokens=5, beams=2)
    run(served)
    for length, request in zip(LENGTHS, requests, strict=True):
        for result in request.results():
            assert_same(result, alone("llama", prompt(length), **options))
    assert len(beams.result().tokens) == 5
    assert drafts.runner.pages.statistics().sequences == 0


def test_a_draft_model_must_fit() -> None:
    drafts = DraftModel(packed("llama"), n_pages=8)
    engine(drafts=drafts)
    with pytest.raises(ArgumentError, match="must serve one engine, but serves another"):
        engine(drafts=drafts)
    with pytest.raises(ArgumentError, match="must have the 60 tokens of the model, but has 61"):
        drafts.serve(60)
    with pytest.raises(ArgumentError, match="widths must have a number at least"):
        DraftModel(packed("llama"), widths=())


@pytest.mark.parametrize("start", [True, False])
def test_a_draft_model_serves_one_engine_after_another(start: bool) -> None:
    drafts = DraftModel(packed("llama"), page_size=4, n_pages=64)
    for wrong in ({"preemption": "x"}, {"max_length": 0}):
        with pytest.raises(ArgumentError):
            engine(drafts=drafts, **wrong)
    for _ in "ab":
        with engine(drafts=drafts, start=start) as served:
            with pytest.raises(ArgumentError, match="Make one for each, or close that one"):
                engine(drafts=drafts)
            served.submit(prompt(5), max_tokens=90)  # it is not finished when the engine is closed
            found = served.submit(prompt(9), **OPTIONS).result(timeout=60)
        assert_same(found, alone("llama", prompt(9), **OPTIONS))
        assert drafts.runner.pages.statistics().sequences == 0
