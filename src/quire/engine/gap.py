"""The gap between two steps: nothing changes while a thread holds it, and questions are answered.

    with gap:                      # no step is computed meanwhile
        gap.answer_all()           # what other threads have asked

A step holds it, too. So whoever is called by a step, as listeners are, is inside of it: its
questions are answered at once, and it must not wait for a step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Gap:
    """A lock that knows who holds it, and a queue of questions."""

    def __init__(self) -> None:
        self.questions: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._holder: int | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        self._holder = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._holder = None
        self._lock.release()

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread holds the gap."""
        return self._holder == threading.get_ident()

    def answer(self, question: Callable[[], T]) -> T:
        """Return the answer to a question of the calling thread."""
        if self.is_mine:
            return question()
        with self:
            return question()

    def ask(self, question: Callable[[], T]) -> Future[T]:
        """Let the next holder answer a question. A caller inside of the gap gets it at once."""
        reply: Future[T] = Future()
        if self.is_mine:
            _reply(reply, question)
        else:
            self.questions.append(lambda: _reply(reply, question))
        return reply

    def answer_all(self) -> None:
        """Answer all questions that other threads have asked."""
        self.answer(self._answer_all)

    def _answer_all(self) -> None:
        while self.questions:
            self.questions.popleft()()


def _reply(reply: Future[T], question: Callable[[], T]) -> None:
    try:
        reply.set_result(question())
    except BaseException as error:
        reply.set_exception(error)
