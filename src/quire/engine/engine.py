"""The engine: many requests, one batch, and nobody notices the others."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, TypeVar

import torch

from quire.checks.arguments import whole_number
from quire.engine.answers import Answer, Completion, FinishReason, Generation
from quire.engine.core import Core, Drafter, Job
from quire.engine.events import EngineStatistics, Listener
from quire.engine.loading import load
from quire.engine.progress import completed
from quire.engine.prompts import Prompt, tokens_of
from quire.engine.request_mods import NO_MODS, mods_of
from quire.engine.runner import Runner
from quire.engine.sampling import Sampler, Sampling, Vocabulary
from quire.engine.scheduler import Limits
from quire.engine.views import EngineView, view
from quire.errors import EngineClosed, RequestTooLong
from quire.integrations.transformers.user_mods import Mods
from quire.linear import Weights
from quire.mods import MaskMod, ScoreMod

T = TypeVar("T")


class Engine:
    """Serves many requests with one causal language model of transformers.

        engine = Engine(model, tokenizer, n_pages=2000)
        request = engine.submit("Once upon a time", max_tokens=64, temperature=0.8, seed=7)
        for token in request:
            print(token.text, end="")

    The tokens of a request do not depend on what else is served, if the rows of the model's layers
    do not (see `quire.linear.pack`). `n_pages` pages of `page_size` tokens, or `max_bytes`, limit
    the cache of keys and values. A step computes up to `max_tokens` tokens, of one prompt up to
    `chunk`, for up to `max_requests` at a time. `prefix` keeps the pages of finished requests for
    prompts that begin like them. `mask` and `score_mod` hold for all requests.

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
        prefix: bool = True,
        mask: MaskMod | None = None,
        score_mod: ScoreMod | None = None,
        num_threads: int | None = None,
        start: bool = True,
    ) -> None:
        advice = "Give a whole number of at least 1."
        for name, number in (("max_tokens", max_tokens), ("max_requests", max_requests)):
            whole_number(name, number, minimum=1, advice=advice)
        chunk = whole_number(
            "chunk", max_tokens if chunk is None else chunk, minimum=1, advice=advice
        )
        if n_pages is None and max_bytes is None:
            max_bytes = 1 << 30
        runner = Runner(
            model,
            mods=Mods(mask, score_mod),
            page_size=page_size,
            n_pages=n_pages,
            max_bytes=max_bytes,
            prefix=prefix,
        )
        self.vocabulary = Vocabulary(
            tokenizer, size=runner.num_logits, ends=_ends(model, tokenizer)
        )
        self.max_length = _max_length(runner.config, max_length)
        self._core = Core(runner, Limits(max_tokens, chunk, max_requests))
        self._inbox: deque[Job] = deque()
        self._questions: deque[Callable[[], object]] = deque()
        self._submitting = threading.Lock()
        self._num_answers = 0
        self._closed = False
        self._stepping = threading.Lock()
        self._awake = threading.Condition()
        self._num_threads = num_threads
        self._threaded = start
        self._thread: threading.Thread | None = None
        self._process = os.getpid()  # a fork has neither the thread, nor the locks that it held

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
        hub. `model_options` go to `from_pretrained` of transformers, `options` to the engine.
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
        not given. `n` samples share the pages of the prompt. A higher `priority` goes first.
        Requests with another `salt` share no pages. Raise if the request can never be answered.

        `mask` and `score_mod` change the attention of this request in all layers; they hide keys
        in addition to the model. If `causal` is False, `mask` takes the place of the model's mask.
        Then the prompt is read in chunks only if the mask is shown to hide later keys.
        """
        self._expect_open()
        tokens = tokens_of(prompt, self.vocabulary)
        wanted = Sampling(**options) if sampling is None else sampling
        count = whole_number("n", n, minimum=1, advice="Say how many samples there are.")
        whole_number("priority", priority, advice="Give a whole number.")
        self._expect_room(len(tokens), wanted.max_tokens)
        heads = self._core.runner.config.num_attention_heads
        length = len(tokens) + wanted.max_tokens
        mods, whole = mods_of(mask, score_mod, causal=causal, heads=heads, length=length)
        first = Sampler(wanted, tokens, self.vocabulary)
        drive = None if self._threaded else self.step
        jobs: list[Job] = []
        with self._submitting:
            for place in range(count):
                answer = Answer(self._num_answers, drive)
                answer.num_prompt = len(tokens)
                job = Job(
                    number=self._num_answers,
                    arrived=self._core.counts.steps,
                    priority=priority,
                    tokens=list(tokens),
                    num_prompt=len(tokens),
                    sampler=first if place == 0 else first.fork(place),
                    answer=answer,
                    mods=mods,
                    whole=whole,
                    salt=salt if mods is NO_MODS else None,
                    drafter=drafter,
                    leader=jobs[0] if jobs else None,
                )
                self._num_answers += 1
                jobs.append(job)
            jobs[0].followers = jobs[1:]
            self._expect_open()
            self._inbox.extend(jobs)
        self._wake()
        return Generation([job.answer for job in jobs])

    def generate(
        self, prompts: Iterable[Prompt], *, progress: bool = False, **options: Any
    ) -> list[Completion]:
        """Answer many prompts, and return the answers in their order.

        `options` are those of `submit`. With `progress`, a bar is drawn meanwhile.
        """
        requests = [self.submit(prompt, **options) for prompt in prompts]
        return completed(requests) if progress else [each.result() for each in requests]

    def _expect_room(self, num_prompt: int, max_tokens: int) -> None:
        total = num_prompt + max_tokens
        if self.max_length is not None and total > self.max_length:
            raise RequestTooLong(
                f"prompt and answer must have at most {self.max_length} tokens, but have "
                f"{num_prompt} + {max_tokens}. Shorten the prompt, or ask for fewer tokens."
            )
        core = self._core
        if not core.pages.has_room([total - 1], core.limits.tokens, alone=True):
            size = core.pages.shape.page_size
            raise RequestTooLong(
                f"a request must fit into the cache alone, but {num_prompt} + {max_tokens} tokens "
                f"need {-(-(total - 1) // size)} pages of {size}, and the limit is "
                f"{core.pages.limits}. Shorten it, or give the engine more pages."
            )

    # --- steps

    def step(self) -> bool:
        """Compute one step. Return whether there is anything left to do."""
        with self._stepping:
            while self._inbox:
                job = self._inbox.popleft()
                self._core.enter(job)
            while self._questions:
                self._questions.popleft()()
            return self._core.is_busy and self._core.step()

    def _run(self) -> None:
        """Compute steps until the engine is closed: what the thread does."""
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        while True:
            with self._awake:
                self._awake.wait_for(
                    lambda: self._closed or self._inbox or self._questions or self._core.is_busy
                )
            if self._closed:
                return
            try:
                self.step()
            except BaseException as error:  # a listener's, or a mistake of ours
                self._core.listeners.clear()
                self._end("error", error)
                return

    def _wake(self) -> None:
        if not self._threaded:
            return
        with self._awake:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="quire engine", daemon=True)
                self._thread.start()
            self._awake.notify()

    # --- looking at it

    def listen(self, listener: Listener) -> None:
        """Call `listener(event)` for every event, from the thread that computes steps."""
        self._core.listeners.append(listener)

    def statistics(self) -> EngineStatistics:
        """Return who waits and runs, sums so far, and the state of pages."""
        return self._between_steps(self._statistics)

    def look(self) -> EngineView:
        """Return who holds which page now, and how far each answer is."""
        return self._between_steps(lambda: view(self._core))

    def check_integrity(self) -> None:
        """Raise PageError unless each page is free, or is held as often as its count says."""
        self._between_steps(self._core.pages.check_integrity)

    def room_after(self, num_prompt: int) -> int:
        """Return how many tokens may follow a prompt of so many tokens, 1 at least."""
        core = self._core
        most = self.max_length or 1 << 24
        low, high = num_prompt + 1, max(num_prompt + 1, most)
        while low < high:  # the longest request that fits into the cache alone
            middle = (low + high + 1) // 2
            fits = core.pages.has_room([middle - 1], core.limits.tokens, alone=True)
            low, high = (middle, high) if fits else (low, middle - 1)
        return low - num_prompt

    @property
    def is_alive(self) -> bool:
        """Whether the engine takes requests and computes steps."""
        return not self._closed and (self._thread is None or self._thread.is_alive())

    def _between_steps(self, question: Callable[[], T]) -> T:
        """Return the answer to a question that only holds between two steps.

        The thread that computes steps answers it: it would take the lock again before anybody else
        that waits for it.
        """
        if self._thread is None or not self.is_alive:
            with self._stepping:
                return question()
        reply: Future[T] = Future()
        self._questions.append(lambda: _reply(reply, question))
        self._wake()
        return reply.result()

    def _statistics(self) -> EngineStatistics:
        core = self._core
        pages = core.pages.statistics()
        return EngineStatistics(
            waiting=len(core.waiting) + len(self._inbox),
            running=len(core.running),
            **asdict(core.counts),
            pages=pages.pages,
            free_pages=pages.free,
            shared_pages=pages.shared,
            kept_pages=pages.kept,
            num_bytes=pages.num_bytes,
        )

    # --- the end

    def close(self) -> None:
        """End all requests and the thread. Answers that are not finished are cancelled."""
        if os.getpid() != self._process:
            return
        with self._submitting:
            self._closed = True
        with self._awake:
            self._awake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._end("cancelled")

    def _end(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """Take no more requests, and end those that wait or run, so that nobody waits for ever."""
        with self._submitting:
            self._closed = True
        with self._stepping:
            while self._inbox:
                self._core.enter(self._inbox.popleft())
            self._core.end_all(reason, error)
            while self._questions:
                self._questions.popleft()()

    def _expect_open(self) -> None:
        if os.getpid() != self._process:
            raise EngineClosed(
                "the engine must be used in the process that made it, but this one was forked. "
                "Make an engine here."
            )
        if self._closed:
            raise EngineClosed("the engine must be open, but was closed. Make a new one.")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _reply(reply: Future[T], question: Callable[[], T]) -> None:
    try:
        reply.set_result(question())
    except BaseException as error:
        reply.set_exception(error)


def _ends(model: Any, tokenizer: Any) -> set[int]:
    """Return the tokens that end an answer: those of the model's own settings, or its tokenizer."""
    settings = getattr(model, "generation_config", None)
    found = getattr(settings, "eos_token_id", None)
    if found is None:
        found = getattr(tokenizer, "eos_token_id", None)
    if found is None:
        return set()
    return {int(each) for each in found} if isinstance(found, Sequence) else {int(found)}


def _max_length(config: Any, wanted: int | None) -> int | None:
    """Return the most tokens of a request that the model has positions for."""
    own: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        # Beyond this length all positions of a call change, whoever's they are.
        own = rope.get("original_max_position_embeddings", own)
    if wanted is None:
        return own
    advice = "Give the most tokens of a prompt and its answer."
    whole_number("max_length", wanted, minimum=1, advice=advice)
    return wanted if own is None else min(own, wanted)
