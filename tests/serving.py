"""A server in a process of its own, with a small random model, for tests."""

from __future__ import annotations

import copy
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import transformers as hf
from tiny_tokenizers import byte_level

KEYS = ("first-key-12345", "second-key-6789")


class Served(NamedTuple):
    """A server that runs."""

    url: str
    process: subprocess.Popen[str]
    log: Path

    def stop(self) -> int:
        """Ask the server to end, and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def save_model(folder: Path, template: str | None = None, added: Sequence[str] = ()) -> Path:
    """Write a small random model and its tokenizer to a folder, which has `added` tokens."""
    torch.manual_seed(0)
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.add_tokens(list(added))
    config = hf.LlamaConfig(
        vocab_size=len(tokenizer) + 3,  # a few logits have no token
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.3,
    )
    hf.LlamaForCausalLM(config).save_pretrained(folder)
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def served(model: Path, *options: str) -> Iterator[Served]:
    """Start `quire serve` at a free port, and end it."""
    log = model.parent / f"{model.name}-{time.monotonic_ns()}.log"
    command = [sys.executable, "-m", "quire.cli", "serve", str(model), "--port", "0", *options]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            env=os.environ | {"OMP_WAIT_POLICY": "passive"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert process.stdout is not None
        found = None
        while found is None:
            line = process.stdout.readline()
            assert line, f"it has not started, and said {log.read_text()}"
            found = re.search(r"http://\S+", line)
        yield Served(found[0], process, log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdout.close()  # type: ignore[union-attr]
