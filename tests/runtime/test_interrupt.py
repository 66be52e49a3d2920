"""Ctrl-C during a long call, in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

SOON = 1.5
"""Seconds after which the process must have ended; the calls below would take half a minute."""

PROGRAM = """
import signal, sys, threading, torch, quire
from quire import Dense, Paged, Ragged
from quire.runtime import launch

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have its jobs ignore it
torch.set_num_threads(2)
if "pool" in sys.argv[1]:
    launch.openmp_library = lambda: None
rows = 2**17
query, key, value = torch.randn(3, 1, 4, rows, 64, requires_grad="backward" in sys.argv[1])
start = launch.torch_threads()


def told(kernel, argument, threads):
    print("begins", flush=True)
    start(kernel, argument, threads)


launch.torch_threads = lambda: told
if sys.argv[1] == "paged":
    pages = [tensor[0].view(4, -1, 128, 64).transpose(0, 1) for tensor in (key, value)]
    memory = Paged(*pages, torch.arange(rows // 128)[None], [rows])
elif sys.argv[1] == "ragged":
    query = query[0].transpose(0, 1)
    memory = Ragged(key[0].transpose(0, 1), value[0].transpose(0, 1), [0, 100, rows])
else:
    memory = Dense(key, value)
try:
    if query.requires_grad:
        out = torch.zeros(1, 4, rows, 64)
        quire.attention_gradients(query, memory, out, out[..., 0], out)
    else:
        quire.attention(query, memory)
except KeyboardInterrupt:
    print("interrupted", signal.set_wakeup_fd(-1), threading.active_count() < 3, flush=True)
    small = torch.randn(3, 1, 1, 5, 8)
    print(bool(quire.attention(small[0], Dense(*small[1:])).isfinite().all()), flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no SIGINT to one process")
@pytest.mark.parametrize("call", ["forward", "ragged", "paged", "backward", "pool"])
def test_ctrl_c_ends_a_long_call(call: str) -> None:
    with subprocess.Popen(  # which says when the kernel begins
        [sys.executable, "-c", PROGRAM, call], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begins\n"
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            start = time.monotonic()
            said = process.stdout.readline()
            taken = time.monotonic() - start
            rest = process.stdout.read()
        finally:
            process.kill()
    assert said == "interrupted -1 True\n"
    assert rest == "True\n"
    assert taken < SOON
