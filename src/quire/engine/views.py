"""What an engine looks like between two steps: who holds which page, and how far each answer is."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from typing import Literal, NamedTuple

import numpy as np

from quire.engine.core import Core
from quire.engine.events import Counts, EngineStatistics
from quire.engine.job import Job
from quire.kv.page_map import FREE as FREE_PAGE
from quire.kv.page_map import PageMap

FREE, KEPT, SHARED = -1, -2, -3
"""The owners of a page that is not held by one answer alone."""

State = Literal["waits", "reads", "writes", "preempted"]


class AnswerView(NamedTuple):
    """How far an answer is, and the pages that it holds."""

    number: int
    state: State
    num_prompt: int
    num_cached: int
    num_tokens: int
    pages: list[int]


class EngineView(NamedTuple):
    """The pages of the first group of layers. An owner is an answer, FREE, KEPT or SHARED.

    A page that one answer holds and that is also kept for later prompts belongs to that answer.
    """

    page_size: int
    owners: list[int]
    answers: list[AnswerView]
    counts: Counts


def view(core: Core) -> EngineView:
    """Return what an engine looks like now. Only between two steps."""
    pages = core.pages.page_map()
    answers = [_answer(job, pages) for job in (*core.running, *core.waiting)]
    owners = np.where(pages.owners == FREE_PAGE, FREE, KEPT)
    held = Counter(page for answer in answers for page in answer.pages)
    for answer in answers:
        owners[answer.pages] = answer.number
    owners[[page for page, count in held.items() if count > 1]] = SHARED
    return EngineView(pages.page_size, owners.tolist(), answers, replace(core.counts))


def statistics(core: Core, new: int) -> EngineStatistics:
    """Return the state of an engine, with `new` answers that no step has seen yet."""
    pages = core.pages.statistics()
    return EngineStatistics(
        waiting=len(core.waiting) + new,
        running=len(core.running),
        **asdict(core.counts),
        pages=pages.pages,
        free_pages=pages.free,
        shared_pages=pages.shared,
        kept_pages=pages.kept,
        num_bytes=pages.num_bytes,
    )


def _answer(job: Job, pages: PageMap) -> AnswerView:
    held = dict.fromkeys(page for own in job.sequences for page in pages.held[own.serial].tolist())
    return AnswerView(
        number=job.number,
        state=_state(job),
        num_prompt=job.num_prompt,
        num_cached=job.answer.num_cached,
        num_tokens=len(job.sampler.tokens),
        pages=list(held),
    )


def _state(job: Job) -> State:
    if not job.sequences:
        return "preempted" if job.sampler.tokens else "waits"
    return "reads" if job.done < job.num_prompt else "writes"
