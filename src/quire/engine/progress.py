"""A bar for many requests: how many are answered, and how many tokens come in a second."""

from __future__ import annotations

import time
from collections.abc import Sequence

from quire.engine.answers import Completion, Generation
from quire.errors import MissingPackageError


def completed(requests: Sequence[Generation]) -> list[Completion]:
    """Wait for all requests under a bar, and return their answers in order."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as TimeLeft
    except ModuleNotFoundError as missing:
        raise MissingPackageError(
            "the package rich must be installed for progress=True, but is not. Install it: "
            "pip install 'quire[engine]'."
        ) from missing
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeLeft()
    results, tokens, began = [], 0, time.perf_counter()
    with Progress(*columns) as bar:
        task = bar.add_task("answering", total=len(requests))
        for request in requests:
            results.append(request.result())
            tokens += len(results[-1].tokens)
            rate = tokens / (time.perf_counter() - began)
            bar.update(task, advance=1, description=f"{rate:.0f} tokens/s")
    return results
