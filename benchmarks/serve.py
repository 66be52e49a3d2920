"""The server: what HTTP costs, what reuse of a prefix gains, how long a start takes, and load.

    python benchmarks/serve.py --only http
    python benchmarks/serve.py --only load --seconds 600

The server runs in a process of its own, with SmolLM2-135M in float32, on this machine's loopback.
QUIRE_PEER_TRANSFORMERS is the Python of an environment with transformers[serving]: without it,
`transformers serve` does not run. Replicas need Ray.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import _load
import httpx2 as httpx
from _client import Client
from _race import Table, race, run_parts

from quire.engine import Engine, loading

MODEL = "SmolLM2-135M-Instruct"
REQUESTS, OUTPUT = 16, 32
CLIENTS, SYSTEM = 64, 512


class Server(subprocess.Popen[str]):
    """A server in a process of its own, its address, and the name of its model."""

    url = ""
    model = MODEL


@contextmanager
def running(command: Sequence[str], **variables: str) -> Iterator[Server]:
    """Start a server, and end it."""
    process = Server(
        command,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(90)


@contextmanager
def served(*options: str) -> Iterator[Server]:
    """Start `quire serve` at a free port."""
    with running([sys.executable, "-m", "quire.cli", "serve", "--port", "0", *options]) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"http://\S+", line):
                process.url = found[0]
                yield process
                return
        raise SystemExit("the server has not started: try `quire serve`")


def prompt(number: int, length: int) -> list[int]:
    """Return tokens; those of another number begin otherwise."""
    return [
        1000 + number,
        *((7 * number + 13 * place) % 40_000 + 500 for place in range(length - 1)),
    ]


def body(tokens: list[int], output: int) -> dict[str, Any]:
    asked = {"model": MODEL, "prompt": tokens, "max_tokens": output, "temperature": 0}
    return asked | {"stream": True, "ignore_eos": True}


def ask_all(url: str, bodies: list[dict[str, Any]]) -> list[float]:
    """Ask as a client that comes once."""
    with Client(url) as client:
        return client.ask(bodies)


def http(table: Table, seconds: float, threads: int) -> None:
    """16 streams over HTTP, against the engine without it. No prompt is asked twice."""
    numbers = iter(range(10**6))

    def prompts() -> list[list[int]]:
        return [prompt(next(numbers), 16 + 7 * place) for place in range(REQUESTS)]

    with (
        served() as server,
        Client(server.url) as client,
        Engine.from_pretrained(MODEL, num_threads=threads) as engine,
    ):

        def direct() -> None:
            options: dict[str, Any] = {"max_tokens": OUTPUT, "ignore_eos": True}
            for request in [engine.submit(each, **options) for each in prompts()]:
                request.result()

        def over_http() -> None:
            client.ask([body(each, OUTPUT) for each in prompts()])

        times = race({"http": over_http, "engine": direct}, seconds)
    rate = round(REQUESTS * OUTPUT / times["http"])
    case = f"{REQUESTS} streams of {OUTPUT} tokens over HTTP"
    table.add(
        case, times["engine"] / times["http"], "x the engine alone", ">= 0.93", tokens_a_second=rate
    )


def prefix(table: Table, seconds: float, threads: int) -> None:
    """Clients that share a system prompt, against clients whose prompts begin otherwise."""
    with served() as server:
        url = server.url
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
        with served() as server:
            ask_all(server.url, [body(prompt(1, 16), 1)])
            best = min(best, time.perf_counter() - began)
    table.add("from command to first answer", best, "s", "<= 8")


def replicas(table: Table, seconds: float, threads: int) -> None:
    """Two replicas of one thread, against one process of two threads. No prompt is asked twice.

    Two servers of one thread without Ray, each with half of the clients, are what replicas can
    reach: both read all weights for half of the rows.
    """
    case = f"{REQUESTS} streams of {OUTPUT} tokens, 2 replicas of 1 thread"
    if importlib.util.find_spec("ray") is None:
        print(f"  {case}: ray is not installed")
        return
    numbers = iter(range(10**6))
    with (
        served("--threads", "2") as process,
        served("--replicas", "2", "--threads", "1") as processes,
        served("--threads", "1") as left,
        served("--threads", "1") as right,
        Client(process.url) as one,
        Client(processes.url) as two,
        Client(left.url, right.url) as halves,
    ):

        def ask(client: Client) -> None:
            prompts = [prompt(next(numbers), 16 + 7 * place) for place in range(REQUESTS)]
            client.ask([body(each, OUTPUT) for each in prompts])

        clients = {"replicas": two, "one": one, "halves": halves}
        times = race({x: functools.partial(ask, each) for x, each in clients.items()}, seconds)
    rate = round(REQUESTS * OUTPUT / times["replicas"])
    unit = "x 1 process of 2 threads"
    table.add(case, times["one"] / times["replicas"], unit, ">= 0.85", tokens_a_second=rate)
    case = f"{REQUESTS} streams of {OUTPUT} tokens, 2 servers of 1 thread without Ray"
    table.add(case, times["one"] / times["halves"], unit)


QUESTION = "{}. Explain in detail, with many examples, how a {} works, and who invented it."
THINGS = "bicycle clock library lens bridge window book piano knife ship kite pump lock drum bell"
TOPICS = [*THINGS.split(" "), "mirror"]


def _save(folder: str) -> None:
    """Write the model as transformers does: it does not write one that came from a GGUF file."""
    model, tokenizer = loading.load(MODEL, None)
    config = type(model.config)(
        **{name: value for name, value in model.config.to_dict().items() if "quant" not in name}
    )
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def transformers_serve(*options: str) -> Iterator[Server]:
    """Start `transformers serve` with the same weights, in float32."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        _save(folder)
        port = free.getsockname()[1]
        free.close()
        command = [os.environ["QUIRE_PEER_TRANSFORMERS"], "-m", "transformers.cli.transformers"]
        command += ["serve", folder, "--device", "cpu", "--dtype", "float32"]
        with running([*command, "--port", str(port), "--host", "127.0.0.1", *options]) as process:
            process.url, process.model = f"http://127.0.0.1:{port}", folder
            for _ in range(600):
                try:
                    if httpx.get(f"{process.url}/health").status_code == 200:
                        break
                except httpx.HTTPError:
                    time.sleep(0.2)
            yield process


async def _chat(client: httpx.AsyncClient, asked: dict[str, Any]) -> str:
    """Return the text of a stream of a chat."""
    text = ""
    async with client.stream("POST", "/v1/chat/completions", json=asked) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
    return text


class Chats:
    """Asks a server questions, all at once, none of them twice."""

    def __init__(self, url: str, model: str) -> None:
        self._url, self._model, self._turn = url, model, 0
        self.texts: list[str] = []

    def ask(self) -> None:
        """Ask, and wait for all answers."""
        self._turn += 1
        options = {"model": self._model, "max_tokens": 2 * OUTPUT, "temperature": 0, "stream": True}
        questions = [QUESTION.format(self._turn, topic) for topic in TOPICS]

        async def all_of_them() -> list[str]:
            limits = httpx.Limits(max_connections=REQUESTS)
            async with httpx.AsyncClient(base_url=self._url, timeout=600, limits=limits) as client:
                bodies = [
                    {**options, "messages": [{"role": "user", "content": each}]}
                    for each in questions
                ]
                return list(await asyncio.gather(*(_chat(client, each) for each in bodies)))

        self.texts = asyncio.run(all_of_them())


def peer(table: Table, seconds: float, threads: int) -> None:
    """16 chats in streams, against `transformers serve`."""
    _against(table, seconds)


def batching(table: Table, seconds: float, threads: int) -> None:
    """The same, with continuous batching there."""
    _against(table, seconds, "--continuous-batching")


def _against(table: Table, seconds: float, *options: str) -> None:
    case = f"{REQUESTS} chats of {2 * OUTPUT} tokens over HTTP"
    if not os.environ.get("QUIRE_PEER_TRANSFORMERS"):
        print(f"  {case}: QUIRE_PEER_TRANSFORMERS names no environment")
        return
    with served() as ours, transformers_serve(*options) as theirs:
        pairs = {"ours": ours, "theirs": theirs}
        sides = {name: Chats(each.url, each.model) for name, each in pairs.items()}
        # A turn of theirs takes half a minute without batching.
        times = race({side: chats.ask for side, chats in sides.items()}, seconds, least=2)
    # Answers may end sooner on either side, so that characters a second are compared.
    rates = {side: len("".join(chats.texts)) / times[side] for side, chats in sides.items()}
    texts = zip(sides["ours"].texts, sides["theirs"].texts, strict=True)
    unit = "x transformers serve" + (", batching" if options else "")
    equal = sum(one == other for one, other in texts)
    table.add(case, rates["ours"] / rates["theirs"], unit, ">= 2", equal_answers=equal)


CONNECTIONS = 200


def load(table: Table, seconds: float, threads: int) -> None:
    """200 connections, lengths of all kinds, clients that leave; each answer is that of before."""
    requests = _load.plans(MODEL, 60, longest=300)
    with served("--max-bytes", "512MB") as server:
        seen = asyncio.run(
            _load.load(server.url, server.pid, requests, CONNECTIONS, max(seconds, 30))
        )
    case = f"{CONNECTIONS} connections, {seconds:g} s"
    for problem in [*seen.lost[:5], *seen.wrong[:5]]:
        print("  ", problem[:300])
    sums = seen.sums()
    counts = {"left": seen.cancelled, "refused": seen.refused, "output_tokens": seen.tokens}
    table.add(f"{case}: answered", seen.complete, "requests", "", **counts)
    table.add(f"{case}: lost", len(seen.lost), "requests", "<= 0")
    table.add(f"{case}: with other tokens than alone", len(seen.wrong), "requests", "<= 0")
    largest = round(max(seen.memory) / 1024)
    table.add(f"{case}: memory at the end", seen.growth(), "x the 2nd fifth", "<= 1.02", MB=largest)
    false = [name for name, holds in sums.items() if not holds]
    table.add(f"{case}: sums that /metrics misses", len(false), "sums", "<= 0", which=false)


PARTS = (http, prefix, start, replicas, peer, batching, load)


if __name__ == "__main__":
    run_parts("serve", __doc__, PARTS)
