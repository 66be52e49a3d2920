"""GGUF's blocks become packed weights without a change."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
import transformers as hf

from quire.errors import PackedFileError
from quire.linear import PackedLinear, pack, unpack
from quire.linear.gguf import _NAMES, from_blocks

gguf = pytest.importorskip("gguf")
IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


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


def tiny() -> Any:
    config = copy.deepcopy(tiny_models.DECODERS["llama"])
    config.num_hidden_layers, config.intermediate_size = 1, 64
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(config).eval()


def written(path: Path, model: Any, kinds: dict[str, str]) -> Path:
    """Write layers of a model to a file, and give the model the numbers that the file has."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, kind in kinds.items():
        type_ = gguf.GGMLQuantizationType[kind]
        layer = model.get_submodule(LAYERS[name])
        raw = gguf.quants.quantize(layer.weight.detach().numpy(), type_)
        layer.weight.data.copy_(torch.from_numpy(gguf.quants.dequantize(raw, type_)))
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


LAYERS = {f"blk.0.{name}": f"model.layers.0.{ours}" for name, ours in _NAMES.items()}
LAYERS["token_embd"] = "lm_head"
KINDS = {"Q8_0": "int8", "Q4_0": "int4", "Q4_1": "int4"}


def layer_of(model: Any, place: str) -> Any:
    """A layer of a packed model, or that which it is a part of."""
    home, _, last = place.rpartition(".")
    module = model.get_submodule(home)
    return getattr(module, last, None) or getattr(module, "qkv", None) or module.gate_up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_may_be_loaded_in_any_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny()
    path = written(tmp_path / "file.gguf", model, dict.fromkeys(LAYERS, "Q8_0"))
    other = copy.deepcopy(model).to(dtype)
    with torch.no_grad():
        expected = other(IDS).logits
    packed = pack(other, gguf=path)
    projection = packed.model.layers[0].self_attn.o_proj
    assert projection.shape.weights == "int8"
    assert torch.equal(projection.weight, model.model.layers[0].self_attn.o_proj.weight)
    found = packed(IDS).logits
    assert found.dtype == dtype
    assert torch.allclose(found.float(), expected.float(), atol=32 * torch.finfo(dtype).eps)
    assert {each.dtype for each in unpack(packed).parameters()} == {dtype}
    model.model.layers[0].self_attn.o_proj.weight.data += 0.1
    with pytest.raises(PackedFileError, match="the file that the model was loaded from"):
        pack(model.to(dtype), gguf=path)


@pytest.mark.parametrize(
    "kinds",
    [
        dict.fromkeys(LAYERS, "Q4_0"),
        {**dict.fromkeys(LAYERS, "Q4_0"), "blk.0.attn_k": "Q4_1", "blk.0.ffn_up": "Q4_1"},
        {**dict.fromkeys(LAYERS, "Q4_0"), "blk.0.attn_v": "Q8_0", "blk.0.ffn_up": "Q8_0"},
        {"blk.0.attn_q": "Q8_0", "blk.0.ffn_gate": "Q4_1", "blk.0.ffn_down": "Q4_0"},
    ],
)
def test_each_layer_keeps_its_blocks(tmp_path: Path, kinds: dict[str, str]) -> None:
    """Also where layers that would be fused have different ones, or only some of them have any."""
    model = tiny()
    path = written(tmp_path / "file.gguf", model, kinds)
    for weights in ("float32", "int4"):
        packed = pack(copy.deepcopy(model), weights, gguf=path)  # type: ignore[arg-type]
        for name, kind in kinds.items():
            place = LAYERS[name]
            assert layer_of(packed, place).shape.weights == KINDS[kind], name
        unpacked = unpack(copy.deepcopy(packed))
        for name in kinds:
            weight = unpacked.get_submodule(LAYERS[name]).weight
            assert torch.equal(weight, model.get_submodule(LAYERS[name]).weight), name
    exact = pack(copy.deepcopy(model), gguf=path)
    assert torch.equal(exact(IDS).logits, pack(model)(IDS).logits)


def test_other_blocks_are_left() -> None:
    assert from_blocks("Q6_K", torch.zeros(1, 210, dtype=torch.uint8)) is None
