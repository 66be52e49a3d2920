"""What every test stands on: two threads, fixed seeds, and working memory that is watched.

With CI in the environment the hypothesis seed is fixed; elsewhere each run draws a new one and so
looks at other examples. Either way the header names it, and `--hypothesis-seed` repeats it.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import targets
import torch
from guards import WatchedScratch
from hypothesis import HealthCheck, register_random, settings

from quire.config import config
from quire.runtime import launch as launcher

CI_SEED = 20_260_101
NUM_THREADS = 2  # enough to meet races, few enough for a laptop to stay quiet

# No deadline: the first call of a torch operator is slow. Derandomising is off because it would
# take the seed from each test's source, and the seed that we print would mean nothing.
settings.register_profile("default", deadline=None, derandomize=False, max_examples=25)
settings.register_profile(
    "ci", deadline=None, derandomize=False, max_examples=50, database=None, print_blob=True
)
settings.register_profile("thorough", deadline=None, derandomize=False, max_examples=1000)
# For an emulator, on which also drawing an example is slow.
settings.register_profile(
    "few",
    deadline=None,
    derandomize=False,
    max_examples=5,
    suppress_health_check=[HealthCheck.too_slow],
)


class _TorchRandom:
    """Torch's generator in the form in which hypothesis rewinds generators before each example."""

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def getstate(self) -> torch.Tensor:
        return torch.get_rng_state()

    def setstate(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


_torch_random = _TorchRandom()  # hypothesis holds it weakly
register_random(_torch_random)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew")


@pytest.hookimpl(tryfirst=True)  # before hypothesis' own plugin reads the options
def pytest_configure(config: pytest.Config) -> None:
    in_ci = bool(os.environ.get("CI"))
    settings.load_profile("ci" if in_ci else "default")
    if config.option.hypothesis_seed is None:
        drawn = CI_SEED if in_ci else secrets.randbelow(2**32)
        config.option.hypothesis_seed = getattr(config, "workerinput", {}).get("seed", drawn)
    if getattr(config.option, "numprocesses", None):  # of xdist, whose processes get it from here
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # else threads that wait take cores
    torch.set_num_threads(NUM_THREADS)
    if not _multiplies_float16():
        torch.backends.mkldnn.enabled = False
    os.environ.setdefault("QUIRE_CACHE_DIR", tempfile.mkdtemp(prefix="quire-tests-"))


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_configure_node(node: Any) -> None:
    """Before a process starts that runs a part of the tests: it has the same seed."""
    node.workerinput["seed"] = node.config.option.hypothesis_seed


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("every_width"):
        metafunc.parametrize("_target", targets.names(), indirect=True)


@pytest.fixture(autouse=True)
def _target(request: pytest.FixtureRequest) -> Iterator[None]:
    with targets.use(getattr(request, "param", targets.NATIVE)):
        yield


def _multiplies_float16() -> bool:
    """Whether torch multiplies matrices of float16, as the reference does.

    On aarch64 it leaves that to oneDNN, and some builds of oneDNN refuse. With oneDNN switched off
    torch has a product of its own.
    """
    matrix = torch.linspace(-1, 1, 64 * 64, dtype=torch.float16).view(64, 64)
    try:
        product = matrix @ matrix
    except RuntimeError:
        return False
    return torch.allclose(product.double(), matrix.double() @ matrix.double(), 1e-2, 1e-2)


def pytest_report_header(config: pytest.Config) -> str:
    profile, seed = settings.get_current_profile_name(), config.option.hypothesis_seed
    return f"hypothesis: profile {profile}; repeat with --hypothesis-seed={seed}"


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Each test begins with the same random numbers, threads, dtype and environment."""
    torch.manual_seed(0)
    yield
    torch.set_num_threads(NUM_THREADS)
    torch.set_default_dtype(torch.float32)
    config.cache_clear()


@pytest.fixture(autouse=True)
def _watched_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that writes past its working memory fails the test that ran it."""
    monkeypatch.setattr(launcher, "Scratch", WatchedScratch)
