"""Timing of functions in one process. They take turns, and the best time of each counts.

Since they take turns, another program slows all of them equally. The best time is one in which
nothing else ran. Most figures are ratios of two such times from one race.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from _results import conditions, keep

from quire.codegen.llvm.target import Target


def race(
    contestants: dict[str, Callable[[], object]], seconds: float = 2.0, least: int = 5
) -> dict[str, float]:
    """Return the seconds of one call of each function: its best of five turns, or `least`, or more.

    A function that takes less than a millisecond is called several times in a turn.
    """
    repeats = {}
    for name, run in contestants.items():
        run()
        start = time.perf_counter()
        run()
        once = time.perf_counter() - start
        repeats[name] = max(1, int(1e-3 / max(once, 1e-7)))
    best = dict.fromkeys(contestants, float("inf"))
    end, turns = time.perf_counter() + seconds, 0
    while turns < least or time.perf_counter() < end:
        for name, run in contestants.items():
            count = repeats[name]
            start = time.perf_counter()
            for _ in range(count):
                run()
            best[name] = min(best[name], (time.perf_counter() - start) / count)
        turns += 1
    return best


class Table:
    """A table of figures. A row is printed when it is added; `write` writes all rows as JSON."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.rows: list[dict[str, object]] = []
        self.part = ""  # the part that adds rows now
        print(title)
        print(f"  {'case':<58} {'figure':>8} {'unit':<27} {'wanted':<8} more")

    def add(self, case: str, figure: float, unit: str, wanted: str = "", **more: object) -> None:
        """Add a row. `wanted` is the limit that the figure should keep, such as ">= 1.2"."""
        assert not wanted or wanted[0] in "<>", "a limit says whether more or less is better"
        row = {"case": case, "figure": figure, "unit": unit, "wanted": wanted, **more}
        self.rows.append({"part": self.part, **row} if self.part else row)
        extra = "  ".join(f"{name.replace('_', ' ')}: {value}" for name, value in more.items())
        print(f"  {case:<58} {figure:8.3f} {unit:<27} {wanted:<8} {extra}".rstrip(), flush=True)

    def write(self, path: str | None) -> None:
        """Write the rows to a file, if there is a path."""
        if path:
            Path(path).write_text(json.dumps({"title": self.title, "rows": self.rows}, indent=1))


def arguments(description: str) -> argparse.Namespace:
    """Return the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="seconds that each race takes, at least"
    )
    parser.add_argument(
        "--only", default="", help="run the part of this name, or all parts whose names contain it"
    )
    parser.add_argument(
        "--threads", type=int, default=0, help="as many threads alone; 0: all, and perhaps one"
    )
    parser.add_argument("--json", default=None, help="write the rows to this file")
    parser.add_argument(
        "--save",
        action="store_true",
        help="keep the rows in benchmarks/results, with processor, versions and commit",
    )
    return parser.parse_args()


Part = Callable[[Table, float, int], None]
"""part(table, seconds, threads) measures something and adds its rows to the table."""


def chosen_parts(parts: Sequence[Part], only: str) -> list[Part]:
    """Return the part with the name `only`. If there is none, return those that contain it."""
    exact = [part for part in parts if part.__name__ == only]
    found = exact or [part for part in parts if only in part.__name__]
    if not found:
        names = ", ".join(part.__name__ for part in parts)
        raise SystemExit(f"--only must be a part ({names}), or a piece of its name, but is: {only}")
    return found


def run_parts(
    name: str, description: str | None, parts: Sequence[Part], with_one_thread: Sequence[Part] = ()
) -> None:
    """Run the parts that `--only` chooses, and write the table.

    Parts in `with_one_thread` run twice: with all threads, and with one.
    """
    options = arguments(description or "")
    warnings.simplefilter("ignore")
    if options.threads:
        torch.set_num_threads(options.threads)
    most = torch.get_num_threads()
    table = Table(f"{name}: {Target.host().cpu}, torch {torch.__version__}, {most} threads")
    for part in chosen_parts(parts, options.only):
        table.part = part.__name__
        both = part in with_one_thread and most > 1 and not options.threads
        counts = [most, 1] if both else [most]
        for threads in counts:
            torch.set_num_threads(threads)
            part(table, options.seconds, threads)
        torch.set_num_threads(most)
    table.write(options.json)
    if options.save:
        keep(name, conditions(most, options.seconds), table.rows)
