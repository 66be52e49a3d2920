"""One server for all tests of a file, and a client of OpenAI's for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import KEYS, Served, save_model, served


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small random model."""
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[Served]:
    """A server that many tests share."""
    with served(model, "--read-limit", "3") as running:
        yield running
        assert running.stop() == 0
    assert "Traceback" not in running.log.read_text()


@pytest.fixture(scope="session")
def guarded(model: Path) -> Iterator[Served]:
    """A server with keys, little room, and little patience."""
    keys = model.parent / "keys"
    keys.write_text(f"{KEYS[1]}\n\n")
    options = ["--api-key", KEYS[0], "--api-keys", str(keys), "--max-ongoing", "4", "--lookup"]
    with served(model, *options, "--read-limit", "2") as running:
        yield running
        assert running.stop() == 0
