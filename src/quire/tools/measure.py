"""Time and peak memory of functions, each in its own new process.

    fast, slow = race(make_fast, make_slow, seconds=5)
    fast.seconds, fast.peak_bytes     # of its best call; beyond the memory before the first call

A factory is called once in its process and returns the function that is measured. It must be
picklable. Functions take turns, so that other programs slow all of them equally, and the best time
of each counts. Each has a new process, since freed memory that an allocator keeps would hide the
next peak.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch

from quire.support.memory import give_back

Factory: TypeAlias = Callable[[], Callable[[], object]]

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class Reading(NamedTuple):
    """The figures of one contestant: seconds of its best call, and its peak memory in bytes.

    `peak_bytes` is None if the system does not report it. `refusal` is why there are no figures.
    """

    seconds: float = float("inf")
    peak_bytes: int | None = None
    refusal: str | None = None


def race(
    *factories: Factory,
    seconds: float,
    threads: int = 1,
    tick: Callable[[float], None] = lambda share: None,
) -> list[Reading]:
    """Call the contestants in turns until about `seconds` have passed, each at least once.

    Measure one thread if you can: several wait for each other when another program takes a core.
    `tick` is called with the share of the time that has passed, from 0 to 1.
    """
    with ExitStack() as stack:
        made = (closing(Contestant(make, threads)) for make in factories)
        contestants = [stack.enter_context(each) for each in made]
        for contestant in contestants:
            contestant.wait_until_ready()
        start, share = time.perf_counter(), 0.0
        while share < 1 and any(contestant.is_running for contestant in contestants):
            for contestant in contestants:
                contestant.run_once()
            share = min(1.0, (time.perf_counter() - start) / seconds)
            tick(share)
        tick(1.0)
        return [contestant.reading for contestant in contestants]


class Contestant:
    """A process that builds its function, and calls it once for each message."""

    def __init__(self, factory: Factory, threads: int) -> None:
        context = _clean_processes()
        self._ours, theirs = context.Pipe()
        arguments = (factory, threads, theirs)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self.reading = Reading()

    def close(self) -> None:
        """End the process."""
        self._ours.close()
        self._process.kill()
        self._process.join()

    def wait_until_ready(self) -> None:
        """Wait until the function is built, since building would slow the others."""
        self._receive()

    @property
    def is_running(self) -> bool:
        """Whether the function has not failed."""
        return self.reading.refusal is None

    def run_once(self) -> None:
        """Call the function once, unless it has failed before."""
        if self.is_running:
            with suppress(BrokenPipeError):  # the process died: _receive finds its exit code
                self._ours.send("go")
            self._receive()

    def _receive(self) -> None:
        try:
            new = self._ours.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            died = f"its process died with exit code {self._process.exitcode}"
            new = Reading(refusal=died)
        self.reading = new._replace(seconds=min(new.seconds, self.reading.seconds))


def _clean_processes() -> SpawnContext | ForkServerContext:
    """Return a way to start processes in which torch is imported and nothing was computed.

    A fork of this process would have its memory, and OpenMP threads that do not respond.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():  # Windows
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["quire"])  # imported once, and not in each process
    return context


def _serve(factory: Factory, threads: int, pipe: Connection) -> None:
    """Run a contestant: build, report, then make one call and one report for each message."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and ends this process
    try:
        torch.set_num_threads(threads)
        function = factory()
        _forget_past()
        before = peak_memory()
        pipe.send(Reading())
        while pipe.recv():
            start = time.perf_counter()
            function()
            seconds, after = time.perf_counter() - start, peak_memory()
            extra = None if before is None or after is None else after - before
            pipe.send(Reading(seconds, extra))
    except EOFError:  # the parent has closed the pipe
        return
    except Exception as error:
        pipe.send(Reading(refusal=f"{type(error).__name__}: {error}"))


def peak_memory() -> int | None:
    """Return the peak memory of this process in bytes, or None if the system does not report it."""
    try:
        for line in _STATUS.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "VmHWM":
                return int(value.split()[0]) * 1024
    except OSError:  # not Linux
        pass
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _forget_past() -> None:
    """Return freed memory to the system and reset the peak, if the system can do so.

    If it cannot, memory that was used to build the function hides a part of the peak.
    """
    gc.collect()
    give_back()
    with suppress(OSError):  # not Linux
        _CLEAR_REFS.write_text("5")
