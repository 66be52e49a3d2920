"""Several sequences in one tensor, over ranks."""

from __future__ import annotations

from itertools import accumulate, product
from typing import Any

import torch
from compare import assert_as_good_as
from torch import Tensor

import quire
from quire import Ragged
from quire.distributed import attention, plan
from quire.mods import causal
from rank_cases.examples import DTYPES, EVERYTHING, MASKS, SLOPES, allowed_blocks, by_head

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
