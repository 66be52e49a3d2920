"""What a packed layer computes, against float64 and decoded weights."""

from __future__ import annotations

import copy
import pickle
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from compare import assert_as_good_as
from threads import at_once
from torch import Tensor, nn

from quire import reference
from quire.errors import (
    ArgumentError,
    CapturedIndexError,
    DeviceError,
    DtypeError,
    PackedTrainingError,
    ShapeError,
    TensorKindError,
)
from quire.linear import PackedEmbedding, PackedLinear, Weights, matmul, pack

WEIGHTS = get_args(Weights)
STEPS = {"float32": 0, "bfloat16": 2**-8, "float16": 2**-11, "int8": 1 / 253, "int4": 1 / 7}
"""How far a weight may be from what was packed, as a part of the largest weight of its group."""


def stored(weights: str) -> str:
    return {"w8a8": "int8", "w4a8": "int4"}.get(weights, weights)


@pytest.mark.every_width
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("rows", [1, 3, 6, 40])
def test_it_is_as_exact_as_torch(weights: Weights, rows: int) -> None:
    linear, x = nn.Linear(330, 90), torch.randn(rows, 330)
    layer = PackedLinear.from_linear(linear, weights)
    assert linear.bias is not None
    truth = reference.linear(x, layer.weight, linear.bias, integers=weights.endswith("a8"))
    rounded = reference.quantised_rows(x).float() if weights.endswith("a8") else x
    assert_as_good_as(layer(x), F.linear(rounded, layer.weight, linear.bias).detach(), truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("depth", [64, 300, 576, 700, 2048, 8192])
def test_long_sums_are_as_exact_as_torchs(depth: int, dtype: torch.dtype) -> None:
    """Of 4,096 sums, the error is at most twice torch's, on average and at worst."""
    weight, x = torch.randn(128, depth) / depth**0.5, torch.randn(32, depth)
    weight, x = weight.to(dtype), x.to(dtype)
    truth = reference.linear(x, weight)
    y, torchs = PackedLinear.from_weight(weight)(x), F.linear(x, weight)
    assert_as_good_as(y, torchs, truth)
    ours, theirs = ((each.double() - truth).abs() for each in (y, torchs))
    assert ours.pow(2).mean().sqrt() <= 2 * theirs.pow(2).mean().sqrt()
    assert ours.max() <= 2 * theirs.max()


@pytest.mark.parametrize("weights", STEPS)
def test_weights_are_close_to_what_was_packed(weights: Weights) -> None:
    weight = torch.randn(50, 100)
    decoded = PackedLinear.from_weight(weight, weights=weights).weight
    groups, error = (F.pad(x, (0, 28)).unflatten(1, (-1, 32)) for x in (weight, decoded - weight))
    assert (error.abs() <= STEPS[weights] * groups.abs().amax(2, keepdim=True) * 1.01).all()
    again = PackedLinear.from_weight(decoded, weights=weights).weight
    assert torch.allclose(again, decoded, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("size", [1e-3, 1e-4, 1e-5, 1e-6, 1e-7])
@pytest.mark.parametrize(("weights", "steps"), [("int8", 127), ("int4", 7.5)])
def test_tiny_weights_stay_near(weights: Weights, steps: float, size: float) -> None:
    """Scales and offsets are multiples of 2**-24 there, so that is the step of small weights."""
    weight = (torch.rand(32, 64) * 2 - 1) * size
    error = (PackedLinear.from_weight(weight, weights=weights).weight - weight).abs().max()
    assert error <= size / steps / 2 + 2**-24


@pytest.mark.every_width
@pytest.mark.parametrize("weights", ["bfloat16", "float16", "int8", "int4"])
@pytest.mark.parametrize("rows", [1, 4, 6, 20, 70])
def test_a_format_has_the_bits_of_float32_weights_that_are_decoded(
    weights: Weights, rows: int
) -> None:
    layer, x = (
        PackedLinear.from_weight(torch.randn(40, 200), weights=weights),
        torch.randn(rows, 200),
    )
    assert torch.equal(layer(x), PackedLinear.from_weight(layer.weight)(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_activations_give_narrow_results(dtype: torch.dtype) -> None:
    weight, x = torch.randn(40, 200), torch.randn(7, 200).to(dtype)
    y = PackedLinear.from_weight(weight)(x)
    assert y.dtype == dtype
    assert torch.equal(y, PackedLinear.from_weight(weight)(x.float()).to(dtype))


@pytest.mark.parametrize("shape", [(5, 7, 30), (30,), (1, 30), (2, 0, 30), (0, 30)])
def test_shapes(shape: tuple[int, ...]) -> None:
    linear, x = nn.Linear(30, 20), torch.randn(shape)
    y = PackedLinear.from_linear(linear)(x)
    assert y.shape == (*shape[:-1], 20)
    assert torch.allclose(y, linear(x), atol=1e-5)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_nan_in_a_weight_gives_nan_in_its_column(weights: Weights) -> None:
    weight = torch.randn(20, 70)
    weight[3, 40] = torch.nan
    y = PackedLinear.from_weight(weight, weights=weights)(torch.randn(6, 70))
    assert y[:, 3].isnan().all() and not y[:, [*range(3), *range(4, 20)]].isnan().any()


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("number", [torch.inf, torch.nan])
def test_a_row_that_is_not_finite_stays_by_itself(weights: Weights, number: float) -> None:
    x = torch.randn(6, 70)
    x[2, 5] = number
    y = PackedLinear.from_weight(torch.randn(20, 70).abs() + 0.1, weights=weights)(x)
    assert y[[0, 1, 3, 4, 5]].isfinite().all()
    assert not y[2].isfinite().any()


def test_groups_of_zeros_and_of_tiny_numbers() -> None:
    x = torch.zeros(3, 64)
    x[1] = 1e-44
    x[2] = 1e30
    layer = PackedLinear.from_weight(torch.ones(4, 64), weights="w8a8")
    y = layer(x)
    assert y[:2].abs().max() < 1e-40
    assert torch.allclose(y[2], layer.weight.sum(1) * 1e30)


# --- norms and epilogues


@pytest.mark.parametrize("norm", [nn.RMSNorm(96, eps=1e-5), nn.LayerNorm(96), nn.RMSNorm(96)])
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_a_norm_before_the_product(norm: nn.Module, weights: Weights) -> None:
    norm = copy.deepcopy(norm)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.uniform_(0.5, 1.5)
    linear, x = nn.Linear(96, 40), torch.randn(9, 96) * 3
    layer = PackedLinear.from_linear(linear, weights, norm=norm)
    with torch.no_grad():
        expected = F.linear(norm(x), layer.weight, linear.bias)
    assert torch.allclose(layer(x), expected, atol=2e-5)
    assert torch.equal(layer(x)[4:5], layer(x[4:5]))
    assert f"norm={'layer' if isinstance(norm, nn.LayerNorm) else 'rms'!r}" in repr(layer)


def gelu(value: Any, row: Any, column: Any) -> Any:
    return F.gelu(value)


def add(value: Any, row: Any, column: Any, *, residual: Tensor) -> Any:
    return value + residual[row, column]


def test_an_epilogue_is_a_mod_of_value_row_and_column() -> None:
    linear, x = nn.Linear(50, 37), torch.randn(9, 50)
    layer = PackedLinear.from_linear(linear, epilogue=gelu)
    assert torch.allclose(layer(x), F.gelu(linear(x)), atol=1e-6)
    numbers = PackedLinear.from_linear(
        linear, epilogue=lambda value, row, column: row * 100 + column
    )
    assert torch.equal(numbers(x), torch.arange(9.0)[:, None] * 100 + torch.arange(37))
    many = torch.randn(300, 50)
    assert torch.equal(numbers(many)[:, 1], torch.arange(300.0) * 100 + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_call_gives_tensors_to_the_epilogue(dtype: torch.dtype) -> None:
    linear = nn.Linear(50, 37)
    layer = PackedLinear.from_linear(linear, epilogue=add)
    x, residual = torch.randn(2, 5, 50).to(dtype), torch.randn(2, 5, 37).to(dtype)
    expected = linear(x.float()) + residual.float()
    assert torch.allclose(layer(x, residual=residual).float(), expected, atol=3e-2)
    strided = torch.randn(2, 37, 5).to(dtype).transpose(1, 2)
    expected = linear(x.float()) + strided.float()
    assert torch.allclose(layer(x, residual=strided).float(), expected, atol=3e-2)
    with pytest.raises(ArgumentError, match=r"must give the tensors .*\['residual'\]"):
        layer(x)
    with pytest.raises(CapturedIndexError, match="must be inside of its tensors"):
        layer(x, residual=residual[:, :, :30])
    for shape in ((), (5, 0), (37,)):
        with pytest.raises(CapturedIndexError, match="must be inside of its tensors"):
            layer(x, residual=torch.zeros(shape, dtype=dtype))
    one = torch.randn(37).to(dtype)
    assert torch.equal(layer(x[0, 0], residual=one), layer(x[0, :1], residual=one[None])[0])
    with pytest.raises(DtypeError, match="residual must be"):
        layer(x, residual=residual.double())


def silu_and_mul(value: Any, other: Any, row: Any, block: Any, column: Any) -> Any:
    return F.silu(value) * other


@pytest.mark.parametrize("half", [48, 20])
@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("rows", [1, 3, 30])
def test_pairs_of_columns_that_merge(half: int, weights: Weights, rows: int) -> None:
    linear, x = nn.Linear(70, 2 * half), torch.randn(rows, 70)
    layer = PackedLinear.from_weight(
        linear.weight, linear.bias, weights=weights, epilogue=silu_and_mul, half=half, merges=True
    )
    gate, up = F.linear(x, layer.weight, linear.bias).chunk(2, 1)
    assert torch.allclose(layer(x), F.silu(gate) * up, atol=1e-5)


@pytest.mark.parametrize("half", [32, 10])
@pytest.mark.parametrize("rows", [1, 30])
def test_pairs_of_columns_that_rotate(half: int, rows: int) -> None:
    """Rotary embedding, as models of the Llama family define it."""
    linear, x, heads = nn.Linear(70, 6 * half), torch.randn(rows, 70), 3
    angle = torch.randn(rows, half)
    cos, sin = (torch.cat((each, each), 1) for each in (angle.cos(), angle.sin()))

    def rotate(value: Any, other: Any, row: Any, block: Any, column: Any) -> Any:
        turned = value * cos[row, column]
        turned = turned + torch.where(column < half, -other, other) * sin[row, column]
        return torch.where(block < 2, turned, value)

    layer = PackedLinear.from_weight(linear.weight, linear.bias, epilogue=rotate, half=half)
    y = linear(x).view(rows, heads, 2 * half)
    swapped = torch.cat((-y[..., half:], y[..., :half]), 2)
    expected = y * cos[:, None] + swapped * sin[:, None]
    expected[:, 2] = y[:, 2]
    assert torch.allclose(layer(x), expected.flatten(1), atol=1e-5)
    assert torch.equal(layer.weight, linear.weight)


# --- a module among others


def test_copies_pickles_and_state_dicts() -> None:
    layer, x = (
        PackedLinear.from_linear(nn.Linear(50, 37), "int8", norm=nn.RMSNorm(50)),
        torch.randn(3, 50),
    )
    y = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), y)
    fresh = PackedLinear.from_linear(nn.Linear(50, 37), "int8", norm=nn.RMSNorm(50))
    assert not torch.equal(fresh(x), y)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x), y)
    fresh.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(fresh(x), y)
    assert layer.to(torch.bfloat16)(x).allclose(y, atol=0.1)


def test_threads_of_python_may_share_a_layer() -> None:
    layer = PackedLinear.from_linear(nn.Linear(200, 150))
    inputs = [torch.randn(rows, 200) for rows in (1, 5, 40, 2)]
    expected = [layer(x) for x in inputs]
    found: list[Tensor | None] = [None] * 4

    def work(i: int) -> None:
        for _ in range(20):
            found[i] = layer(inputs[i])

    at_once(work, 4)
    for y, other in zip(expected, found, strict=True):
        assert other is not None and torch.equal(y, other)


def test_matmul_is_the_product_alone() -> None:
    linear, x = nn.Linear(50, 37), torch.randn(3, 50)
    layer = PackedLinear.from_linear(linear, norm=nn.RMSNorm(50), epilogue=gelu)
    assert torch.allclose(matmul(x, layer), x @ linear.weight.T, atol=1e-5)
    assert torch.equal(matmul(x, layer), matmul(x, layer))
    pairs = PackedLinear.from_weight(linear.weight[:32], half=16)
    with pytest.raises(ArgumentError, match="must have plain columns"):
        matmul(x, pairs)


def test_matmul_has_the_weights_of_the_layer_of_today() -> None:
    layer, other = (PackedLinear.from_linear(nn.Linear(50, 37)) for _ in range(2))
    x = torch.randn(3, 50)
    assert not torch.equal(matmul(x, layer), matmul(x, other))
    layer.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(matmul(x, layer), matmul(x, other))
    assert len(pickle.dumps(layer)) < 1.5 * layer.packed.nbytes


@pytest.mark.parametrize("half", [0, 10])
def test_a_layer_has_the_bias_and_the_norm_of_today(half: int) -> None:
    linear, norm, x = nn.Linear(50, 40), nn.LayerNorm(50), torch.randn(3, 50)
    layer = PackedLinear.from_weight(linear.weight, linear.bias, norm=norm, half=half)
    if half:
        layer.epilogue = lambda value, other, row, block, column: value + 2 * other

    def expected() -> Tensor:
        fresh = PackedLinear.from_weight(linear.weight, layer.bias, norm=norm, half=half)
        for name in ("norm_weight", "norm_bias"):
            setattr(fresh, name, getattr(layer, name).clone())
        fresh.epilogue = layer.epilogue
        return fresh(x)

    def changes(dtype: torch.dtype) -> None:
        for name in ("bias", "norm_weight", "norm_bias"):
            before = layer(x)
            setattr(layer, name, torch.randn_like(getattr(layer, name)))
            assert not torch.equal(layer(x), before), name
            assert torch.equal(layer(x), expected()), name
            getattr(layer, name).mul_(2)
            assert torch.equal(layer(x), expected()), name
        state = {name: torch.randn_like(each, dtype=dtype) for name, each in floats(layer).items()}
        layer.load_state_dict({**state, "packed": layer.packed})
        assert torch.equal(layer(x), expected())

    changes(torch.float32)
    layer.to(torch.bfloat16)
    changes(torch.bfloat16)
    layer.bias = None
    assert torch.equal(layer(x), expected())
    layer.bias = nn.Parameter(torch.randn(40), requires_grad=False)  # type: ignore[assignment]
    assert torch.equal(layer(x), expected())
    layer.bias = nn.Parameter(torch.randn(40), requires_grad=False)  # type: ignore[assignment]
    assert torch.equal(layer(x), expected()) and "bias" in layer.state_dict()


def floats(layer: PackedLinear) -> dict[str, Tensor]:
    return {name: each for name, each in layer.named_buffers() if name != "packed"}


def test_a_compiled_function_breaks_its_graph_here() -> None:
    layer, x = PackedLinear.from_linear(nn.Linear(50, 37)), torch.randn(3, 50)
    compiled = torch.compile(lambda x: layer(x) * 2, backend="eager")
    assert torch.equal(compiled(x), layer(x) * 2)


# --- refusals


def test_training_is_refused() -> None:
    layer, x = PackedLinear.from_linear(nn.Linear(50, 37)), torch.randn(3, 50, requires_grad=True)
    with pytest.raises(PackedTrainingError, match="must not require a gradient"):
        layer(x)
    with torch.no_grad():
        assert not layer(x).requires_grad
    assert not list(layer.parameters())


@pytest.mark.parametrize("where", ["bias", "norm_weight", "residual", "captured", "parameter"])
def test_gradients_that_would_be_lost_are_refused(where: str) -> None:
    scale, residual, x = torch.randn(37), torch.randn(3, 37), torch.randn(3, 50)

    def scaled(value: Any, row: Any, column: Any, *, residual: Any) -> Any:
        return value * scale[column] + residual[row, column]

    layer = PackedLinear.from_linear(nn.Linear(50, 37), norm=nn.RMSNorm(50), epilogue=scaled)
    if where != "parameter":
        layer(x, residual=residual)
    if where == "parameter":
        layer.bias = nn.Parameter(torch.randn(37))
    elif where in ("residual", "captured"):
        (residual if where == "residual" else scale).requires_grad_()
    else:
        getattr(layer, where).requires_grad_()
    with pytest.raises(PackedTrainingError, match="must not require a gradient"):
        layer(x, residual=residual)
    with torch.no_grad():
        assert not layer(x, residual=residual).requires_grad


def test_a_layer_on_another_device_is_refused() -> None:
    layer = PackedLinear.from_linear(nn.Linear(50, 37)).to("meta")
    with pytest.raises(DeviceError, match="packed must be on the CPU, as x is, but is on meta"):
        layer(torch.randn(3, 50))


@pytest.mark.parametrize("half", [0, 13])
def test_the_default_device_does_not_matter(half: int) -> None:
    linear, x = nn.Linear(53, 26), torch.randn(3, 53)  # of sizes that no other test has
    expected = F.layer_norm(x, (53,))
    norm = nn.LayerNorm(53)
    residual = torch.randn(3, 26)
    epilogue = None if half else add
    given = {} if half else {"residual": residual}
    with torch.device("meta"):
        layer = PackedLinear.from_weight(
            linear.weight, linear.bias, norm=norm, half=half, epilogue=epilogue
        )
        y, weight = layer(x, **given), layer.weight
    assert torch.equal(weight, linear.weight)
    truth = F.linear(expected, linear.weight, linear.bias) + (0 if half else residual)
    assert torch.allclose(y, truth, atol=1e-5)


def test_numbers_that_are_negated_when_they_are_read() -> None:
    x, bias, residual = (
        torch.randn(shape, dtype=torch.complex64).conj().imag for shape in ((3, 50), (37,), (3, 37))
    )
    assert x.is_neg() and bias.is_neg() and residual.is_neg()
    weight = torch.randn(37, 50)
    layer = PackedLinear.from_weight(weight, epilogue=add)
    layer.bias = bias
    y = layer(x, residual=residual)
    assert torch.allclose(y, F.linear(x, weight, bias) + residual, atol=1e-4)


def test_a_layer_without_columns_is_left() -> None:
    with torch.device("meta"), pytest.warns(UserWarning, match="zero-element"):
        linear = nn.Linear(0, 5)
    with pytest.raises(ShapeError, match="must have a column for each number of a row"):
        PackedLinear.from_linear(linear)
    assert pack(nn.Sequential(linear))[0] is linear  # type: ignore[index]


def test_other_rows_are_refused() -> None:
    layer = PackedLinear.from_linear(nn.Linear(50, 37))
    with pytest.raises(ShapeError, match="must end with 50 numbers"):
        layer(torch.randn(3, 51))
    with pytest.raises(DtypeError, match="x must be float32, bfloat16 or float16, but is float64"):
        layer(torch.randn(3, 50).double())
    with pytest.raises(DeviceError, match="x must be on the CPU"):
        layer(torch.randn(3, 50, device="meta"))
    with torch.device("meta"):
        elsewhere = nn.Linear(50, 37)
    with pytest.raises(DeviceError, match="the weight must be on the CPU"):
        PackedLinear.from_linear(elsewhere)
    nested = torch.nested.nested_tensor([torch.randn(2, 50)], layout=torch.jagged)
    with pytest.raises((TensorKindError, ShapeError)):
        layer(nested)


def test_layers_lie_side_by_side_in_large_pages() -> None:
    layers = [PackedLinear.from_linear(nn.Linear(100, 40)) for _ in range(3)]
    addresses = [layer.packed.data_ptr() for layer in layers]
    assert all(address % 64 == 0 for address in addresses)
    assert len({address // 2**21 for address in addresses}) <= 2
    assert all(layer.packed.untyped_storage().nbytes() == layer.packed.nbytes for layer in layers)
    large = PackedLinear.from_linear(nn.Linear(3000, 3000, bias=False))
    assert large.packed.data_ptr() % 2**21 == 0


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("packed", None),
        ("packed", torch.zeros(3, dtype=torch.uint8)),
        ("packed", torch.zeros(3 * 64 * 16 * 4)),
        ("packed", torch.zeros(2 * 3 * 64 * 16 * 4, dtype=torch.uint8)[::2]),
        ("bias", torch.zeros(36)),
        ("norm_weight", torch.zeros(49)),
        ("norm_bias", torch.zeros(1, 50)),
    ],
)
def test_tensors_of_other_sizes_are_refused(name: str, tensor: Any) -> None:
    """The kernel looks at no size: it would read beyond them."""
    layer = PackedLinear.from_linear(nn.Linear(50, 37), norm=nn.LayerNorm(50))
    layer(torch.randn(3, 50))
    setattr(layer, name, tensor)
    with pytest.raises(ShapeError, match=f"{name} must have .* Give the tensors of this layer"):
        layer(torch.randn(3, 50))
    with pytest.raises(ShapeError, match=name):
        PackedEmbedding(layer)(torch.tensor([3]))


def test_other_layers_are_refused() -> None:
    linear = nn.Linear(50, 37)
    with pytest.raises(ArgumentError, match=r"weights must be one of float32, .* but is 'int3'"):
        PackedLinear.from_linear(linear, "int3")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="norm must be an RMSNorm or a LayerNorm"):
        PackedLinear.from_linear(linear, norm=nn.BatchNorm1d(50))
    with pytest.raises(ShapeError, match="norm must be of 50 numbers"):
        PackedLinear.from_linear(linear, norm=nn.RMSNorm(49))
    with pytest.raises(ShapeError, match=r"must be \[N, K\]"):
        PackedLinear.from_weight(torch.randn(3))
    with pytest.raises(ShapeError, match="half is 20"):
        PackedLinear.from_weight(torch.randn(50, 3), half=20)
    with pytest.raises(ShapeError, match="columns in pairs must be"):
        PackedLinear.from_weight(torch.randn(50, 3), merges=True)
    with pytest.raises(ShapeError, match="bias must have 50 numbers"):
        PackedLinear.from_weight(torch.randn(50, 3), torch.zeros(49))
    with pytest.raises(DtypeError, match="must be float32, bfloat16 or float16, but is int64"):
        PackedLinear.from_weight(torch.ones(3, 3, dtype=torch.int64))
