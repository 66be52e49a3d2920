"""The site, built once, and a browser to look at it."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "docs"))  # the package that builds the site

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the first test that needs the site time to build it, on a busy machine too."""
    for item in items:
        if "site" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole site. Warnings of Sphinx are errors."""
    if importlib.util.find_spec("sphinx") is None:
        pytest.skip("sphinx is not installed: pip install 'quire[docs]'")
    several = os.environ.get("PYTEST_XDIST_TESTRUNUID")  # processes, which share one site
    base = tmp_path_factory.getbasetemp()
    folder = base.parent / f"docs-{several}" if several else base / "docs"
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "site" / "index.html").exists():
            build(folder)
    return folder / "site"


def build(folder: Path) -> None:
    """Build the site where a page of a build before it is left."""
    (folder / "site").mkdir(parents=True, exist_ok=True)
    (folder / "site" / "page-of-before.html").write_text("")
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "builder", "--quiet", "--out", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no Chromium is installed")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page whose errors fail the test."""
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    yield opened
    opened.close()
    # Of a page that is opened as a file, the search cannot fetch summaries, and shows titles alone.
    assert not [error for error in errors if error != "Failed to fetch"]
