"""Examples of the names of `quire.linear`; each cell is a program of its own."""

# %% quire.linear.pack
import torch
from torch import nn

import quire.linear

model = nn.Sequential(nn.Linear(96, 256), nn.GELU(), nn.Linear(256, 96))
quire.linear.pack(model, weights="int8")
x = torch.randn(64, 96)
assert torch.equal(model(x)[:1], model(x[:1]))  # a row does not know the others

# %% quire.linear.unpack
from torch import nn

import quire.linear

model = quire.linear.pack(nn.Sequential(nn.Linear(96, 96)), weights="bfloat16")
quire.linear.unpack(model)
assert type(model[0]) is nn.Linear  # with the weights that were multiplied by

# %% quire.linear.PackedLinear
import torch
from torch import nn

from quire.linear import PackedLinear

layer = PackedLinear.from_linear(nn.Linear(96, 64), weights="int8")
y = layer(torch.randn(5, 96))
assert y.shape == (5, 64)

# %% quire.linear.PackedEmbedding
import torch
from torch import nn

from quire.linear import PackedEmbedding, PackedLinear

head = PackedLinear.from_linear(nn.Linear(32, 100, bias=False))
embedding = PackedEmbedding(head)  # tied: the weights are stored once
assert embedding(torch.tensor([3, 7])).shape == (2, 32)

# %% quire.linear.matmul
import torch
from torch import nn

from quire.linear import PackedLinear, matmul

linear = nn.Linear(96, 64)
x = torch.randn(5, 96)
product = matmul(x, PackedLinear.from_linear(linear))  # without the bias
torch.testing.assert_close(product, x @ linear.weight.T)

# %% quire.linear.packed_layers
from torch import nn

from quire.linear import pack, packed_layers

model = pack(nn.Sequential(nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 96)))
assert [name for name, layer in packed_layers(model)] == ["0", "2"]

# %% quire.linear.save
import tempfile
from pathlib import Path

from torch import nn

from quire.linear import pack, save

model = pack(nn.Sequential(nn.Linear(96, 96)), weights="int4")
with tempfile.TemporaryDirectory() as folder:
    save(model, Path(folder) / "model.safetensors")

# %% quire.linear.load
import tempfile
from pathlib import Path

import torch
from torch import nn

from quire.linear import load, pack, save

model = pack(nn.Sequential(nn.Linear(96, 96)), weights="int8")
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "model.safetensors"
    save(model, path)
    with torch.device("meta"):
        again = nn.Sequential(nn.Linear(96, 96))  # takes no memory
    load(again, path)
    x = torch.randn(3, 96)
    assert torch.equal(again(x), model(x))

# %% quire.linear.add
import torch
from torch import nn

from quire.linear import PackedLinear, add

layer = PackedLinear.from_linear(nn.Linear(96, 96), epilogue=add)
x = torch.randn(5, 96)
y = layer(x, residual=x)  # x + layer(x), in one pass

# %% quire.linear.silu
import torch
import torch.nn.functional as F
from torch import nn

from quire.linear import PackedLinear, silu

linear = nn.Linear(96, 64)
x = torch.randn(5, 96)
layer = PackedLinear.from_linear(linear, epilogue=silu)
torch.testing.assert_close(layer(x), F.silu(linear(x)).detach())

# %% quire.linear.gelu
import torch
import torch.nn.functional as F
from torch import nn

from quire.linear import PackedLinear, gelu

linear = nn.Linear(96, 64)
x = torch.randn(5, 96)
layer = PackedLinear.from_linear(linear, epilogue=gelu)
torch.testing.assert_close(layer(x), F.gelu(linear(x)).detach())

# %% quire.linear.silu_and_mul
import torch

from quire.linear import PackedLinear, silu_and_mul

gate_and_up = torch.randn(2 * 64, 96)  # 64 rows of the gate, then 64 of what it gates
layer = PackedLinear.from_weight(gate_and_up, half=64, epilogue=silu_and_mul, merges=True)
assert layer(torch.randn(5, 96)).shape == (5, 64)

# %% quire.linear.gelu_and_mul
import torch

from quire.linear import PackedLinear, gelu_and_mul

layer = PackedLinear.from_weight(
    torch.randn(2 * 64, 96), half=64, epilogue=gelu_and_mul, merges=True
)
assert layer(torch.randn(5, 96)).shape == (5, 64)

# %% quire.linear.gelu_tanh_and_mul
import torch

from quire.linear import PackedLinear, gelu_tanh_and_mul

layer = PackedLinear.from_weight(
    torch.randn(2 * 64, 96), half=64, epilogue=gelu_tanh_and_mul, merges=True
)
assert layer(torch.randn(5, 96)).shape == (5, 64)

# %% quire.linear.Rotary
import torch

from quire.linear import PackedLinear, Rotary

weight = torch.randn(6 * 32, 96)  # six heads of 32: four of queries, one of keys, one of values
layer = PackedLinear.from_weight(weight, half=16, epilogue=Rotary(heads=5, half=16))
angles = torch.randn(7, 32)
y = layer(torch.randn(7, 96), cos=angles.cos(), sin=angles.sin())
assert y.shape == (7, 192)

# %% quire.linear.Weights
from typing import get_args

from quire.linear import Weights

assert {"float32", "bfloat16", "int8", "int4", "w8a8"} <= set(get_args(Weights))
