"""The same work in several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable


def at_once(work: Callable[[int], None], count: int) -> None:
    """Call `work` with 0, 1, ..., each in a thread of its own, and wait for all."""
    workers = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
