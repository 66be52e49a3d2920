"""A packed model in a file of safetensors, which processes map into memory and share.

    save(model, "model.safetensors")
    load(skeleton, "model.safetensors")      # the same model before it was packed, without weights

    tensors             the state dict of the model and its other buffers; of tied tensors, one copy
    metadata "quire"    as JSON: every packed layer, what is tied, fused, and computed row by row

Packed weights come first, at multiples of 64 bytes from the start of the file, so that a vector of
a mapped file is in one line of the cache. The header is filled up with spaces for that.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quire.checks.arguments import dtype_name
from quire.errors import DtypeError, MissingFileError, PackedFileError
from quire.linear.epilogues import epilogue_name, epilogue_of_name
from quire.linear.experts import packed_experts, packed_routers, place_experts, place_router
from quire.linear.families import GatedMLP, place_attention, place_mlp
from quire.linear.models import packed_layers, set_module
from quire.linear.module import PackedEmbedding, PackedLinear
from quire.linear.rowwise import RowKind, place_rows, row_wise
from quire.linear.shape import TENSORS, Shape

_VERSION = 2
_ALIGNED = 64
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPE_OF = {name: dtype for dtype, name in _DTYPES.items()}


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a packed model to a file as a whole, or raise and leave no part of it behind."""
    tensors, tied = _tensors_of(model)
    names = sorted(tensors, key=lambda name: (not name.endswith("packed"), name))
    description = {**_description(model), "tied": tied}
    header: dict[str, Any] = {"__metadata__": {"quire": json.dumps(description)}}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        kind, shape = _DTYPES[tensor.dtype], list(tensor.shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNED)
    file = Path(path)
    draft = file.with_name(f".{file.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(draft, "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                whole = tensors[name].contiguous().flatten()
                bytes_: Any = whole.view(torch.uint8).numpy()
                out.write(memoryview(bytes_))
        os.replace(draft, file)
    except OSError as error:
        raise PackedFileError(
            f"path must be a place for a file, but {str(path)!r} cannot be written: {error}. Make "
            f"the directory, or free space."
        ) from error
    finally:
        draft.unlink(missing_ok=True)  # after an error or Ctrl-C; else it is the file by now


def _tensors_of(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a model by name, and of those that are tied, the name of the first."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    known: dict[object, str] = {}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, tensor in {**buffers, **model.state_dict()}.items():
        if tensor.dtype not in _DTYPES:
            raise DtypeError(
                f"{name} must be of a dtype that safetensors has, but is "
                f"{dtype_name(tensor.dtype)}. Convert it."
            )
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        first = known.setdefault(key, name) if tensor.numel() else name
        if first == name:
            tensors[name] = tensor.detach()
        else:
            tied[name] = first
    return tensors, tied


def _description(model: nn.Module) -> dict[str, Any]:
    layers = {
        name: {**layer.shape._asdict(), "epilogue": epilogue_name(layer.epilogue)}
        for name, layer in packed_layers(model)
    }
    modules = list(model.named_modules())
    names = {id(module): name for name, module in modules}
    packed = (PackedLinear, PackedEmbedding)
    every = model.named_modules(remove_duplicate=False)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return {
        "version": _VERSION,
        "layers": layers,
        "embeddings": {
            name: [names[id(module.layer)], module.padding_idx]
            for name, module in modules
            if isinstance(module, PackedEmbedding)
        },
        "again": {  # packed modules in further places
            name: names[id(module)]
            for name, module in every
            if isinstance(module, packed) and names[id(module)] != name
        },
        "attentions": {
            name: module.packed_heads for name, module in modules if hasattr(module, "packed_heads")
        },
        "mlps": [name for name, module in modules if isinstance(module, GatedMLP)],
        "rows": {name: forward.kind for name, forward in row_wise(model)},
        "experts": [name for name, _ in packed_experts(model)],
        "routers": [name for name, _ in packed_routers(model)],
        "buffers": sorted(buffers.keys() - model.state_dict().keys()),
    }


def load(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Fill a model with what `save` has written, in place, and return it.

    `model` is of the class that was packed. Its own weights are not used, so make it without:

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)

    Weights are mapped: they are read when they are used, and processes share them.
    """
    tensors, description = _read(path)
    try:
        tied = description.get("tied", {})
        tensors.update({name: tensors[first] for name, first in tied.items()})
        _build(model, tensors, description)
        missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
        for name, first in tied.items():
            _tie(model, name, first)
    except (KeyError, AttributeError, TypeError, RuntimeError) as error:
        raise _refusal(path, f"it is of another model: {error}") from error
    if missing or unexpected:
        raise _refusal(path, f"missing are {missing[:3]}, unknown are {unexpected[:3]}")
    return model.requires_grad_(False)


def _tie(model: nn.Module, name: str, first: str) -> None:
    """Make a parameter the same object as another one, whose numbers it has."""
    home, _, last = name.rpartition(".")
    parent = model.get_submodule(home)
    place, _, found = first.rpartition(".")
    parameter = getattr(model.get_submodule(place), found)
    if isinstance(parameter, nn.Parameter) and isinstance(getattr(parent, last), nn.Parameter):
        setattr(parent, last, parameter)


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the mapped tensors of a file, and its description."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= size - 8:
                raise ValueError("it has no header")
            header = json.loads(file.read(length))
        description = json.loads(header.pop("__metadata__")["quire"])
        if description["version"] != _VERSION:
            raise ValueError(f"its version is {description['version']}, not {_VERSION}")
        first = length + 8
        whole = torch.from_file(os.fspath(path), shared=False, size=size, dtype=torch.uint8)
        tensors = {name: _tensor(whole[first:], entry) for name, entry in header.items()}
    except FileNotFoundError as error:
        raise MissingFileError(
            f"path must be a file that quire.linear.save has written, but there is none at "
            f"{str(path)!r}. Give the path that the model was saved under."
        ) from error
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise _refusal(path, str(error)) from error
    return tensors, description


def _tensor(data: Tensor, entry: Mapping[str, Any]) -> Tensor:
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end <= len(data):
        raise ValueError("it ends too early")
    dtype = _DTYPE_OF[entry["dtype"]]
    piece = data[begin:end]
    if piece.data_ptr() % dtype.itemsize:
        piece = piece.clone()
    return piece.view(dtype).view(entry["shape"])


def _build(model: nn.Module, tensors: dict[str, Tensor], description: Mapping[str, Any]) -> None:
    """Give a model the structure of the packed one."""
    layers = {}
    for name, fields in description["layers"].items():
        fields = dict(fields)
        epilogue = epilogue_of_name(fields.pop("epilogue"))
        own = {each: tensors[f"{name}.{each}"] for each in TENSORS if f"{name}.{each}" in tensors}
        layers[name] = PackedLinear(Shape(**fields), own, epilogue)
    for name, heads in description["attentions"].items():
        attention: Any = model.get_submodule(name)
        for each in ("q_proj", "k_proj", "v_proj"):
            delattr(attention, each)
        attention.qkv = layers.pop(f"{name}.qkv")
        place_attention(model.get_submodule(name.rpartition(".")[0]), heads)
    for name in description["mlps"]:
        layer = model.get_submodule(name.rpartition(".")[0])
        place_mlp(layer, GatedMLP(layers.pop(f"{name}.gate_up"), model.get_submodule(name)))
    for name in description["routers"]:
        place_router(model.get_submodule(name), layers.pop(f"{name}.packed"))
    for name in description["experts"]:
        experts: Any = model.get_submodule(name)
        parts = {
            part: nn.ModuleList(
                layers.pop(f"{name}.{part}.{expert}") for expert in range(experts.num_experts)
            )
            for part in ("gate_up", "down")
        }
        place_experts(experts, parts)
    for name, fields in description["rows"].items():
        place_rows(model.get_submodule(name), RowKind(*fields))
    for name, packed in layers.items():
        model.get_submodule(name)  # which must be there
        set_module(model, name, packed)
    for name, (tied, padding) in description["embeddings"].items():
        set_module(model, name, PackedEmbedding(layers[tied], padding))
    for name, first in description.get("again", {}).items():
        set_module(model, name, model.get_submodule(first))
    for name in description["buffers"]:  # that are in no state dict
        home, _, last = name.rpartition(".")
        model.get_submodule(home).register_buffer(last, tensors.pop(name), persistent=False)


def _refusal(path: str | os.PathLike[str], reason: str) -> PackedFileError:
    return PackedFileError(
        f"path must be a file that quire.linear.save has written for a model like this one, but "
        f"{str(path)!r} is not: {reason}. Save the model again."
    )
