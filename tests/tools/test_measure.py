"""Measuring: in other processes, whatever becomes of them."""

from __future__ import annotations

import ctypes
import operator
import os
import time
from functools import partial

import pytest

from quire.tools import measure
from quire.tools.measure import Factory, peak_memory, race

# A factory has to pickle, so each is a partial of a partial: calling it gives the function.
NAP: Factory = partial(partial, time.sleep, 0.02)
LONG_NAP: Factory = partial(partial, time.sleep, 0.06)
GREEDY: Factory = partial(partial, operator.mul, b"x", 60_000_000)
WRONG: Factory = partial(partial, operator.truediv, 1, 0)
DEADLY: Factory = partial(partial, os._exit, 3)
STILLBORN: Factory = partial(operator.truediv, 1, 0)  # type: ignore[assignment]

knows_peaks = pytest.mark.skipif(peak_memory() is None, reason="this system tells no peak")


def test_the_best_time_of_each_in_the_order_given() -> None:
    shares: list[float] = []
    slow, fast = race(LONG_NAP, NAP, seconds=0.3, tick=shares.append)
    assert 0.02 <= fast.seconds < slow.seconds
    assert slow.seconds >= 0.06
    assert len(shares) > 2 and shares == sorted(shares) and shares[-1] == 1


@knows_peaks
def test_the_peak_is_what_the_call_needed() -> None:
    greedy, modest = race(GREEDY, NAP, seconds=0.1)
    assert greedy.peak_bytes is not None and modest.peak_bytes is not None
    assert 55e6 < greedy.peak_bytes < 75e6
    assert modest.peak_bytes < 5e6


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        (WRONG, "ZeroDivisionError: division by zero"),
        (STILLBORN, "ZeroDivisionError: division by zero"),
        (DEADLY, "its process died with exit code 3"),
    ],
)
def test_a_contestant_that_fails_says_why_and_the_other_runs_on(
    factory: Factory, reason: str
) -> None:
    failed, nap = race(factory, NAP, seconds=0.1)
    assert failed.refusal == reason
    assert failed.seconds == float("inf") and failed.peak_bytes is None
    assert nap.refusal is None and nap.seconds >= 0.02


def test_nobody_left_to_run_is_the_end() -> None:
    start = time.perf_counter()
    assert all(reading.refusal for reading in race(WRONG, WRONG, seconds=600))
    assert time.perf_counter() - start < 60


def test_windows_has_no_library_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def windows(name: str | None) -> None:
        raise TypeError("expected a name")

    monkeypatch.setattr(ctypes, "CDLL", windows)
    measure._forget_past()
