"""How many answers may run or wait at a time. Who comes later is told when to come again."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from quire.errors import ApiError
from quire.serve.metrics import Metrics


class Gate:
    """Lets `most` answers in. Only the event loop's thread may use it."""

    def __init__(self, most: int, metrics: Metrics) -> None:
        self._most = most
        self._metrics = metrics
        self.inside = 0
        self._typical = 1.0  # seconds of a request, a moving average

    @contextmanager
    def admit(self, count: int) -> Iterator[None]:
        """Count `count` answers as inside for a while, or raise an ApiError."""
        if count > self._most:
            raise ApiError(
                f"a request must have at most {self._most} answers, but asks for {count}.",
                code="too_many_answers",
            )
        if self.inside + count > self._most:
            self._metrics.refused.inc()
            raise ApiError(
                f"the server is full: {self.inside} answers run or wait, and {count} more would "
                f"exceed {self._most}. Try again later.",
                status=429,
                code="queue_full",
                retry_after=min(60, max(1, math.ceil(self._typical / 2))),
            )
        began = time.perf_counter()
        self._enter(count)
        try:
            yield
        finally:
            self._enter(-count)
            self._typical += 0.1 * (time.perf_counter() - began - self._typical)

    def _enter(self, count: int) -> None:
        self.inside += count
        self._metrics.ongoing.set(self.inside)
