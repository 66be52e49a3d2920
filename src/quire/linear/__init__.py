"""Linear layers whose rows do not know each other: packed weights, and the same bits for a row.

model = quire.linear.pack(model, weights="int8")
"""

from quire.linear.arguments import Weights
from quire.linear.epilogues import (
    Rotary,
    add,
    gelu,
    gelu_and_mul,
    gelu_tanh_and_mul,
    silu,
    silu_and_mul,
)
from quire.linear.files import load, save
from quire.linear.models import pack, packed_layers, unpack
from quire.linear.module import PackedEmbedding, PackedLinear, matmul

__all__ = [
    "PackedEmbedding",
    "PackedLinear",
    "Rotary",
    "Weights",
    "add",
    "gelu",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "load",
    "matmul",
    "pack",
    "packed_layers",
    "save",
    "silu",
    "silu_and_mul",
    "unpack",
]
