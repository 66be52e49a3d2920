"""Real processes of a gloo group that wait for functions to run, so that tests start them once.

with Ranks(4) as ranks:
    ranks.run(function, 3, argument)    # function(group, argument) on the first 3 processes
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from quire.codegen.llvm import jit
from quire.codegen.llvm.target import Target

PATIENCE = 100  # seconds for one function
AFTER_AN_ERROR = 5  # seconds for the ranks that have not failed


class RankError(AssertionError):
    """A function failed in another process."""


class Ranks:
    """Processes of one thread each. Function and arguments are pickled."""

    def __init__(self, count: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="quire-ranks-")
        self._pipes, self._processes = [], []
        for rank in range(count):
            ours, theirs = spawn.Pipe()
            arguments = (theirs, f"{self._folder.name}/store", rank, count)
            process = spawn.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            process.kill()
        self._folder.cleanup()

    def run(self, function: Callable[..., Any], size: int, *args: object) -> list[Any]:
        """Return what `function(group, *args)` returns on each of the first `size` ranks."""
        outcomes = self.outcomes(function, size, *args)
        failed = [f"rank {rank}: {x}" for rank, (ok, x) in enumerate(outcomes) if not ok]
        if failed:
            raise RankError("\n".join(failed))
        return [value for _, value in outcomes]

    def outcomes(self, function: Callable[..., Any], size: int, *args: object) -> list[Any]:
        """Return for each rank whether it succeeded, and its result or its error as text."""
        for pipe in self._pipes:
            pipe.send((function, size, args))
        found: dict[int, Any] = {}
        limit = time.monotonic() + PATIENCE
        while len(found) < len(self._pipes) and (left := limit - time.monotonic()) > 0:
            pending = {pipe: n for n, pipe in enumerate(self._pipes) if n not in found}
            for pipe in wait(pending, left):
                try:
                    found[pending[pipe]] = pipe.recv()
                except EOFError:
                    found[pending[pipe]] = (False, "the process ended")
            if not all(ok for ok, _ in found.values()):  # the others may wait for one that failed
                limit = min(limit, time.monotonic() + AFTER_AN_ERROR)
        return [found.get(rank, (False, "it hangs")) for rank in range(size)]


def _compile_once(folder: Path) -> None:
    """Ranks need a kernel at the same moment. One of them compiles it, and the others wait for it.

    tests/runtime/test_cache.py has processes that do not wait.
    """
    import fcntl

    compile_object = jit.compile_object

    def shared(text: str, target: Target) -> bytes:
        name = hashlib.sha256(f"{target}{text}".encode()).hexdigest()
        with open(folder / name, "ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            image = file.read()
            if not image:
                image = compile_object(text, target)
                file.write(image)
        return image

    jit.compile_object = shared


def _serve(pipe: Connection, store: str, rank: int, count: int) -> None:
    """Run what comes through the pipe until it is closed."""
    torch.set_num_threads(1)
    if os.name == "posix":  # others have no flock
        _compile_once(Path(store).parent)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, count),
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=60),
    )
    groups = {size: dist.new_group(list(range(size))) for size in range(1, count + 1)}
    while True:
        try:
            function, size, args = pipe.recv()
        except EOFError:
            os._exit(0)
        if rank >= size:
            pipe.send((True, None))
            continue
        try:
            torch.manual_seed(0)
            pipe.send((True, function(groups[size], *args)))
        except BaseException as error:
            lines = "".join(traceback.format_exception(error)[-2:])
            pipe.send((False, f"{type(error).__name__}: {error}\n{lines}"))
