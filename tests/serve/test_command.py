"""What the options of the command do to the answers of its process."""

from __future__ import annotations

import re
import signal
import socket
from pathlib import Path

import httpx2 as httpx
import pytest
from serving import served

from quire.engine import Engine
from quire.errors import ArgumentError
from quire.serve import process
from quire.tools import show

MODS = """
def near(b, h, q_idx, kv_idx):
    return q_idx - kv_idx < 4

def fading(score, b, h, q_idx, kv_idx):
    return score - (q_idx - kv_idx) * 0.5
"""


def test_attention_of_your_own_and_packed_weights(model: Path, tmp_path: Path) -> None:
    """The answer is that of an engine with the same mods, which is not that of one without."""
    file = tmp_path / "mods.py"
    file.write_text(MODS)
    mask, score_mod = f"{file}:near", f"{file}:fading"
    prompt = "the quick brown fox jumps over the lazy dog"
    with served(
        model, "--weights", "int8", "--mask", mask, "--score-mod", score_mod, "--name", "mine"
    ) as running:
        body = {"model": "mine", "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 1}
        answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=60).json()
        assert running.stop() == 0
    (choice,) = answer["choices"]
    found = choice["logprobs"]["token_logprobs"]

    def wanted(weights: str, *, mods: bool) -> list[float] | None:
        chosen = {"mask": show.load(mask), "score_mod": show.load(score_mod)} if mods else {}
        with Engine.from_pretrained(str(model), weights=weights, n_pages=64, **chosen) as engine:  # type: ignore[arg-type]
            return engine.submit(prompt, max_tokens=8, temperature=0, logprobs=1).result().logprobs

    assert found == wanted("int8", mods=True)
    assert found != wanted("int8", mods=False)
    assert found != wanted("float32", mods=True)


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
def test_the_loopback_of_ipv6(model: Path) -> None:
    with served(model, "--host", "::1") as running:
        assert running.url.startswith("http://[::1]:")
        assert httpx.get(f"{running.url}/health").status_code == 200
        assert httpx.get(f"{running.url}/health", headers={"host": "x"}).status_code == 421
        running.process.send_signal(signal.SIGINT)  # Ctrl-C
        assert running.process.wait(60) == 0
    assert "Traceback" not in running.log.read_text()


@pytest.mark.parametrize(("host", "at"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_a_port_that_is_taken(host: str, at: str) -> None:
    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no ::1")
    with process.listen(host, 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ArgumentError, match=re.escape(f"must have {at}:{port} for itself")):
            process.listen(host, port)
