"""Packed models in files: what is written is what is read, and it is mapped."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers as hf
from torch import nn

from quire.errors import ArgumentError, MissingFileError, PackedFileError
from quire.linear import PackedLinear, load, pack, packed_layers, save, unpack

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])


def tiny(family: str = "llama", **changes: Any) -> Any:
    config = copy.deepcopy(tiny_models.DECODERS[family])
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("weights", ["float32", "w4a8"])
def test_a_model_comes_back(tmp_path: Path, weights: Any, tied: bool) -> None:
    model = pack(tiny(tie_word_embeddings=tied), weights)
    expected = model(IDS).logits
    save(model, tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = hf.AutoModelForCausalLM.from_config(model.config).eval()
    again: Any = load(empty, tmp_path / "model.safetensors")
    assert torch.equal(again(IDS).logits, expected)
    assert not any(each.requires_grad for each in again.parameters())
    assert all(layer.packed.data_ptr() % 64 == 0 for _, layer in packed_layers(again))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    if weights == "float32":
        assert torch.equal(unpack(again)(IDS).logits, tiny(tie_word_embeddings=tied)(IDS).logits)


def test_any_reader_of_safetensors_reads_it(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = pack(nn.Sequential(nn.Linear(20, 30), nn.LayerNorm(30)), "int8")
    save(model, tmp_path / "file")
    read = safetensors.load_file(tmp_path / "file")
    assert read.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(read[name], tensor)


def test_files_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(MissingFileError, match="there is none at"):
        load(nn.Sequential(), path)
    path.write_bytes(b"nothing")
    with pytest.raises(PackedFileError, match="it has no header"):
        load(nn.Sequential(), path)
    model = pack(nn.Sequential(nn.Linear(20, 30)))
    save(model, path)
    with pytest.raises(PackedFileError, match="of another model"):
        load(nn.Module(), path)
    with pytest.raises(PackedFileError, match="missing are"):
        load(nn.Sequential(nn.Linear(20, 30), nn.LayerNorm(3)), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-64])
    with pytest.raises(PackedFileError, match="it ends too early"):
        load(nn.Sequential(nn.Linear(20, 30)), path)
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    header["__metadata__"]["quire"] = json.dumps({"version": 0})
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(PackedFileError, match="its version is 0, not 2"):
        load(nn.Sequential(nn.Linear(20, 30)), path)
    with pytest.raises(PackedFileError, match="cannot be written"):
        save(model, tmp_path / "none" / "file")


def test_an_epilogue_of_ones_own_is_not_saved(tmp_path: Path) -> None:
    layer = PackedLinear.from_linear(nn.Linear(4, 4), epilogue=lambda value, row, column: value)
    with pytest.raises(ArgumentError, match="must be one of silu_and_mul"):
        save(nn.Sequential(layer), tmp_path / "file")
