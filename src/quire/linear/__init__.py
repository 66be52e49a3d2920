"""Linear layers whose rows do not know each other: packed weights, and the same bits for a row.

model = quire.linear.pack(model, weights="int8")
"""

from quire.linear.models import pack, packed_layers, unpack
from quire.linear.module import PackedEmbedding, PackedLinear, Weights, matmul

__all__ = [
    "PackedEmbedding",
    "PackedLinear",
    "Weights",
    "matmul",
    "pack",
    "packed_layers",
    "unpack",
]
