"""Workflows, which run elsewhere: their schema, and that all they name is here."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from shell import ROOT, check

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install 'quire[docs]'")

FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS: dict[str, dict[str, Any]] = {
    path.stem: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yml"))
}
JOBS = {
    f"{name}: {title}": job
    for name, flow in WORKFLOWS.items()
    for title, job in flow["jobs"].items()
}
STEPS = [(where, step) for where, job in JOBS.items() for step in job["steps"]]
RUN = [(where, step["run"]) for where, step in STEPS if "run" in step]
BASH = pytest.mark.skipif(
    os.name == "nt" or shutil.which("bash") is None, reason="bash, and paths as it has them"
)

SCHEMAS = {
    "github-workflows": [*FOLDER.glob("*.yml")],
    "github-issue-forms": [*(ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")],
    "citation-file-format": [ROOT / "CITATION.cff"],
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_keep_the_schema_of_who_reads_them(schema: str) -> None:
    if importlib.util.find_spec("check_jsonschema") is None:
        pytest.skip("check-jsonschema is not installed: pip install 'quire[dev]'")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    files = SCHEMAS[schema]
    done = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
    assert files and done.returncode == 0, done.stdout + done.stderr


@BASH
@pytest.mark.parametrize(("where", "shell"), RUN)
def test_steps_are_shell(where: str, shell: str) -> None:
    plain = re.sub(r"\$\{\{.*?\}\}", "x", shell)
    done = subprocess.run(["bash", "-n"], input=plain, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr


COMMAND = re.compile(r"(?:^|&& )((?:quire|make) [^&\n]+)", re.MULTILINE)
PATH = re.compile(
    r"(?<![\w/$\"])(?:[\w.-]+/)*[\w.-]*\w\.(?:py|txt|toml|md|cff)\b|\.ci/\w+|tests/\w+"
)
MADE = {"pins.txt"}
"""Files that a step writes."""


@pytest.mark.parametrize(("where", "shell"), RUN)
def test_steps_name_what_is_here(where: str, shell: str) -> None:
    for command in COMMAND.findall(shell):
        check([word.strip('"') for word in re.findall(r'(?:[^\s"]|"[^"]*")+', command)])
    paths = {path for path in PATH.findall(shell) if Path(path).name not in MADE}
    assert not [path for path in paths if not (ROOT / path).exists()]
    for extras in re.findall(r"\.\[([\w,]+)\]", shell):
        check(["pip", "install", f".[{extras}]"])
    for module in re.findall(r"python -m (\w+)", shell):
        # Not by importlib.util: for pip, setuptools would get in between, with a warning.
        assert importlib.machinery.PathFinder.find_spec(module), module


def test_steps_were_found() -> None:
    assert len(RUN) > 8 and WORKFLOWS.keys() == {"ci", "docs", "matrix", "release"}
    found = [command for _, shell in RUN for command in COMMAND.findall(shell)]
    assert {"make docs", "quire demo --seconds 3"} <= set(found)
    assert {"constraints.txt", ".ci/run"} <= {
        path for _, shell in RUN for path in PATH.findall(shell)
    }


@pytest.mark.parametrize("where", JOBS)
def test_jobs_follow_jobs_and_end(where: str) -> None:
    flow, job = WORKFLOWS[where.partition(":")[0]], JOBS[where]
    assert {job.get("needs", next(iter(flow["jobs"])))} <= flow["jobs"].keys()
    assert job.get("timeout-minutes", 0) <= 60 and (
        "timeout-minutes" in job or "environment" in job
    )
    ids = {step.get("id") for step in job["steps"]}
    assert set(re.findall(r"steps\.(\w+)\.", str(job))) <= ids
    keys = {key for row in matrix(job) for key in row}
    assert set(re.findall(r"matrix\.(\w+)", str(job))) <= keys


def matrix(job: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a job's matrix, or what its keys have."""
    given = job.get("strategy", {}).get("matrix", {})
    return given.get("include", [given])


@pytest.mark.parametrize(("where", "step"), [each for each in STEPS if "uses" in each[1]])
def test_actions_have_a_version_and_files_that_are_here(where: str, step: dict[str, Any]) -> None:
    action, _, version = step["uses"].partition("@")
    assert re.fullmatch(r"(?:actions|pypa)/[\w-]+", action)
    assert re.fullmatch(r"v\d+|release/v\d+", version)
    given = step.get("with", {})
    if action == "actions/checkout":
        assert given["persist-credentials"] is False
    assert (ROOT / given.get("cache-dependency-path", "README.md")).exists()
    if action == "actions/upload-pages-artifact":
        assert f"the site, in `{given['path']}`" in (ROOT / "CONTRIBUTING.md").read_text()


# Steps that decide what is published or installed are run, with programs that only tell their names


def step(where: str, name: str) -> str:
    (found,) = (each["run"] for each in JOBS[where]["steps"] if each.get("name") == name)
    return str(found)


@BASH
@pytest.mark.parametrize(
    ("tag", "date", "good"),
    [
        ("v0.1.0", "2026-01-02", True),
        ("v0.1.1", "2026-01-02", False),
        ("v0.1.0", "unreleased", False),
    ],
)
def test_a_tag_is_the_version_and_has_a_date(
    tag: str, date: str, good: bool, tmp_path: Path
) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changes\n\n## 0.1.0 ({date})\n")
    status = run(step("release: build", "The tag is the version"), tmp_path, GITHUB_REF_NAME=tag)
    assert (status == 0) == good


@BASH
def test_the_matrix_installs_all_pins_but_torch(tmp_path: Path) -> None:
    shutil.copy(ROOT / "constraints.txt", tmp_path)
    (tmp_path / "python").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    (tmp_path / "python").chmod(0o755)
    shell = step("matrix: test", "Install, with every pin but that of torch")
    shell = shell.replace("${{ matrix.torch }}", "2.14")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    assert run(shell, tmp_path, RUNNER_TEMP=str(tmp_path), PATH=path) == 0
    pins = (tmp_path / "pins.txt").read_text()
    assert "\nnumpy==" in pins and "\ntorch==" not in pins
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 3 and asked[1].endswith("torch==2.14.*") and "--no-deps" in asked[2]


def run(shell: str, folder: Path, **variables: str) -> int:
    """The status of a step, as GitHub runs it."""
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", shell]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **variables}, capture_output=True, check=False
    )
    return done.returncode
