"""Examples of the names of `quire.distributed`; each cell runs in one process or in many."""

# %% quire.distributed.plan
import quire.distributed
from quire.mods import sliding_window

divided = quire.distributed.plan(sliding_window(4096), length=2**20, num_ranks=64)
print(divided)  # who has which tokens, what is sent; ranks are imagined here

# %% quire.distributed.ContextPlan
import torch

from quire.distributed import plan
from quire.mods import causal

divided = plan(causal, length=1000)
x = torch.randn(1, 1000, 64)
(shard,) = divided.shard(x, dim=1)
assert torch.equal(divided.gather(shard, dim=1), x)
assert len(divided.positions) == shard.shape[1]

# %% quire.distributed.attention
import torch

import quire
from quire import Dense
from quire.distributed import attention, plan
from quire.mods import causal, document

mask = causal & document(lengths=[300, 20, 180])
query, key, value = torch.randn(3, 1, 4, 500, 64)
divided = plan(mask, length=500)  # under torchrun: over all processes
q, k, v = divided.shard(query, key, value, dim=2)
out = attention(q, Dense(k, v), plan=divided)  # shards in, a shard out
assert torch.equal(divided.gather(out, dim=2), quire.attention(query, Dense(key, value), mask=mask))

# %% quire.distributed.context_parallel
import torch

import quire
from quire import Dense
from quire.distributed import context_parallel, plan
from quire.mods import causal

query, key, value = torch.randn(3, 1, 4, 500, 64)
divided = plan(causal, length=500)
q, k, v = divided.shard(query, key, value, dim=2)
with context_parallel(divided):  # code inside knows nothing of ranks
    out = quire.attention(q, Dense(k, v), mask=causal)

# %% quire.distributed.merge_over_ranks
import torch
import torch.distributed as dist

from quire import AuxRequest, Dense, attention
from quire.distributed import merge_over_ranks

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
query, key, value = torch.randn(3, 1, 4, 8, 32)  # each rank has its own keys
out, aux = attention(query, Dense(key, value), return_aux=AuxRequest(lse=True))
merged, lse = merge_over_ranks(out, aux.lse)
assert torch.equal(merged, out)  # of one rank
dist.destroy_process_group()

# %% quire.distributed.attend_over_ranks
import torch

from quire import Dense, attention
from quire.distributed import attend_over_ranks
from quire.mods import causal

query, (key, value) = torch.randn(1, 4, 1, 32), torch.randn(2, 1, 4, 3000, 32)
part = Dense(key, value, start=0)  # of several ranks, each has the positions from its start on
out, lse = attend_over_ranks(query, part, mask=causal, q_start=2999)
assert torch.equal(out, attention(query, Dense(key, value), mask=causal))
