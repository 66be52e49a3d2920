"""The server: what HTTP costs, what reuse of a prefix gains, and how long a start takes.

    python benchmarks/serve.py --only http

The server runs in a process of its own, with SmolLM2-135M in float32, on this machine's loopback.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2 as httpx
from _race import Table, race, run_parts

from quire.engine import Engine

MODEL = "SmolLM2-135M-Instruct"
REQUESTS, OUTPUT = 16, 32
CLIENTS, SYSTEM = 64, 512


@contextmanager
def served() -> Iterator[str]:
    """Start `quire serve` at a free port, give its address, and end it."""
    command = [sys.executable, "-m", "quire.cli", "serve", "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found, "the server has not started: try `quire serve`"
        yield found[0]
    finally:
        process.terminate()
        process.wait(90)


def prompt(number: int, length: int) -> list[int]:
    """Return tokens; those of another number begin otherwise."""
    return [
        1000 + number,
        *((7 * number + 13 * place) % 40_000 + 500 for place in range(length - 1)),
    ]


def body(tokens: list[int], output: int) -> dict[str, Any]:
    asked = {"model": MODEL, "prompt": tokens, "max_tokens": output, "temperature": 0}
    return asked | {"stream": True, "ignore_eos": True}


async def first_token(client: httpx.AsyncClient, asked: dict[str, Any]) -> float:
    """Read a whole stream. Return the seconds until its first event."""
    began, first = time.perf_counter(), 0.0
    async with client.stream("POST", "/v1/completions", json=asked) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            first = first or time.perf_counter() - began
            assert not line or line == "data: [DONE]" or "error" not in json.loads(line[6:])
    return first


def ask_all(url: str, bodies: list[dict[str, Any]]) -> list[float]:
    """Send all requests at once, and read their streams. Return the times of first tokens."""

    async def ask() -> list[float]:
        limits = httpx.Limits(max_connections=len(bodies))
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
            return list(await asyncio.gather(*(first_token(client, each) for each in bodies)))

    return asyncio.run(ask())


def http(table: Table, seconds: float, threads: int) -> None:
    """16 streams over HTTP, against the engine without it. No prompt is asked twice."""
    numbers = iter(range(10**6))

    def prompts() -> list[list[int]]:
        return [prompt(next(numbers), 16 + 7 * place) for place in range(REQUESTS)]

    with served() as url, Engine.from_pretrained(MODEL, num_threads=threads) as engine:

        def direct() -> None:
            options: dict[str, Any] = {"max_tokens": OUTPUT, "ignore_eos": True}
            for request in [engine.submit(each, **options) for each in prompts()]:
                request.result()

        def over_http() -> None:
            ask_all(url, [body(each, OUTPUT) for each in prompts()])

        times = race({"http": over_http, "engine": direct}, seconds)
    rate = round(REQUESTS * OUTPUT / times["http"])
    case = f"{REQUESTS} streams of {OUTPUT} tokens over HTTP"
    table.add(
        case, times["engine"] / times["http"], "x the engine alone", ">= 0.93", tokens_a_second=rate
    )


def prefix(table: Table, seconds: float, threads: int) -> None:
    """Clients that share a system prompt, against clients whose prompts begin otherwise."""
    with served() as url:
        shared = prompt(0, SYSTEM)
        ask_all(url, [body(shared, 1)])
        asked = [body([*shared, *prompt(number, 8)], 2) for number in range(1, CLIENTS + 1)]
        ours = statistics.median(ask_all(url, asked))
        alone = [body(prompt(number, SYSTEM + 8), 2) for number in range(1, CLIENTS + 1)]
        other = statistics.median(ask_all(url, alone))
    case = f"{CLIENTS} clients, a system prompt of {SYSTEM} tokens, first token"
    table.add(case, other / ours, "x sooner than without reuse", ">= 4", ours_s=round(ours, 2))


def start(table: Table, seconds: float, threads: int) -> None:
    """From the command to the first answer, with a warm disk."""
    best = float("inf")
    for _ in range(2):
        began = time.perf_counter()
        with served() as url:
            ask_all(url, [body(prompt(1, 16), 1)])
            best = min(best, time.perf_counter() - began)
    table.add("from command to first answer", best, "s", "<= 8")


PARTS = (http, prefix, start)


if __name__ == "__main__":
    run_parts("serve", __doc__, PARTS)
