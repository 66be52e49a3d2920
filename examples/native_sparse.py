"""A small model with native sparse attention: compressed, selected and near keys.

    python examples/native_sparse.py --steps 200

Each token attends three times, and learned gates add up the results:

    compressed    the mean of every block of 16 keys that lies before the token
    selected      the 4 blocks that its group of heads likes best, by those means, and its own
    near          a window of 32 keys

The selected blocks are a `BlockMask` whose lists are computed a moment before: each token and key
head has a list of its own. While text is generated, keys are in pages of 16, and a page that is not
selected is a hole in the page table. The model learns bytes of the sources of Python.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire import BlockMask, Dense, Paged, attention
from quire.mods import causal, sliding_window

WIDTH, HEADS, KEY_HEADS, LAYERS = 64, 4, 2, 2
GROUP, HEAD_DIM = HEADS // KEY_HEADS, WIDTH // HEADS
BLOCK, SELECTED, WINDOW = 16, 4, 32
BATCH, LENGTH = 8, 256
VOCABULARY = 256  # a byte is a token

near = causal & sliding_window(WINDOW)


def finished(b: Tensor, h: Tensor, q_idx: Tensor, block: Tensor) -> Tensor:
    """Return whether all keys of a block lie before or at a query."""
    return (block + 1) * BLOCK <= q_idx + 1


def means(rows: Tensor) -> Tensor:
    """Return the mean of every whole block of rows [B, Hkv, N, D]: [B, Hkv, blocks, D]."""
    count = rows.shape[2] // BLOCK
    return rows[:, :, : count * BLOCK].unflatten(2, (count, BLOCK)).mean(3)


def select(query: Tensor, compressed: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the blocks that each token reads: counts [B, Hkv, L], blocks [B, Hkv, L, 5].

    The heads of a group choose together, from the blocks before that of the token.
    """
    own = positions // BLOCK
    together = query.unflatten(1, (KEY_HEADS, GROUP)).sum(2)
    liking = F.pad(together @ compressed.transpose(-2, -1), (0, SELECTED + 1), value=-torch.inf)
    liking = liking.masked_fill(torch.arange(liking.shape[-1]) >= own[:, None], -torch.inf)
    best = liking.topk(SELECTED)
    counts = (best.values > -torch.inf).sum(-1)
    blocks = torch.cat([own.expand(*counts.shape).unsqueeze(-1), best.indices], -1)
    return (counts + 1).int(), blocks.int()


class Cache(NamedTuple):
    """Pages [B * Hkv * pages, 1, 16, D] of one layer: sequence b * Hkv + h has its own."""

    key: Tensor
    value: Tensor

    @staticmethod
    def new(batch: int, length: int) -> Cache:
        """Return empty pages for sequences of `length` tokens."""
        pages = batch * KEY_HEADS * -(-length // BLOCK)
        return Cache(*torch.zeros(2, pages, 1, BLOCK, HEAD_DIM))

    def append(self, key: Tensor, value: Tensor, at: int) -> None:
        """Write keys and values [B, Hkv, L, D] to the positions from `at` on."""
        for pages, rows in ((self.key, key), (self.value, value)):
            self.rows(pages, key.shape[0])[:, :, at : at + key.shape[2]] = rows

    @staticmethod
    def rows(pages: Tensor, batch: int) -> Tensor:
        """Return pages as rows [B, Hkv, positions, D]."""
        return pages.view(batch, KEY_HEADS, -1, HEAD_DIM)

    def memory(self, blocks: Tensor, length: int) -> Paged:
        """Return the pages that sequences list, blocks [B * Hkv, most], and holes elsewhere."""
        count = len(blocks)
        own = torch.arange(len(self.key), dtype=torch.int32).view(count, -1)
        listed = torch.zeros(own.shape, dtype=torch.bool).scatter(1, blocks, True)
        holes = torch.where(listed, own, -1)
        return Paged(self.key, self.value, holes, torch.full((count,), length))


class SparseAttention(nn.Module):
    """Three branches of attention, and gates that add them up."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key, self.value = (nn.Linear(WIDTH, KEY_HEADS * HEAD_DIM) for _ in range(2))
        self.gates = nn.Linear(WIDTH, 3 * HEADS)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, cache: Cache | None = None, at: int = 0) -> Tensor:
        """Attend from x [B, L, WIDTH]; with a cache from one token, at position `at`."""
        query, key, value = (
            rows.unflatten(2, (-1, HEAD_DIM)).transpose(1, 2)
            for rows in (self.query(x), self.key(x), self.value(x))
        )
        gates = self.gates(x).sigmoid().unflatten(2, (3, HEADS)).permute(2, 0, 3, 1)
        if cache is None:
            branches = self.trained(query, key, value)
        else:
            cache.append(key, value, at)
            branches = self.decoded(query, cache, at)
        mixed = sum(gate[..., None] * out for gate, out in zip(gates, branches, strict=True))
        joined: Tensor = self.out(torch.as_tensor(mixed).transpose(1, 2).flatten(2))
        return joined

    def trained(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return the three branches for whole sequences."""
        length = query.shape[2]
        compressed = Dense(means(key), means(value))
        with torch.no_grad():
            lists = select(query, compressed.key, torch.arange(length))
        selected = BlockMask.from_kv_blocks(
            *(x.repeat_interleave(GROUP, 1) for x in lists),
            BLOCK_SIZE=(1, BLOCK),
            mask_mod=causal,
            seq_lengths=(length, length),
            compute_q_blocks=False,
        )
        memory = Dense(key, value)
        return [
            attention(query, compressed, mask=finished, q_start=0),
            attention(query, memory, mask=selected, q_start=0),
            attention(query, memory, mask=near, q_start=0),
        ]

    def decoded(self, query: Tensor, cache: Cache, at: int) -> list[Tensor]:
        """Return the three branches for one token, from pages."""
        batch, length = len(query), at + 1
        key, value = (cache.rows(x, batch)[:, :, :length] for x in cache)
        compressed = Dense(means(key), means(value))
        counts, blocks = select(query, compressed.key, torch.tensor([at]))
        # An entry that is not read becomes the token's own block, which is.
        read = torch.arange(blocks.shape[-1]) < counts.unsqueeze(-1)
        selected = torch.where(read, blocks, at // BLOCK).long().flatten(0, 2)
        first = max(0, at - WINDOW) // BLOCK
        window = torch.arange(first, at // BLOCK + 1).expand(batch * KEY_HEADS, -1)
        rows = query.unflatten(1, (KEY_HEADS, GROUP)).flatten(0, 1)
        outs = [
            attention(rows, cache.memory(selected, length)),
            attention(rows, cache.memory(window, length), mask=near),
        ]
        return [
            attention(query, compressed, mask=finished, q_start=at),
            *(out.unflatten(0, (batch, KEY_HEADS)).flatten(1, 2) for out in outs),
        ]


class Model(nn.Module):
    """A few layers of attention and of a small network, over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.tokens.weight, std=WIDTH**-0.5)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.attention = nn.ModuleList(SparseAttention() for _ in range(LAYERS))
        self.networks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * LAYERS + 1))

    def forward(self, tokens: Tensor, caches: list[Cache] | None = None, at: int = 0) -> Tensor:
        """Return the logits of the tokens that follow tokens [B, L]."""
        norms = iter(self.norms)
        x = self.tokens(tokens) + self.positions(torch.arange(at, at + tokens.shape[1]))
        for layer, (attend, network) in enumerate(zip(self.attention, self.networks, strict=True)):
            x = x + attend(next(norms)(x), None if caches is None else caches[layer], at)
            x = x + network(next(norms)(x))
        logits: Tensor = F.linear(next(norms)(x), self.tokens.weight)
        return logits


def batches(generator: torch.Generator) -> Iterator[Tensor]:
    """Yield pieces [BATCH, LENGTH + 1] of the sources of Python, for ever."""
    sources = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join((sources / name).read_bytes() for name in ("argparse.py", "typing.py"))
    every = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    while True:
        first = torch.randint(len(every) - LENGTH, (BATCH,), generator=generator)
        yield every[first[:, None] + torch.arange(LENGTH + 1)]


def train(steps: int) -> tuple[Model, list[float]]:
    """Train a model, and return it with its losses."""
    torch.manual_seed(0)
    model, losses = Model(), []
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step, text in zip(range(steps), batches(torch.Generator().manual_seed(0)), strict=False):
        logits = model(text[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:4}   loss {losses[-1]:.3f}")
    return model, losses


@torch.no_grad()
def decode(model: Model, text: Tensor) -> Tensor:
    """Return the logits of a text [B, N], one token after the other, from caches in pages."""
    caches = [Cache.new(*text.shape) for _ in range(LAYERS)]
    steps = (model(text[:, at : at + 1], caches, at) for at in range(text.shape[1]))
    return torch.cat(list(steps), 1)


def main(arguments: list[str] | None = None) -> None:
    """Train, and compare decoding with the forward pass."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    model, _ = train(parser.parse_args(arguments).steps)
    text = next(batches(torch.Generator().manual_seed(1)))[:2, :LENGTH]
    with torch.no_grad():
        apart = (model(text) - decode(model, text)).abs().max().item()
    print(f"logits of decoding and of the forward pass differ by at most {apart:.1e}")


if __name__ == "__main__":
    main()
