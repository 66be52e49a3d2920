"""Load: many connections, requests of all lengths, clients that leave at random.

Every request of a list is first asked alone. Then all connections ask requests of the list at
random, whole or as streams, and each answer must be the one that came alone. A client that finds a
full queue asks again. At the end, the numbers of /metrics must be those that the clients counted.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx

TEXT = "the quick brown fox jumps over the lazy dog and then it sleeps under an old tree"
WORDS = TEXT.split(" ")
LONG = 1200.0  # seconds after which a request is lost
Plan = tuple[str, dict[str, Any]]  # a path, and a body


@dataclass
class Report:
    """What the clients have seen."""

    sent: int = 0
    complete: int = 0
    answers: int = 0
    tokens: int = 0
    cancelled: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)  # another answer than alone
    lost: list[str] = field(default_factory=list)  # no answer
    memory: list[int] = field(default_factory=list)  # of the server, in KB, once a second
    ran: float = 0.0  # seconds, without those in which the machine slept
    numbers: dict[str, float] = field(default_factory=dict)  # of /metrics, at the end

    def growth(self) -> float:
        """Return the memory of the last fifth of the time, over that of the second."""
        fifth = max(1, len(self.memory) // 5)
        return statistics.median(self.memory[-fifth:]) / statistics.median(
            self.memory[fifth : 2 * fifth]
        )

    def sums(self) -> dict[str, bool]:
        """Return what must hold of the numbers at the end."""
        now = Counter[str]()
        for name, value in self.numbers.items():
            if name.startswith("quire_http_requests_total") and "completions" in name:
                now["requests"] += int(value)
            now[name.partition("{")[0]] += int(value)
        told = self.sent - self.cancelled
        engine = {name: now[f"quire_engine_{name}"] for name in ("pages", "free_pages")}
        return {
            "every request was counted once": told <= now["requests"] <= self.sent,
            "every answer was counted once": self.answers
            <= now["quire_answers_total"]
            <= self.answers + 2 * self.cancelled,
            "every refusal was counted": now["quire_refused_total"] >= self.refused,
            "whatever began has ended": now["quire_engine_submitted_total"]
            == now["quire_engine_finished_total"]
            >= self.answers,
            "no token was counted less": now["quire_engine_output_tokens_total"] >= self.tokens,
            "nobody is there": not now["quire_ongoing_answers"] and not now["quire_engine_running"],
            "every page is free or kept": engine["pages"]
            == engine["free_pages"] + now["quire_engine_kept_pages"],
        }


def plans(model: str, count: int, longest: int, seed: int = 0) -> list[Plan]:
    """Return requests of many kinds. Some prompts begin alike."""
    draw = random.Random(seed)
    made: list[Plan] = []
    for number in range(count):
        words = draw.choices(WORDS, k=draw.choice([1, 4, 16, 50, longest]))
        text = " ".join(WORDS * 4 * (number % 3 == 0) + words)
        body = {
            "model": model,
            "max_tokens": draw.choice([1, 2, 8, 20, 48]),
            "temperature": draw.choice([0, 0.7, 1.0]),
            "seed": number,
            "n": draw.choice([1, 1, 1, 2]),
            "stream": draw.random() < 0.6,
            "ignore_eos": draw.random() < 0.5,
        }
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        if draw.random() < 0.5:
            messages = [{"role": "user", "content": text}]
            made.append(("/v1/chat/completions", {**body, "messages": messages, "logprobs": True}))
        else:
            made.append(("/v1/completions", {**body, "prompt": text, "logprobs": 2}))
    return made


class Refused(Exception):
    """The queue is full. Its argument says when to come again."""


async def ask(client: httpx.AsyncClient, plan: Plan, events: int | None = None) -> Any:
    """Return the answer to a request. After some `events` of a stream, leave."""
    path, body = plan
    async with client.stream("POST", path, json=body) as response:
        if response.status_code == 429:
            raise Refused(float(response.headers["retry-after"]))
        if response.status_code != 200:
            raise OSError(f"{response.status_code}: {(await response.aread())[:200]!r}")
        if not body["stream"]:
            return _answer([json.loads(await response.aread())])
        found = []
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return _answer(found)
            if line:
                found.append(json.loads(line[6:]))
                if "error" in found[-1]:
                    raise OSError(str(found[-1]))
            if events is not None and len(found) >= events:
                return None
    raise OSError("the stream has ended without its end")


def _answer(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what does not depend on when a request came, and how many tokens there were."""
    choices: dict[int, list[Any]] = {}
    for event in events:
        for choice in event["choices"]:
            choices.setdefault(choice["index"], []).append(choice)
    return {"choices": choices, "tokens": events[-1]["usage"]["completion_tokens"]}


async def _visit(client: httpx.AsyncClient, plan: Plan, wanted: Any, report: Report) -> None:
    """Ask once, wait for the answer or leave, and write down what came."""
    draw = random.random()
    report.sent += 1
    try:
        if draw < 0.1:  # leaves after a while
            async with asyncio.timeout(random.expovariate(2)):
                await ask(client, plan)
        elif draw < 0.2:  # leaves after some tokens
            if await ask(client, plan, random.randrange(1, 20)) is None:
                report.cancelled += 1
                return
        else:
            found = await ask(client, plan)
            if found != wanted:
                report.wrong.append(f"{plan}: {found}, not {wanted}")
            report.complete += 1
            report.answers += len(found["choices"])
            report.tokens += found["tokens"]
            return
        report.complete += 1  # before it wanted to leave
        report.answers += len(wanted["choices"])
        report.tokens += wanted["tokens"]
    except TimeoutError:
        report.cancelled += 1
    except Refused as refusal:
        report.refused += 1
        await asyncio.sleep(refusal.args[0] * random.uniform(0.2, 1))
    except (OSError, httpx.HTTPError) as error:
        report.lost.append(f"{plan}: {error!r}")


async def load(
    url: str, pid: int, requests: Sequence[Plan], connections: int, seconds: float
) -> Report:
    """Ask from many connections at once, and return what was seen."""
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    report = Report()
    async with httpx.AsyncClient(base_url=url, timeout=LONG, limits=limits) as client:
        wanted = [await ask(client, plan) for plan in requests]
        for answer in wanted:
            report.answers += len(answer["choices"])
            report.tokens += answer["tokens"]
        report.sent = report.complete = len(requests)

        async def visitor() -> None:
            while report.ran < seconds:
                number = random.randrange(len(requests))
                await _visit(client, requests[number], wanted[number], report)

        async def watch() -> None:
            while True:
                began = time.monotonic()
                status = await asyncio.to_thread(Path(f"/proc/{pid}/status").read_text)
                report.memory.append(int(status.partition("VmRSS:")[2].split()[0]))
                await asyncio.sleep(1)
                report.ran += min(time.monotonic() - began, 2.0)

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(visitor() for _ in range(connections)))
        watching.cancel()
        report.numbers = await _numbers(client)
    return report


async def _numbers(client: httpx.AsyncClient) -> dict[str, float]:
    """Return the numbers of /metrics when nobody is served any more."""
    for _ in range(600):
        lines = (await client.get("/metrics")).text.splitlines()
        parts = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        now = {name: float(value) for name, _, value in parts}
        busy = [
            value
            for name, value in now.items()
            if name.startswith(("quire_ongoing_answers", "quire_engine_running"))
        ]
        if not any(busy):
            return now
        await asyncio.sleep(0.1)
    raise AssertionError("the server has not become idle")
