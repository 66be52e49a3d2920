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

from quire.errors import ArgumentError, DtypeError, MissingFileError, PackedFileError
from quire.linear import PackedLinear, load, pack, packed_layers, save, unpack
from quire.linear.epilogues import ELEMENTWISE

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


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"out_features": 100_000}, "packed must have .* bytes"),
        ({"out_features": 80}, "packed must have 20480 bytes .* but is uint8"),
        ({"in_features": 90}, "packed must have 16384 bytes"),
        ({"in_features": -20}, "packed must have 0 bytes"),
        ({"weights": "bfloat16"}, "packed must have 4096 bytes"),
        ({"in_features": 24}, "norm_weight must have 24 numbers"),
        ({"out_features": 31}, "bias must have 31 numbers"),
        ({"merges": True}, "columns in pairs must be"),
        ({"out_features": 28, "half": 14, "weights": "float16"}, "packed must have 4096 bytes"),
        ({"half": 13}, "columns in pairs must be a multiple of two halves, but are 30"),
    ],
)
def test_a_shape_that_the_tensors_do_not_have(tmp_path: Path, changes: Any, reason: str) -> None:
    """The kernel looks at no size: it would read beyond the file."""
    path = tmp_path / "file"
    save(nn.Sequential(PackedLinear.from_linear(nn.Linear(20, 30), norm=nn.RMSNorm(20))), path)
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    description = json.loads(header["__metadata__"]["quire"])
    description["layers"]["0"].update(changes)
    header["__metadata__"]["quire"] = json.dumps(description)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
    with pytest.raises(PackedFileError, match=reason):
        load(nn.Sequential(nn.Linear(20, 30)), path)


class Shared(nn.Module):
    """A layer and an embedding in two places, two tied embeddings, and buffers of many dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(50, 32)
        self.second = nn.Embedding(50, 32)
        self.second.weight = self.first.weight
        self.head = nn.Linear(32, 50, bias=False)
        self.input = nn.Embedding(50, 32)
        self.input.weight = self.head.weight
        self.again = nn.ModuleList([self.head, self.input])
        for dtype in DTYPES:
            numbers = torch.arange(3).to(dtype)
            self.register_buffer(str(dtype).removeprefix("torch."), numbers)
        self.register_buffer("lost", torch.ones(3), persistent=False)
        self.twin = nn.Module()
        self.twin.register_buffer("lost", self.lost, persistent=False)

    def forward(self, ids: Any) -> Any:
        return self.head(self.first(ids) + self.second(ids) * 2 + self.again[1](ids))


DTYPES = (
    torch.int16,
    torch.int8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def test_what_is_shared_is_written_once_and_stays_shared(tmp_path: Path) -> None:
    model = pack(Shared())
    expected = model(IDS)
    save(model, tmp_path / "file")
    packed = model.head.packed.nbytes
    assert (tmp_path / "file").stat().st_size < packed + 50 * 32 * 4 + 4096
    with torch.device("meta"):
        empty = Shared()
    again: Any = load(empty, tmp_path / "file")
    assert torch.equal(again(IDS), expected)
    assert again.first.weight is again.second.weight
    assert again.again[0] is again.head and again.again[1] is again.input
    assert again.input.layer is again.head
    assert torch.equal(again.twin.lost, torch.ones(3)) and torch.equal(again.lost, torch.ones(3))
    for name, buffer in model.named_buffers():
        assert torch.equal(again.get_buffer(name), buffer), name
    unpack(again)
    assert again.again[0] is again.head and again.head.weight is again.input.weight


def test_a_dtype_that_no_file_has(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_buffer("wide", torch.zeros(3, dtype=torch.complex128))
    with pytest.raises(DtypeError, match="wide must be of a dtype that safetensors has"):
        save(pack(model), tmp_path / "file")
    assert not [*tmp_path.iterdir()]


def test_an_interrupt_leaves_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*places: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(pack(nn.Sequential(nn.Linear(4, 4))), tmp_path / "file")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("epilogue", ELEMENTWISE.values())
def test_activations_are_epilogues_that_are_saved(tmp_path: Path, epilogue: Any) -> None:
    x, linear = torch.randn(5, 20), nn.Linear(20, 30)
    fused = PackedLinear.from_linear(linear, epilogue=epilogue)
    expected = epilogue(linear(x), None, None).detach()
    assert torch.allclose(fused(x), expected, atol=1e-6)
    save(nn.Sequential(fused), tmp_path / "file")
    again = load(nn.Sequential(nn.Linear(20, 30)), tmp_path / "file")
    assert torch.equal(again(x), fused(x))


def test_an_epilogue_of_ones_own_is_not_saved(tmp_path: Path) -> None:
    layer = PackedLinear.from_linear(nn.Linear(4, 4), epilogue=lambda value, row, column: value)
    with pytest.raises(ArgumentError, match="must be one of silu_and_mul"):
        save(nn.Sequential(layer), tmp_path / "file")
