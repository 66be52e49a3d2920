"""Two replicas on Ray: the answers of one process, prompts where their pages are, a replica killed.

One start of Ray serves the whole file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import psutil
import pytest
from serving import KEYS, Served, served

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)

import yaml
from ray.serve.schema import ServeDeploySchema

from quire.integrations import minilm
from quire.serve.command import _RAY
from quire.serve.options import Options

pytestmark = pytest.mark.timeout(600)

ONGOING = 8
RUNNING = "quire_engine_running"
SENT = {"authorization": f"Bearer {KEYS[0]}"}
LONG: dict[str, Any] = {"max_tokens": 1000, "temperature": 1.0, "extra_body": {"ignore_eos": True}}


FAULTY = """
import os
from pathlib import Path

from quire.engine.core import Core
from quire.mods import causal as mask

fault, schedule = Path({fault!r}), Core.schedule


def once(core):
    if fault.exists() and fault.read_text() == str(os.getpid()):
        fault.unlink()
        raise RuntimeError("on purpose")
    return schedule(core)


Core.schedule = once
"""
"""A file of mods: the engine of the replica whose process the file `fault` names fails."""


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults") / "fault"


@pytest.fixture(scope="module")
def ray(model: Path, fault: Path) -> Iterator[Served]:
    mods = fault.with_name("mods.py")
    mods.write_text(FAULTY.format(fault=str(fault)))
    options = ["--replicas", "2", "--threads", "1", "--max-ongoing", str(ONGOING)]
    options += ["--mask", f"{mods}:mask"]  # of the same meaning as none, and so with the same bits
    with served(model, *options, "--api-key", KEYS[0], "--api-key", KEYS[1]) as running:
        yield running
        while CLIENTS:
            CLIENTS.popitem()[1].close()


CLIENTS: dict[tuple[str, str], openai.OpenAI] = {}


def client(server: Served, key: str = KEYS[0]) -> openai.OpenAI:
    if (server.url, key) not in CLIENTS:
        CLIENTS[server.url, key] = openai.OpenAI(
            base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=300
        )
    return CLIENTS[server.url, key]


def numbers(server: Served, name: str) -> dict[str, float]:
    """Return a number of each replica. test_front.py shows that `/metrics` always answers."""
    text = httpx.get(f"{server.url}/metrics", headers=SENT, timeout=60).text
    lines = (line.rpartition(" ") for line in text.splitlines() if line.startswith(f"{name}{{"))
    return {labels.split('"')[1]: float(value) for labels, _, value in lines}


def of_both(server: Served, name: str) -> dict[str, float]:
    """Return a number of both replicas, as soon as both have answered the same question.

    One that is busy, on a machine that is, may not answer in time.
    """
    found: dict[str, float] = {}

    def both() -> bool:
        found.clear()
        found.update(numbers(server, name))
        return len(found) == 2

    wait_until(both, f"{name} of both replicas")
    return found


def total(server: Served, name: str) -> float:
    return sum(of_both(server, name).values())


def processes(server: Served) -> list[psutil.Process]:
    """Return the processes of the replicas."""
    found = psutil.Process(server.process.pid).children(recursive=True)
    return [each for each in found if "replica" in command_of(each).lower()]


def command_of(process: psutil.Process) -> str:
    """Return the command of a process, or nothing if it has ended meanwhile."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def wait_until(holds: Callable[[], object], what: str, seconds: float = 60) -> None:
    """Wait. How long a replica takes to start depends on the machine, and on who else uses it."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def wait_running(server: Served) -> None:
    """Wait until both replicas write answers."""
    wait_until(lambda: all(of_both(server, RUNNING).values()), "both replicas write")


def wait_idle(server: Served, seconds: float = 60) -> None:
    """Wait until both replicas are there and have nothing to do."""

    def both() -> bool:
        running = numbers(server, RUNNING)
        return len(running) == 2 and not any(running.values())

    wait_until(both, "both replicas are idle", seconds)


def shown_in_docs() -> dict[str, Any]:
    page = Path(__file__).parent.parent.parent / "docs" / "serve.md"
    shown: dict[str, Any] = yaml.safe_load(page.read_text().partition("```yaml")[2].split("```")[0])
    return shown


def test_the_docs_show_a_file_that_ray_reads() -> None:
    (made,) = ServeDeploySchema.model_validate(shown_in_docs()).applications
    assert made.import_path == "quire.serve.replicas:application"
    assert Options(**made.args).replicas == 4


def test_the_file_of_the_docs_answers(model: Path, tmp_path: Path) -> None:
    """With the paths, the port and the sizes of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = shown_in_docs()
    config["http_options"] |= {"host": "127.0.0.1", "port": port}
    args = config["applications"][0]["args"]
    keys = tmp_path / "keys"
    keys.write_text(KEYS[0])
    args |= {"model": str(model), "replicas": 1, "threads": 1, "api_keys_file": str(keys)}
    yaml_file, log = tmp_path / "serve.yaml", tmp_path / "log"
    yaml_file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "--address", "local"]
    with log.open("w") as said:
        command.append(str(yaml_file))
        process = subprocess.Popen(command, env=os.environ | _RAY, stdout=said, stderr=said)
    try:

        def answers() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).is_success
            except httpx.TransportError:
                return False

        wait_until(answers, "the application is there", seconds=120)
        url = f"http://127.0.0.1:{port}/v1/completions"
        body = {"model": "tiny", "prompt": "the fox", "max_tokens": 8, "stream": True}
        text = httpx.post(url, json=body, headers=SENT, timeout=60).text
        assert text.endswith("data: [DONE]\n\n") and text.count("\n\n") > 2
        assert httpx.post(url, json=body, timeout=60).status_code == 401
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def test_the_answers_are_those_of_one_process_bit_for_bit(ray: Served, server: Served) -> None:
    prompts = [f"{number} the quick brown fox" for number in range(8)]
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 24, "temperature": 0.9, "seed": 5}

    def ask(server: Served, prompt: str) -> list[Any]:
        asking = client(server)
        text = asking.completions.create(prompt=prompt, logprobs=3, n=2, **options)
        messages = [{"role": "user", "content": prompt}]
        stream = asking.chat.completions.create(
            messages=messages,  # type: ignore[arg-type]
            stream=True,
            logprobs=True,
            **options,
        )
        return [text.choices, text.usage, *(chunk.choices for chunk in stream)]

    before = of_both(ray, "quire_engine_submitted_total")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda prompt: ask(ray, prompt), prompts))
    assert found == [ask(server, prompt) for prompt in prompts]
    after = of_both(ray, "quire_engine_submitted_total")
    assert all(after[name] > before[name] for name in after), "one of the replicas wrote them all"


@pytest.mark.skipif(bool(minilm.missing()), reason=f"not installed: {minilm.missing()}")
def test_embeddings_are_those_of_one_process_bit_for_bit(ray: Served, server: Served) -> None:
    texts = ["the fox", "a lazy dog", "the quick brown fox jumps over the lazy dog"]

    def vectors(asked: Served, texts: list[str]) -> list[list[float]]:
        found = client(asked).embeddings.create(model="all-MiniLM-L6-v2", input=texts)
        return [each.embedding for each in found.data]

    def both() -> bool:
        """Whether each replica has embedded something. Nobody says which one gets a request."""
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda text: vectors(ray, [text]), texts))
        assert [vector for (vector,) in found] == wanted
        text = httpx.get(f"{ray.url}/metrics", headers=SENT, timeout=60).text
        counts = [line for line in text.splitlines() if "http_requests_total{" in line]
        mine = [line for line in counts if 'route="/v1/embeddings"' in line]
        return sum('replica="front"' not in line for line in mine) == 2

    wanted = vectors(server, texts)
    wait_until(both, "both replicas have embedded", seconds=120)


def test_a_prompt_goes_where_its_pages_are(ray: Served) -> None:
    def cached(prompt: str, key: str) -> int:
        made = client(ray, key).completions.create(model="tiny", prompt=prompt, max_tokens=2)
        assert made.usage is not None and made.usage.prompt_tokens_details is not None
        return made.usage.prompt_tokens_details.cached_tokens or 0

    text = "the quick brown fox jumps over the lazy dog " * 5
    for number in range(4):
        assert cached(f"{number} {text}", KEYS[0]) == 0
    for number in range(4):
        assert cached(f"{number} {text} and then?", KEYS[0]) > 30
        assert cached(f"{number} {text} and then?", KEYS[1]) == 0, "a key reads the other's pages"


def test_checks_are_those_of_one_process(ray: Served) -> None:
    assert httpx.get(f"{ray.url}/health").json() == {"status": "ok"}
    assert httpx.get(ray.url).status_code == 200
    for path in ("/v1/models", "/metrics", "/live"):
        assert httpx.get(f"{ray.url}{path}").status_code == 401
    with pytest.raises(openai.AuthenticationError):
        client(ray, "wrong").models.list()
    assert client(ray).models.list().data[0].id == "tiny"
    for body, status in ((b"{", 400), (b" " * (5 << 20), 413)):
        headers = SENT | {"content-type": "application/json"}
        answer = httpx.post(f"{ray.url}/v1/completions", content=body, headers=headers)
        assert answer.status_code == status and answer.json()["error"]["message"]
        assert answer.headers.get_list("x-frame-options") == ["DENY"]
    with pytest.raises(openai.BadRequestError, match="at most 1024 tokens"):
        client(ray).completions.create(model="tiny", prompt="x", max_tokens=5000)


def test_the_map_of_each_replica(ray: Served) -> None:
    for place in (0, 1):
        url = f"{ray.url}/live?replica={place}"
        with httpx.stream("GET", url, headers=SENT, timeout=60) as live:
            assert live.headers["x-replicas"] == "2"
            frame = json.loads(next(live.iter_lines())[6:])
        assert frame["page_size"] == 16 and frame["counts"]["output_tokens"] > 0
    for place in ("2", "-1", "x", "9" * 30):
        answer = httpx.get(f"{ray.url}/live?replica={place}", headers=SENT)
        assert answer.status_code == 400 and "from 0 to 1" in answer.json()["error"]["message"]


def test_who_leaves_ends_the_request(ray: Served) -> None:
    """Whether the answer comes as a stream, or would have come whole."""
    before = total(ray, "quire_engine_output_tokens_total")
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1000, "n": ONGOING, "ignore_eos": True}
    host, _, port = ray.url.removeprefix("http://").partition(":")
    for stream in (True, False):
        content = json.dumps(body | {"stream": stream}).encode()
        lines = [
            "POST /v1/completions HTTP/1.1",
            f"Host: {host}",
            "Content-Type: application/json",
            f"Content-Length: {len(content)}",
            f"Authorization: {SENT['authorization']}",
        ]
        with socket.create_connection((host, int(port))) as leaving:
            leaving.sendall("\r\n".join([*lines, "", ""]).encode() + content)
            wait_until(lambda: total(ray, RUNNING), "it is written")
        wait_idle(ray)
    written = total(ray, "quire_engine_output_tokens_total") - before
    assert 0 < written < 2 * ONGOING * 1000


def test_a_full_queue_says_when_to_come_again(ray: Served) -> None:
    def ask(number: int) -> openai.RateLimitError | None:
        try:
            client(ray).completions.create(model="tiny", prompt=f"{number} x", **LONG)
        except openai.RateLimitError as refusal:
            return refusal
        return None

    with ThreadPoolExecutor(5 * ONGOING) as pool:
        asked = [pool.submit(ask, number) for number in range(5 * ONGOING)]
        wait_running(ray)
        while not all(each.done() for each in asked):  # others wait, and checks do not wait
            assert httpx.get(f"{ray.url}/health", timeout=60).status_code == 200
            assert len(of_both(ray, RUNNING)) == 2
    refused = [each for each in (done.result() for done in asked) if each is not None]
    assert 0 < len(refused) <= 3 * ONGOING
    assert {each.code for each in refused} == {"queue_full"}
    assert all(1 <= int(each.response.headers["retry-after"]) <= 60 for each in refused)
    wait_idle(ray)


@pytest.mark.timeout(900)
def test_replicas_that_fail_come_back(ray: Served, server: Served, fault: Path) -> None:
    """One is killed, and streams that it wrote end with an error; all else is answered.

    Then the engine of the other fails. Ray starts another one of each.
    """

    def whole(asked: Served, number: int) -> Any:
        return client(asked).completions.create(
            model="tiny", prompt=f"{number} x", seed=number, **LONG
        )

    def stream(number: int) -> str | None:
        text = ""
        try:
            for chunk in client(ray).completions.create(
                model="tiny", prompt=f"{number} x", seed=number, stream=True, **LONG
            ):
                text += chunk.choices[0].text
        except openai.APIError as error:
            return error.code
        return text

    victims = processes(ray)
    assert len(victims) == 2
    with ThreadPoolExecutor(ONGOING + 3) as pool:
        streams = [pool.submit(stream, number) for number in range(ONGOING)]
        answers = [pool.submit(whole, ray, number) for number in range(ONGOING, ONGOING + 3)]
        wait_running(ray)
        victims[0].kill()
        written = [each.result() for each in streams]
        answered = [each.result() for each in answers]
    wanted = [whole(server, number) for number in range(ONGOING + 3)]
    assert all(
        text in ("replica_lost", wanted[place].choices[0].text)
        for place, text in enumerate(written)
    )
    assert [each.choices for each in answered] == [each.choices for each in wanted[ONGOING:]]
    fault.write_text(str(victims[1].pid))
    for number in itertools.cycle(range(ONGOING + 3)):
        with contextlib.suppress(openai.APIStatusError):  # unless the first is back, none is left
            assert whole(ray, number).choices == wanted[number].choices
        if not fault.exists():
            break
    old = {each.pid for each in victims}
    wait_until(lambda: len({each.pid for each in processes(ray)} - old) == 2, "two others", 400)
    wait_idle(ray, seconds=400)  # both have numbers again
    again = [whole(ray, number) for number in range(ONGOING)]
    assert [each.choices for each in again] == [each.choices for each in wanted[:ONGOING]]


def test_streams_end_before_the_processes(ray: Served) -> None:
    """The last test of the file: it ends the server."""
    children = psutil.Process(ray.process.pid).children(recursive=True)
    stream = iter(client(ray).completions.create(model="tiny", prompt="x", stream=True, **LONG))
    with httpx.stream("GET", f"{ray.url}/live", headers=SENT, timeout=60) as live:
        frames = live.iter_lines()
        next(frames)
        next(stream)
        ray.process.terminate()
        assert list(stream)[-1].choices[0].finish_reason == "length"
        list(frames)
    assert ray.process.wait(120) == 0
    _, alive = psutil.wait_procs(children, 120)
    assert not alive
    tracebacks = ray.log.read_text().split("Traceback")[1:]
    assert all("on purpose" in each for each in tracebacks)
