"""patch_torch makes PyTorch's names call quire, and unpatch_torch restores PyTorch."""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from graphs import BLOCKS, Graphs, Model, causal, qkv, slope
from torch import Tensor
from torch.nested._internal.sdpa import jagged_scaled_dot_product_attention as early_jagged
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.experimental import _paged_attention as torch_paged
from torch.nn.attention.flex_attention import create_block_mask as early_create_block_mask
from torch.nn.attention.flex_attention import create_mask as early_create_mask
from torch.nn.attention.flex_attention import flex_attention as early

import quire
from quire.api import patch
from quire.api.patch import ROWS, patch_torch, unpatch_torch
from quire.backends import inductor
from quire.errors import TorchVersionError

EARLY = {
    "flex_attention": early,
    "create_block_mask": early_create_block_mask,
    "create_mask": early_create_mask,
    "jagged_scaled_dot_product_attention": early_jagged,
    **{
        f"PagedAttention.{name}": getattr(torch_paged.PagedAttention, name)
        for name in patch.PAGED_METHODS
    },
}


MODULES = {row.name: row.module for row in ROWS}


def state(function: Any) -> tuple[Any, ...]:
    """Return everything that could change in a function."""
    return (
        function.__code__,
        function.__defaults__,
        function.__kwdefaults__,
        dict(function.__dict__),
        inspect.signature(function),
    )


BEFORE = {name: state(function) for name, function in EARLY.items()}


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    assert patch._depth == 0
    assert {name: state(function) for name, function in EARLY.items()} == BEFORE


def is_ours() -> bool:
    """Only ours has a backward pass on the CPU."""
    try:
        return bool(early(*qkv(requires_grad=True)).requires_grad)
    except NotImplementedError:
        return False


def test_every_row_is_here() -> None:
    assert {row.name for row in ROWS} == EARLY.keys()


def test_a_context() -> None:
    assert not is_ours()
    with patch_torch():
        assert is_ours()
    assert not is_ours()


def test_two_calls() -> None:
    patch_torch()
    assert is_ours()
    unpatch_torch()
    assert not is_ours()


def test_an_error_leaves_the_context() -> None:
    with pytest.raises(KeyError), patch_torch():
        raise KeyError
    assert not is_ours()


def test_nested() -> None:
    with patch_torch():
        with patch_torch():
            patch_torch()
        assert is_ours()
        unpatch_torch()
        assert is_ours()
    assert not is_ours()


def test_nothing_to_undo() -> None:
    unpatch_torch()
    unpatch_torch()
    with patch_torch():
        assert is_ours()


def test_many_threads_at_once() -> None:
    def work() -> None:
        for _ in range(20):
            with patch_torch():
                early_create_mask(causal, 1, 1, 2, 2, "cpu")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not is_ours()


@pytest.mark.parametrize("name", EARLY)
def test_the_objects_stay_what_they_are(name: str) -> None:
    function = EARLY[name]
    with patch_torch():
        module = importlib.import_module(MODULES[name])
        assert operator.attrgetter(name)(module) is function
        assert inspect.signature(function) == BEFORE[name][-1]
        assert function.__qualname__ == name
        assert pickle.loads(pickle.dumps(function)) is function


def test_whoever_holds_the_function_gets_ours() -> None:
    query, key, value = qkv()
    table, bound = {"flex": early}, functools.partial(early, score_mod=slope)
    expected = quire.flex_attention(query, key, value, slope)
    with patch_torch():
        assert torch.equal(bound(query, key, value), expected)
        assert torch.equal(table["flex"](query, key, value, slope), expected)
        assert torch.equal(torch_flex.flex_attention(query, key, value, slope), expected)


def test_block_masks_are_ours() -> None:
    with patch_torch():
        blocks = early_create_block_mask(causal, None, None, 64, 64, BLOCK_SIZE=16)
        assert type(blocks) is quire.BlockMask
        assert early_create_mask(causal, None, None, 2, 2).tolist() == [
            [[[True, False], [True, True]]]
        ]
        assert pickle.loads(pickle.dumps(blocks)).equal(blocks)
        assert str(blocks) and blocks[0].to_dense().shape == (1, 1, 4, 4)
        theirs = torch_flex.BlockMask.from_kv_blocks(blocks.kv_num_blocks, blocks.kv_indices)
        assert type(theirs) is torch_flex.BlockMask


def test_masks_put_together_by_pytorch_are_understood() -> None:
    """Their functions are not exchanged: ours trace through them, without a warning."""
    query, key, value = qkv()
    near = torch_flex.and_masks(causal, lambda b, h, q, k: q - k < 4)
    either = torch_flex.or_masks(near, torch_flex.noop_mask)
    with patch_torch():
        for mask in (near, either):
            blocks = torch_flex.create_block_mask(
                mask, None, None, 32, 32, BLOCK_SIZE=16, device="cpu"
            )
            out = torch_flex.flex_attention(query, key, value, block_mask=blocks)
            assert torch.equal(out, quire.flex_attention(query, key, value, mask_mod=mask))


def test_pages_are_kept_by_ours_also_if_made_before() -> None:
    pages = torch_paged.PagedAttention(8, 4, 2, "cpu")
    pages.reserve(torch.tensor([0]), torch.tensor([8]))
    pages.reserve(torch.tensor([1]), torch.tensor([4]))
    cache = torch.zeros(1, 1, 32, 2)
    new = (torch.tensor([[4]]), *torch.ones(2, 1, 1, 1, 2), cache, cache.clone())
    with patch_torch():
        with pytest.raises(quire.QuireError, match="below 4, the number of positions that slot 1"):
            pages.assign(torch.tensor([1]), *new)
        assert not cache.any()
        pages.erase(torch.tensor(1))
        pages.reserve(torch.tensor([0, 1]), torch.tensor([12, 4]))
        blocks = early_create_block_mask(causal, 1, None, 4, 32, BLOCK_SIZE=4)
        theirs = pages.convert_logical_block_mask(blocks, torch.tensor([1]))
        assert type(theirs) is quire.BlockMask
        assert theirs.kv_num_blocks.tolist() == [[[1]]]
        assert theirs.mask_mod(*torch.tensor([0, 0, 3, 4 * int(pages.page_table[1, 0])]))
        assert pages.get_score_mod(None)(*torch.tensor([1, 0, 0, 0, 31])) == -torch.inf
    twin = quire.PagedAttention(8, 4, 2, "cpu")
    twin.__dict__ = pages.__dict__
    twin.check_integrity()
    pages.assign(torch.tensor([1]), *new)  # PyTorch's again, which writes somewhere
    assert cache.any()


# PyTorch's own, where it is PyTorch's turn


def test_other_devices_are_pytorchs() -> None:
    query, key, value = (x.to("meta") for x in qkv())
    with patch_torch():
        with pytest.raises(ValueError, match="FlexAttention is only supported on CUDA"):
            torch_flex.flex_attention(query, key, value)
        with pytest.raises(ValueError, match="FlexAttention is only supported on CUDA"):
            torch_flex.flex_attention(query=query, key=key, value=value)
        for device in ("meta", torch.device("meta")):
            mask = torch_flex.create_mask(causal, 1, 1, 4, 4, device)
            assert mask.device.type == "meta"
            assert torch_flex.create_mask(causal, 1, 1, 4, 4, device=device).device == mask.device
        mods = {
            device: torch_paged.PagedAttention(8, 4, 2, device).get_mask_mod(None)
            for device in ("cpu", "meta")
        }
        assert mods["cpu"].__name__ == "noop_mask in pages"
        assert mods["meta"].__name__ == "new_mask_mod"


def test_without_a_device_the_accelerator_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    with patch_torch():
        assert patch._is_cpu(None)
        assert torch_flex.create_block_mask(causal, None, None, 4, 4).device.type == "cpu"
        cuda = torch.device("cuda")
        monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: cuda)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
        assert patch._is_cpu(None)  # PyTorch is built for it, and it is not there
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        assert not patch._is_cpu(None)


def test_a_mistake_is_told_by_ours() -> None:
    with patch_torch(), pytest.raises(quire.QuireError, match=r"query must be a torch\.Tensor"):
        torch_flex.flex_attention([1.0], [1.0], [1.0])


def test_our_way_to_pytorch_stays_open() -> None:
    """We call PyTorch for other devices and for whole graphs: this must not call quire again."""
    with patch_torch():
        assert inductor.torch_attention.__code__ is BEFORE["flex_attention"][0]
        with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
            inductor.torch_attention(*qkv(requires_grad=True))


# torch.compile


@pytest.fixture
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return early(query + 1, key, value, slope, BLOCKS) * 2


@pytest.mark.usefixtures("_fresh_dynamo")
def test_compiled_before_patched_after() -> None:
    graphs, operands = Graphs(), qkv()
    compiled = torch.compile(model, backend=graphs)
    theirs = compiled(*operands)
    assert graphs.uses_torch
    graphs.graphs.clear()
    with patch_torch():
        ours = compiled(*operands)
        assert torch.equal(ours, model(*operands))
        assert graphs.graphs and not graphs.uses_torch
    assert torch.equal(compiled(*operands), theirs)


@pytest.mark.usefixtures("_fresh_dynamo")
def test_of_our_code_only_what_was_exchanged_is_compiled() -> None:
    compiled = set()
    hook = torch._dynamo.convert_frame.register_bytecode_hook(
        lambda old, new: compiled.add((old.co_filename, old.co_name))
    )
    try:
        with patch_torch():
            torch.compile(model, backend="eager")(*qkv())
    finally:
        hook.remove()
    assert {filename for filename, _ in compiled} == {__file__}


@pytest.mark.usefixtures("_fresh_dynamo")
def test_one_graph_has_our_operator() -> None:
    graphs, operands = Graphs(), qkv()
    with patch_torch():
        out = torch.compile(model, backend=graphs, fullgraph=True)(*operands)
        assert graphs.uses_quire and not graphs.uses_torch
        assert torch.equal(out, model(*operands))
        program = torch.export.export(Model(early), tuple(operands))
        assert torch.equal(program.module()(*operands), model(*operands))


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.filterwarnings("ignore::quire.OneGraphWarning")
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_creation_of_masks(fullgraph: bool) -> None:
    compiled = torch.compile(early_create_block_mask, backend="eager", fullgraph=fullgraph)
    with patch_torch():
        blocks = compiled(causal, None, None, 32, 32, device="cpu", BLOCK_SIZE=16)
    assert isinstance(blocks, quire.BlockMask) is not fullgraph
    assert torch.equal(blocks.to_dense(), BLOCKS.to_dense())


# A row that cannot be exchanged


def test_a_row_that_fails_undoes_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = patch.Exchange("torch", "no_such_function", quire.flex_attention, 0)
    monkeypatch.setattr(patch, "ROWS", (*ROWS, bad))
    with pytest.raises(TorchVersionError, match=r"PyTorch must have torch\.no_such_function"):
        patch_torch()
    assert not is_ours()
