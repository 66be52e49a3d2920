"""quire inside graphs of torch.compile: `make bench`, or python benchmarks/compile.py.

The model is a GPT of four layers with packed documents and a learned bias for each distance. It is
one graph (fullgraph=True), which Inductor compiles. So this needs a C++ compiler.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from _race import Table, race, run_parts
from torch import Tensor, nn
from torch.nn.attention import flex_attention as torch_flex

import quire
from quire import Dense
from quire.mods import LearnedDistanceBias, causal, document

LAYERS, HEADS, WIDTH, TOKENS, WORDS = 4, 8, 512, 1024, 512
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """A layer of the GPT. `kind` is "quire" or "sdpa".

    With "sdpa", attention is causal, without documents or bias.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.bias = LearnedDistanceBias(HEADS, 128) if kind == "quire" else None

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return the output of the layer, [B, N, WIDTH] like `x`. `ids` [N] are the documents."""
        parts = self.mix(self.norms[0](x)).unflatten(-1, (3, HEADS, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        if self.kind == "quire":
            mask = document(ids) & causal
            out = quire.attention(query, Dense(key, value), score_mod=self.bias, mask=mask)
        else:
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norms[1](x))))


class GPT(nn.Module):
    """A language model of four layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(LAYERS))

    def forward(self, tokens: Tensor, ids: Tensor) -> Tensor:
        """Return the loss of `tokens` [B, N]. `ids` [N] has the document of each position."""
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x, ids)
        logits = x[:, :-1] @ self.words.weight.T
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batch(length: int = TOKENS) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(WORDS, (1, length)), torch.arange(length) // 300


def compiled_whole(model: nn.Module) -> Callable[..., Tensor]:
    return torch.compile(model, fullgraph=True, dynamic=False)


def step(model: Callable[..., Tensor], parameters: list[nn.Parameter], length: int) -> None:
    torch.autograd.grad(model(*batch(length)), parameters)


def training(table: Table, seconds: float, threads: int) -> None:
    """A step of training: forward, backward; and what compiling gains on each model."""
    contestants = {}
    for kind in ("quire", "sdpa"):
        torch._dynamo.reset()
        model = GPT(kind)
        learned, compiled = list(model.parameters()), compiled_whole(model)
        contestants[kind] = functools.partial(step, compiled, learned, TOKENS)
        contestants[f"{kind}, eager"] = functools.partial(step, model, learned, TOKENS)
    best = race(contestants, seconds)
    table.add(
        "training step, compiled", best["sdpa"] / best["quire"], "x as fast as SDPA", ">= 1.0"
    )
    for kind, must in (("quire", ">= 1.1"), ("sdpa", "")):
        gain = best[f"{kind}, eager"] / best[kind]
        table.add(f"training step, compiled, {kind}", gain, "x eager", must)


def compile_time(table: Table, seconds: float, threads: int) -> None:
    """The first step: each model in processes of its own, with empty caches of torch and quire.

    In one process, the second model would find the kernels of norms and products of the first.
    """
    best = dict.fromkeys(("quire", "sdpa"), float("inf"))
    for _ in range(3):
        for kind in best:
            with tempfile.TemporaryDirectory() as empty:
                environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{empty}/torch"}
                environment["QUIRE_CACHE_DIR"] = f"{empty}/quire"
                command = [sys.executable, __file__, "--first-step", kind]
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, check=True
                )
            best[kind] = min(best[kind], float(done.stdout))
    said = " and ".join(f"{best[kind]:.1f} s" for kind in best)
    table.add(
        "time to compile",
        best["quire"] / best["sdpa"],
        "x the time with SDPA",
        "<= 1.3",
        seconds=said,
    )


def first_step(kind: str) -> float:
    """Return the seconds of the first step, after torch.compile has compiled something else."""
    torch.compile(nn.Linear(8, 8))(torch.ones(1, 8)).sum().backward()
    torch._dynamo.reset()
    model = GPT(kind)
    learned, compiled = list(model.parameters()), compiled_whole(model)
    start = time.perf_counter()
    step(compiled, learned, TOKENS)
    return time.perf_counter() - start


def lengths(table: Table, seconds: float, threads: int) -> None:
    """How many graphs are compiled in 100 training steps with 64 different lengths."""
    torch._dynamo.reset()
    model, graphs = GPT("quire"), []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    learned = list(model.parameters())
    for number in range(100):
        step(compiled, learned, 96 + 7 * number % 64)
    table.add("100 steps over 64 lengths", len(graphs), "graphs", "<= 2")


def call(table: Table, seconds: float, threads: int) -> None:
    """The time of a small call inside a graph. The graph has 32 such calls, one after the other."""
    torch._dynamo.reset()
    query = torch.randn(1, 8, 1, 64)
    memory = Dense(*(torch.randn(1, 8, 128, 64) for _ in range(2)))

    def chain(attend: Callable[..., Tensor], query: Tensor) -> Tensor:
        for _ in range(32):
            query = attend(query, memory)
        return query

    plan = quire.plan(query, memory, mask=causal)
    whole = functools.partial(chain, functools.partial(quire.attention, mask=causal))
    compiled = torch.compile(whole, fullgraph=True)
    with torch.no_grad():
        best = race(
            {
                "compiled": lambda: compiled(query),
                "plan": lambda: chain(plan, query),
                "eager": lambda: whole(query),
            },
            seconds,
        )
    table.add(
        "q 1, kv 128, in a graph", best["compiled"] / best["plan"], "x the time of a plan", "<= 2"
    )
    table.add("q 1, kv 128, not compiled", best["eager"] / best["plan"], "x the time of a plan")


def forward(table: Table, seconds: float, threads: int) -> None:
    """A forward pass inside a graph, against PyTorch's compiled flex_attention."""
    query, key, value = (torch.randn(1, 8, 2048, 64) for _ in range(3))
    slopes = torch.rand(8)
    blocks = torch_flex.create_block_mask(causal, None, None, 2048, 2048, device="cpu")

    def bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - slopes[h] * (q_idx - kv_idx)

    torch._dynamo.reset()
    ours = torch.compile(
        lambda q, k, v: quire.flex_attention(q, k, v, bias, blocks), fullgraph=True, dynamic=False
    )
    theirs = torch.compile(
        lambda q, k, v: torch_flex.flex_attention(q, k, v, bias, blocks),
        fullgraph=True,
        dynamic=False,
    )
    with torch.no_grad():
        best = race(
            {"quire": lambda: ours(query, key, value), "torch": lambda: theirs(query, key, value)},
            seconds,
        )
    table.add(
        "causal with slopes, N 2048 D 64", best["torch"] / best["quire"], "x as fast as PyTorch's"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--first-step"]:
        print(first_step(sys.argv[2]))
    else:
        run_parts("compile", __doc__, (training, compile_time, lengths, call, forward))
