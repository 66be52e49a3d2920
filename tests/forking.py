"""Copies of the process that runs the tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest


def forks(test: Callable[..., Any]) -> Callable[..., Any]:
    """A test that forks.

    From Python 3.12 on a fork next to other threads warns, and torch's are there. What a child may
    do then is what these tests are about.
    """
    quiet = pytest.mark.filterwarnings(
        "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"
    )
    able = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no os.fork")
    return able(quiet(test))
