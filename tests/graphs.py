"""What tests of torch.compile and torch.export share: a look at the graphs, and a small model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import quire


class Graphs:
    """A backend of torch.compile that keeps the graphs it is given, and runs them as they are.

    If another backend is named, it runs them.
    """

    def __init__(self, backend: str | None = None) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.backend = backend

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs.append(graph)
        if self.backend is None:
            return graph.forward
        compile_graph: Any = torch._dynamo.lookup_backend(self.backend)
        return compile_graph(graph, inputs)  # type: ignore[no-any-return]

    @property
    def uses_quire(self) -> bool:
        return any("quire.attention" in str(graph.graph) for graph in self.graphs)

    @property
    def uses_torch(self) -> bool:
        return any("flex_attention" in str(graph.graph) for graph in self.graphs)


SLOPES = torch.tensor([0.5, -0.25])


def slope(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + SLOPES[h] * (q_idx - kv_idx)


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


BLOCKS = quire.create_block_mask(causal, None, None, 32, 32, BLOCK_SIZE=16)


def qkv(**kind: Any) -> list[Tensor]:
    return [torch.randn(2, 2, 32, 8, **kind) for _ in range(3)]


class Model(torch.nn.Module):
    def __init__(self, attention: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.attention, self.options = attention, options

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attention(query + 1, key, value, slope, BLOCKS, **self.options) * 2
