"""100,000 requests: pages, handles and memory stay flat. `pytest tests/engine -m exhaustive`."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import pytest
from served import engine

from quire.engine import Generation

REQUESTS, AT_A_TIME = 100_000, 24


def resident() -> int:
    """The memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def soak(count: int) -> list[tuple[int, int]]:
    """Serve so many requests; return memory and the number of objects, ten times on the way."""
    draw, served = random.Random(0), engine(max_tokens=64, max_requests=16)
    live: list[Generation] = []
    submitted, seen = 0, []
    while submitted < count or live:
        while len(live) < AT_A_TIME and submitted < count:
            prompt = [draw.randrange(1, 60) for _ in range(draw.randrange(1, 16))]
            request = served.submit(
                prompt,
                max_tokens=draw.randrange(1, 6),
                temperature=draw.choice([0.0, 1.0]),
                seed=draw.randrange(1000),
                n=draw.choice([1, 1, 1, 2]),
                priority=draw.choice([0, 0, 1]),
            )
            if draw.random() < 0.05:
                request.cancel()
            live.append(request)
            submitted += 1
            if submitted % (count // 10) == 0:
                gc.collect()
                seen.append((resident(), len(gc.get_objects())))
                print(submitted, *seen[-1], flush=True)
        served.step()
        live = [each for each in live if any(one.finish_reason is None for one in each.answers)]
    served.check_integrity()
    now = served.statistics()
    assert served._core.pages.statistics().sequences == 0
    assert now.pages - now.free_pages == now.kept_pages and now.running == now.waiting == 0
    return seen


def test_a_thousand_requests_leave_nothing_behind() -> None:
    soak(1000)


@pytest.mark.exhaustive
@pytest.mark.timeout(0)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_nothing_leaks_over_many_requests() -> None:
    seen = soak(REQUESTS)
    memory, objects = zip(*seen[2:], strict=True)  # the first requests fill caches
    assert max(memory) - memory[0] < 20 << 20
    assert max(objects) - objects[0] < 5000
