"""The four functions of a step: admit, schedule, run, sample.

    waiting ──admit──▶ running ──schedule──▶ chunks ──run──▶ logits ──sample──▶ tokens
       ▲                  │                                                        │
       └─────preempt──────┘                                          finished, or running again

Only the engine's own thread is in here. A job owns its sequence of pages from `admit` until it is
finished or preempted; nobody else frees it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from quire.engine.answers import FinishReason, Token
from quire.engine.events import Counts, Event, EventKind, Listener
from quire.engine.job import Job, Scheduled
from quire.engine.runner import Runner
from quire.engine.sampling import Beams
from quire.engine.sampling.distribution import Floats
from quire.engine.scheduler import Limits, choose, in_turn
from quire.engine.speculation import DraftModel
from quire.engine.speculation.model import Draftable
from quire.engine.speculation.tree import paths_of
from quire.errors import OutOfPages, SamplingError
from quire.integrations.transformers.packed import PartFailure


class Core:
    """The state of an engine between steps, and the four functions that change it."""

    def __init__(
        self, runner: Runner, limits: Limits, drafts: DraftModel | None, *, saves: bool
    ) -> None:
        self.runner, self.limits, self.drafts, self.saves = runner, limits, drafts, saves
        self.pages, self.prefix = runner.pages, runner.prefix
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.counts = Counts()
        self.listeners: list[Listener] = []
        self.problems: list[tuple[str, Exception]] = []  # who raised what, and nobody was told

    def step(self) -> bool:
        """Compute one step. Return whether there is anything left to do.

        A step that is interrupted, as by Ctrl-C, ends all requests: it may have done half of
        anything. New ones can come.
        """
        began = time.perf_counter()
        try:
            self._step()
        except Exception as error:  # a mistake of ours
            self.end_all("error", error)
            raise
        except BaseException:
            self.end_all("cancelled")
            raise
        self.counts.seconds += time.perf_counter() - began
        return self.is_busy

    def _step(self) -> None:
        self.counts.steps += 1
        self.drop_cancelled()
        self.admit()
        scheduled = self.schedule()
        if scheduled is not None:
            logits = self.run(scheduled)
            if logits is not None:
                self.sample(scheduled, logits)

    @property
    def is_busy(self) -> bool:
        """Whether anybody waits or runs."""
        return bool(self.waiting or self.running)

    def enter(self, job: Job) -> None:
        """Let a new job wait. If it does already, an interrupt came before its caller knew."""
        if self.waiting and self.waiting[-1] is job:
            return
        self.waiting.append(job)
        self.counts.submitted += len(job.answers)
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
            try:
                self._place(job)
            except Exception as error:  # nobody else is at fault
                if isinstance(error, OutOfPages) and self.running:
                    self.pages.free(*job.sequences)
                    job.sequences = []
                    break  # the system has less memory than the cache may take
                self.finish(job, "error", error)
                continue
            self._start(job)

    def _place(self, job: Job) -> None:
        """Give a job sequences: with what was saved of them, or pages that hold their tokens."""
        pages = self.pages
        if job.saved:
            for saved in job.saved:
                job.sequences.append(pages.restore(saved))
            job.saved = []
            return
        salt = job.salt if self.prefix else None
        for text in job.texts:
            known = None if salt is None else text[:-1]
            job.sequences.append(pages.sequence(known, salt=salt or b""))
        job.done = min(map(pages.length, job.sequences))
        if job.width > 1:  # all beams go on from one place
            for sequence in job.sequences:
                pages.truncate(sequence, job.done)
        if not job.was_placed:  # later it finds what it has computed itself
            job.was_placed = True
            job.answer.num_cached = min(job.done, job.num_prompt)
        self.counts.cached_tokens += job.done * job.width

    def _start(self, job: Job) -> None:
        """Let a job that has sequences run."""
        self.runner.look_again()
        self.running.append(job)
        self.waiting.remove(job)
        self._tell("admit", job, job.done)

    def _has_room(self, job: Job) -> bool:
        everybody = [*self.running, job]
        if sum(1 + len(each.followers) for each in everybody) > self.limits.requests:
            return False
        size = self.pages.shape.page_size
        wanted = [len(job.tokens) + size] * job.most_width
        for each in self.running:
            wanted += [each.left + size] * each.most_width
        for each in everybody:  # they share the pages of the prompt
            wanted += [size] * len(each.followers)
        return self.pages.has_room(wanted, max(self.limits.tokens, job.most_at_once))

    # --- schedule

    def schedule(self) -> Scheduled | None:
        """Choose the chunks of the next step, and reserve their pages. Preempt who is last."""
        self._guess()
        while True:
            chosen = choose(self.running, self.limits)
            if not chosen:
                return None
            jobs = [job for job, _ in chosen]
            for job in jobs:  # each path of a tree after the first one is a fork of the text
                for _ in job.drafts[1:]:
                    job.sequences.append(self.pages.fork(job.sequences[0]))
            chunks = [job.chunks(count) for job, count in chosen]
            try:
                reserved = self.runner.reserve([chunk for each in chunks for chunk in each])
                return Scheduled(jobs, [len(each) for each in chunks], reserved)
            except OutOfPages as error:
                guessed = [job for job in jobs if job.drafts]
                last = in_turn(self.running)[-1]
                if guessed:  # guesses must not cost anybody pages
                    for job in guessed:
                        self._settle(job)
                elif len(self.running) > 1:
                    self.preempt(last)
                else:  # the system has less memory than the cache may take
                    self.finish(last, "error", error)

    def _guess(self) -> None:
        """Ask for drafts of all jobs that can use some."""
        asked: list[Job] = []
        for job in list(self.running):
            job.drafts = []
            room = job.room
            if job.drafter is None:
                asked += [job] if room and self.drafts is not None else []
            elif room:
                try:
                    given = job.drafter(list(job.tokens))  # a copy: it is the user's code
                    job.drafts = paths_of(given, room, self.runner.num_logits)
                except Exception as error:
                    self.finish(job, "error", error)
        if self.drafts is not None and asked:
            texts = [Draftable(j.number, j.tokens, j.sampler, j.room) for j in asked]
            try:
                found = self.drafts.draft(texts)
            except Exception as error:
                self.problems.append(("a draft model", error))
                return  # without guesses the answers are the same
            for job, paths in zip(asked, found, strict=True):
                job.drafts = paths

    def preempt(self, job: Job) -> None:
        """Take the pages of a job, and save what they hold, or let it be computed again.

        Both give the same bits.
        """
        self._tell("preempt", job, job.done)
        self.counts.preempted += 1
        self._settle(job)
        if self.saves:
            job.saved = [self.pages.copy_out(each) for each in job.sequences]
        self._release(job)
        if not self.saves:
            job.done = 0
        self.waiting.append(job)
        self.running.remove(job)

    # --- run

    def run(self, scheduled: Scheduled) -> list[Floats] | None:
        """Compute the logits of all chunks, or return None if a job has failed.

        A job fails if its mods raise; if something else does, all jobs of the step fail.
        """
        jobs = scheduled.jobs
        began = time.perf_counter()
        try:
            logits = self.runner.compute(scheduled.reserved)
        except PartFailure as failure:
            self._blame(scheduled.jobs_of(scheduled.reserved.members(failure.part)), failure)
            for job in jobs:
                self._settle(job)
            return None
        except Exception as error:
            for job in jobs:
                self.finish(job, "error", error)
            return None
        self.counts.model_seconds += time.perf_counter() - began
        firsts = scheduled.of_each_job(scheduled.reserved.chunks)
        for job, (chunk, *_) in zip(jobs, firsts, strict=True):
            count = min(len(chunk.tokens), job.left)
            job.done += count
            job.apart = False
            if count > 1 or job.done <= job.num_prompt:
                self.counts.prompt_tokens += count * job.width
                self._tell("chunk", job, count)
                self._keep(job)
        return logits

    def _blame(self, jobs: Sequence[Job], failure: PartFailure) -> None:
        """End the job whose mods raise. The others of the step are computed again.

        If several jobs share the part, each gets a part of its own until a step succeeds, so that
        only those end that are at fault. A guess may be at fault where a token of the answer is
        not: without guesses, the job gets another chance.
        """
        if len(jobs) > 1:
            for job in jobs:
                job.apart = True
        elif jobs[0].drafts:
            jobs[0].guesses = False
        else:
            self.finish(jobs[0], "error", failure.__cause__)

    # --- sample

    def sample(self, scheduled: Scheduled, logits: Sequence[Floats]) -> None:
        """Sample from the logits of each job that has computed all its tokens."""
        for job, rows in zip(scheduled.jobs, scheduled.of_each_job(logits), strict=True):
            if not len(rows[0]):
                continue
            for each in (job, *self._join(job)):
                try:
                    if each.beams is None:
                        self._sample(each, rows)
                    else:
                        self._advance(each, each.beams, rows)
                except Exception as error:  # in sampling, or in a grammar
                    self._settle(each)
                    self.finish(each, "error", error)

    def _join(self, job: Job) -> list[Job]:
        """Let the samples that waited for a prompt run, as many as there are places.

        They fork its sequence. The others wait on, and find its pages later or read it again.
        """
        followers, job.followers = job.followers, []
        places = max(0, self.limits.requests - len(self.running))
        for follower in followers:
            follower.leader = None
        for follower in followers[:places]:
            follower.sequences, follower.done = [self.pages.fork(job.sequences[0])], job.done
            self._start(follower)
        return followers[:places]

    def _sample(self, job: Job, rows: Sequence[Floats]) -> None:
        """Accept tokens of one job: as long as they are on a path of its drafts, and one more.

        `rows` has the logits of each path: after the text, and after each of its guesses.
        """
        sampler, place = job.sampler, 0
        paths = list(enumerate(job.drafts or [[]]))
        while paths:
            job.path = paths[0][0]
            found = sampler.sample(rows[job.path][place])
            sampler.accept(found.token)
            job.tokens.append(found.token)
            text = sampler.text
            new, job.shown = text[job.shown :], len(text)
            self.counts.output_tokens += 1
            job.answer.add(Token(found.token, new, found.logprob, found.top_logprobs))
            self._tell("token", job, len(sampler.tokens))
            if sampler.finished is not None:
                break
            paths = [each for each in paths if each[1][place : place + 1] == [found.token]]
            job.done += bool(paths)
            place += 1
        self._settle(job)
        if sampler.finished is not None:
            self.finish(job, sampler.finished)

    def _advance(self, job: Job, beams: Beams, rows: Sequence[Floats]) -> None:
        """Let the beams of a job go on by a token. New beams fork the sequences of old ones."""
        parents = beams.advance([row[0] for row in rows])
        old = job.sequences
        job.sequences = [self.pages.fork(old[parent]) for parent in parents]
        self.pages.free(*old)
        self._tell("token", job, len(job.tokens) + 1 - job.num_prompt)
        if not beams.finished:
            job.tokens, job.width = beams.texts[0], len(beams.texts)
            return
        for answer, beam in zip(job.answers, beams.answers, strict=False):
            if answer.finish_reason is not None:  # it was cancelled
                continue
            for found, text in beam.found:
                answer.add(Token(found.token, text, found.logprob, found.top_logprobs))
            answer.finish(beam.sampler.finished or "length", beam.sampler.text)
            self.counts.output_tokens += len(beam.found)
        if len(beams.answers) < len(job.answers):
            raise SamplingError(
                f"a beam search must find {len(job.answers)} texts, but the grammar or the bias "
                f"allows only {len(beams.answers)}. Ask for fewer."
            )
        self.finish(job, job.answer.finish_reason or "length")

    def _settle(self, job: Job) -> None:
        """Drop drafts that did not come true, and the forks that held them."""
        if job.drafts:
            kept = job.sequences[job.path]
            others = [each for each in job.sequences if each is not kept]
            job.sequences, job.drafts, job.path = [kept], [], 0
            self.pages.free(*others)
            self.pages.truncate(kept, job.done)

    # --- the end of a job

    def finish(self, job: Job, reason: FinishReason, error: BaseException | None = None) -> None:
        """End the answer of a job, and give its pages back or keep them for later prompts."""
        try:
            self._leave(job)
            self._release(job)
        except Exception as mistake:  # of ours; whoever waits for this job must hear of it
            reason, error = "error", error or mistake
        finally:
            self.counts.finished += len(job.answers)
            for answer in job.answers:
                if answer.finish_reason is None:
                    answer.finish(reason, job.sampler.text, error)
        self._tell("finish", job, len(job.sampler.tokens), reason)

    def _leave(self, job: Job) -> None:
        """Take a job out of those who wait or run, and from those it shares a prompt with."""
        for jobs in (self.running, self.waiting):
            if job in jobs:
                jobs.remove(job)
        if job.leader is not None:
            job.leader.followers.remove(job)
        for follower in job.followers:  # each reads the prompt itself
            follower.leader = None

    def drop_cancelled(self) -> None:
        """End the answers that nobody wants any more."""
        for job in [*self.running, *self.waiting]:
            if any(each.is_cancelled for each in job.answers):
                self._cancel(job)

    def _cancel(self, job: Job) -> None:
        """End the answers of a job that nobody wants. A beam search goes on for the others."""
        if all(each.is_cancelled for each in job.answers):
            self.finish(job, "cancelled")
            return
        for answer in job.answers:
            if answer.is_cancelled and answer.finish_reason is None:
                answer.finish("cancelled", "")

    def end_all(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """End all answers, because the engine is closed or has failed."""
        for job in dict.fromkeys([*self.running, *self.waiting]):
            self.finish(job, reason, error)

    def _release(self, job: Job) -> None:
        """Give the sequences of a job back. Their full pages are kept for later prompts."""
        try:
            self._settle(job)
            self._keep(job)
        finally:
            sequences, job.sequences = job.sequences, []
            self.pages.free(*sequences)
            if self.drafts is not None:
                self.drafts.forget(job.number)

    def _keep(self, job: Job) -> None:
        """Remember the full pages of a job by their tokens."""
        if self.prefix and job.salt is not None:
            for sequence, text in zip(job.sequences, job.texts, strict=False):
                self.pages.keep(sequence, text[: job.done], salt=job.salt)

    def _tell(self, kind: EventKind, job: Job, count: int = 0, detail: str = "") -> None:
        if self.listeners:
            event = Event(kind, self.counts.steps, job.answer.number, count, detail)
            for listener in tuple(self.listeners):
                try:
                    listener(event)
                except Exception as error:  # no request is at fault
                    self.listeners.remove(listener)
                    self.problems.append(("a listener", error))
