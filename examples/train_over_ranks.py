"""The GPT of train_gpt.py, trained with every row of a batch cut over the processes of a group.

    torchrun --nproc-per-node 2 examples/train_over_ranks.py --steps 20

The model is the same: inside of `context_parallel`, its attention computes over all processes. Each
has a part of every row, and receives the keys that its queries read. Gradients of weights are added
up over processes. For comparison, every process also trains a copy of the model on whole rows.

The gradient of a weight is a sum over all tokens. If each process adds up its own, the total agrees
with that of one process up to rounding. With `--same-bits`, process 0 computes the gradients of
weights from the tokens of all, in the order of one process, so that every loss has the same bits.
"""

from __future__ import annotations

import argparse
import copy
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import train_gpt
from torch import Tensor, nn
from train_gpt import GPT, Batch, by_quire, own_piece, packed, standard_library

from quire.distributed import ContextPlan, context_parallel, plan
from quire.mods import Mask


class OfAllTokens(torch.autograd.Function):
    """A layer that computes each token alone. Its weights get their gradients from all tokens."""

    @staticmethod
    def forward(ctx: Any, divided: ContextPlan, layer: nn.Module, x: Tensor, *_: Tensor) -> Tensor:
        ctx.divided, ctx.layer = divided, layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        divided, weights, (x,) = ctx.divided, [*ctx.layer.parameters()], ctx.saved_tensors
        x, grad = (divided.gather(each, dim=1) for each in (x, grad))
        inputs = [x.requires_grad_()] if x.is_floating_point() else []
        with torch.enable_grad():
            found = [*torch.autograd.grad(ctx.layer(x), [*inputs, *weights], grad)]
        by_x = divided.shard(found.pop(0), dim=1)[0] if inputs else None
        if divided.rank:  # gradients are added up over processes
            found = [torch.zeros_like(each) for each in found]
        return None, None, by_x, *found


class PerToken(nn.Module):
    """A layer that computes each token alone, in one process or as `OfAllTokens`."""

    divided: ContextVar[ContextPlan | None] = ContextVar("divided", default=None)

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        divided = self.divided.get()
        if divided is None:
            return self.layer(x)
        return OfAllTokens.apply(divided, self.layer, x, *self.layer.parameters())


def by_tokens(model: GPT) -> GPT:
    """Return the model with `PerToken` around all of its layers but attention."""
    for part, names in [(model, ("embed", "last", "predict"))] + [
        (block, ("before", "project", "merge", "between", "think")) for block in model.blocks
    ]:
        for name in names:
            setattr(part, name, PerToken(getattr(part, name)))
    return model


def mean_loss(logits: Tensor, targets: Tensor, divided: ContextPlan | None = None) -> Tensor:
    """Return the loss over all tokens, from those of this process."""
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    if divided is None:
        return each.mean()
    every = divided.gather(each.view_as(targets), dim=1).flatten()
    part = each.sum() / len(every)
    return part + (every.mean() - part).detach()  # the loss of all, the gradient of a part


def loss_together(
    model: GPT, batch: Batch, group: dist.ProcessGroup | None = None, *, same_bits: bool = False
) -> Tensor:
    """Return the loss. Its gradients are this process's part of those of one process."""
    count, length = batch.tokens.shape
    mask = Mask(own_piece, document=batch.document)
    divided = plan(mask, length=length, mesh=group, batch=count, same_bits=same_bits)
    tokens, targets = divided.shard(batch.tokens, batch.targets, dim=1)
    token = PerToken.divided.set(divided if same_bits else None)
    try:
        with context_parallel(divided):
            loss = mean_loss(model(tokens, batch.document), targets, divided)
        loss.backward()
    finally:
        PerToken.divided.reset(token)
    return loss.detach()


def train(
    steps: int, length: int, group: dist.ProcessGroup | None = None, *, same_bits: bool = False
) -> tuple[list[float], list[float]]:
    """Train two copies of one model; return the losses of that over ranks and of that alone."""
    torch.manual_seed(0)
    batches = packed(standard_library(), length, torch.Generator().manual_seed(0))
    over_ranks = by_tokens(GPT(by_quire))
    models = over_ranks, copy.deepcopy(over_ranks)
    optimizers = [torch.optim.AdamW(x.parameters(), lr=train_gpt.LEARNING_RATE) for x in models]
    losses: tuple[list[float], list[float]] = ([], [])
    for _ in range(steps):
        batch = next(batches)
        losses[0].append(loss_together(over_ranks, batch, group, same_bits=same_bits).item())
        for weight in over_ranks.parameters():
            dist.all_reduce(weight.grad, group=group)
        alone = mean_loss(models[1](batch.tokens, batch.document), batch.targets)
        alone.backward()
        losses[1].append(alone.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def main() -> None:
    """Train, and print both losses on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--same-bits", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    together, alone = train(options.steps, options.length, same_bits=options.same_bits)
    if dist.get_rank() == 0:
        for step, losses in enumerate(zip(together, alone, strict=True)):
            print(
                "step {:3}   {} ranks {:.9f}   alone {:.9f}".format(
                    step, dist.get_world_size(), *losses
                )
            )
        apart = max(abs(x - y) for x, y in zip(together, alone, strict=True))
        print(f"losses are at most {apart:.1e} apart")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
