"""The wheel and the sdist hold what they should, and the wheel works where nothing else is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent.parent
TOP = [
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
    "MANIFEST.in",
    "README.md",
    "constraints.txt",
    "pyproject.toml",
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = f"quire-{PROJECT['version']}"
ALLOWED = re.compile(r"quire/(?:[\w/]+\.py|py\.typed|serve/page/[\w.-]+)")
"""The files of the package."""
IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built from a copy of the source."""
    pytest.importorskip("build", reason="build is not installed: pip install 'quire[dev]'")
    copy = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "src", copy / "src", ignore=IGNORED)
    for name in ("benchmarks", "docs", "examples", "tests"):  # which must stay out
        (copy / name).mkdir()
        (copy / name / "test_nothing.py").touch()
    for name in TOP:
        shutil.copy(ROOT / name, copy)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", copy / "dist", copy],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return copy / "dist"


def sources() -> set[str]:
    """The files of the package: Python, and what pages of the server and tools read."""
    kept = (path for path in (ROOT / "src" / "quire").rglob("*") if path.is_file())
    return {
        path.relative_to(ROOT / "src").as_posix()
        for path in kept
        if "__pycache__" not in path.parts
    }


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"{NAME}-py3-none-any.whl"  # no compiled code: one for all systems
    names = set(zipfile.ZipFile(wheel).namelist())
    about = {name for name in names if name.startswith(f"{NAME}.dist-info/")}
    assert names - about == sources()
    other = [name for name in names - about if not ALLOWED.fullmatch(name)]
    assert not other, f"the wheel holds Python, py.typed and the server's page, but also {other}"
    assert not {"tests", "benchmarks", "docs", "examples"} & {Path(name).parts[0] for name in names}
    assert {Path(name).name for name in about} == {
        "LICENSE",
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
        "top_level.txt",
    }


def test_the_sdist_holds_what_is_needed_to_build(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        files = {member.name for member in archive.getmembers() if member.isfile()}
    inside = {name.removeprefix(f"{NAME}/") for name in files}
    made = {name for name in inside if "egg-info" in name or name in ("PKG-INFO", "setup.cfg")}
    assert inside - made == {f"src/{name}" for name in sources()} | set(TOP)


def test_the_metadata_is_whole(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    text = zipfile.ZipFile(wheel).read(f"{NAME}.dist-info/METADATA").decode()
    assert f"\nVersion: {PROJECT['version']}\n" in text
    assert "\nRequires-Python: >=3.11\n" in text
    assert "\nDescription-Content-Type: text/markdown\n" in text
    assert set(re.findall(r"Provides-Extra: (\w+)", text)) >= {"draw", "kv", "models", "serve"}
    always = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", text, re.MULTILINE)
    assert set(always) == {"torch", "numpy", "llvmlite", "rich", "typer"}


def needed(name: str) -> set[str]:
    """The packages that a package needs, with itself and without extras."""
    found, todo = set[str](), [name]
    while todo:
        package = canonicalize_name(todo.pop())
        if package in found:
            continue
        found.add(package)
        stated = PROJECT["dependencies"] if package == "quire" else metadata.requires(package)
        required = [Requirement(text) for text in stated or []]
        todo += [r.name for r in required if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


def borrow(packages: Path) -> None:
    """Let an environment see the packages of this one that the wheel needs, and no others."""
    if os.name == "nt":  # links need rights there: all packages are seen, but no .pth file of them
        (packages / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        return
    for name in needed("quire") - {"quire"}:
        package = metadata.distribution(name)
        for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(package.locate_file(top))))


@pytest.fixture(scope="module")
def environment(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and what it says that it needs, borrowed from this one."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    borrow(Path(paths["purelib"]))
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    subprocess.run(
        [*pip, "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", wheel],
        check=True,
        capture_output=True,
    )
    return python


def run(program: Path, *arguments: str, cwd: Path) -> str:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [program, *arguments], capture_output=True, text=True, check=False, cwd=cwd, env=clean
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_quire_demo_works_from_the_wheel(environment: Path, tmp_path: Path) -> None:
    where = run(environment, "-c", "import quire; print(quire.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(environment.parent.parent)
    command = environment.parent / ("quire.exe" if os.name == "nt" else "quire")
    assert command.exists()
    options = ("--tokens", "256", "--seconds", "0.1")
    said = run(command, "demo", *options, cwd=tmp_path)
    assert "256 tokens" in said and "quire" in said
    if os.name != "nt":
        seen = "from importlib.util import find_spec; print(find_spec('transformers'))"
        assert run(environment, "-c", seen, cwd=tmp_path) == "None\n"


def test_the_changelog_is_kept_by_towncrier() -> None:
    pytest.importorskip("towncrier", reason="towncrier is not installed: pip install 'quire[dev]'")
    kinds = {"added", "changed", "fixed", "removed"}
    fragments = [path for path in (ROOT / "changes").glob("*.md") if path.name != "README.md"]
    assert all(path.name.split(".")[-2] in kinds for path in fragments)
    drafted = subprocess.run(
        [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "9.9.9"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert drafted.lstrip().startswith("## 9.9.9 (")
    for path in fragments:
        assert path.read_text().split("\n")[0][:60] in drafted
