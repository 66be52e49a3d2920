"""The programs in docstrings run: those with >>> everywhere, and those of public names.

A docstring takes names such as `query` as known. Here they get values.
"""

from __future__ import annotations

import ast
import doctest
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from builder import source
from docstrings import COMMON, PROGRAMS, TINY

WITH_PROMPTS = [
    name for name, module in source.modules().items() if ">>>" in module.path.read_text()
]

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
ONE_RANK = """
import torch.distributed as dist
from quire.distributed import attend_over_ranks, merge_over_ranks
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
first, n = 0, 3071
query, key, value = torch.randn(1, 4, 1, 32), *torch.randn(2, 1, 4, 1024, 32)
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
    "quire.linear.pack": TINY,
    "quire.distributed.attention": DIVIDED,
    "quire.distributed.context_parallel": DIVIDED,
    "quire.distributed.plan": DIVIDED,
    "quire.distributed": DIVIDED,
    "quire.distributed.attend_over_ranks": ONE_RANK,
    "quire.distributed.merge_over_ranks": ONE_RANK,
    "quire.draw.pages": """
from quire.draw.pages import draw_pages
monkeypatch.chdir(folder)  # it draws a file
cache, maps = PagedKVCache(layers=1, heads=1, head_dim=1, page_size=4, n_pages=4), []
cache.append([cache.sequence()], *torch.zeros(2, 1, 5, 1, 1))
""",
    "quire.engine.Engine": f"{TINY}\nfrom quire.linear import pack\npack(model)",
    "quire.engine.speculation.DraftModel": f"""
{TINY}
from quire.engine.speculation import DraftModel
small = model
""",
    "quire.engine": f"""
{TINY}
monkeypatch.setattr(loading.smollm2, "load", lambda: (model, tokenizer))  # as small as that
""",
    "quire.integrations.transformers": f"""
{TINY}
from quire.integrations.transformers import PagedCache, enable
name, batch = folder / "tiny", {{"input_ids": torch.ones(1, 4, dtype=torch.long)}}
""",
    "quire.linear.load": """
from transformers import AutoModelForCausalLM, LlamaConfig
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2)
""",
    "quire.weights": f"{DENSE}; memory = Dense(key, value); from quire.mods.weights import *",
}
"""What the program in a docstring takes as known; a list has an entry for each statement."""

UNDONE = {
    "quire.patch_torch": "quire.unpatch_torch()",
    "quire.distributed.attend_over_ranks": "dist.destroy_process_group()",
    "quire.distributed.merge_over_ranks": "dist.destroy_process_group()",
    "quire.engine.Engine": "engine.close()",
    "quire.engine": "engine.close()",
}


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


def test_programs_are_found() -> None:
    assert len(PROGRAMS) > 15
    names = {name for name, _ in PROGRAMS}
    assert names == SETUPS.keys(), "give what it takes as known a value here"


@pytest.mark.parametrize(("name", "program"), PROGRAMS, ids=[name for name, _ in PROGRAMS])
def test_programs_run(
    name: str, program: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    known: dict[str, Any] = {"monkeypatch": monkeypatch, "folder": tmp_path}
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
        exec(UNDONE.get(name, ""), known)
