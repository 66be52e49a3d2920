"""A process may fork while one of its threads compiles."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import quire

SCRIPT = textwrap.dedent("""
    import itertools, os, signal, threading, time
    from quire.codegen.llvm import jit
    from quire.codegen.llvm.builder import Module
    from quire.codegen.llvm.target import Target
    from quire.codegen.llvm.types import I64
    from quire.ir.graph import const
    from quire.support.bounded import BoundedDict
    import torch

    known = BoundedDict(4)

    def compile_one(number: int, lines: int) -> None:
        module = Module()
        with module.function("answer", {"x": I64}, I64) as f:
            (total,) = f.parameters
            for line in range(lines):
                total = total * (number + line) ^ line
            f.give_back(total)
        jit.load(jit.compile_object(module.text, Target.host()), ["answer"])
        known.keep(const(number, torch.int64), number)

    def compile_for_ever() -> None:
        for number in itertools.count():
            compile_one(number, 1000)

    threading.Thread(target=compile_for_ever, daemon=True).start()
    time.sleep(0.3)
    for round in range(5):
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # ends a child that waits for ever
            compile_one(-1 - round, 10)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(status, flush=True)
        time.sleep(0.05)
    os._exit(0)
""")


def test_a_child_compiles_while_a_thread_of_its_parent_did() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert run.stdout.split() == ["0"] * 5, run.stderr


def test_every_lock_holds_across_a_fork() -> None:
    """But for those of a pool of threads and of an engine, which a child does not use."""
    made = []
    for path in Path(quire.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                ("Lock", "Condition")
            ):
                made.append(path.name)
    # tests/engine: a forked child is refused by an engine before it waits for one of its locks.
    of_an_engine = ["answers.py"] * 2 + ["engine.py"] * 2 + ["gap.py"]
    assert sorted(made) == [*of_an_engine, "launch.py", "locks.py"]
