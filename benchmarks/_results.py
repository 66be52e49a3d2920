"""Figures that are kept: benchmarks/results/PROCESSOR/SCRIPT.json.

A file has the parts of one script on one processor. Each part has the rows of its last run and
under which conditions it ran; of earlier runs it has the commit, the date and the figures of rows
that should keep a limit. Tables of the README, plots and pages are made of these files.

    znver4/forward.json               code for a Zen 4, on a Zen 4
    znver5-x86-64-v3/forward.json     code for AVX2 (QUIRE_TARGET=x86-64-v3), on a Zen 5
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from quire.codegen.llvm.target import Target
from quire.tools.doctor import report

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("quire", "torch", "numpy", "llvmlite")
CHOICES = ("QUIRE_TARGET", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
"""Variables that make quire, PyTorch or its libraries leave instructions of a processor unused."""

MOST_EARLIER = 24
"""How many earlier runs of a part are kept."""


def conditions(threads: int, seconds: float) -> dict[str, object]:
    """Return when, where and with which versions figures are measured."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "threads": threads,
        "seconds": seconds,
        "environment": {name: os.environ[name] for name in CHOICES if name in os.environ},
        "versions": {"python": platform.python_version(), **versions},
    }


def commit() -> str:
    """Return the commit of the source; "-dirty" says that the source had changes besides it."""
    here = Path(__file__).parent.parent
    head = ["git", "rev-parse", "--short=9", "HEAD"]
    changes = ["git", "status", "--porcelain", "--", "src", "benchmarks/*.py"]
    try:
        found = [
            subprocess.run(command, cwd=here, capture_output=True, text=True, check=True).stdout
            for command in (head, changes)
        ]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found[0].strip() + ("-dirty" if found[1] else "")


def keep(
    script: str,
    under: Mapping[str, object],
    rows: Sequence[Mapping[str, object]],
    folder: Path | None = None,
) -> Path:
    """Put rows into the file of a script, in place of those of the same parts; return its path."""
    machine, target = llvm.get_host_cpu_name(), Target.host().cpu
    place = machine if target == machine else f"{machine}-{target}"
    path = (folder or RESULTS) / place / f"{script}.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    parts = dict(kept.get("parts", {}))
    for name in dict.fromkeys(str(row["part"]) for row in rows):
        own = [
            {key: value for key, value in row.items() if key != "part"}
            for row in rows
            if row["part"] == name
        ]
        command = f"python benchmarks/{script}.py --only {name}"
        before = earlier(parts.get(name, {}), str(under["commit"]))
        parts[name] = {"command": command, **under, "rows": own, "earlier": before}
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "script": f"benchmarks/{script}.py",
        "processor": dict(report())["cpu"],
        "machine": machine,
        "target": target,
        "parts": dict(sorted(parts.items())),
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def earlier(part: Mapping[str, Any], commit: str) -> list[dict[str, object]]:
    """Return the runs of a part with limits before one at `commit`: one of each commit."""
    if not part:
        return []
    figures = {
        f"{row['case']}, {row['unit']}": round(row["figure"], 3)
        for row in part["rows"]
        if row.get("wanted")
    }
    last = {"commit": part["commit"], "date": part["date"], "figures": figures}
    runs = [*part.get("earlier", []), last]
    kept = [run for run in runs if run["figures"] and run["commit"] != commit]
    return kept[-MOST_EARLIER:]
