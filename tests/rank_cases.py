"""What each rank of a group does in tests of `quire.distributed`. Every function runs on all ranks.

All ranks make the same whole tensors, compute the whole in one process, and compare their part.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import assert_as_good_as
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.utils.checkpoint import checkpoint

import quire
from quire import AuxRequest, Dense, Paged, Ragged
from quire.block_mask import NOOP_BLOCK_SIZE
from quire.distributed import (
    ContextPlan,
    attend_over_ranks,
    attending,
    attention,
    context_parallel,
    exchange,
    local,
    merge_over_ranks,
    passes,
    plan,
)
from quire.distributed import group as group_module
from quire.distributed.group import RankGroup
from quire.errors import ArgumentError, DistributedError, OptionError, ShapeError
from quire.kv import PagedKVCache
from quire.mods import causal, document, sliding_window
from quire.plans import CallPlan
from quire.runtime.backward import Pass

DTYPES = {x: getattr(torch, x) for x in ("float32", "bfloat16", "float16", "float64")}


def allowed_blocks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Blocks of 24 tokens, chosen at random."""
    return RANDOM[q_idx // 24, kv_idx // 24]


def by_batch(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 40 + 100 * b)


def by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx).abs() < 16 + 64 * h


def never(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx < 0


def untraceable(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.special.bessel_j0(q_idx.float()) > torch.special.bessel_j0(kv_idx.float())


RANDOM = torch.rand(100, 100, generator=torch.Generator().manual_seed(3)) < 0.15
TEXTS = document(lengths=[300, 20, 500, 180, 400, 7000])
MASKS: dict[str, Callable[..., Any]] = {
    "causal": causal,
    "window": sliding_window(100),
    "causal documents": causal & TEXTS,
    "documents": TEXTS,
    "random": allowed_blocks,
    "by batch": by_batch,
    "by head": by_head,
    "never": never,
}
SLOPES = torch.tensor([0.01, 0.02, 0.04, 0.08])
TABLE = torch.randn(2, 32, generator=torch.Generator().manual_seed(4))


def slopes(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - SLOPES[h] * (q_idx - kv_idx)


def table(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + TABLE[b, kv_idx % 32]


SCORES = {"": None, "slopes": slopes, "table": table}


@dataclass(frozen=True)
class Example:
    """One call."""

    mask: str = "causal"
    length: int = 333
    layout: str = "auto"
    block_size: int | None = None
    dtype: str = "float32"
    heads: tuple[int, int] = (4, 2)
    width: tuple[int, int] = (16, 16)
    batch: int = 2
    score: str = ""
    sink: bool = False
    dropout_p: float = 0.0
    same_bits: bool | None = None
    method: str = "auto"

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the whole query, key and value."""
        (heads, key_heads), (width, value_width) = self.heads, self.width
        shapes = ((heads, width), (key_heads, width), (key_heads, value_width))
        dtype = DTYPES[self.dtype]
        torch.manual_seed(0)  # ranks have drawn different numbers before
        q, k, v = (torch.randn(self.batch, h, self.length, w).to(dtype) for h, w in shapes)
        return q, k, v

    def plan(self, group: object) -> ContextPlan:
        return plan(
            MASKS[self.mask],
            length=self.length,
            mesh=group,  # type: ignore[arg-type]
            layout=self.layout,
            block_size=self.block_size,
            batch=self.batch if self.mask == "by batch" else None,
            heads=self.heads[0] if self.mask == "by head" else None,
            same_bits=self.same_bits,
            method=self.method,  # type: ignore[arg-type]
        )

    @property
    def options(self) -> dict[str, Any]:
        sink = torch.linspace(-1, 1, self.heads[0]) if self.sink else None
        return {"score_mod": SCORES[self.score], "sink": sink, "dropout_p": self.dropout_p}

    def alone(self, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
        """Return what one process computes."""
        torch.manual_seed(1)
        return quire.attention(q, Dense(k, v), mask=MASKS[self.mask], **self.options, **more)

    def together(self, divided: ContextPlan, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
        """Return what this rank computes of its shards."""
        torch.manual_seed(1 + divided.rank)  # the seed of rank 0 counts
        return attention(q, Dense(k, v), plan=divided, **self.options, **more)


SOON = timedelta(seconds=3)
EVERYTHING = AuxRequest(lse=True, max_scores=True, argmax=True, entropy=True)


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


def in_a_ring(group: object, examples: list[Example]) -> None:
    """Results and gradients of the method `ring` are as good as those of one process."""
    wanted = AuxRequest(lse=True, max_scores=True)
    for example in examples:
        whole, divided = example.tensors(), example.plan(group)
        above = example.alone(*whole).cos()
        found: list[list[Tensor]] = []
        for dtype in (None, torch.float64):
            tensors = [x.to(dtype or x.dtype, copy=True).requires_grad_() for x in whole]
            out, aux = example.alone(*tensors, return_aux=wanted)
            out.backward(above.to(out.dtype))
            grads = [x.grad for x in tensors if x.grad is not None]
            found.append([out.detach(), aux.lse.detach(), *grads])
        own = [x.clone().requires_grad_() for x in divided.shard(*whole, dim=2)]
        out, aux = example.together(divided, *own, return_aux=wanted)
        out.backward(divided.shard(above, dim=2)[0])
        mine = [out, aux.lse, *(x.grad for x in own)]
        for x, peer, truth in zip(mine, *found, strict=True):
            assert_as_good_as(divided.gather(x, dim=2), peer, truth, f"{example}", size=8.0)
        assert aux.max_scores is not None and not aux.max_scores.requires_grad


def keys_of_two_others(group: object) -> int:
    """Return in how many places of memory keys arrive that go round."""
    example = Example(length=400, method="ring", layout="contiguous", width=(24, 16))
    divided, places, real = example.plan(group), set(), RankGroup.pass_on

    def pass_on(self: RankGroup, *keys: tuple[Tensor, ...]) -> Any:
        places.add(keys[1][0].data_ptr())
        return real(self, *keys)

    RankGroup.pass_on = pass_on  # type: ignore[method-assign, assignment]
    try:
        example.together(divided, *divided.shard(*example.tensors(), dim=2))
    finally:
        RankGroup.pass_on = real  # type: ignore[method-assign]
    return len(places)


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


def while_keys_arrive(group: object, examples: list[Example]) -> int:
    """Queries that read own keys are computed first; return how often that was before a wait."""
    worth, local.WORTH_A_CALL = local.WORTH_A_CALL, 0
    waited, early = exchange.Sending.wait, []
    compute = local._in_pages
    done: set[int] = set()

    def wait(self: exchange.Sending) -> tuple[Tensor, ...]:
        done.add(id(self.pages[0]))
        return waited(self)

    def in_pages(*args: Any, **named: Any) -> Any:
        early.append(id(args[3][0]) not in done)
        return compute(*args, **named)

    exchange.Sending.wait, local._in_pages = wait, in_pages  # type: ignore[method-assign]
    try:
        same_results(group, examples)
        gradients(group, examples)
    finally:
        exchange.Sending.wait, local._in_pages = waited, compute  # type: ignore[method-assign]
        local.WORTH_A_CALL = worth
    return sum(early)


def memory(group: Any, learns: bool) -> tuple[float, float]:
    """Return the most bytes that a call takes, and those of what the plan gives to this rank."""
    heads, width, length = 2, 64, 2**16
    divided = plan(sliding_window(256), length=length, mesh=group)
    tokens, received = len(divided.positions), int(divided.received[divided.rank])
    shape = (1, heads, tokens, width)
    q, k, v, above = (torch.randn(shape).requires_grad_(learns) for _ in range(4))
    for _ in range(2):  # the first one compiles
        most = peak_bytes()
        out = attention(q, Dense(k, v), plan=divided)
        if learns:
            torch.autograd.grad(out, (q, k, v), above.detach())
        del out
        taken = most()
    row = heads * width * 4
    return taken, row * (2 * tokens + 2 * (tokens + received))  # queries, results, keys, values


def peak_bytes() -> Callable[[], float]:
    """Begin to watch the memory of this process, and return what tells the most above now."""

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(x.split()[1]) for x in lines if x.startswith(name)) * 1024

    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    return lambda: status("VmHWM") - before


def bytes_on_the_wire(group: object, example: Example) -> tuple[int, int]:
    """Return the bytes that this rank receives from others, and those that the plan counts."""
    whole, divided = example.tensors(), example.plan(group)
    counted, real = [], dist.all_to_all_single

    def counting(out: Tensor, given: Tensor, **options: Any) -> Any:
        sizes = options["output_split_sizes"]
        assert sizes[divided.rank] == 0 and len(out) == sum(sizes)
        counted.append(out.nbytes)
        return real(out, given, **options)

    group_module.dist.all_to_all_single = counting
    try:
        example.together(divided, *divided.shard(*whole, dim=2))
    finally:
        group_module.dist.all_to_all_single = real
    per_key = example.heads[1] * sum(example.width) * DTYPES[example.dtype].itemsize
    return sum(counted), int(divided.received[divided.rank]) * per_key * example.batch


def gradients_on_the_wire(group: object, example: Example) -> tuple[int, int]:
    """Return the gradients of keys that this rank receives, and those that the plan counts."""
    divided = example.plan(group)
    q, k, v = (x.requires_grad_() for x in divided.shard(*example.tensors(), dim=2))
    out = example.together(divided, q, k, v)
    counted, real = [], dist.all_to_all_single

    def counting(into: Tensor, given: Tensor, **options: Any) -> Any:
        counted.append(into.nbytes)
        return real(into, given, **options)

    group_module.dist.all_to_all_single = counting
    try:
        out.sum().backward()
    finally:
        group_module.dist.all_to_all_single = real
    per_key = example.heads[1] * sum(example.width) * 4  # sums are float32
    return sum(counted), int(divided.returned[divided.rank]) * per_key * example.batch


def disagree(group: object, what: str) -> None:
    """Rank 1 does something else than the others."""
    odd = dist.get_rank(group) == 1  # type: ignore[arg-type]
    example = Example("causal documents", length=300, score="slopes")
    if odd and what == "length":
        example = replace(example, length=320)
    elif odd and what == "mask":
        example = replace(example, mask="documents")
    elif odd and what == "score_mod":
        example = replace(example, score="")
    elif odd and what == "dtype":
        example = replace(example, dtype="bfloat16")
    elif odd and what == "sink":
        example = replace(example, sink=True)
    q, k, v = example.plan(group).shard(*example.tensors(), dim=2)
    if odd and what == "bad input":
        k = k[:, :, 1:]
    more = {"return_aux": AuxRequest(lse=True), "backend": "eager"}
    if odd and what == "what learns":
        q.requires_grad_()
    example.together(
        example.plan(group), q, k, v, **{what: more[what]} if odd and what in more else {}
    )


def asks_for_too_much(group: object, what: str) -> None:
    """Rank 1 gives arguments that are refused before anything else is looked at."""
    odd = dist.get_rank(group) == 1  # type: ignore[arg-type]
    divided = plan(causal, length=300, mesh=group, timeout=SOON)  # type: ignore[arg-type]
    q, k, v = divided.shard(*Example(length=300).tensors(), dim=2)
    weights = AuxRequest(weights=[0])
    if what in ("mask", "q_start"):
        more: Any = {"mask": {"mask": sliding_window(9)}, "q_start": {"q_start": 5}}
        with context_parallel(divided):
            quire.attention(q, Dense(k, v), **more[what] if odd else {})
    elif what == "weights":
        attention(q, Dense(k, v), plan=divided, return_aux=weights if odd else AuxRequest())
    else:
        attention(q, Dense(k, v), plan=divided, **{"score": None} if odd else {})  # type: ignore[call-overload]


def fails(group: object, method: str, which: str) -> None:
    """Rank 1 has an error in the middle of a forward or a backward pass."""
    odd = dist.get_rank(group) == 1  # type: ignore[arg-type]
    example = Example(length=1100, heads=(6, 3), same_bits=False, method=method)
    divided = replace(example.plan(group), group=RankGroup.of(group, SOON))  # type: ignore[arg-type]
    own = [x.requires_grad_() for x in divided.shard(*example.tensors(), dim=2)]
    real = getattr(CallPlan, which)

    def broken(*args: Any, **named: Any) -> Any:
        raise ValueError("this is broken")

    if odd:
        setattr(CallPlan, which, broken)
    try:
        out = example.together(divided, *own)
        out.sum().backward()
    finally:
        setattr(CallPlan, which, real)


def fails_in_slices(group: object, rounds: int) -> None:
    """Rank 1 has an error while it computes slices, after it has sent the sums of some rounds."""
    odd = dist.get_rank(group) == 1  # type: ignore[arg-type]
    example = Example(length=1100, heads=(6, 3), same_bits=True, method="pages")
    divided = replace(example.plan(group), group=RankGroup.of(group, SOON))  # type: ignore[arg-type]
    own = [x.requires_grad_() for x in divided.shard(*example.tensors(), dim=2)]
    largest, real, done = passes.LARGEST_SUMS, Pass._launch, []

    def launch(*args: Any) -> None:
        if len(done) == rounds:
            raise ValueError("this is broken")
        done.append(real(*args))  # type: ignore[func-returns-value]

    passes.LARGEST_SUMS = 1  # one head at a time
    if odd:
        Pass._launch = launch  # type: ignore[method-assign]
    try:
        example.together(divided, *own).sum().backward()
    finally:
        passes.LARGEST_SUMS, Pass._launch = largest, real  # type: ignore[method-assign]


def patience(group: object, how: str, same_bits: bool) -> None:
    """Rank 1 never calls, is killed before it does, or between a forward and a backward pass."""
    odd = dist.get_rank(group) == 1  # type: ignore[arg-type]
    example = Example(length=1100, same_bits=same_bits)
    divided = plan(causal, length=1100, mesh=group, same_bits=same_bits, timeout=SOON)  # type: ignore[arg-type]
    own = [x.requires_grad_() for x in divided.shard(*example.tensors(), dim=2)]
    dist.barrier(group)  # type: ignore[arg-type]
    if odd and how == "never calls":
        time.sleep(6)
        return
    if odd and how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    out = example.together(divided, *own)
    dist.barrier(group)  # type: ignore[arg-type]
    if odd and how == "is killed later":
        os.kill(os.getpid(), signal.SIGKILL)
    if odd and how == "has no backward pass":
        time.sleep(6)
        return
    out.sum().backward()


def on_a_mesh(group: object) -> None:
    """A dimension of a mesh beside another one: each row of the mesh has its own sequence."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "cp"))
    q, k, v = (x * (1 + mesh["data"].get_local_rank()) for x in Example(length=300).tensors())
    divided = plan(causal, length=300, mesh=mesh["cp"])
    assert divided.num_ranks == 2 and divided.rank == mesh["cp"].get_local_rank()
    out = attention(*_as_call(divided.shard(q, k, v, dim=2)), plan=divided)
    assert torch.equal(divided.gather(out, dim=2), quire.attention(q, Dense(k, v), mask=causal))


def sharded_operands(group: object) -> None:
    """DTensors that are sharded along the sequence, beside data parallelism."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "cp"))
    whole = Example(length=256, heads=(4, 2)).tensors()
    divided = plan(causal, length=256, mesh=mesh["cp"], layout="contiguous")
    places = [Shard(0), Shard(2)]
    q, k, v = (distribute_tensor(x, mesh, places).requires_grad_() for x in whole)
    wanted = AuxRequest(lse=True)
    with context_parallel(divided):
        out, aux = quire.attention(q, Dense(k, v), score_mod=table, return_aux=wanted)
    alone = [x.clone().requires_grad_() for x in whole]
    result, more = quire.attention(
        alone[0], Dense(*alone[1:]), mask=causal, score_mod=table, q_start=0, return_aux=wanted
    )
    assert isinstance(out, DTensor) and out.placements == tuple(places)
    assert torch.equal(out.full_tensor(), result) and torch.equal(aux.lse.full_tensor(), more.lse)
    out.square().sum().backward()
    result.square().sum().backward()
    for x, y in zip((q, k, v), alone, strict=True):
        torch.testing.assert_close(x.grad.full_tensor(), y.grad)
    for odd, words in (
        (distribute_tensor(whole[1], mesh, [Replicate(), Shard(2)]), "as the query does"),
        (whole[1], "must be a DTensor"),
    ):
        with pytest.raises(ArgumentError, match=words):
            attention(q, Dense(odd, odd), plan=divided)
    with pytest.raises(OptionError, match=r"dropout_p must be 0 if .* sharded by batch entries"):
        attention(q, Dense(k, v), plan=divided, dropout_p=0.1)
    by_entry = plan(by_batch, length=256, mesh=mesh["cp"], layout="contiguous", batch=2)
    with pytest.raises(ArgumentError, match="mask of the plan must be the same for all batch"):
        attention(q, Dense(k, v), plan=by_entry)
    one_head = [x if n == 0 else x[:, :1] for n, x in enumerate(whole)]
    uneven = [distribute_tensor(x, mesh, [Shard(1), Shard(2)]) for x in one_head]
    with pytest.raises(ArgumentError, match="heads of key must be a multiple of the 2 ranks"):
        attention(uneven[0], Dense(*uneven[1:]), plan=divided)
    by_heads = [distribute_tensor(x, mesh, [Shard(1), Shard(2)]) for x in whole]
    with pytest.raises(ShapeError, match=r"sink must hold one number per query head, shape \[4\]"):
        attention(by_heads[0], Dense(*by_heads[1:]), plan=divided, sink=torch.zeros(3))
    with pytest.raises(OptionError, match="dropout_p must be 0 if operands are sharded by heads"):
        attention(by_heads[0], Dense(*by_heads[1:]), plan=divided, dropout_p=0.1)


def sharded_heads(group: object) -> None:
    """DTensors that are sharded by heads beside the sequence: mods count the heads of the whole."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("heads", "cp"))
    sink, options = torch.linspace(-1, 1, 4), {"layout": "contiguous", "same_bits": True}
    for name, heads in (("causal", None), ("by head", 4)):
        whole, mask = Example(length=1024, heads=(4, 2)).tensors(), MASKS[name]
        divided = plan(mask, length=1024, mesh=mesh["cp"], heads=heads, **options)  # type: ignore[arg-type]
        places = [Shard(1), Shard(2)]
        q, k, v = (distribute_tensor(x, mesh, places).requires_grad_() for x in whole)
        out = attention(q, Dense(k, v), plan=divided, score_mod=slopes, sink=sink)
        alone = [x.clone().requires_grad_() for x in whole]
        result = quire.attention(
            alone[0], Dense(*alone[1:]), mask=mask, score_mod=slopes, sink=sink
        )
        assert torch.equal(out.full_tensor(), result)
        out.square().sum().backward()
        result.square().sum().backward()
        for x, y in zip((q, k, v), alone, strict=True):
            assert torch.equal(x.grad.full_tensor(), y.grad)


SEQUENCES = ([300, 20, 0, 1500, 180], [1, 1, 1], [40] * 12, [2300], [0, 1100, 5, 700])


def of_sequence(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * (1 + 0.1 * b) - SLOPES[h] * (q_idx - kv_idx)


def by_sequence(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 40 + 100 * b)


def several_sequences(group: object, dtype: str) -> None:
    """Sequences in one tensor, over ranks: bits of one process; gradients of keys are as good."""
    masks = {"causal": causal, "window": MASKS["window"], "random": allowed_blocks}
    masks |= {"by sequence": by_sequence, "by head": by_head}
    wrong = []  # raised at the end: all ranks take part in all calls
    for number, (lengths, (name, mask)) in enumerate(product(SEQUENCES, masks.items())):
        options = {"score_mod": of_sequence, "dropout_p": 0.2 * (number % 3 == 0)}
        heads = 4 if name == "by head" else None
        divided = plan(mask, lengths=lengths, mesh=group, heads=heads)  # type: ignore[arg-type]
        offsets = [0, *accumulate(lengths)]
        torch.manual_seed(0)
        shapes = ((4, 24), (2, 24), (2, 8), (4, 8))
        q, k, v, above = (torch.randn(offsets[-1], *x).to(DTYPES[dtype]) for x in shapes)

        def alone(*tensors: Tensor) -> Any:
            torch.manual_seed(1)
            memory = Ragged(tensors[1], tensors[2], offsets)  # noqa: B023
            return quire.attention(
                tensors[0],
                memory,
                mask=mask,  # noqa: B023
                q_start=0,
                return_aux=EVERYTHING,
                **options,  # noqa: B023
            )

        whole = [x.clone().requires_grad_() for x in (q, k, v)]
        out, aux = alone(*whole)
        out.backward(above)
        for learns in (False, True):
            own = [x.requires_grad_(learns) for x in divided.shard(q, k, v, dim=0)]
            torch.manual_seed(1)
            memory = Ragged(own[1], own[2], divided.offsets)
            found, more = attention(own[0], memory, plan=divided, return_aux=EVERYTHING, **options)
            wanted = divided.shard(out, *aux[:4], dim=0)
            if not all(map(torch.equal, (found, *more[:4]), wanted)):
                wrong.append(f"{lengths}, {name}, {divided}, learns {learns}")
        found.backward(*divided.shard(above, dim=0))
        grads = [divided.gather(x.grad, dim=0) for x in own]
        if not torch.equal(grads[0], whole[0].grad):
            wrong.append(f"{lengths}, {name}, {divided}, gradient of the query")
        exact = [x.detach().double().requires_grad_() for x in whole]
        alone(*exact)[0].backward(above.double())
        for x, peer, truth in zip(grads[1:], whole[1:], exact[1:], strict=True):
            assert_as_good_as(x, peer.grad, truth.grad, f"{lengths}, {name}", size=8.0)
    assert not wrong, "\n".join(wrong)


def long_and_short_sequences(group: object) -> None:
    """If ranks could have heads of their own, a batch of sequences is still not one sequence."""
    lengths = [1750, 250]
    divided = plan(causal, lengths=lengths, mesh=group)  # type: ignore[arg-type]
    torch.manual_seed(0)  # ranks have drawn different numbers before
    q, k, v = torch.randn(3, sum(lengths), 4, 64)
    whole = quire.attention(q, Ragged(k, v, [0, *accumulate(lengths)]), mask=causal, q_start=0)
    rows, keys, values = divided.shard(q, k, v, dim=0)
    found = attention(rows, Ragged(keys, values, divided.offsets), plan=divided)
    assert torch.equal(found, *divided.shard(whole, dim=0))


def refused_sequences(group: object) -> None:
    """Offsets that are not the plan's, on one rank alone, raise on all ranks."""
    divided = plan(causal, lengths=[50, 70], mesh=group)  # type: ignore[arg-type]
    (x,) = divided.shard(torch.randn(120, 2, 8), dim=0)
    offsets = divided.offsets if divided.rank else [0, 0, len(x)]
    attention(x, Ragged(x, x, offsets), plan=divided)


def in_blocks(group: object, examples: list[Example]) -> None:
    """The way of other devices, on the CPU: dense blocks, and autograd records what is sent."""
    real = attending.computes_in_blocks
    attending.computes_in_blocks = lambda request: True
    try:
        for example in examples:
            whole, divided = example.tensors(), example.plan(group)
            above = example.alone(*whole).cos()
            found: list[list[Tensor]] = []
            for dtype in (None, torch.float64):
                tensors = [x.to(dtype or x.dtype, copy=True).requires_grad_() for x in whole]
                out = example.alone(*tensors)
                out.backward(above.to(out.dtype))
                found.append([out.detach(), *(x.grad for x in tensors if x.grad is not None)])
            own = [x.clone().requires_grad_() for x in divided.shard(*whole, dim=2)]
            out = example.together(divided, *own, backend="eager")
            out.backward(divided.shard(above, dim=2)[0])
            mine = [divided.gather(x, dim=2) for x in (out, *(x.grad for x in own))]
            for x, peer, truth in zip(mine, *found, strict=True):
                assert_as_good_as(x, peer, truth, f"{example}", size=8.0)
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


def with_fsdp(group: object) -> None:
    """FSDP2 over all ranks of a mesh, beside which the sequence is cut."""
    import transformers as hf
    from tiny_models import DECODERS
    from torch.distributed.fsdp import fully_shard

    from quire.integrations.transformers import enable

    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "cp"))
    torch.manual_seed(0)
    model = enable(hf.AutoModelForCausalLM.from_config(DECODERS["llama"]))
    tokens, targets = torch.randint(1, 61, (2, 2, 100))

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        each = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum"
        )
        return each / targets.numel()

    alone = loss_of(model(tokens, use_cache=False).logits, targets)
    alone.backward()
    wanted = [x.grad.clone() for x in model.parameters()]
    model.zero_grad()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["data", "cp"]._flatten("all"))
    fully_shard(model, mesh=mesh["data", "cp"]._flatten("all"))
    divided = plan(causal, length=100, mesh=mesh["cp"])
    own = slice(mesh["data"].get_local_rank(), mesh["data"].get_local_rank() + 1)
    mine, labels, real = divided.shard(
        tokens[own], targets[own], torch.ones_like(tokens[own]), dim=1
    )
    given = {"position_ids": divided.positions.expand(1, -1), "attention_mask": real}
    with context_parallel(divided):
        loss = loss_of(model(mine, **given, use_cache=False).logits, labels)
    (4 * loss).backward()  # FSDP takes the mean over ranks
    total = loss.detach()
    dist.all_reduce(total)
    torch.testing.assert_close(total, alone.detach())
    for parameter, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), grad, rtol=1e-4, atol=1e-5)


def _as_call(shards: tuple[Tensor, ...]) -> tuple[Tensor, Dense]:
    q, k, v = shards
    return q, Dense(k, v)


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


def decoding(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """A cache in pages of which each rank has a part: one merge per step."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 1, 32), *torch.randn(2, 2, 2, 150, 32)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    begin, end = (150 * n // size // 10 * 10 for n in (rank, rank + 1))
    pages = [x[:, :, begin:end].reshape(2, 2, -1, 10, 32).transpose(1, 2) for x in (key, value)]
    count = (end - begin) // 10
    table = torch.zeros(2, end // 10, dtype=torch.int32)
    table[:, begin // 10 :] = torch.arange(2 * count).view(2, count)
    cache = Paged(*(x.flatten(0, 1) for x in pages), table, [end] * 2, [begin // 10] * 2)
    options = {"mask": sliding_window(120), "q_start": 149, "return_aux": AuxRequest(lse=True)}
    out, aux = quire.attention(query, cache, score_mod=slopes, **options)
    found = merge_over_ranks(out, aux.lse, mesh=group)
    for dtype in (torch.float32, torch.float64):
        q, k, v = (x.to(dtype) for x in (query, key, value))
        whole, more = quire.attention(q, Dense(k, v), score_mod=slopes, **options)
        if dtype == torch.float32:
            peers = whole, more.lse
    for mine, peer, truth in zip(found, peers, (whole, more.lse), strict=True):
        assert_as_good_as(mine, peer, truth)
    with pytest.raises(ShapeError, match=r"lse must have shape \[2, 4, 1\]"):
        merge_over_ranks(out, aux.lse[..., 0], mesh=group)
    return found


def decoding_with_caches(group: dist.ProcessGroup, dtype: str) -> None:
    """Caches of which each rank has some positions: every step has the bits of one process."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    length, steps = 1024 * size + 100, 3
    torch.manual_seed(0)
    rows = [x.to(DTYPES[dtype]) for x in torch.randn(2, 2, length + steps, 2, 32)]
    queries = torch.randn(steps, 2, 4, 1, 32).to(DTYPES[dtype])
    sink = torch.linspace(-1, 1, 4)
    shape = {"heads": 2, "head_dim": 32, "page_size": 64, "n_pages": 80}
    cache = PagedKVCache(1, **shape, dtype=DTYPES[dtype])
    mine = [cache.sequence() for _ in range(2)]
    begin = 1024 * rank
    end = length if rank == size - 1 else begin + 1024
    for n, sequence in enumerate(mine):
        cache.append([sequence], *(x[None, n, begin:end] for x in rows))
    for step in range(steps):
        now = length + step + 1
        if rank == size - 1:  # it has the new tokens
            cache.append(mine, *(x[:, now - 1].unsqueeze(0) for x in rows))
        part = cache.memory(0, mine, first_page=begin // 64)
        options = {"mask": sliding_window(2000), "score_mod": slopes, "q_start": now - 1}
        found = attend_over_ranks(queries[step], part, sink=sink, mesh=group, **options)
        key, value = (x[:, :now].transpose(1, 2) for x in rows)
        wanted = AuxRequest(lse=True)
        whole, aux = quire.attention(
            queries[step], Dense(key, value), sink=sink, return_aux=wanted, **options
        )
        assert torch.equal(found[0], whole) and torch.equal(found[1], aux.lse), f"step {step}"
    if size > 1:
        with pytest.raises((ArgumentError, DistributedError), match="must begin at a multiple"):
            attend_over_ranks(
                queries[0], cache.memory(0, mine, first_page=1), q_start=9, mesh=group
            )


def decodes_differently(group: dist.ProcessGroup, what: str) -> None:
    """Rank 1 gives other arguments than the others, or a part of another cache."""
    rank = dist.get_rank(group)
    odd = rank == 1
    width = 8 if odd and what == "width" else 16
    part = Dense(torch.randn(1, 2, 1024, 16), torch.randn(1, 2, 1024, width), start=1024 * rank)
    given = {"mask": causal, "q_start": 3000, "scale": 0.1, "sink": torch.zeros(4)}
    other = {
        "mask": {"mask": sliding_window(9)},
        "score_mod": {"score_mod": slopes},
        "q_start": {"q_start": 5},
        "scale": {"scale": 1.0},
        "sink": {"sink": torch.ones(4)},
        "shape of the sink": {"sink": torch.zeros(3)},
    }
    given |= other.get(what, {}) if odd else {}
    attend_over_ranks(torch.zeros(1, 4, 1, 16), part, mesh=group, timeout=SOON, **given)


def gathers(group: dist.ProcessGroup, what: str) -> None:
    """Rank 1 gives a shard that is not of the plan, or not as the others."""
    divided = plan(causal, length=300, mesh=group, timeout=SOON)
    (shard,) = divided.shard(torch.zeros(2, 300, 4), dim=1)
    other = {"tokens": shard[:, 1:], "dtype": shard.half(), "size": shard[..., 1:]}
    divided.gather(other[what] if divided.rank == 1 else shard, dim=1)


def weights_in_a_ring(group: object) -> None:
    """Sums of weights cannot be merged as results of a softmax."""
    divided = plan(causal, length=300, mesh=group, method="ring")  # type: ignore[arg-type]
    q, k, v = divided.shard(*Example(length=300).tensors(), dim=2)
    with (
        context_parallel(divided),
        pytest.raises(OptionError, match="must be those of a softmax with the method 'ring'"),
    ):
        quire.attention(q, Dense(k, v), weight=quire.weights.relu)


def long_cache(group: object, size: int) -> None:
    """A rank has the keys of many pieces, and nobody has others."""
    torch.manual_seed(0)
    query, rows = torch.randn(1, 1, 1, 8), torch.randn(1, 1, size, 8)
    rank = dist.get_rank(group)  # type: ignore[arg-type]
    part = Dense(rows, rows) if rank == 0 else None
    found, _ = attend_over_ranks(query, part, q_start=size, mesh=group)  # type: ignore[arg-type]
    assert torch.equal(found, quire.attention(query, Dense(rows, rows), q_start=size))


def training(group: object, same_bits: bool) -> tuple[list[float], list[float]]:
    """Train the GPT of the examples, and return its losses over ranks and alone."""
    folder = str(Path(__file__).parent.parent / "examples")
    sys.path.insert(0, folder)
    try:
        example, gpt = (importlib.import_module(x) for x in ("train_over_ranks", "train_gpt"))
        for name, value in {"WIDTH": 32, "LAYERS": 2, "BATCH": 2, "REACH": 20}.items():
            setattr(gpt, name, value)
        losses: tuple[list[float], list[float]] = example.train(3, 1600, group, same_bits=same_bits)
        return losses
    finally:
        sys.path.remove(folder)
