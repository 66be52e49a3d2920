"""The programs in docstrings run: those with >>> everywhere, and those of public names.

A docstring takes names such as `query` as known. Here they get values.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from builder import source
from builder.symbols import public_modules, symbols

import quire

WITH_PROMPTS = [
    name for name, module in source.modules().items() if ">>>" in module.path.read_text()
]

COMMON = """
import math, torch
from torch import nn
import quire, quire.distributed, quire.linear
from quire import *
from quire.kv import *
from quire.ir.trace import trace
from quire.mods import *
{more}
"""

NAMES: dict[str, str] = {
    "quire.api.explain": "query, key, value = torch.randn(3, 1, 2, 64, 32)",
    "quire.api.paged.attention": """
batch_idx, input_pos = torch.tensor([0, 1]), torch.arange(150).expand(2, 150)
k_val, v_val = torch.randn(2, 2, 2, 150, 16)
k_cache, v_cache = torch.zeros(2, 1, 2, 64 * 128, 16)
kv_len = torch.tensor([150, 150])
logical_mask = create_block_mask(causal, None, None, 150, 384, BLOCK_SIZE=128)
query = torch.randn(2, 2, 150, 16)
""",
    "quire.api.why": "doc = torch.arange(32) // 10",
    "quire.block_mask.blocks": "block_mask = create_block_mask(causal, None, None, 256, 200)",
    "quire.block_mask.parts": """
block_mask = create_block_mask(causal, None, None, 1024, 1024)
query, key, value = torch.randn(3, 1, 2, 1024, 16)
t = 700
""",
}
"""What the examples of a module take as known."""

PACKED = "query, key, value = torch.randn(3, 12, 4, 32); offsets = [0, 5, 12]"
DENSE = "query, key, value = torch.randn(3, 1, 4, 12, 32)"
PAGES = """
query = torch.randn(2, 4, 1, 32)
key, value = torch.randn(2, 6, 4, 16, 32)
page_table, lengths = torch.tensor([[0, 1], [2, 3]]), [20, 30]
"""
DIVIDED = """
mask, n, mesh = causal, 64, {"cp": None}
plan = quire.distributed.plan(mask, length=n)
x, labels = torch.randn(1, n, 8), torch.arange(n)[None]
q, k, v = torch.randn(3, 1, 4, n, 32)
bias, model = None, nn.Identity()
"""
LINEAR = "linear, rms_norm, x = nn.Linear(96, 96), nn.RMSNorm(96), torch.randn(5, 96)"
SETUPS: dict[str, str | list[str]] = {
    "quire.attention": [DENSE, PACKED, PAGES],
    "quire.explain": [DENSE, PACKED],
    "quire.flex_attention": f"{DENSE}; alibi = alibi(4)",
    "quire.jagged_scaled_dot_product_attention": """
parts = [torch.randn(n, 4, 32) for n in (5, 7)]
query = key = value = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
""",
    "quire.merge_attention": """
(out_a, out_b, out_c), (lse_a, lse_b, lse_c) = torch.randn(3, 1, 4, 8, 32), torch.randn(3, 1, 4, 8)
""",
    "quire.merge_pieces": f"""
{DENSE}
piece_a = piece_b = piece_c = attention_piece(query, Dense(key, value))
""",
    "quire.patch_torch": f"{DENSE}; import torch.nn.attention.flex_attention; quire.patch_torch()",
    "quire.random": "seed = 0",
    "quire.varlen_attention": "q, k, v = torch.randn(3, 12, 4, 32); cu_seqlens = [0, 5, 12]",
    "quire.varlen_attn": f"{PACKED}; longest = 7",
    "quire.linear.PackedLinear": f"{LINEAR}; from quire.linear import PackedLinear, add",
    "quire.linear.pack": "model = nn.Sequential(nn.Linear(96, 96))",
    "quire.distributed.attention": DIVIDED,
    "quire.distributed.context_parallel": DIVIDED,
    "quire.distributed.plan": DIVIDED,
    "quire.distributed": DIVIDED,
    "quire.weights": f"{DENSE}; memory = Dense(key, value); from quire.mods.weights import *",
}
"""What the program in a docstring takes as known; a list has an entry for each statement."""

ELSEWHERE = {
    "quire.linear.load": "a model of transformers; docs/examples/linear.py runs the same",
    "quire.distributed.attend_over_ranks": "ranks; docs/examples/distributed.py runs the same",
    "quire.distributed.merge_over_ranks": "ranks; docs/examples/distributed.py runs the same",
    "quire.engine.Engine": "a model with a tokenizer; docs/examples/engine.py runs the same",
    "quire.engine": "a model with a tokenizer; docs/learn/serve.md runs the same",
    "quire.integrations.transformers": "a model's files; docs/learn/serve.md runs the same",
}
"""Programs that need what a test cannot give them here, and where the same is run."""

UNDONE = {"quire.patch_torch": "quire.unpatch_torch()"}


class FromTheStart(doctest.OutputChecker):
    """A docstring may show the beginning of what is printed; spaces do not count."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return " ".join(got.replace("<BLANKLINE>", "").split()).startswith(" ".join(want.split()))


@pytest.mark.parametrize("name", WITH_PROMPTS)
def test_prompts(name: str) -> None:
    known: dict[str, Any] = {}
    exec(COMMON.format(more=NAMES.get(name, "")), known)
    module = importlib.import_module(name)
    known = {key: value for key, value in known.items() if key not in vars(module)}
    runner = doctest.DocTestRunner(FromTheStart())
    for test in doctest.DocTestFinder().find(module, extraglobs=known):
        runner.run(test)
    assert runner.failures == 0 and runner.tries > 0


def programs() -> Iterator[tuple[str, str]]:
    """The indented programs of public docstrings that call something."""
    seen = set()
    texts = [(name, symbol.doc) for name, symbol in symbols().items()]
    texts += [(name, module.__doc__ or "") for name, module in public_modules().items()]
    for name, doc in texts:
        for block in re.findall(
            r"(?:^ {4,}.*\n|^\s*\n)+", inspect.cleandoc(doc) + "\n", re.MULTILINE
        ):
            text = inspect.cleandoc(block)
            if text and text not in seen and ">>>" not in text and is_program(text):
                seen.add(text)
                yield name, text


def is_program(text: str) -> bool:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return False
    return any(isinstance(node, ast.Call) for node in ast.walk(tree))


PROGRAMS = list(programs())


def test_programs_are_found() -> None:
    assert len(PROGRAMS) > 15
    names = {name for name, _ in PROGRAMS}
    assert names <= SETUPS.keys() | ELSEWHERE.keys(), "give what it takes as known a value here"
    assert SETUPS.keys() | ELSEWHERE.keys() <= names


HERE = [(name, program) for name, program in PROGRAMS if name not in ELSEWHERE]


@pytest.mark.parametrize(("name", "program"), HERE, ids=[name for name, _ in HERE])
def test_programs_run(name: str, program: str) -> None:
    torch.set_num_threads(1)
    known: dict[str, Any] = {}
    exec(COMMON.format(more=""), known)
    given = SETUPS[name]
    try:
        if isinstance(given, str):
            exec(given, known)
            exec(program, known)
            return
        for setup, statement in zip(given, ast.parse(program).body, strict=True):
            exec(setup, known)
            exec(ast.unparse(statement), known)
    finally:
        exec(UNDONE.get(name, ""), {"quire": quire})
