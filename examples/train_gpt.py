"""Train a small GPT on the sources of Python's standard library, with attention by quire.

    python examples/train_gpt.py --steps 300 --out loss.svg

Each row of a batch holds pieces of several files, one after the other. A query sees only its own
piece, and every head learns a bias for each distance between query and key. SDPA can compute this
too, if piece and bias are written into one dense float mask. A second model does so. It starts with
the same weights and gets the same batches, and the two models take turns.
"""

from __future__ import annotations

import argparse
import copy
import math
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from charts import Curve, line_chart, save
from torch import Tensor, nn

from quire import flex_attention
from quire.mods import Mask, ScoreChange

WIDTH, HEADS, LAYERS, REACH = 128, 4, 4, 128
BATCH = 8
VOCABULARY = 256  # a byte is a token
SHORTEST_PIECE = 32
LEARNING_RATE, WARM_UP = 1e-3, 20

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""attend(query, key, value, bias, document) returns the output [B, H, N, D].

query, key and value are [B, H, N, D], bias [H, REACH + 1] and document [B, N].
"""


# --- attention, twice ----------------------------------------------------------------------------


def own_piece(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, document: Tensor) -> Tensor:
    """Return whether a key is in the piece of a query, and not after it."""
    return (kv_idx <= q_idx) & (document[b, q_idx] == document[b, kv_idx])


def by_distance(
    score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, bias: Tensor
) -> Tensor:
    """Add what a head has learned about the distance of a key."""
    return score + bias[h, torch.clamp(q_idx - kv_idx, 0, REACH)]


def by_quire(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, document: Tensor) -> Tensor:
    """Compute attention with quire. The mask and the bias are functions of positions."""
    return flex_attention(
        query,
        key,
        value,
        score_mod=ScoreChange(by_distance, bias=bias),
        mask_mod=Mask(own_piece, document=document),
    )


def by_sdpa(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, document: Tensor) -> Tensor:
    """Compute the same with PyTorch. The mask and the bias are one tensor [B, H, N, N]."""
    positions = torch.arange(query.shape[2])
    distance = positions[:, None] - positions
    visible = (distance >= 0) & (document[:, :, None] == document[:, None, :])
    biases = bias[:, distance.clamp(min=0, max=REACH)]
    mask = torch.where(visible[:, None], biases, -math.inf)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


# --- the model -----------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer of the GPT: attention, then two linear layers, each with a residual connection."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.bias = nn.Parameter(torch.zeros(HEADS, REACH + 1))
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.merge = nn.Linear(WIDTH, WIDTH, bias=False)
        self.think = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        batch, length, _ = x.shape
        packed = self.project(self.before(x)).view(batch, length, 3, HEADS, -1)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        seen = self.attend(query, key, value, self.bias, document)
        x = x + self.merge(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.think(self.between(x))


class GPT(nn.Module):
    """A GPT without position embeddings: only the biases tell it about positions."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(attend) for _ in range(LAYERS))
        self.last = nn.LayerNorm(WIDTH)
        self.predict = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, document: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, document)
        return self.predict(self.last(x))

    def with_attention(self, attend: Attend) -> GPT:
        """Return a model with the same weights and another attention function."""
        other = copy.deepcopy(self)
        for block in other.blocks:
            block.attend = attend
        return other


# --- the text ------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """The tokens [B, N], the token that follows each, and the piece that each belongs to."""

    tokens: Tensor
    targets: Tensor
    document: Tensor


def standard_library() -> list[Tensor]:
    """Return each module of the standard library as a tensor of its bytes."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [path.read_bytes() for path in paths]
    files = [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts if text]
    files = [file.long() for file in files if len(file) > SHORTEST_PIECE + 1]
    if not files:
        raise SystemExit("This Python has no sources of its standard library to train on.")
    return files


def packed(files: list[Tensor], length: int, random: torch.Generator) -> Iterator[Batch]:
    """Yield batches whose rows of `length` tokens are filled with pieces of random files."""

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=random))

    def row() -> Batch:
        pieces: list[Batch] = []
        left = length
        while left:
            file = files[number(0, len(files))]
            size = min(left, len(file) - 1, number(SHORTEST_PIECE, length + 1))
            start = number(0, len(file) - size)
            text = file[start : start + size + 1]
            pieces.append(Batch(text[:-1], text[1:], torch.full((size,), len(pieces))))
            left -= size
        return Batch(*map(torch.cat, zip(*pieces, strict=True)))

    while True:
        yield Batch(*map(torch.stack, zip(*(row() for _ in range(BATCH)), strict=True)))


# --- training ------------------------------------------------------------------------------------


class Training:
    """A model in training, with the loss and the time of each step."""

    def __init__(self, name: str, model: GPT) -> None:
        self.name, self.model = name, model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        warm_up = lambda step: min(1.0, (step + 1) / WARM_UP)  # noqa: E731
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warm_up)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, batch: Batch) -> None:
        start = time.perf_counter()
        logits = self.model(batch.tokens, batch.document)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())

    def __str__(self) -> str:
        return f"{self.name}: {1000 * min(self.seconds):.0f} ms a step"


def train(steps: int, length: int) -> list[Training]:
    """Train two copies of one model. They take turns: a step of the first, a step of the second."""
    torch.manual_seed(0)
    batches = packed(standard_library(), length, torch.Generator().manual_seed(0))
    model = GPT(by_quire)
    trainings = [Training("quire", model), Training("SDPA", model.with_attention(by_sdpa))]
    print(f"{sum(p.numel() for p in model.parameters()):,} weights, {BATCH} x {length} tokens")
    for step in range(steps):
        batch = next(batches)
        for training in trainings:
            training.step(batch)
        if step % max(1, steps // 20) == 0 or step == steps - 1:
            found = "   ".join(
                f"{each.name} {each.losses[-1]:.4f} in {1000 * each.seconds[-1]:.0f} ms"
                for each in trainings
            )
            print(f"step {step:4}   loss: {found}", flush=True)
    return trainings


def main(arguments: list[str] | None = None) -> None:
    """Train both models. Print the largest difference of their losses, and draw the losses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="training steps")
    parser.add_argument("--length", type=int, default=512, help="tokens in a row")
    parser.add_argument("--out", type=Path, default=None, help="write a chart to this SVG or PNG")
    options = parser.parse_args(arguments)
    trainings = train(options.steps, options.length)
    apart = max(abs(a - b) for a, b in zip(*(each.losses for each in trainings), strict=True))
    print(f"{'; '.join(map(str, trainings))}; the losses differ by at most {apart:.1e}")
    if options.out is not None:
        title = f"A small GPT, documents packed into rows of {options.length} bytes"
        curves = [Curve(str(each), each.losses) for each in trainings]
        save(lambda: line_chart(title, "step", "loss", curves), options.out)


if __name__ == "__main__":
    main()
