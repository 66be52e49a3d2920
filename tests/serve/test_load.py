"""Many clients at once, some of which leave: a short form of `benchmarks/serve.py --only load`."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path

import pytest
from serving import served

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def test_nobody_is_lost_or_mistaken_for_another(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    load = importlib.import_module("_load")
    requests = load.plans("tiny", 24, longest=120)
    # Little room: answers are preempted, and the queue is full at times.
    with served(model, "--max-bytes", "300KB", "--max-ongoing", "36") as running:
        report = asyncio.run(load.load(running.url, running.process.pid, requests, 40, 3.0))
        assert running.stop() == 0
    assert not report.lost and not report.wrong
    assert report.complete > 40 and report.cancelled > 0
    failed = [name for name, holds in report.sums().items() if not holds]
    assert not failed, (failed, report.numbers)
    assert "Traceback" not in running.log.read_text()
