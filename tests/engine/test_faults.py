"""Faults of one request, a drafter or a listener: the others are answered, and nobody waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import Queue
from typing import Any

import pytest
import torch
from served import alone, assert_same, engine, packed, prompt, run
from tiny_models import decoder

from quire.engine import Engine, EngineWarning, Event, Generation, Sampling
from quire.engine.runner import _Probe
from quire.engine.speculation import DraftModel, DraftTree, PromptLookup
from quire.errors import ArgumentError, CapturedIndexError, EngineError
from quire.linear import pack

OPTIONS: dict[str, Any] = {"max_tokens": 8, "logprobs": 1}


def fails(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("on purpose")


def assert_empty(served: Engine) -> None:
    """Nothing waits or runs, and no page or sequence is lost."""
    served.check_integrity()
    now = served.statistics()
    assert now.running == now.waiting == 0
    assert now.pages - now.free_pages == now.kept_pages
    assert served._core.pages.statistics().sequences == 0


# --- one request


def test_a_salt_is_bytes() -> None:
    with Engine(packed("llama"), page_size=4, n_pages=64) as served:
        salt: Any = "text"
        with pytest.raises(ArgumentError, match=r"salt must be bytes, but is 'text'\. Encode it"):
            served.submit(prompt(9), salt=salt)
        assert len(served.submit(prompt(9), max_tokens=3).result(timeout=60).tokens) == 3


@pytest.mark.parametrize("width", [{}, {"beams": 3}, {"n": 2}])
def test_a_fault_while_it_is_admitted_ends_a_request_alone(
    monkeypatch: pytest.MonkeyPatch, width: dict[str, int]
) -> None:
    served = engine()
    good = served.submit(prompt(9), **OPTIONS)
    served.step()
    with monkeypatch.context() as patched:
        patched.setattr(served._core.pages, "sequence", fails)
        bad = served.submit(prompt(6), max_tokens=4, **width)
        served.step()
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            bad.result()
    run(served)
    assert_same(good.result(), alone("llama", prompt(9), **OPTIONS))
    for answer in bad.answers[1:] if "n" in width else ():  # it reads the prompt itself
        assert len(answer.result().tokens) == 4
    assert_empty(served)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_fault_while_saved_pages_come_back_ends_a_request_alone(
    monkeypatch: pytest.MonkeyPatch, beams: int
) -> None:
    served = engine(preemption="save")
    good, bad = (served.submit(prompt(9), max_tokens=8, beams=each) for each in (1, beams))
    for _ in range(4):
        served.step()
    core = served._core
    core.preempt(core.running[1])
    place, calls = "quire.kv.files.place", []

    def place_once(*given: Any) -> None:
        calls.append(given)
        if len(calls) == beams:
            fails()
        real(*given)

    import quire.kv.files as files

    real = files.place
    monkeypatch.setattr(place, place_once)
    run(served)
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        bad.result()
    assert good.result().tokens == alone("llama", prompt(9), max_tokens=8).tokens
    assert_empty(served)


def test_a_fault_at_the_end_of_a_request_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submitted = threading.Event()  # a request must be there before the fault, which ends the engine

    def fails_then(*_: Any, **__: Any) -> None:
        assert submitted.wait(60)
        fails()

    with Engine(packed("llama"), page_size=4, n_pages=64) as served:
        monkeypatch.setattr(served._core.pages, "keep", fails_then)
        requests = [served.submit(prompt(9), max_tokens=4) for _ in range(3)]
        submitted.set()
        for request in requests:
            with pytest.raises(ZeroDivisionError, match="on purpose"):
                request.result(timeout=60)


@pytest.mark.parametrize("options", [{}, {"beams": 2}, {"temperature": 1.0, "seed": 1, "n": 2}])
def test_a_fault_at_the_end_of_a_request_ends_it_alone(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    served = engine()
    real = served._core.pages.keep

    def keep(sequence: Any, text: list[int], *, salt: bytes) -> None:
        real(sequence, text, salt=salt)
        if salt and len(text) > 9:
            fails()

    monkeypatch.setattr(served._core.pages, "keep", keep)
    good = served.submit(prompt(9), **OPTIONS)
    bad = served.submit(prompt(9), max_tokens=4, salt=b"bad", **options)
    run(served)
    for answer in bad.answers if "beams" not in options else ():  # beams have their answer already
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            answer.result()
    assert_same(good.result(), alone("llama", prompt(9), **OPTIONS))
    assert_empty(served)


class ClosingLoop:
    """An event loop that its thread closes just after somebody has asked whether it is closed."""

    def is_closed(self) -> bool:
        return False

    def call_soon_threadsafe(self, *_: Any) -> None:
        raise RuntimeError("Event loop is closed")


def test_a_loop_that_is_closed_stops_nobody() -> None:
    served, loop = engine(), ClosingLoop()
    request = served.submit(prompt(9), max_tokens=4)
    loops: list[Any] = request.answers[0]._loops
    loops.append((loop, asyncio.Event()))
    run(served)
    assert len(request.result().tokens) == 4


def test_a_loop_is_woken_once_for_all_answers_of_a_step() -> None:
    woken: list[Any] = []

    class Loop:
        def call_soon_threadsafe(self, call: Any, events: Any) -> None:
            woken.append(len(events))
            call(events)

    served, loop, event = engine(), Loop(), asyncio.Event()
    requests = [served.submit(prompt(4 + number), max_tokens=3) for number in range(4)]
    for request in requests:
        loops: list[Any] = request.answers[0]._loops
        loops.append((loop, event if request is requests[0] else asyncio.Event()))
    requests[0].answers[0]._loops.append((loop, event))  # an event is set once
    steps = 1
    while served.step():
        steps += 1
    assert len(woken) == steps < sum(woken) == 12 and event.is_set()


def test_a_sampling_or_its_options() -> None:
    with pytest.raises(ArgumentError, match=r"either a Sampling or its options .*'max_tokens'"):
        engine().submit(prompt(9), Sampling(), max_tokens=5)


@pytest.mark.parametrize("start", [True, False])
@pytest.mark.parametrize("fault", ["submit", "result", "interrupt"])
def test_generate_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, fault: str, start: bool
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    def drafter(tokens: Any) -> Any:
        return fails() if len(tokens) == 7 else []

    with Engine(packed("llama"), page_size=4, n_pages=64, start=start) as served:
        prompts = [prompt(5), prompt(9), [] if fault == "submit" else prompt(8)]
        if fault == "interrupt":
            monkeypatch.setattr(Generation, "result", interrupted)
        with pytest.raises((ArgumentError, ZeroDivisionError, KeyboardInterrupt)):
            served.generate(prompts, max_tokens=100, drafter=drafter)
        monkeypatch.undo()
        if not start:
            served.step()
        now = served.statistics()
        while now.running or now.waiting:
            now = served.statistics()
        assert now.output_tokens < 100
        assert_empty(served)


def test_a_sampling_is_no_dict() -> None:
    wrong: Any = {"max_tokens": 5}
    with pytest.raises(ArgumentError, match=r"sampling must be a Sampling, but is {'max_tokens'"):
        engine().submit(prompt(9), wrong)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_are_no_prompt(kind: Any) -> None:
    with pytest.raises(ArgumentError, match=r"prompt must be text or tokens, but is .*Give a text"):
        engine().submit(kind(b"\x05\x06"), max_tokens=2)


# --- guesses


@pytest.mark.parametrize("given", [[5.0], [True], ["5"], DraftTree([5.0], [-1])])  # type: ignore[list-item]
def test_guesses_are_whole_numbers(given: Any) -> None:
    served = engine()
    good = served.submit(prompt(9), **OPTIONS)
    bad = served.submit(prompt(9), **OPTIONS, drafter=lambda tokens: given)
    run(served)
    with pytest.raises(ArgumentError, match="a token of drafts must be a whole number, but is"):
        bad.result()
    assert_same(good.result(), alone("llama", prompt(9), **OPTIONS))
    assert_empty(served)


@pytest.mark.parametrize("place", ["compute", "reserve"])
@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_draft_model_that_fails_costs_guesses_only(
    monkeypatch: pytest.MonkeyPatch, after: int, place: str
) -> None:
    drafts = DraftModel(packed("llama"), widths=(2, 1, 1), page_size=4, n_pages=64)
    served = engine(drafts=drafts, n_pages=100)
    real, calls = getattr(drafts.runner, place), []

    def sometimes(given: Any) -> Any:
        calls.append(given)
        return fails() if len(calls) == after + 1 else real(given)

    monkeypatch.setattr(drafts.runner, place, sometimes)
    requests = [served.submit(prompt(length), **OPTIONS) for length in (5, 9)]
    with pytest.warns(EngineWarning, match="a draft model must not raise, but it raised ZeroDiv"):
        run(served)
    for length, request in zip((5, 9), requests, strict=True):
        assert_same(request.result(), alone("llama", prompt(length), **OPTIONS))
    assert len(calls) > after + 1  # it is asked again
    assert drafts.runner.pages.statistics().sequences == 0
    drafts.runner.pages.check_integrity()
    assert_empty(served)


@pytest.mark.parametrize("harm", [list.clear, lambda tokens: tokens.extend([1, 2, 3])])
def test_a_drafter_cannot_change_the_text(harm: Callable[[list[int]], None]) -> None:
    def drafter(tokens: Any) -> list[int]:
        harm(tokens)
        return [7]

    served = engine()
    requests = [served.submit(prompt(9), **OPTIONS, drafter=each) for each in (drafter, None)]
    run(served)
    for request in requests:
        assert_same(request.result(), alone("llama", prompt(9), **OPTIONS))
    assert_empty(served)


def test_each_answer_has_a_lookup_of_its_own() -> None:
    served, given = engine(n_pages=100), PromptLookup()
    given([60, 59, 60, 59])  # what it has seen elsewhere is of no use here
    text = [9, 8, 7] * 5
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0, "seed": 1}
    samples = served.submit(text, n=3, drafter=given, **options)
    jobs = list(served._inbox)
    assert len({id(job.drafter) for job in jobs} | {id(given)}) == 4
    run(served)
    plain = engine(n_pages=100).submit(text, n=3, **options)
    assert [each.tokens for each in samples.results()] == [each.tokens for each in plain.results()]
    prompts = [text, prompt(9), [3, 4] * 6]
    found = served.generate(prompts, drafter=given, max_tokens=8)
    assert [each.tokens for each in found] == [
        alone("llama", each, max_tokens=8).tokens for each in prompts
    ]
    assert given._indexed == 4


def test_who_shares_a_mod_with_the_guilty_keeps_guesses() -> None:
    short = torch.zeros(14)

    def failing(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + short[q_idx]

    def guess(tokens: Any) -> list[int]:
        return [7]

    served = engine()
    good = served.submit(prompt(5), max_tokens=8, score_mod=failing, drafter=guess)
    bad = served.submit(prompt(12), max_tokens=8, score_mod=failing)
    innocent, _ = list(served._inbox)
    run(served)
    with pytest.raises(CapturedIndexError):
        bad.result()
    assert innocent.guesses and not innocent.apart
    assert good.result().tokens == alone("llama", prompt(5), max_tokens=8, score_mod=failing).tokens


# --- the engine's thread, and listeners


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True])
def test_the_number_of_threads_is_checked(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="num_threads must be a whole number of at least 1"):
        Engine(packed("llama"), n_pages=64, num_threads=wrong)


def test_threads_are_those_of_whoever_computes() -> None:
    with pytest.raises(ArgumentError, match="num_threads must be None with start=False"):
        engine(num_threads=2)


@pytest.mark.parametrize("kind", ["submit", "admit", "chunk", "token", "finish"])
def test_a_listener_that_raises_is_told_of_once(kind: str) -> None:
    calls, after = [], []

    def listener(event: Event) -> None:
        if event.kind == kind:
            calls.append(event)
            raise KeyError("a listener")

    served = engine()
    served.listen(listener)
    served.listen(after.append)
    requests = [served.submit(prompt(9), **OPTIONS, n=2) for _ in range(2)]
    with pytest.warns(EngineWarning, match="a listener must not raise, but it raised KeyError"):
        run(served)
    for request in requests:
        assert_same(request.result(), alone("llama", prompt(9), **OPTIONS))
    assert len(calls) == 1
    assert sum(event.kind == "finish" for event in after) == 4
    assert_empty(served)


def test_a_warning_that_is_an_error_does_not_end_the_thread(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Engine(packed("llama"), page_size=4, n_pages=64) as served:
        served.listen(fails)
        for _ in range(2):
            assert len(served.submit(prompt(9), max_tokens=4).result(timeout=60).tokens) == 4
        assert served.is_alive
    assert "EngineWarning: a listener must not raise" in capfd.readouterr().err


@pytest.mark.parametrize("start", [True, False])
def test_a_listener_may_ask_and_submit(start: bool) -> None:
    others: Queue[Generation] = Queue()

    def listener(event: Event) -> None:
        served.check_integrity()
        assert served.statistics().pages == len(served.look().owners)
        if event.kind == "finish" and event.answer == 0:
            others.put(served.submit(prompt(6), max_tokens=2))

    with Engine(packed("llama"), page_size=4, n_pages=64, start=start) as served:
        served.listen(listener)
        served.submit(prompt(9), max_tokens=4).result(timeout=60)
        other = others.get(timeout=60)  # who waits may be told before listeners are
        assert len(other.result(timeout=60).tokens) == 2


@pytest.mark.parametrize("start", [True, False])
def test_a_listener_may_close_but_not_wait(start: bool) -> None:
    errors: list[str] = []
    asked = threading.Event()

    def listener(event: Event) -> None:
        if event.kind == "token" and event.size == 2:
            assert asked.wait(60)
            other = answers[1]
            calls: list[Callable[[], object]] = [served.step, other.result, lambda: list(other)]
            for call in calls:
                with pytest.raises(EngineError, match="must be awaited outside of listeners"):
                    call()
                errors.append("raised")
            served.close()

    with Engine(packed("llama"), page_size=4, n_pages=64, start=start) as served:
        served.listen(listener)
        answers = served.submit(prompt(9), max_tokens=40, n=2).answers  # both have equal steps
        asked.set()
        for answer in answers:
            assert answer.result(timeout=60).finish_reason == "cancelled"
        assert len(errors) == 6 and not served.is_alive
        assert_empty(served)


def test_a_model_that_is_not_packed_shares_no_pages_unless_asked() -> None:
    model = decoder("qwen2").ours
    options: dict[str, Any] = {"n_pages": 64, "page_size": 4, "start": False}
    with pytest.warns(EngineWarning, match=r"its 'model.layers.0.self_attn.q_proj' is not\."):
        served = Engine(model, **options)
    asked = Engine(model, **options, prefix=True)
    for each, cached in ((served, 0), (asked, 8)):
        found = [each.submit(prompt(9), max_tokens=2).result() for _ in "ab"]
        assert found[1].num_cached == cached
    Engine(packed("qwen3"), **options)  # without a warning


@pytest.mark.parametrize(("fused", "loose"), [(False, "layers.0.mlp.act_fn"), (True, "norm")])
def test_norms_and_activations_must_be_packed_too(fused: bool, loose: str) -> None:
    model = pack(decoder("llama").ours, fused=fused, rowwise=False)
    with pytest.warns(EngineWarning, match=f"its 'model.{loose}' is not"):
        served = Engine(model, n_pages=64, start=False)
    assert not served._core.runner.prefix


def test_layers_with_unlike_keys_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = _Probe.update

    def update(self: Any, key: torch.Tensor, value: torch.Tensor, layer: int, **more: Any) -> Any:
        wide = torch.cat((key, key), -1) if layer else key
        return real(self, wide, value, layer, **more)

    monkeypatch.setattr(_Probe, "update", update)
    with pytest.raises(ArgumentError, match=r"keys and values of one shape, .* Use generate for"):
        engine()
