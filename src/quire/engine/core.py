"""The four functions of a step: admit, schedule, run, sample.

    waiting ──admit──▶ running ──schedule──▶ chunks ──run──▶ logits ──sample──▶ tokens
       ▲                  │                                                        │
       └─────preempt──────┘                                          finished, or running again

Only the engine's own thread is in here. A job owns its sequence of pages from `admit` until it is
finished or preempted; nobody else frees it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from quire.engine.answers import Answer, FinishReason, Token
from quire.engine.events import Counts, Event, EventKind, Listener
from quire.engine.request_mods import NO_MODS
from quire.engine.runner import Chunk, Reserved, Runner
from quire.engine.sampling import Sampler
from quire.engine.scheduler import Limits, Turn, choose, in_turn
from quire.errors import OutOfPages
from quire.integrations.transformers.packed import PartFailure
from quire.integrations.transformers.user_mods import Mods
from quire.kv import SequenceHandle

Drafter = Callable[[Sequence[int]], list[int]]
"""Takes the tokens so far and returns guesses of the next ones."""


@dataclass(eq=False, kw_only=True)
class Job(Turn):
    """One answer that is being written."""

    sampler: Sampler
    answer: Answer
    mods: Mods = NO_MODS
    salt: bytes | None = b""  # None if its pages must not be shared
    drafter: Drafter | None = None
    sequence: SequenceHandle | None = None
    apart: bool = False  # whether its attention is computed by a call of its own
    leader: Job | None = None  # who reads the prompt for this sample
    shown: int = 0  # characters of the answer's text that were given out
    followers: list[Job] = field(default_factory=list)

    @property
    def handle(self) -> SequenceHandle:
        """The sequence of a job that runs."""
        assert self.sequence is not None, "a job that runs has a sequence"
        return self.sequence


class Core:
    """The state of an engine between steps, and the four functions that change it."""

    def __init__(self, runner: Runner, limits: Limits) -> None:
        self.runner, self.limits = runner, limits
        self.pages, self.prefix = runner.pages, runner.prefix
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.counts = Counts()
        self.listeners: list[Listener] = []

    def step(self) -> bool:
        """Compute one step. Return whether there is anything left to do."""
        began = time.perf_counter()
        self.counts.steps += 1
        self.drop_cancelled()
        self.admit()
        scheduled = self.schedule()
        if scheduled is not None:
            logits = self.run(scheduled)
            if logits is not None:
                self.sample(scheduled.jobs, logits)
        self.counts.seconds += time.perf_counter() - began
        return self.is_busy

    @property
    def is_busy(self) -> bool:
        """Whether anybody waits or runs."""
        return bool(self.waiting or self.running)

    def enter(self, job: Job) -> None:
        """Let a new job wait."""
        self.counts.submitted += 1
        self.waiting.append(job)
        self._tell("submit", job, job.num_prompt)

    # --- admit

    def admit(self) -> None:
        """Let those who wait run, in their order, as long as there are places and pages.

        A job is admitted if all its tokens fit beside the tokens that others have yet to compute,
        and beside one page more for each of them. Who shares a prompt waits for its leader.
        """
        for job in in_turn(each for each in self.waiting if each.leader is None):
            if self.running and not self._has_room(job):
                break
            self.waiting.remove(job)
            cached = 0
            if self.prefix and job.salt is not None:
                job.sequence = self.pages.sequence(job.tokens[:-1], salt=job.salt)
                cached = job.done = self.pages.length(job.sequence)
            else:
                job.sequence, job.done = self.pages.sequence(), 0
            job.answer.num_cached = min(cached, job.num_prompt)
            self.counts.cached_tokens += cached
            self.running.append(job)
            self._tell("admit", job, cached)

    def _has_room(self, job: Job) -> bool:
        if len(self.running) + 1 + len(job.followers) > self.limits.requests:
            return False
        size = self.pages.shape.page_size
        grow = [each.left + size for each in self.running]
        return self.pages.has_room([len(job.tokens) + size, *grow], self.limits.tokens)

    # --- schedule

    def schedule(self) -> Scheduled | None:
        """Choose the chunks of the next step, and reserve their pages. Preempt who is last."""
        while True:
            for job in self.running:
                job.drafts = _drafts(job)
            chosen = choose(self.running, self.limits)
            if not chosen:
                return None
            jobs = [job for job, _ in chosen]
            try:
                return Scheduled(jobs, self.runner.reserve([_chunk(*each) for each in chosen]))
            except OutOfPages as error:
                last = in_turn(self.running)[-1]
                if len(self.running) > 1:
                    self.preempt(last)
                else:  # the system has less memory than the cache may take
                    self.finish(last, "error", error)

    def preempt(self, job: Job) -> None:
        """Take the pages of a job. It will compute its tokens again, which gives the same bits."""
        self._tell("preempt", job, job.done)
        self.counts.preempted += 1
        self._release(job)
        job.done = 0
        self.waiting.append(job)

    # --- run

    def run(self, scheduled: Scheduled) -> list[Tensor] | None:
        """Compute the logits of all chunks, or return None if a job has failed.

        A job fails if its mods raise; if something else does, all jobs of the step fail.
        """
        jobs = scheduled.jobs
        began = time.perf_counter()
        try:
            logits = self.runner.compute(scheduled.reserved)
        except PartFailure as failure:
            self._blame(
                [jobs[place] for place in scheduled.reserved.members(failure.part)], failure
            )
            return None
        except Exception as error:
            for job in jobs:
                self.finish(job, "error", error)
            return None
        self.counts.model_seconds += time.perf_counter() - began
        for job, chunk in zip(jobs, scheduled.reserved.chunks, strict=True):
            count = min(len(chunk.tokens), job.left)
            job.done += count
            if count > 1 or job.done <= job.num_prompt:
                self.counts.prompt_tokens += count
                self._tell("chunk", job, count)
                self._keep(job)
        return logits

    def _blame(self, jobs: Sequence[Job], failure: PartFailure) -> None:
        """End the job whose mods raise. The others of the step are computed again.

        If several jobs share the part, each gets a part of its own, so that only those end that
        are at fault. A guess may be at fault where a token of the answer is not: without guesses,
        the job gets another chance.
        """
        if len(jobs) == 1 and not jobs[0].drafts:
            self.finish(jobs[0], "error", failure.__cause__)
        for job in jobs:
            job.apart, job.drafter = True, None

    # --- sample

    def sample(self, jobs: Sequence[Job], logits: Sequence[Tensor]) -> None:
        """Sample from the logits of each job that has computed all its tokens."""
        for job, rows in zip(jobs, logits, strict=True):
            if not len(rows):
                continue
            for follower in job.followers:
                follower.sequence, follower.done = self.pages.fork(job.handle), job.done
                follower.leader = None
                self.waiting.remove(follower)
                self.running.append(follower)
                self._tell("admit", follower, follower.done)
            for each in (job, *job.followers):
                self._sample(each, rows)
            job.followers.clear()

    def _sample(self, job: Job, rows: Tensor) -> None:
        """Accept tokens of one job: as long as its drafts are what it samples, and one more."""
        drafts = job.drafts[: len(rows) - 1]
        sampler = job.sampler
        try:
            for place, row in enumerate(rows):
                found = sampler.sample(row)
                sampler.accept(found.token)
                job.tokens.append(found.token)
                text = sampler.text
                new, job.shown = text[job.shown :], len(text)
                self.counts.output_tokens += 1
                job.answer.add(Token(found.token, new, found.logprob, found.top_logprobs))
                self._tell("token", job, len(sampler.tokens))
                if sampler.finished is not None or found.token != [*drafts, None][place]:
                    break
                job.done += 1
        except Exception as error:
            self.finish(job, "error", error)
            return
        if drafts:
            self.pages.truncate(job.handle, job.done)
        if sampler.finished is not None:
            self.finish(job, sampler.finished)

    # --- the end of a job

    def finish(self, job: Job, reason: FinishReason, error: BaseException | None = None) -> None:
        """End the answer of a job, and give its pages back or keep them for later prompts."""
        if job in self.running:
            self._release(job)
        else:
            self.waiting.remove(job)
        if job.leader is not None:
            job.leader.followers.remove(job)
        for follower in job.followers:  # each reads the prompt itself
            follower.leader = None
        self.counts.finished += 1
        job.answer.finish(reason, job.sampler.text, error)
        self._tell("finish", job, len(job.sampler.tokens), reason)

    def drop_cancelled(self) -> None:
        """End the answers that nobody wants any more."""
        for job in [*self.running, *self.waiting]:
            if job.answer.is_cancelled:
                self.finish(job, "cancelled")

    def end_all(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """End all answers, because the engine is closed or has failed."""
        for job in [*self.running, *self.waiting]:
            self.finish(job, reason, error)

    def _release(self, job: Job) -> None:
        self._keep(job)
        self.running.remove(job)
        self.pages.free(job.handle)
        job.sequence = None

    def _keep(self, job: Job) -> None:
        """Remember the full pages of a job by their tokens."""
        if self.prefix and job.salt is not None:
            self.pages.keep(job.handle, job.tokens[: job.done], salt=job.salt)

    def _tell(self, kind: EventKind, job: Job, count: int = 0, detail: str = "") -> None:
        if self.listeners:
            event = Event(kind, self.counts.steps, job.answer.number, count, detail)
            for listener in self.listeners:
                listener(event)


@dataclass(frozen=True, eq=False)
class Scheduled:
    """The jobs of a step, and their reserved chunks."""

    jobs: list[Job]
    reserved: Reserved


def _drafts(job: Job) -> list[int]:
    """Return guesses of the next tokens of a job that answers.

    While others wait to fork its sequence, it must hold no guesses. If a token may see later ones,
    it would see guesses, too.
    """
    if job.drafter is None or job.left != 1 or job.followers or job.whole:
        return []
    room = job.sampler.options.max_tokens - len(job.sampler.tokens) - 1
    return job.drafter(job.tokens)[: max(0, room)]


def _chunk(job: Job, count: int) -> Chunk:
    """Return the next `count` tokens of a job; drafts follow its last token."""
    ends = job.done + count >= len(job.tokens)
    tokens = job.tokens[job.done : job.done + count]
    drafts = job.drafts[: count - len(tokens)]
    return Chunk(
        job.handle,
        job.done,
        [*tokens, *drafts],
        num_logits=1 + len(drafts) if ends else 0,
        mods=job.mods,
        apart=job.apart,
    )
