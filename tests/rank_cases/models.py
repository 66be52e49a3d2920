"""Models, and other code that knows nothing of ranks."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.utils.checkpoint import checkpoint

import quire
from quire import Dense
from quire.block_mask import NOOP_BLOCK_SIZE
from quire.distributed import context_parallel, plan
from quire.errors import ArgumentError, OptionError
from quire.mods import causal, document, sliding_window
from rank_cases.examples import MASKS, Example, by_batch


def models(group: Any) -> None:
    """A model of transformers has the logits and the loss of one process."""
    import transformers as hf
    from tiny_models import DECODERS

    from quire.integrations.transformers import enable

    torch.manual_seed(0)
    model = enable(hf.AutoModelForCausalLM.from_config(DECODERS["llama"]))
    tokens, targets = torch.randint(1, 61, (2, 2, 100))
    everything = torch.ones_like(tokens)

    def logits_of(mask: Any, mesh: Any = None, num_ranks: int | None = None) -> tuple[Any, Tensor]:
        divided = plan(mask, length=100, mesh=mesh, num_ranks=num_ranks)
        mine, real = divided.shard(tokens, everything, dim=1)  # so that positions have no meaning
        places = divided.positions.expand(2, -1)
        with context_parallel(divided, instead_of=causal):
            found = model(mine, position_ids=places, attention_mask=real, use_cache=False)
        return divided, found.logits

    divided, logits = logits_of(causal, group)
    assert torch.equal(divided.gather(logits, dim=1), model(tokens, use_cache=False).logits)
    mask = causal & document(lengths=[30, 50, 20])
    divided, logits = logits_of(mask, group)
    (labels,) = divided.shard(targets, dim=1)
    entropy = torch.nn.functional.cross_entropy
    loss = entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / targets.numel()
    loss.backward()
    grads = [x.grad for x in model.parameters()]
    for grad in grads:
        dist.all_reduce(grad, group=group)
    model.zero_grad()
    _, whole = logits_of(mask, num_ranks=1)
    assert torch.equal(divided.gather(logits, dim=1), whole)
    entropy(whole.flatten(0, 1), targets.flatten()).backward()
    for grad, parameter in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-4, atol=1e-5)


def in_a_context(group: object) -> None:
    """Code that knows nothing of ranks: quire.attention, flex_attention, and a backward pass."""
    example = Example("causal documents", length=333)
    whole, mask = example.tensors(), MASKS[example.mask]
    blocks = quire.create_block_mask(mask, None, None, 333, 333, "cpu")
    divided = example.plan(group)
    out = example.alone(*whole)
    q, k, v = (x.requires_grad_() for x in divided.shard(*whole, dim=2))
    (wanted,) = divided.shard(out, dim=2)
    with context_parallel(divided, instead_of=causal):
        found = [
            quire.attention(q, Dense(k, v)),
            quire.attention(q, Dense(k, v), mask=mask),
            quire.attention(q, Dense(k, v), mask=causal),
            quire.flex_attention(q, k, v, block_mask=blocks, enable_gqa=True),
            checkpoint(
                lambda *x: quire.attention(x[0], Dense(*x[1:])), q, k, v, use_reentrant=False
            ),
        ]
        again = torch.autograd.grad(found[-1].sum(), k)[0]  # computes the forward pass again
        with pytest.raises(ArgumentError, match=r"is 'sliding_window_7'. Make the plan with it"):
            quire.attention(q, Dense(k, v), mask=sliding_window(7))
        with pytest.raises(OptionError, match="prob_mod must be None inside of context_parallel"):
            quire.attention(q, Dense(k, v), prob_mod=lambda prob, b, h, q_idx, kv_idx: prob * 2)
    assert all(torch.equal(x, wanted) for x in found)
    grads = [again, *(torch.autograd.grad(x.sum(), k)[0] for x in found[:-1])]
    assert all(torch.equal(x, grads[0]) for x in grads)
    assert quire.attention(q, Dense(k, v)).shape == q.shape  # outside it is one process again


def lists_of_blocks(group: object) -> None:
    """A BlockMask stands for its mask_mod only if its lists say the same."""
    divided = plan(causal, length=64, mesh=group)  # type: ignore[arg-type]
    q, k, v = divided.shard(*Example(length=64, heads=(2, 2)).tensors(), dim=2)
    sizes = {"BLOCK_SIZE": 16, "device": "cpu"}
    made = quire.create_block_mask(causal, None, None, 64, 64, **sizes)  # type: ignore[arg-type]
    longer = quire.create_block_mask(causal, None, None, 90, 90, **sizes)  # type: ignore[arg-type]
    by_pytorch = torch_flex.create_block_mask(causal, 2, 2, 64, 64, **sizes)  # type: ignore[arg-type]
    same = [made, longer, longer._adjust(64, 64), longer.resize(50, 50), ~~made, by_pytorch]
    one, first = torch.ones(1, 1, 1).int(), torch.zeros(1, 1, 1, 1).int()
    endless = {"BLOCK_SIZE": NOOP_BLOCK_SIZE, "mask_mod": causal, "seq_lengths": (1, 1)}
    same.append(quire.BlockMask.from_kv_blocks(one, first, **endless))  # type: ignore[arg-type]
    every = quire.BlockMask.from_kv_blocks(0 * one, first, one, first, **endless)  # type: ignore[arg-type]
    diagonal = torch.ones(1, 1, 4).int(), torch.arange(4).int().view(1, 1, 4, 1)
    own = {"BLOCK_SIZE": 16, "mask_mod": causal, "seq_lengths": (64, 64)}
    some = quire.BlockMask.from_kv_blocks(*diagonal, **own)  # type: ignore[arg-type]
    none = torch.zeros(1, 1, 4).int()
    full = quire.BlockMask.from_kv_blocks(none, diagonal[1], *diagonal, **own)  # type: ignore[arg-type]
    of_one = quire.create_block_mask(by_batch, None, None, 512, 512, **sizes)  # type: ignore[arg-type]
    with context_parallel(divided):
        out = quire.flex_attention(q, k, v)
        for mask in same:
            assert torch.equal(quire.flex_attention(q, k, v, block_mask=mask), out)
        for mask in (some, full, every):
            with pytest.raises(ArgumentError, match=r"but is .blocks of causal.\. Make the plan"):
                quire.flex_attention(q, k, v, block_mask=mask)
    for mask, wanted in ((causal, some), (some, full), (by_batch, of_one)):
        refused = pytest.raises(ArgumentError, match="must be None or the mask of the plan")
        bidirectional = plan(None, length=64, mesh=group)  # type: ignore[arg-type]
        with context_parallel(bidirectional, instead_of=wanted), refused:
            quire.attention(q, Dense(k, v), mask=mask)
    for mask in (some, full):
        with context_parallel(divided, instead_of=mask):
            assert torch.equal(quire.flex_attention(q, k, v, block_mask=mask), out)


def training(group: object, same_bits: bool) -> tuple[list[float], list[float]]:
    """Train the GPT of the examples, and return its losses over ranks and alone."""
    folder = str(Path(__file__).parents[2] / "examples")
    sys.path.insert(0, folder)
    try:
        example, gpt = (importlib.import_module(x) for x in ("train_over_ranks", "train_gpt"))
        for name, value in {"WIDTH": 32, "LAYERS": 2, "BATCH": 2, "REACH": 20}.items():
            setattr(gpt, name, value)
        losses: tuple[list[float], list[float]] = example.train(3, 1600, group, same_bits=same_bits)
        return losses
    finally:
        sys.path.remove(folder)
