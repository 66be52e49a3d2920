"""Results and gradients over ranks have the bits of one process, or are as good."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from compare import assert_as_good_as
from torch import Tensor

import quire
from quire import AuxRequest, Dense, Ragged
from quire.distributed import attending, attention, context_parallel, passes, plan
from quire.mods import causal
from rank_cases.examples import DTYPES, EVERYTHING, MASKS, Example, assert_as_good_as_alone


def same_results(group: object, examples: list[Example]) -> None:
    """Output and all other results have the bits of one process, with and without autograd."""
    wrong = []  # raised at the end: all ranks take part in all calls
    for example in examples:
        whole, divided = example.tensors(), example.plan(group)
        out, aux = example.alone(*whole, return_aux=EVERYTHING)
        shards = divided.shard(*whole, dim=2)
        wanted = divided.shard(out, *aux[:4], dim=2)
        for learns in (False, True):
            own = [x.detach().requires_grad_(learns) for x in shards]
            found, more = example.together(divided, *own, return_aux=EVERYTHING)
            for name, x, y in zip(("out", *aux._fields), (found, *more[:4]), wanted, strict=False):
                if x.dtype != y.dtype or not torch.equal(x, y):
                    wrong.append(f"{example}, {divided}, {name}, learns {learns}")
        if not torch.equal(divided.gather(found, dim=2), out):
            wrong.append(f"{example}, {divided}, gathered")
    assert not wrong, "\n".join(wrong)


def gradients(group: object, examples: list[Example]) -> None:
    """Gradients have the bits of one process, or those of keys are as good."""
    wrong = []  # raised at the end: all ranks take part in all calls
    for example in examples:
        whole, divided = example.tensors(), example.plan(group)
        above = example.alone(*whole).cos()
        alone = [x.clone().requires_grad_() for x in whole]
        example.alone(*alone).backward(above)
        own = [x.clone().requires_grad_() for x in divided.shard(*whole, dim=2)]
        example.together(divided, *own).backward(divided.shard(above, dim=2)[0])
        found = [divided.gather(x.grad, dim=2) for x in own if x.grad is not None]
        if divided.same_bits:
            equal = [torch.equal(x, y.grad) for x, y in zip(found, alone, strict=True)]
            wrong += [] if all(equal) else [f"{example}, {divided}, {equal}"]
            continue
        exact = [x.to(torch.float64, copy=True).requires_grad_() for x in whole]
        example.alone(*exact).backward(above.double())
        assert torch.equal(found[0], alone[0].grad), f"{example}, {divided}"
        for x, peer, truth in zip(found[1:], alone[1:], exact[1:], strict=True):
            assert peer.grad is not None and truth.grad is not None
            assert_as_good_as(x, peer.grad, truth.grad, f"{example}", size=8.0)
    assert not wrong, "\n".join(wrong)


def gradients_head_by_head(group: object, examples: list[Example]) -> None:
    """Sums of slices of one head at a time, as for long sequences."""
    largest, passes.LARGEST_SUMS = passes.LARGEST_SUMS, 1
    try:
        gradients(group, examples)
    finally:
        passes.LARGEST_SUMS = largest


def captured_gradients(
    group: dist.ProcessGroup,
    same_bits: bool,
    dtype: str,
    mask: str = "causal documents",
    dropout_p: float = 0.0,
) -> None:
    """The parts of all ranks add up to the gradient of one process, also of a sink."""
    example = Example(mask, length=1100, dtype=dtype, same_bits=same_bits)
    whole, divided = example.tensors(), example.plan(group)
    above = whole[0].cos()

    def learned(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Callable[..., Any]]:
        bias = torch.linspace(-1, 1, 64, dtype=dtype).requires_grad_()
        rows = torch.linspace(-1, 1, 2 * 1100, dtype=dtype).view(2, 1100).requires_grad_()
        sink = torch.linspace(-1, 1, 4, dtype=dtype).requires_grad_()

        def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return score + bias[(q - kv) % 64] + rows[b, q] * 0.1

        return bias, rows, sink, mod

    found = []
    for each in (DTYPES[dtype], torch.float64):
        *tensors, mod = learned(each)
        q, k, v = (x.to(each) for x in whole)
        options = {"score_mod": mod, "sink": tensors[-1], "dropout_p": dropout_p}
        torch.manual_seed(1)
        out = quire.attention(q, Dense(k, v), mask=divided.mask, **options)
        out.backward(above.to(each))
        found.append([x.grad for x in tensors])
    *tensors, mod = learned(DTYPES[dtype])
    q, k, v = divided.shard(*whole, dim=2)
    options = {"score_mod": mod, "sink": tensors[-1], "dropout_p": dropout_p}
    torch.manual_seed(1)
    out = attention(q, Dense(k, v), plan=divided, **options)
    out.backward(divided.shard(above, dim=2)[0])
    for mine, peer, truth in zip([x.grad for x in tensors], *found, strict=True):
        assert mine is not None and peer is not None and truth is not None
        dist.all_reduce(mine, group=group)
        if same_bits:
            assert torch.equal(mine, peer)
        else:
            assert_as_good_as(mine, peer, truth, size=30.0)


WEIGHTS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "sums": {"weight": quire.weights.sigmoid(-3.0), "normalise": False},
    "shares": {"weight": quire.weights.softplus},
    "softmax_one": {"weight": quire.weights.softmax_one},
}


def gradients_through_lse(group: object, same_bits: bool) -> None:
    """Gradients of the output and lse by the method `pages`, with a softmax and other weights."""
    example = Example("causal documents", 1100, same_bits=same_bits, method="pages", batch=1)
    whole, divided = example.tensors(), example.plan(group)
    above, above_lse = whole[0].cos(), whole[0].sin().sum(-1)

    def learned(tensors: tuple[Tensor, ...], *above: Tensor, **options: Any) -> list[Tensor]:
        """Return output, lse and gradients."""
        q, k, v = (x.clone().requires_grad_() for x in tensors)
        options |= {"mask": MASKS[example.mask], "return_aux": AuxRequest(lse=True)}
        out, aux = quire.attention(q, Dense(k, v), **options)
        finite = torch.where(aux.lse.isfinite(), above[1], 0)
        torch.autograd.backward((out, aux.lse), (above[0], finite))
        return [out.detach(), aux.lse.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]

    for options in WEIGHTS.values():
        every = (above, above_lse)
        peers = learned(whole, *every, **options)
        exact = learned(tuple(x.double() for x in whole), *(x.double() for x in every), **options)
        with context_parallel(divided):
            found = learned(divided.shard(*whole, dim=2), *divided.shard(*every, dim=2), **options)
        for n, (mine, peer, truth) in enumerate(zip(found, peers, exact, strict=True)):
            together = divided.gather(mine, dim=2)
            if same_bits or n < 3:
                assert torch.equal(together, peer), f"{options}, {n}"
            else:
                assert_as_good_as(together, peer, truth, f"{options}, {n}", size=8.0)


def second_derivative(group: object) -> None:
    """Sending and returning are each other's derivative, any number of times."""
    example = Example("window", length=150, heads=(2, 2), batch=1)
    whole = [x.double() for x in example.tensors()]
    divided = example.plan(group)

    def penalty(q: Tensor, k: Tensor, v: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        out = attend(q, k, v)
        (slope,) = torch.autograd.grad(out.square().sum(), k, create_graph=True)
        (found,) = torch.autograd.grad(slope.square().sum(), v)
        return found

    alone = penalty(*(x.clone().requires_grad_() for x in whole), example.alone)
    own = (x.clone().requires_grad_() for x in divided.shard(*whole, dim=2))
    found = penalty(*own, lambda *x: example.together(divided, *x))
    torch.testing.assert_close(found, divided.shard(alone, dim=2)[0])


def unsent_is_unread(group: object, example: Example) -> None:
    """NaN in every block that a rank does not receive does not reach it, in both directions."""
    whole, divided = example.tensors(), example.plan(group)
    query, *keys = (x.clone() for x in whole)
    out = example.alone(query.requires_grad_(), *keys)
    above = out.detach().cos()
    (grad,) = torch.autograd.grad(out, query, above)
    for reader in range(divided.num_ranks):
        seen = torch.from_numpy(divided.division.needs[reader].any(0))
        hidden = ~seen.repeat_interleave(divided.block)[: example.length]
        q, k, v = (x.clone() for x in whole)
        k[:, :, hidden], v[:, :, hidden] = float("nan"), float("nan")
        for learns in (False, True):
            own = [x.requires_grad_(learns) for x in divided.shard(q, k, v, dim=2)]
            found = example.together(divided, *own)
            if divided.rank == reader:
                assert torch.equal(found, divided.shard(out, dim=2)[0])
        found.backward(*divided.shard(above, dim=2))
        if divided.rank == reader:
            assert torch.equal(own[0].grad, *divided.shard(grad, dim=2))


def in_blocks(group: object, examples: list[Example]) -> None:
    """The way of other devices, on the CPU: dense blocks, and autograd records what is sent."""
    real = attending.computes_in_blocks
    attending.computes_in_blocks = lambda request: True
    try:
        for example in examples:
            assert_as_good_as_alone(group, example, backend="eager")
        divided = plan(causal, lengths=[300, 20, 500], mesh=group)  # type: ignore[arg-type]
        torch.manual_seed(0)  # ranks have drawn different numbers before
        x = torch.randn(820, 2, 16)
        (mine,) = divided.shard(x, dim=0)
        out = attention(mine, Ragged(mine, mine, divided.offsets), plan=divided, backend="eager")
        alone = quire.attention(x, Ragged(x, x, [0, 300, 320, 820]), mask=causal, q_start=0)
        torch.testing.assert_close(divided.gather(out, dim=0), alone)
    finally:
        attending.computes_in_blocks = real


def with_kernels_of_pytorch(group: object) -> None:
    """PyTorch's flex_attention computes the blocks of a rank."""
    whole = Example(length=300).tensors()
    divided = plan(causal, length=300, mesh=group)  # type: ignore[arg-type]
    q, k, v = divided.shard(*whole, dim=2)
    out = attention(q, Dense(k, v), plan=divided, backend="inductor")
    alone = quire.attention(whole[0], Dense(*whole[1:]), mask=causal)
    torch.testing.assert_close(divided.gather(out, dim=2), alone)
