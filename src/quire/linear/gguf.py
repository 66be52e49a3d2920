"""Weights of a GGUF file as they lie there: Q8_0, Q4_0 and Q4_1.

    Q8_0   32 weights: scale (float16), 32 x int8
    Q4_0   32 weights: scale, then 16 bytes; byte i has weight i in its low half and i + 16 in its
           high half; 8 stands for 0
    Q4_1   32 weights: scale, offset (float16), 16 bytes as above

Q8_0 becomes int8, the others int4. A file of the Llama family stores the rows of q and k in another
order than transformers, two halves of a head interleaved; they are put in order.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quire.codegen.phases.weights import FORMATS, GROUP
from quire.errors import MissingPackageError, PackedFileError
from quire.linear.packing import IntegerWeight, quantised_weight

_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class FileWeights:
    """The weights of a file by the names of a model's layers.

    The model must have the same weights, which is checked. A layer is read when it is asked for, so
    that no other is in memory as integers.
    """

    def __init__(self, path: str | os.PathLike[str], model: nn.Module) -> None:
        self._stored: dict[str, _Stored] = {}
        for name, layer, tensor in _layers(path, model):
            kind = tensor.tensor_type.name
            if kind not in _KINDS:
                continue
            orders = (None, _order(len(tensor.data), model))
            dtype = layer.weight.dtype
            several = (_Stored(kind, tensor.data, order, dtype) for order in orders)
            found = next((each for each in several if each.is_weight(layer.weight)), None)
            if found is None:
                raise PackedFileError(
                    f"gguf must be the file that the model was loaded from, but {tensor.name} in "
                    f"{str(path)!r} is not {name}. Give the file of this model, or leave it out."
                )
            self._stored[name] = found

    def get(self, name: str) -> IntegerWeight | None:
        """Return the weights of a layer as integers; None if the file has none."""
        stored = self._stored.get(name)
        return None if stored is None else stored.rows(0, len(stored.data))


class _Stored(NamedTuple):
    """A tensor of a file: its blocks [N, bytes], and in which order its rows are taken."""

    kind: str
    data: Any  # an array of numpy, mapped
    order: Tensor | None
    dtype: torch.dtype  # of the layer

    def rows(self, first: int, last: int) -> IntegerWeight:
        places = slice(first, last) if self.order is None else self.order[first:last].numpy()
        weight = from_blocks(self.kind, torch.from_numpy(self.data[places].copy()))
        assert weight is not None, "only kinds that are known are stored"
        return weight._replace(dtype=self.dtype)

    def is_weight(self, weight: Tensor) -> bool:
        """Return whether these are the numbers of a weight [N, K], rounded to its dtype."""
        at_once = max(1, _NUMBERS_AT_ONCE // max(1, weight.shape[1]))
        return len(self.data) == len(weight) and all(
            torch.equal(
                quantised_weight(self.rows(first, min(first + at_once, len(weight)))).to(weight),
                weight[first : first + at_once],
            )
            for first in range(0, len(weight), at_once)
        )


_KINDS = ("Q8_0", "Q4_0", "Q4_1")
_NUMBERS_AT_ONCE = 1 << 20  # that are compared


def _layers(path: str | os.PathLike[str], model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield the layers of a model that a file has, by name, and what it has of them."""
    try:
        gguf = importlib.import_module("gguf")
    except ImportError as error:
        raise MissingPackageError(
            "the package gguf must be installed to read such files, but cannot be found. Install: "
            "pip install 'quire[models]'"
        ) from error
    modules = dict(model.named_modules())
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    head = tensors.get("output.weight", tensors.get("token_embd.weight"))
    if "lm_head" in modules and head is not None:
        yield "lm_head", modules["lm_head"], head
    for name, tensor in tensors.items():
        part = name.split(".")
        if part[0] == "blk" and part[2] in _NAMES and part[-1] == "weight":
            ours = f"model.layers.{part[1]}.{_NAMES[part[2]]}"
            if ours in modules:
                yield ours, modules[ours], tensor


def from_blocks(kind: str, rows: Tensor) -> IntegerWeight | None:
    """Return rows of blocks, uint8 [N, bytes], as integers; None if they are of another kind."""
    if kind == "Q8_0":
        blocks = rows.view(len(rows), -1, 2 + GROUP)
        numbers = blocks[..., 2:] ^ 0x80  # + 128
        return _weight("int8", numbers, _halves(blocks[..., :2]))
    if kind not in _KINDS:
        return None
    parts = 2 if kind == "Q4_1" else 1
    blocks = rows.view(len(rows), -1, 2 * parts + GROUP // 2)
    header, nibbles = _halves(blocks[..., : 2 * parts]), blocks[..., 2 * parts :]
    if parts == 1:
        header = torch.cat((header, header * -8), 2)  # exact
    return _weight("int4", torch.cat((nibbles & 15, nibbles >> 4), 2), header)


def _halves(bytes_: Tensor) -> Tensor:
    return bytes_.contiguous().view(torch.float16)


def _weight(name: str, numbers: Tensor, header: Tensor) -> IntegerWeight:
    return IntegerWeight(FORMATS[name], numbers.flatten(1).contiguous(), header)


def _order(count: int, model: nn.Module) -> Tensor | None:
    """Return where a file has the rows of q or k, in the order of transformers."""
    config: Any = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if count % width:
        return None
    return torch.arange(count, device="cpu").view(-1, width // 2, 2).transpose(1, 2).flatten()
