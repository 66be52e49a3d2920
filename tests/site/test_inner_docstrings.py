"""The programs in docstrings of what is not public run, or a table says why not."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builder import source
from docstrings import COMMON, PROGRAMS, TINY, is_program, programs_of

LONG = "query, key, value = torch.randn(3, 1, 4, 2048, 32)"
SETUPS = {
    "quire.api.gradients": f"""
{LONG}
grad_out = torch.randn(1, 4, 2048, 32)
shards = [Dense(key[:, :, :1024], value[:, :, :1024])]
shards += [Dense(key[:, :, 1024:], value[:, :, 1024:], start=1024)]
""",
    "quire.api.merge": LONG,
    "quire.api.nested": """
rows = [torch.randn(n, 4, 32) for n in (5, 7)]
key = value = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
""",
    "quire.api.patch": "model, tokens = nn.Identity(), torch.zeros(1)",
    "quire.api.pieces": LONG,
    "quire.api.plan": """
query = torch.randn(1, 2, 1, 16)
keys, values = torch.randn(2, 1, 2, 4096, 16)
""",
    "quire.api.varlen": """
q, k, v = torch.randn(3, 12, 4, 32)
cu_seqlens_q = cu_seqlens_k = cu_seq_q = cu_seq_k = torch.tensor([0, 5, 12], dtype=torch.int32)
max_q = max_k = 7
""",
    "quire.aux_outputs": f"{LONG}; memory = Dense(key, value)",
    "quire.block_mask": "",
    "quire.codegen.llvm.builder": "from quire.codegen.llvm.types import F32, I64, PTR",
    "quire.draw": "monkeypatch.chdir(folder)",
    "quire.draw.scale": "",
    "quire.draw.scores": "mod = trace(alibi(8), 'score')",
    "quire.integrations.transformers.cache": f"""
{TINY}
batch = {{"input_ids": torch.ones(1, 4, dtype=torch.long), "max_new_tokens": 2}}
""",
    "quire.ir.trace": "bias = torch.randn(4, 300)",
    "quire.ir.vector": "",
    "quire.kv.pool": "",
    "quire.kv.prefix": """
from quire.kv.pool import PagePool
pool, prompt, other_prompt = PagePool(64), list(range(64)), list(range(40))
pages = pool.allocate(4)
""",
    "quire.linear.packing": "weight = torch.randn(96, 96)",
    "quire.tools.colour": "from rich.console import Console",
}
"""What the program of a module takes as known, beside its own names."""

ENDS = {"quire.api.patch": "quire.unpatch_torch()"}

NOT_RUN = {
    "quire.api.weighting": "its arguments are made inside of a call",
    "quire.codegen.kernels.epilogue": "it shows how generated code is called",
    "quire.codegen.llvm.blocks": "it is a line inside of a function that is being written",
    "quire.codegen.llvm.jit": "the types of arguments are left out",
    "quire.codegen.llvm.parallel": "it shows how generated code is called",
    "quire.codegen.mods.functions": "it shows how generated code is called",
    "quire.codegen.phases.observe": "it shows how generated code is called",
    "quire.engine.gap": "its arguments are made inside of an engine",
    "quire.engine.runner": "its arguments are made inside of an engine",
    "quire.engine.sampling": "its arguments are made inside of an engine",
    "quire.integrations.smollm2": "it needs a package with a model",
    "quire.integrations.transformers.continuous": "it changes transformers for all tests",
    "quire.kv.cache": "it takes 8 GB of memory",
    "quire.runtime.linear": "its arguments are made inside of a layer",
    "quire.runtime.program": "its arguments are made inside of a step",
    "quire.support.torch_private.tracing": "Dynamo makes its arguments",
    "quire.tools.measure": "it takes five seconds, in two processes",
}
"""Modules with a program that only shows how something is called, and why it does not run."""


def inner_programs() -> Iterator[tuple[str, str]]:
    """The programs of all docstrings that are not among those of public names."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    seen = {program for _, program in PROGRAMS}
    for name, module in source.modules().items():
        for node in ast.walk(module.tree):
            if isinstance(node, kinds):
                for program in programs_of(ast.get_docstring(node) or ""):
                    if program not in seen:
                        seen.add(program)
                        yield name, program


INNER = list(inner_programs())


def test_each_program_runs_or_has_a_reason() -> None:
    assert all(is_program(program) for _, program in INNER)
    assert not SETUPS.keys() & NOT_RUN.keys()
    assert {name for name, _ in INNER} == SETUPS.keys() | NOT_RUN.keys()


RUN = [(name, program) for name, program in INNER if name in SETUPS]


@pytest.mark.parametrize(("name", "program"), RUN, ids=[name for name, _ in RUN])
def test_inner_programs_run(
    name: str, program: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    known: dict[str, Any] = {"monkeypatch": monkeypatch, "folder": tmp_path}
    exec(COMMON.format(more=""), known)
    known |= {k: v for k, v in vars(importlib.import_module(name)).items() if k[:2] != "__"}
    try:
        exec(SETUPS[name], known)
        exec(program, known)
    finally:
        exec(ENDS.get(name, ""), known)
