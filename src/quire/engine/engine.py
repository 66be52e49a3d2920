"""The engine: many requests, one batch, and nobody notices the others."""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

import torch

from quire.checks.arguments import whole_number
from quire.engine.answers import (
    Answer,
    Bells,
    Completion,
    FinishReason,
    Generation,
    expect_process,
)
from quire.engine.arguments import (
    beams_of,
    check_threads,
    drafter_of,
    ends_of,
    max_length_of,
    prefix_of,
    sampling_of,
)
from quire.engine.core import Core
from quire.engine.events import EngineStatistics, EngineWarning, Listener
from quire.engine.gap import Gap
from quire.engine.job import Drafter, Job
from quire.engine.loading import load
from quire.engine.progress import completed
from quire.engine.prompts import Prompt, tokens_of
from quire.engine.request_mods import checked, mods_of
from quire.engine.room import expect_positions, expect_room, room_after
from quire.engine.runner import Runner
from quire.engine.sampling import Sampler, Sampling, Vocabulary
from quire.engine.scheduler import Limits
from quire.engine.speculation import DraftModel
from quire.engine.views import EngineView, statistics, view
from quire.errors import ArgumentError, EngineClosed, EngineError
from quire.integrations.transformers.user_mods import NO_MODS
from quire.kv.prefix import expect_salt
from quire.linear import Weights
from quire.mods import MaskMod, ScoreMod
from quire.runtime.teams import end_team
from quire.support.warn import warn

T = TypeVar("T")


class Engine:
    """Serves many requests with one causal language model of transformers.

        engine = Engine(model, tokenizer, n_pages=2000)
        request = engine.submit("Once upon a time", max_tokens=64, temperature=0.8, seed=7)
        for token in request:
            print(token.text, end="")

    The tokens of a request do not depend on what else is served, if the rows of the model's layers
    do not (see `quire.linear.pack`). `n_pages` pages of `page_size` tokens, or `max_bytes`, limit
    the cache of keys and values. Up to `max_requests` answers are written at a time; a beam search
    counts as one. A step computes a token of each, however many they are, and then guesses and
    prompts until it has `max_tokens` tokens, of one prompt up to `chunk`. `prefix` keeps the pages
    of finished requests for prompts that begin like them; by default where a model allows it and is
    packed. `mask`, `score_mod` and `causal` hold for all requests, as those of `submit` for one;
    those of `enable` are not read. `drafts` guesses tokens of all requests that have no `drafter`
    of their own. When pages run out, the last request gives up its own: it computes them again
    later, or with `preemption="save"` copies them first.

    A thread of the engine computes steps, with `num_threads` threads of torch. With `start=False`
    there is none: call `step`, or read an answer, which then computes what it needs.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        page_size: int = 16,
        n_pages: int | None = None,
        max_bytes: int | None = None,
        max_tokens: int = 256,
        chunk: int | None = None,
        max_requests: int = 64,
        max_length: int | None = None,
        prefix: bool | None = None,
        mask: MaskMod | None = None,
        score_mod: ScoreMod | None = None,
        causal: bool = True,
        drafts: DraftModel | None = None,
        preemption: Literal["recompute", "save"] = "recompute",
        num_threads: int | None = None,
        start: bool = True,
    ) -> None:
        advice = "Give a whole number of at least 1."
        for name, number in (("max_tokens", max_tokens), ("max_requests", max_requests)):
            whole_number(name, number, minimum=1, advice=advice)
        chunk = whole_number(
            "chunk", max_tokens if chunk is None else chunk, minimum=1, advice=advice
        )
        check_threads(num_threads, start=start)
        if n_pages is None and max_bytes is None:
            max_bytes = 1 << 30
        runner = Runner(
            model,
            mods=checked(mask, score_mod, causal=causal),
            page_size=page_size,
            n_pages=n_pages,
            max_bytes=max_bytes,
            prefix=prefix_of(model, prefix),
        )
        if prefix and not runner.prefix:
            raise ArgumentError(
                "prefix must be None or False for a model with sliding windows, since its layers "
                "give pages back that a later prompt would need, but is True. Leave it out."
            )
        self.vocabulary = Vocabulary(
            tokenizer, size=runner.num_logits, ends=ends_of(model, tokenizer)
        )
        self.max_length = max_length_of(runner.config, max_length)
        if preemption not in ("recompute", "save"):
            raise ArgumentError(
                f'preemption must be "recompute" or "save", but is {preemption!r}. Save pages if '
                f"there is memory for copies of them, and computing them again takes longer."
            )
        limits = Limits(max_tokens, chunk, max_requests)
        self._core = Core(runner, limits, drafts, saves=preemption == "save")
        self._inbox: deque[Job] = deque()
        self._submitting = threading.Lock()
        self._num_answers = 0
        self._closed = False
        self._gap = Gap()
        self._bells = Bells()
        self._awake = threading.Condition()
        self._num_threads = num_threads
        self._threaded = start
        self._thread: threading.Thread | None = None
        self._process = os.getpid()  # a fork has neither the thread, nor the locks that it held
        if drafts is not None:  # at last, since nothing raises after it
            drafts.serve(runner.num_logits)

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        *,
        weights: Weights | None = "float32",
        model_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> Engine:
        """Return an engine for a model by its name, with linear layers packed as `weights`.

        `name` is "SmolLM2-135M-Instruct", which needs no network, a directory, or a name of the
        hub. `model_options` go to `from_pretrained` of transformers, and those that say where files
        are, such as `revision`, to that of the tokenizer, too. `options` go to the engine.
        """
        model, tokenizer = load(name, weights, **(model_options or {}))
        return cls(model, tokenizer, **options)

    # --- requests

    def submit(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        n: int = 1,
        priority: int = 0,
        salt: bytes = b"",
        mask: MaskMod | None = None,
        score_mod: ScoreMod | None = None,
        causal: bool = True,
        drafter: Drafter | None = None,
        **options: Any,
    ) -> Generation:
        """Take a request, and return it at once. It is answered while others are.

        `prompt` is a text, a chat or ids of tokens. `options` are those of `Sampling`, if it is
        not given. `n` samples share the pages of the prompt, and wait for places as requests do;
        with `beams`, they are the `n` best ones. A higher `priority` goes first. Requests with
        another `salt` share no pages. `drafter(tokens)` guesses what follows the tokens so far, one
        list of them or a `DraftTree`. Raise if the request can never be answered.

        `mask` and `score_mod` change the attention of this request in all layers; they hide keys
        in addition to the model. If `causal` is False, `mask` takes the place of the model's mask.
        Then the prompt is read in chunks only if the mask is shown to hide later keys.
        """
        self._expect_open()
        tokens = tokens_of(prompt, self.vocabulary)
        wanted = sampling_of(sampling, options)
        count = whole_number("n", n, minimum=1, advice="Say how many samples there are.")
        whole_number("priority", priority, advice="Give a whole number.")
        expect_salt(salt)
        expect_positions(self.max_length, len(tokens), wanted.max_tokens)
        heads = self._core.runner.config.num_attention_heads
        length = len(tokens) + wanted.max_tokens
        given = checked(mask, score_mod, causal=causal)
        mods, whole = mods_of(given, self._core.runner.mods, heads=heads, length=length)
        expect_room(self._core.pages, self._core.limits, len(tokens), wanted, whole=whole)
        first = Sampler(wanted, tokens, self.vocabulary)
        beams = beams_of(first, tokens, count)
        drive = None if self._threaded else self.step
        jobs: list[Job] = []
        with self._submitting:
            answers = [
                Answer(self._num_answers + place, drive, self._expect_waiting, self._bells)
                for place in range(count)
            ]
            self._num_answers += count
            for answer in answers:
                answer.num_prompt = len(tokens)
                answer.is_scored = wanted.logprobs is not None
            for place, own in enumerate([answers] if beams else [[each] for each in answers]):
                job = Job(
                    number=own[0].number,
                    arrived=self._core.counts.steps,
                    priority=priority,
                    tokens=list(tokens),
                    num_prompt=len(tokens),
                    sampler=first if place == 0 else first.fork(place),
                    answers=own,
                    mods=mods,
                    whole=whole,
                    salt=salt if mods is NO_MODS and not whole else None,
                    drafter=drafter_of(drafter),
                    beams=beams,
                    leader=jobs[0] if jobs else None,
                )
                jobs.append(job)
            jobs[0].followers = jobs[1:]
            self._expect_open()
            self._inbox.extend(jobs)
        self._wake()
        return Generation(answers)

    def generate(
        self, prompts: Iterable[Prompt], *, progress: bool = False, **options: Any
    ) -> list[Completion]:
        """Answer many prompts, and return the answers in their order.

        `options` are those of `submit`. With `progress`, a bar is drawn meanwhile. If one raises,
        or the call is interrupted, the others are cancelled.
        """
        requests: list[Generation] = []
        try:
            for prompt in prompts:
                requests.append(self.submit(prompt, **options))
            return completed(requests) if progress else [each.result() for each in requests]
        except BaseException:
            for request in requests:
                request.cancel()
            raise

    # --- steps

    def step(self) -> bool:
        """Compute one step. Return whether there is anything left to do."""
        self._expect_waiting()
        with self._gap:
            self._take_in()
            self._gap.answer_all()
            if self._core.is_busy:
                self._core.step()
            self._bells.sound()
        if self._closed:  # by a listener
            self._end("cancelled")
        self._report()
        return self._core.is_busy

    def _take_in(self) -> None:
        """Let all jobs wait that were submitted. An interrupt in between loses none of them."""
        while self._inbox:
            self._core.enter(self._inbox[0])
            self._inbox.popleft()

    def _run(self) -> None:
        """Compute steps until the engine is closed: what the thread does."""
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        while True:
            with self._awake:
                self._awake.wait_for(
                    lambda: self._closed or self._inbox or self._gap.questions or self._core.is_busy
                )
            if self._closed:
                return
            try:
                self.step()
            except EngineWarning:  # the user's filter makes an error of it, which no one can catch
                traceback.print_exc()
            except BaseException as error:  # a mistake of ours
                with contextlib.suppress(Exception):  # all who wait hear of the first error
                    self._end("error", error)
                return

    def _wake(self) -> None:
        if not self._threaded:
            return
        with self._awake:
            if self._thread is None:
                end_team()  # of the thread that made the engine, which now waits for it
                self._thread = threading.Thread(target=self._run, name="quire engine", daemon=True)
                self._thread.start()
            self._awake.notify()

    # --- looking at it

    def listen(self, listener: Listener) -> None:
        """Call `listener(event)` for every event, from the thread that computes steps.

        It may ask for statistics, submit and close, but not wait for an answer. If it raises, an
        EngineWarning says so, and it is not called again.
        """
        self._core.listeners.append(listener)

    def statistics(self) -> EngineStatistics:
        """Return who waits and runs, sums so far, and the state of pages."""
        return self._between_steps(lambda: statistics(self._core, len(self._inbox)))

    def look(self) -> EngineView:
        """Return who holds which page now, and how far each answer is."""
        return self._between_steps(lambda: view(self._core))

    def check_integrity(self) -> None:
        """Raise PageError unless each page is free, or is held as often as its count says."""
        self._between_steps(self._core.pages.check_integrity)

    def room_after(self, num_prompt: int) -> int:
        """Return how many tokens may follow a prompt of so many tokens, 1 at least."""
        core = self._core
        return room_after(core.pages, core.limits, self.max_length, num_prompt)

    @property
    def is_alive(self) -> bool:
        """Whether the engine takes requests and computes steps."""
        return not self._closed and (self._thread is None or self._thread.is_alive())

    def _expect_waiting(self) -> None:
        """Raise where nobody can wait for a step: in a fork, and in a listener."""
        expect_process(self._process)
        if self._gap.is_mine:
            raise EngineError(
                "an answer must be awaited outside of listeners, for which each step waits, but is "
                "awaited in one. Read it in another thread, or after the step."
            )

    def _report(self) -> None:
        """Warn of what was raised and ends no request."""
        while self._core.problems:
            who, error = self._core.problems.pop(0)
            warn(
                f"{who} must not raise, but it raised {error!r}. Answers go on without it; mend "
                f"it.",
                EngineWarning,
            )

    def _between_steps(self, question: Callable[[], T]) -> T:
        """Return the answer to a question that only holds between two steps.

        The thread that computes steps answers it: it would take the lock again before anybody else
        that waits for it.
        """
        expect_process(self._process)
        if self._thread is None or not self.is_alive:
            return self._gap.answer(question)
        reply = self._gap.ask(question)
        self._wake()
        if not self.is_alive:  # it may have ended before it saw the question
            self._gap.answer_all()
        return reply.result()

    # --- the end

    def close(self) -> None:
        """End all requests and the thread. Answers that are not finished are cancelled."""
        if os.getpid() != self._process:
            return
        with self._submitting:
            self._closed = True
        if self._gap.is_mine:
            return  # the step ends, and then the engine
        with self._awake:
            self._awake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._end("cancelled")
        self._report()

    def _end(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """Take no more requests, and end those that wait or run, so that nobody waits for ever."""
        with self._submitting:
            self._closed = True
        with self._gap:
            self._take_in()
            try:
                self._core.end_all(reason, error)
            finally:
                self._gap.answer_all()
                self._bells.sound()  # whoever hears them sees that the engine is closed
            drafts, self._core.drafts = self._core.drafts, None
        if drafts is not None:
            drafts.leave()

    def _expect_open(self) -> None:
        expect_process(self._process)
        if self._closed:
            raise EngineClosed("the engine must be open, but was closed. Make a new one.")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
