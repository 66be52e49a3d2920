"""GGUF's blocks become packed weights without a change."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
import transformers as hf
from torch import nn

from quire.errors import PackedFileError
from quire.linear import PackedLinear, pack
from quire.linear.gguf import from_blocks

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_blocks_are_what_the_library_decodes(kind: str) -> None:
    numbers = np.random.default_rng(0).standard_normal((20, 96)).astype(np.float32)
    type_ = gguf.GGMLQuantizationType[kind]
    raw = gguf.quants.quantize(numbers, type_)
    weight = from_blocks(kind, torch.from_numpy(raw))
    assert weight is not None
    layer = PackedLinear.from_weight(weight)
    assert layer.shape.weights == ("int8" if kind == "Q8_0" else "int4")
    assert np.array_equal(layer.weight.numpy(), gguf.quants.dequantize(raw, type_))
    assert PackedLinear.from_weight(weight, weights="w8a8").shape.weights in ("w8a8", "w4a8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_may_be_loaded_in_any_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    config = copy.deepcopy(tiny_models.DECODERS["llama"])
    config.num_hidden_layers, config.tie_word_embeddings = 1, False
    model = hf.AutoModelForCausalLM.from_config(config)
    layer, path = model.model.layers[0].self_attn.o_proj, tmp_path / "file.gguf"
    type_ = gguf.GGMLQuantizationType.Q8_0
    raw = gguf.quants.quantize(layer.weight.detach().numpy(), type_)
    stored = torch.from_numpy(gguf.quants.dequantize(raw, type_))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.attn_output.weight", raw, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    layer.weight = nn.Parameter(stored)
    other = pack(copy.deepcopy(model).to(dtype), gguf=path)
    packed = other.model.layers[0].self_attn.o_proj
    assert packed.shape.weights == "int8" and torch.equal(packed.weight, stored)
    layer.weight = nn.Parameter(stored + 0.1)
    with pytest.raises(PackedFileError, match="the file that the model was loaded from"):
        pack(model.to(dtype), gguf=path)


def test_other_blocks_are_left() -> None:
    assert from_blocks("Q6_K", torch.zeros(1, 210, dtype=torch.uint8)) is None
