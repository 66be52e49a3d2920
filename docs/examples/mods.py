"""Examples of the names of `quire.mods` and `quire.weights`; each cell is a program of its own."""

# %% quire.mods.causal
import torch

from quire import Dense, attention
from quire.mods import causal

query, key, value = torch.randn(3, 1, 4, 64, 32)
out = attention(query, Dense(key, value), mask=causal)
assert torch.equal(out[:, :, 0], value[:, :, 0])  # the first query sees itself alone

# %% quire.mods.sliding_window
import quire
from quire.mods import sliding_window

mask = sliding_window(2)  # itself and two before
assert quire.create_mask(mask, None, None, 4, 4)[0, 0, 3].tolist() == [False, True, True, True]

# %% quire.mods.dilated_sliding_window
import quire
from quire.mods import dilated_sliding_window

blocks = quire.create_block_mask(dilated_sliding_window(512, 128), None, None, 2048, 2048)
assert blocks.sparsity() > 50

# %% quire.mods.global_sliding_window
import torch

import quire
from quire.mods import global_sliding_window

is_global = torch.arange(1024) % 256 == 0  # these see all, and all see them
mask = global_sliding_window(64, is_global)
assert quire.create_mask(mask, None, None, 1024, 1024)[0, 0, 700, 256]

# %% quire.mods.prefix_lm
import quire
from quire.mods import prefix_lm

mask = quire.create_mask(prefix_lm(3), None, None, 5, 5)
assert mask[0, 0, 0].tolist() == [True, True, True, False, False]

# %% quire.mods.padding
import torch

from quire import Dense, attention
from quire.mods import causal, padding

query, key, value = torch.randn(3, 2, 4, 10, 32)
mask = causal & padding(lengths=[10, 6])  # the second sequence of the batch has 6 tokens
out = attention(query, Dense(key, value), mask=mask)

# %% quire.mods.document
import torch

from quire import Dense, attention
from quire.mods import causal, document

lengths = [300, 20, 180]  # three documents, packed into one sequence
query, key, value = torch.randn(3, 1, 4, 500, 32)
out = attention(query, Dense(key, value), mask=causal & document(lengths=lengths))
assert torch.equal(out[:, :, 300], value[:, :, 300])  # a document begins

# %% quire.mods.shared_prefix
import quire
from quire.mods import shared_prefix

mask = shared_prefix([0, 2, 4, 6], [0, 0, 0])  # a prompt of two, and two answers of two
assert quire.create_mask(mask, None, None, 6, 6)[0, 0, 5].int().tolist() == [1, 1, 0, 0, 1, 1]

# %% quire.mods.tree
import quire
from quire.mods import tree

mask = tree([-1, 0, 0, 1])  # node 3 descends from 1, and 1 from 0
assert quire.create_mask(mask, None, None, 4, 4)[0, 0, 3].int().tolist() == [1, 1, 0, 1]

# %% quire.mods.neighbourhood
import quire
from quire.mods import neighbourhood

mask = neighbourhood(canvas=(32, 32), kernel=(7, 7))  # a picture of 32 x 32 patches
blocks = quire.create_block_mask(mask, None, None, 1024, 1024)
assert blocks.sparsity() > 50

# %% quire.mods.block_diffusion
import quire
from quire.mods import block_diffusion

mask = block_diffusion(seq_len=512, block_size=64)  # 512 noised tokens, then 512 clean ones
assert quire.create_block_mask(mask, None, None, 1024, 1024).shape == (1, 1, 1024, 1024)

# %% quire.mods.offset
import quire
from quire.mods import causal, offset

later = offset(causal, 100)  # for queries that begin at position 100
assert quire.create_mask(later, None, None, 1, 102)[0, 0, 0].sum() == 101

# %% quire.mods.alibi
import torch

from quire import Dense, attention
from quire.mods import alibi, causal

query, key, value = torch.randn(3, 1, 8, 64, 32)
out = attention(query, Dense(key, value), score_mod=alibi(8), mask=causal)

# %% quire.mods.softcap
import torch

from quire import Dense, attention
from quire.mods import alibi, softcap

query, key, value = torch.randn(3, 1, 8, 64, 32)
out = attention(query, Dense(key, value), score_mod=softcap(30.0) >> alibi(8))

# %% quire.mods.distance_bias
import torch

from quire import Dense, attention
from quire.mods import distance_bias

table = torch.zeros(4, 129, requires_grad=True)  # for each head, distances -64 to 64
query, key, value = torch.randn(3, 1, 4, 64, 32)
attention(query, Dense(key, value), score_mod=distance_bias(table)).square().sum().backward()
assert table.grad.abs().sum() > 0

# %% quire.mods.relative_position_bias
import torch

from quire import Dense, attention
from quire.mods import relative_position_bias

table = torch.randn(32, 8)  # T5's `relative_attention_bias.weight` [buckets, heads]
query, key, value = torch.randn(3, 1, 8, 64, 32)
out = attention(query, Dense(key, value), score_mod=relative_position_bias(table), scale=1.0)

# %% quire.mods.table_bias
import torch

from quire import Dense, attention
from quire.mods import table_bias

bias = torch.randn(8, 64, 64)  # [H, L, S], as a dense float mask
query, key, value = torch.randn(3, 1, 8, 64, 32)
out = attention(query, Dense(key, value), score_mod=table_bias(bias))
expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
torch.testing.assert_close(out, expected)

# %% quire.mods.in_turn
from quire.mods import alibi, in_turn, softcap

mod = in_turn(alibi(8), softcap(30.0))
assert mod == alibi(8) >> softcap(30.0)

# %% quire.mods.LearnedAlibi
import torch

from quire import Dense, attention
from quire.mods import LearnedAlibi

bias = LearnedAlibi(8)  # a module: its slopes are a parameter
query, key, value = torch.randn(3, 1, 8, 64, 32)
attention(query, Dense(key, value), score_mod=bias).square().sum().backward()
assert bias.slopes.grad.shape == (8,)

# %% quire.mods.LearnedDistanceBias
import torch

from quire import Dense, attention
from quire.mods import LearnedDistanceBias

bias = LearnedDistanceBias(num_heads=4, reach=64)
query, key, value = torch.randn(3, 1, 4, 64, 32)
attention(query, Dense(key, value), score_mod=bias).square().sum().backward()
assert bias.table.grad.shape == (4, 129)

# %% quire.mods.LearnedRelativePositionBias
import torch

from quire import Dense, attention
from quire.mods import LearnedRelativePositionBias

bias = LearnedRelativePositionBias(num_heads=4)
query, key, value = torch.randn(3, 1, 4, 64, 32)
attention(query, Dense(key, value), score_mod=bias).square().sum().backward()
assert bias.table.grad is not None

# %% quire.mods.LearnedTableBias
import torch

from quire import Dense, attention
from quire.mods import LearnedTableBias

bias = LearnedTableBias(4, 64, 64)  # [H, L, S]
query, key, value = torch.randn(3, 1, 4, 64, 32)
attention(query, Dense(key, value), score_mod=bias).square().sum().backward()
assert bias.table.grad.shape == (4, 64, 64)

# %% quire.mods.Mask
import quire
from quire.mods import Mask, causal


def within(b, h, q_idx, kv_idx, size):
    return (q_idx - kv_idx).abs() <= size


mask = causal & Mask(within, size=2)  # a value: it can be copied, pickled, compared, combined
assert quire.create_mask(mask, None, None, 4, 4)[0, 0, 3].tolist() == [False, True, True, True]

# %% quire.mods.MaskMod
from quire.mods import MaskMod, causal


def strict(mask: MaskMod) -> MaskMod:
    def other(b, h, q_idx, kv_idx):
        return mask(b, h, q_idx, kv_idx) & (q_idx != kv_idx)

    return other


assert callable(strict(causal))

# %% quire.mods.ScoreChange
from quire.mods import ScoreChange, softcap


def lowered(score, b, h, q_idx, kv_idx, slope):
    return score - slope * (q_idx - kv_idx).abs()


mod = ScoreChange(lowered, slope=0.5) >> softcap(20.0)
assert "lowered" in mod.__name__

# %% quire.mods.ScoreMod
import torch

from quire.mods import ScoreMod


def hot(temperature: float) -> ScoreMod:
    def warmed(score, b, h, q_idx, kv_idx):
        return score / temperature

    return warmed


assert hot(2.0)(torch.tensor(3.0), *torch.zeros(4, dtype=torch.int64)) == 1.5

# %% quire.mods.ScoreModule
import torch
from torch import nn

from quire import Dense, attention
from quire.mods import ScoreModule


class Temperature(ScoreModule):
    def __init__(self, heads):
        super().__init__()
        self.log = nn.Parameter(torch.zeros(heads))

    def forward(self, score, b, h, q_idx, kv_idx):
        return score * self.log[h].exp()


mod = Temperature(4)
query, key, value = torch.randn(3, 1, 4, 64, 32)
attention(query, Dense(key, value), score_mod=mod).square().sum().backward()
assert mod.log.grad.shape == (4,)

# %% quire.weights.sigmoid
import math

import torch

from quire import Dense, attention, weights

query, key, value = torch.randn(3, 1, 4, 512, 32)
weight = weights.sigmoid(-math.log(512))  # so that weights add up to about 1
out = attention(query, Dense(key, value), weight=weight, normalise=False)

# %% quire.weights.softmax
import torch

from quire import Dense, attention, weights

query, key, value = torch.randn(3, 1, 4, 64, 32)
out = attention(query, Dense(key, value), weight=weights.softmax)
torch.testing.assert_close(out, attention(query, Dense(key, value)))  # it is the default

# %% quire.weights.softmax_one
import torch

from quire import Dense, attention, weights

query, key, value = torch.randn(3, 1, 4, 64, 32)
out = attention(query, Dense(key, value), weight=weights.softmax_one)
same = attention(query, Dense(key, value), sink=torch.zeros(4))
torch.testing.assert_close(out, same)

# %% quire.weights.exp
import torch

from quire import Dense, attention, weights

query, key, value = torch.randn(3, 1, 4, 64, 32)
sums = attention(query, Dense(key, value), weight=weights.exp, normalise=False)
score = query @ key.transpose(-2, -1) / 32**0.5
torch.testing.assert_close(sums, score.exp() @ value, rtol=1e-4, atol=1e-4)

# %% quire.weights.relu
import torch

from quire import Dense, attention, weights

query, key, value = torch.randn(3, 1, 4, 64, 32)
out = attention(query, Dense(key, value), weight=weights.relu)

# %% quire.weights.squared_relu
import torch

from quire import Dense, attention, weights

query, key, value = torch.randn(3, 1, 4, 64, 32)
out = attention(query, Dense(key, value), weight=weights.squared_relu)

# %% quire.weights.softplus
import torch

from quire import Dense, attention, weights

query, key, value = torch.randn(3, 1, 4, 64, 32)
out = attention(query, Dense(key, value), weight=weights.softplus)

# %% quire.mods.attention_gym.generate_doc_mask_mod
import torch
import quire
from quire.mods import causal
from quire.mods.attention_gym import generate_doc_mask_mod

query = torch.randn(1, 2, 12, 16)
mask = generate_doc_mask_mod(causal, offsets=[0, 5, 12])
out = quire.flex_attention(query, query, query, mask_mod=mask)

# %% quire.mods.attention_gym.generate_packed_causal_doc_mask_mod
import torch
import quire
from quire.mods.attention_gym import generate_packed_causal_doc_mask_mod

query = torch.randn(1, 2, 12, 16)
mask = generate_packed_causal_doc_mask_mod([0, 5, 12])
out = quire.flex_attention(query, query, query, mask_mod=mask)

# %% quire.mods.attention_gym.generate_natten
import torch
import quire
from quire.mods.attention_gym import generate_natten

query = torch.randn(1, 2, 8 * 6, 16)
mask = generate_natten(canvas_w=8, canvas_h=6, kernel_w=3, kernel_h=3)
out = quire.flex_attention(query, query, query, mask_mod=mask)

# %% quire.mods.attention_gym.generate_tanh_softcap
import torch
import quire
from quire.mods.attention_gym import generate_tanh_softcap

query = torch.randn(1, 2, 12, 16)
out = quire.flex_attention(query, query, query, score_mod=generate_tanh_softcap(30.0))
