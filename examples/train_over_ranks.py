"""The GPT of train_gpt.py, trained with every row of a batch cut over the processes of a group.

    torchrun --nproc-per-node 2 examples/train_over_ranks.py --steps 20

The model is the same: inside of `context_parallel`, its attention computes over all processes. Each
has a part of every row, and receives the keys that its queries read. Gradients of weights are added
up over processes. For comparison, every process also trains a copy of the model on whole rows.
"""

from __future__ import annotations

import argparse
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
import train_gpt
from torch import Tensor
from train_gpt import GPT, Batch, by_quire, packed, standard_library

from quire.distributed import context_parallel, plan
from quire.mods import Mask


def own_piece(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, document: Tensor) -> Tensor:
    """Return whether a key is in the piece of a query, and not after it."""
    return (kv_idx <= q_idx) & (document[b, q_idx] == document[b, kv_idx])


def loss_alone(model: GPT, batch: Batch) -> Tensor:
    """Return the loss of a batch in one process."""
    logits = model(batch.tokens, batch.document)
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())


def loss_together(model: GPT, batch: Batch, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return this process's part of the loss. Its gradients are added to those of all others."""
    count, length = batch.tokens.shape
    mask = Mask(own_piece, document=batch.document)
    divided = plan(mask, length=length, mesh=group, batch=count)
    tokens, targets = divided.shard(batch.tokens, batch.targets, dim=1)
    with context_parallel(divided):
        logits = model(tokens, batch.document)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss / batch.targets.numel()


def added(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum over all processes."""
    dist.all_reduce(tensor, group=group)
    return tensor


def train(
    steps: int, length: int, group: dist.ProcessGroup | None = None
) -> tuple[list[float], list[float]]:
    """Train two copies of one model; return the losses of that over ranks and of that alone."""
    torch.manual_seed(0)
    batches = packed(standard_library(), length, torch.Generator().manual_seed(0))
    over_ranks = GPT(by_quire)
    models = over_ranks, copy.deepcopy(over_ranks)
    optimizers = [torch.optim.AdamW(x.parameters(), lr=train_gpt.LEARNING_RATE) for x in models]
    losses: tuple[list[float], list[float]] = ([], [])
    for _ in range(steps):
        batch = next(batches)
        together, alone = loss_together(models[0], batch, group), loss_alone(models[1], batch)
        together.backward()
        alone.backward()
        for weight in over_ranks.parameters():
            added(weight.grad, group)
        losses[0].append(added(together.detach(), group).item())
        losses[1].append(alone.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def main() -> None:
    """Train, and print both losses on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=1024)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    together, alone = train(options.steps, options.length)
    if dist.get_rank() == 0:
        for step, losses in enumerate(zip(together, alone, strict=True)):
            print(
                "step {:3}   {} ranks {:.6f}   alone {:.6f}".format(
                    step, dist.get_world_size(), *losses
                )
            )
        apart = max(abs(x - y) for x, y in zip(together, alone, strict=True))
        print(f"losses are at most {apart:.1e} apart")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
