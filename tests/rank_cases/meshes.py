"""A sequence over ranks beside other dimensions of a mesh."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import quire
from quire import AuxRequest, Dense
from quire.distributed import attention, context_parallel, plan
from quire.errors import ArgumentError, OptionError, ShapeError
from quire.mods import causal
from rank_cases.examples import MASKS, Example, as_call, by_batch, slopes, table


def on_a_mesh(group: object) -> None:
    """A dimension of a mesh beside another one: each row of the mesh has its own sequence."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "cp"))
    q, k, v = (x * (1 + mesh["data"].get_local_rank()) for x in Example(length=300).tensors())
    divided = plan(causal, length=300, mesh=mesh["cp"])
    assert divided.num_ranks == 2 and divided.rank == mesh["cp"].get_local_rank()
    out = attention(*as_call(divided.shard(q, k, v, dim=2)), plan=divided)
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
