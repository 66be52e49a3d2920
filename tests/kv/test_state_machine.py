"""Whatever is done to a cache, in whatever order, it holds what a dictionary says."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kv.witness import Witness

from quire.kv import Group, PagedKVCache

pytest.importorskip("safetensors")

SIZES = {"heads": 2, "head_dim": 3, "value_dim": 2, "page_size": 4}
CACHES: dict[str, Callable[[], PagedKVCache]] = {
    "prefix": lambda: PagedKVCache(2, n_pages=20, prefix=True, **SIZES),
    "windows": lambda: PagedKVCache(
        groups=[Group([0, 2]), Group([1], window=5)], max_bytes=6_000, **SIZES
    ),
    "bfloat16": lambda: PagedKVCache(
        1, n_pages=20, prefix=True, dtype=torch.bfloat16, heads=1, head_dim=5, page_size=1
    ),
    "int8": lambda: PagedKVCache(
        groups=[Group([1]), Group([0], window=6)], n_pages=14, dtype=torch.int8, **SIZES
    ),
    "float8": lambda: PagedKVCache(2, n_pages=20, prefix=True, dtype=torch.float8_e4m3fn, **SIZES),
    "latent": lambda: PagedKVCache(
        2, n_pages=20, prefix=True, heads=1, head_dim=5, latent=3, page_size=4
    ),
    "float8 without scales": lambda: PagedKVCache(
        2, n_pages=20, prefix=True, dtype=torch.float8_e5m2, scales=False, **SIZES
    ),
}
WITHOUT_PREFIX = ("windows", "int8")
PREFIX_ACTIONS = ("keep", "match", "evict")
ACTIONS = (
    *(
        "start",
        "append",
        "append",
        "append",
        "draft",
        "draft",
        "give_up",
        "fork",
        "truncate",
        "free",
    ),
    *("save", "load", *PREFIX_ACTIONS),
)


class Machine(RuleBasedStateMachine):
    """One rule for each action; numbers come from hypothesis, so that failures shrink."""

    cache = "prefix"

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.witness = Witness(CACHES[self.cache](), Path(self.directory.name))

    def teardown(self) -> None:
        self.directory.cleanup()

    def _act(self, action: str, data: st.DataObject) -> None:
        getattr(self.witness, action)(lambda n: data.draw(st.integers(0, n - 1)))

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self._act("start", data)

    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        self._act("append", data)

    @rule(data=st.data())
    def draft(self, data: st.DataObject) -> None:
        self._act("draft", data)

    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        self._act("give_up", data)

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self._act("fork", data)

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        self._act("truncate", data)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self._act("free", data)

    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        self._act("save", data)

    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        self._act("load", data)

    @precondition(lambda self: self.cache not in WITHOUT_PREFIX)
    @rule(action=st.sampled_from(PREFIX_ACTIONS), data=st.data())
    def prefix(self, action: str, data: st.DataObject) -> None:
        self._act(action, data)

    @invariant()
    def everything_reads_back(self) -> None:
        self.witness.check()


class WindowMachine(Machine):
    cache = "windows"


class NarrowMachine(Machine):
    cache = "bfloat16"


class QuantisedMachine(Machine):
    cache = "int8"


for _machine in (Machine, WindowMachine, NarrowMachine, QuantisedMachine):
    _machine.TestCase.settings = settings(max_examples=10, stateful_step_count=30, deadline=None)

TestMachine = Machine.TestCase
TestWindowMachine = WindowMachine.TestCase
TestNarrowMachine = NarrowMachine.TestCase
TestQuantisedMachine = QuantisedMachine.TestCase


def run(cache: str, steps: int, seed: int, directory: Path) -> Witness:
    """Random actions; files and refusals among them."""
    chance = random.Random(seed)
    witness = Witness(CACHES[cache](), directory)
    actions = [
        each for each in ACTIONS if cache not in WITHOUT_PREFIX or each not in PREFIX_ACTIONS
    ]
    for step in range(steps):
        getattr(witness, chance.choice(actions))(chance.randrange)
        witness.check()
        if step % 50 == 0:
            witness.check_attention(chance.randrange)
    return witness


@pytest.mark.parametrize("cache", CACHES)
def test_many_steps(cache: str, tmp_path: Path) -> None:
    witness = run(cache, 500, seed=0, directory=tmp_path)
    assert witness.refusals > 10, "the cache was never full"
    witness.cache.free(*witness.tokens)
    if cache not in WITHOUT_PREFIX:
        witness.cache.evict(1_000)
    now = witness.cache.statistics()
    assert now.free == now.pages > 0


@pytest.mark.exhaustive
@pytest.mark.timeout(0)
@pytest.mark.parametrize("cache", CACHES)
def test_a_million_steps(cache: str, tmp_path: Path) -> None:
    """With the other caches; a new one is made every 5,000 steps, and grows again."""
    for seed in range(50):
        run(cache, 5_000, seed, tmp_path)
