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
from quire.integrations import smollm2
from quire.serve import Options, Settings, process
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


@pytest.mark.skipif(bool(smollm2.missing()), reason=f"not installed: {smollm2.missing()}")
def test_the_model_that_is_served_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where its log goes
    with served(Path(Options().model)) as running:
        body = {
            "model": "SmolLM2-135M-Instruct",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 24,
            "temperature": 0,
        }
        answer = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=100).json()
        assert running.stop() == 0
    (choice,) = answer["choices"]
    assert "Paris" in choice["message"]["content"]


def test_names_that_clients_may_call_a_server_by() -> None:
    loopback = ("127.0.0.1", "localhost", "::1")
    for given, wanted in [
        ({}, {*loopback}),
        ({"host": "127.0.0.2"}, {*loopback, "127.0.0.2"}),
        ({"allowed_hosts": ["a.example"]}, {*loopback, "a.example"}),
        ({"host": "0.0.0.0"}, None),
        ({"host": "0.0.0.0", "allowed_hosts": ["a.example"]}, {*loopback, "0.0.0.0", "a.example"}),
    ]:
        found = Options(**given).settings().hosts  # type: ignore[arg-type]
        assert (found if found is None else set(found)) == wanted, given


def test_all_addresses_a_name_and_ctrl_c(model: Path) -> None:
    """An answer that is being written is finished, then the process ends."""
    with served(model, "--host", "0.0.0.0", "--allow-host", "a.example") as running:
        port = running.url.rpartition(":")[2]
        url = f"http://127.0.0.1:{port}"
        for host, status in [("a.example", 200), (f"a.example:{port}", 200), ("b.example", 421)]:
            answer = httpx.get(f"{url}/v1/models", headers={"host": host}, timeout=60)
            assert answer.status_code == status, host
        body = {"model": "tiny", "prompt": "x", "max_tokens": 300, "ignore_eos": True}
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=60
        ) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            running.process.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert '"finish_reason":"length"' in rest[-2] and rest[-1] == "data: [DONE]"
        assert running.process.wait(60) == 0
    assert "Traceback" not in running.log.read_text()


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
def test_the_loopback_of_ipv6(capsys: pytest.CaptureFixture[str]) -> None:
    with process.listen("::1", 0) as bound:
        process.announce(Settings(model="tiny"), bound)
        port = bound.getsockname()[1]
        with socket.create_connection(("::1", port), timeout=60):
            pass
    assert f"tiny at http://[::1]:{port} " in capsys.readouterr().out


@pytest.mark.parametrize(("host", "at"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_a_port_that_is_taken(host: str, at: str) -> None:
    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no ::1")
    with process.listen(host, 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ArgumentError, match=re.escape(f"must have {at}:{port} for itself")):
            process.listen(host, port)
