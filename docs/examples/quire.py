"""Examples of the names of `quire`; each cell is a program of its own."""

# %% quire.attention
import torch

from quire import Dense, Paged, Ragged, attention
from quire.mods import causal

query, key, value = torch.randn(3, 2, 8, 40, 64)  # [B, H, L, D]
out = attention(query, Dense(key, value), mask=causal)
assert out.shape == (2, 8, 40, 64)

rows = torch.randn(3, 52, 8, 64)  # sequences of 40 and 12 tokens, packed
out = attention(rows[0], Ragged(rows[1], rows[2], offsets=[0, 40, 52]), mask=causal)
assert out.shape == (52, 8, 64)

pages = torch.randn(2, 10, 8, 16, 64)  # ten pages of 16 tokens
table = torch.tensor([[7, 2, 4], [5, -1, -1]])
out = attention(query[:, :, :1], Paged(*pages, table, lengths=[40, 12]), mask=causal)
assert out.shape == (2, 8, 1, 64)

# %% quire.flex_attention
import torch

from quire import flex_attention

slope = torch.full((4,), 0.1, requires_grad=True)


def near(score, b, h, q_idx, kv_idx):
    return score - slope[h] * (q_idx - kv_idx).abs()


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


query, key, value = torch.randn(3, 1, 4, 256, 64)
out = flex_attention(query, key, value, score_mod=near, mask_mod=causal)
out.sum().backward()
assert slope.grad.shape == (4,)

# %% quire.Dense
import torch

from quire import Dense, attention
from quire.mods import causal

key, value = torch.randn(2, 1, 4, 100, 64)  # [B, Hkv, S, D]
query = torch.randn(1, 8, 1, 64)  # eight query heads share four key heads
out = attention(query, Dense(key, value), mask=causal)  # the query is at position 99
assert out.shape == (1, 8, 1, 64)

shard = Dense(key[:, :, 60:], value[:, :, 60:], start=60)  # its first key has position 60
assert shard.start == 60

# %% quire.Ragged
import torch

from quire import Ragged, attention
from quire.mods import causal

query, key, value = torch.randn(3, 312, 8, 64)  # [total, heads, head_dim]
memory = Ragged(key, value, offsets=[0, 5, 12, 312])  # three sequences
out = attention(query, memory, mask=causal)

alone = attention(query[5:12], Ragged(key[5:12], value[5:12], offsets=[0, 7]), mask=causal)
assert torch.equal(out[5:12], alone)  # the same bits

# %% quire.Paged
import torch

from quire import Paged, attention
from quire.mods import causal

key, value = torch.randn(2, 10, 4, 16, 64)  # [pages, Hkv, page, D]
page_table = torch.tensor([[7, 2, 4], [5, 2, -1]])  # page 2 is shared
memory = Paged(key, value, page_table, lengths=[40, 30])
query = torch.randn(2, 8, 1, 64)  # the newest token of each sequence
out = attention(query, memory, mask=causal)
assert out.shape == (2, 8, 1, 64)

# %% quire.AuxRequest
import torch

from quire import AuxRequest, Dense, attention

query, key, value = torch.randn(3, 1, 4, 64, 32)
wanted = AuxRequest(lse=True, entropy=True, weights=[0, -1])
out, aux = attention(query, Dense(key, value), return_aux=wanted)
assert aux.lse.shape == aux.entropy.shape == (1, 4, 64)
assert aux.weights.shape == (1, 4, 2, 64)  # of the first and the last query

# %% quire.AuxOutput
import torch

from quire import AuxRequest, Dense, attention

query, key, value = torch.randn(3, 1, 4, 64, 32)
out, aux = attention(query, Dense(key, value), return_aux=AuxRequest(lse=True, key_mass=True))
torch.testing.assert_close(aux.key_mass.sum(-1), torch.full((1, 4), 64.0))
assert aux.argmax is None  # it was not asked for

# %% quire.BlockMask
import torch

from quire import create_block_mask, flex_attention
from quire.mods import causal, document

blocks = create_block_mask(causal, None, None, 1024, 1024)
packed = blocks & create_block_mask(document(lengths=[600, 424]), None, None, 1024, 1024)
assert packed.sparsity() > blocks.sparsity() > 40

query, key, value = torch.randn(3, 1, 4, 1024, 64)
out = flex_attention(query, key, value, block_mask=packed)

# %% quire.create_block_mask
from quire import create_block_mask
from quire.mods import sliding_window

million = 1_048_576
blocks = create_block_mask(sliding_window(4096), None, None, million, million)
assert blocks.sparsity() > 99  # a fraction of a second, since bounds decide whole regions

# %% quire.create_mask
from quire import create_mask
from quire.mods import causal

mask = create_mask(causal, None, None, 3, 3)  # [1, 1, L, S], every element
assert mask[0, 0].tolist() == [[True, False, False], [True, True, False], [True, True, True]]

# %% quire.and_masks
from quire import and_masks
from quire.mods import causal, document

packed = and_masks(causal, document(lengths=[700, 300]))
assert packed == causal & document(lengths=[700, 300])

# %% quire.or_masks
from quire import create_mask, or_masks
from quire.mods import causal


def first_four(b, h, q_idx, kv_idx):
    return kv_idx < 4


mask = create_mask(or_masks(causal, first_four), None, None, 6, 6)
assert mask[0, 0, 0].tolist() == [True, True, True, True, False, False]

# %% quire.not_mask
from quire import create_mask, not_mask
from quire.mods import causal

future = not_mask(causal)
assert create_mask(future, None, None, 3, 3)[0, 0, 0].tolist() == [False, True, True]

# %% quire.noop_mask
from quire import create_block_mask, noop_mask

blocks = create_block_mask(noop_mask, None, None, 256, 256)
assert blocks.sparsity() == 0

# %% quire.attention_gradients
import torch

from quire import AuxRequest, Dense, attention, attention_gradients

query, key, value = torch.randn(3, 1, 4, 64, 32)
memory = Dense(key, value)
out, aux = attention(query, memory, return_aux=AuxRequest(lse=True))
gradients = attention_gradients(query, memory, out, aux.lse, grad_out=torch.ones_like(out))
assert gradients.key.shape == key.shape

# %% quire.AttentionGradients
import torch

from quire import AuxRequest, Dense, attention, attention_gradients

query, key, value = torch.randn(3, 1, 4, 64, 32)
slope = torch.tensor(0.1, requires_grad=True)


def near(score, b, h, q_idx, kv_idx):
    return score - slope * (q_idx - kv_idx).abs()


memory = Dense(key, value)
out, aux = attention(query, memory, score_mod=near, return_aux=AuxRequest(lse=True))
found = attention_gradients(
    query, memory, out, aux.lse, grad_out=torch.ones_like(out), score_mod=near
)
((tensor, gradient),) = found.captured
assert tensor is slope and gradient.shape == ()

# %% quire.attention_piece
import torch

from quire import Dense, attention, attention_piece, merge_pieces
from quire.mods import causal

query = torch.randn(1, 8, 2, 64)
key, value = torch.randn(2, 1, 8, 3000, 64)
pieces = [
    attention_piece(query, Dense(key[:, :, a:b], value[:, :, a:b], start=a), q_start=2998)
    for a, b in ((0, 1024), (1024, 2048), (2048, 3000))
]
out, lse = merge_pieces(pieces)
assert torch.equal(out, attention(query, Dense(key, value)))  # the bits of one call

# %% quire.AttentionPiece
import torch

from quire import Dense, attention_piece

query, key, value = torch.randn(3, 1, 4, 16, 32)
piece = attention_piece(query, Dense(key, value))
mean = piece.out / piece.sums[..., None]  # what `merge_pieces([piece])` returns
assert mean.shape == (1, 4, 16, 32) and piece.maxima.shape == (1, 4, 16)

# %% quire.merge_pieces
import torch

from quire import Dense, attention_piece, merge_pieces

query, key, value = torch.randn(3, 1, 4, 16, 32)
sink = torch.zeros(4)  # a sink joins once, at the end
out, lse = merge_pieces([attention_piece(query, Dense(key, value))], sink=sink)
assert lse.shape == (1, 4, 16)

# %% quire.merge_attention
import torch

from quire import AuxRequest, Dense, attention, merge_attention

query, key, value = torch.randn(3, 1, 4, 96, 32)
lse = AuxRequest(lse=True)
left, left_aux = attention(query, Dense(key[:, :, :50], value[:, :, :50]), return_aux=lse)
right, right_aux = attention(query, Dense(key[:, :, 50:], value[:, :, 50:]), return_aux=lse)
out, _ = merge_attention(left, left_aux.lse, right, right_aux.lse)
torch.testing.assert_close(out, attention(query, Dense(key, value)))

# %% quire.plan
import torch

import quire
from quire import Dense
from quire.mods import causal

query, key, value = torch.randn(3, 1, 4, 128, 64)
planned = quire.plan(query, Dense(key, value), mask=causal)  # traces the mask once
for _ in range(3):
    out = planned(query, Dense(key, value))  # saves microseconds in each call

# %% quire.Plan
import torch

import quire
from quire import Dense, Plan

query, key, value = torch.randn(3, 1, 4, 128, 64)
planned = quire.plan(query, Dense(key, value))
assert isinstance(planned, Plan)
assert planned(query[:, :, :7], Dense(key, value)).shape == (1, 4, 7, 64)  # any lengths

# %% quire.kernel
import quire
from quire.mods import causal

stages = quire.kernel(mask_mod=causal, target="x86-64-v3").stages
assert "le %0, %1 : bool" in stages["graph"]
assert {"graph", "llvm", "asm"} <= stages.keys()

# %% quire.explain
import torch

import quire
from quire.mods import causal

query, key, value = torch.randn(3, 1, 4, 512, 64)
text = quire.explain(query, key, value, mask_mod=causal)
assert "jit" in text and "eager" in text

# %% quire.why
import quire
from quire.mods import sliding_window

found = quire.why(sliding_window(256), b=0, h=0, q_idx=300, kv_idx=3)
assert found.value is False
assert "300 - 3 = 297" in str(found)

# %% quire.draw
import quire
from quire.mods import causal, document

drawing = quire.draw(causal & document(lengths=[600, 424]), 1024)
assert "1,024 queries x 1,024 keys" in str(drawing)

# %% quire.random
import torch

import quire
from quire import Dense, attention

seed = torch.tensor(0)  # seed.random_() draws another for the next step


def jitter(score, b, h, q_idx, kv_idx):
    return score + 0.1 * quire.random(seed, b, h, q_idx, kv_idx)


query, key, value = torch.randn(3, 1, 4, 64, 32)
one, two = (attention(query, Dense(key, value), score_mod=jitter) for _ in range(2))
assert torch.equal(one, two)

# %% quire.varlen_attention
import torch

from quire import varlen_attention

q, k, v = torch.randn(3, 312, 8, 64)  # [total, heads, head_dim]
cu_seqlens = torch.tensor([0, 5, 12, 312])
out = varlen_attention(q, k, v, cu_seqlens, causal=True, window_size=(128, 0))
assert out.shape == (312, 8, 64)

# %% quire.varlen_attn
import torch

from quire import varlen_attn

query, key, value = torch.randn(3, 312, 8, 64)
offsets = torch.tensor([0, 5, 12, 312])
out = varlen_attn(query, key, value, offsets, offsets, 300, 300, window_size=(-1, 0))
assert out.shape == (312, 8, 64)

# %% quire.jagged_scaled_dot_product_attention
import torch

from quire import jagged_scaled_dot_product_attention

tokens = [torch.randn(n, 4, 32) for n in (5, 17, 9)]  # [length, heads, head_dim]
query = torch.nested.nested_tensor(tokens, layout=torch.jagged).transpose(1, 2)
out = jagged_scaled_dot_product_attention(query, query, query, is_causal=True)
assert [part.shape[1] for part in out.unbind()] == [5, 17, 9]

# %% quire.PagedAttention
import torch

from quire import PagedAttention

paged = PagedAttention(n_pages=64, page_size=16, max_batch_size=8, device="cpu")
paged.reserve(torch.tensor([0, 1]), torch.tensor([40, 20]))  # all of them, or nothing
keys, values = torch.randn(2, 2, 4, 20, 32)  # the first 20 tokens of both
k_cache, v_cache = torch.zeros(2, 1, 4, 64 * 16, 32)
positions = torch.arange(20).expand(2, 20)
paged.assign(torch.tensor([0, 1]), positions, keys, values, k_cache, v_cache)
assert paged.capacity[:2].tolist() == [48, 32]

# %% quire.patch_torch
import torch
from torch.nn.attention import flex_attention as torch_flex

import quire

query, key, value = torch.randn(3, 1, 4, 64, 32, requires_grad=True)
with quire.patch_torch():
    out = torch_flex.flex_attention(query, key, value)  # quire computes it
    out.sum().backward()  # which PyTorch refuses on a CPU without a compiler

# %% quire.unpatch_torch
import torch
from torch.nn.attention import flex_attention as torch_flex

import quire

quire.patch_torch()  # from here on, in all code of this process
query, key, value = torch.randn(3, 1, 4, 64, 32)
out = torch_flex.flex_attention(query, key, value)
quire.unpatch_torch()  # and until here

# %% quire.FlexKernelOptions
import torch

from quire import FlexKernelOptions, flex_attention

options: FlexKernelOptions = {"BLOCK_M": 64, "BLOCK_N": 64}  # a GPU's; checked, then ignored
query, key, value = torch.randn(3, 1, 4, 64, 32)
out = flex_attention(query, key, value, kernel_options=options)

# %% quire.KernelOptionWarning
import warnings

import torch

from quire import KernelOptionWarning, flex_attention

query, key, value = torch.randn(3, 1, 4, 64, 32)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    flex_attention(query, key, value, kernel_options={"BLOK_M": 64})
assert [each.category for each in caught] == [KernelOptionWarning]

# %% quire.EagerModWarning
import warnings

import torch

from quire import EagerModWarning, flex_attention


def unusual(score, b, h, q_idx, kv_idx):
    return torch.special.bessel_j0(score)  # no op of quire, so torch computes tile by tile


query, key, value = torch.randn(3, 1, 4, 64, 32)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    flex_attention(query, key, value, score_mod=unusual)
assert [each.category for each in caught] == [EagerModWarning]

# %% quire.OneGraphWarning
import warnings

from quire import OneGraphWarning

# torch.compile(fullgraph=True) cannot leave a graph for a mod that quire does not trace. PyTorch's
# operators then compute, and this warning says so. To make it an error:
with warnings.catch_warnings():
    warnings.simplefilter("error", OneGraphWarning)

# %% quire.QuireError
import torch

from quire import Dense, QuireError, attention

query, key, value = torch.randn(1, 4, 8, 32), torch.randn(1, 3, 8, 32), torch.randn(1, 3, 8, 32)
try:
    attention(query, Dense(key, value))
except QuireError as error:  # also a ValueError, as in PyTorch
    print(error)  # what must be, what is, and what to do

# %% quire.__version__
import quire

assert quire.__version__.count(".") == 2
