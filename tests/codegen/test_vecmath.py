"""Vector functions against float64 libm (mpmath for float64), in units of the last place."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from mpmath import mp, mpf
from numpy.typing import NDArray

from quire.codegen.llvm import jit, vecmath
from quire.codegen.llvm.builder import Function, Module
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import F16, F32, F64, I64, PTR, Type
from quire.codegen.llvm.values import Value
from quire.errors import CodegenError

pytestmark = pytest.mark.every_width

Unary = Callable[[Function, Value], Value]
Array = NDArray[np.floating]

EXACT: dict[str, Callable[[Array], Array]] = {
    "exp2": np.exp2,
    "exp4_nonpositive": lambda x: np.exp2(2 * x),
    "exp4": lambda x: np.exp2(2 * x),
    "exp": np.exp,
    "log2": np.log2,
    "log": np.log,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)),
    "erf": lambda x: torch.erf(torch.from_numpy(np.ascontiguousarray(x))).numpy(),
    "sin": np.sin,
    "cos": np.cos,
}
ULP_F32 = {
    "exp2": 1.0,
    "exp4_nonpositive": 1.0,
    "exp4": 1.0,
    "exp": 1.5,
    "log2": 2.0,
    "log": 1.5,
    "tanh": 7.0,
    "sigmoid": 3.0,
    "erf": 7.0,
    "sin": 2.0,
    "cos": 2.0,
}
ULP_F64 = ULP_F32 | {"tanh": 3.0, "erf": 3.0}
"""The bounds that the docstrings of vecmath.py state."""


@functools.cache
def compiled(target: Target, name: str, element: Type, arity: int = 1) -> Callable[..., None]:
    """out[i] = function(x[i], ...) for n numbers, a multiple of the lanes."""
    module, vector = Module(), target.vector(element)
    pointers = {f"x{k}": PTR for k in range(arity)} | {"out": PTR}
    with module.function(name, {"n": I64, **pointers}) as f:
        n, *inputs, out = f.parameters
        with f.range(0, n, vector.lanes) as i:
            values = [f.load(vector, x, i) for x in inputs]
            f.store(getattr(vecmath, name)(f, *values), out, i)
    code = jit.load(jit.compile_object(module.text, target), [name])
    types = [ctypes.c_int64] + [ctypes.c_void_p] * (arity + 1)
    function = ctypes.CFUNCTYPE(None, *types)(code.address(name))

    def call(*arrays: Array) -> None:
        assert len(arrays[0]) % vector.lanes == 0
        function(len(arrays[0]), *(a.ctypes.data for a in arrays))

    call.code = code  # type: ignore[attr-defined]
    return call


def apply(name: str, *inputs: Array) -> Array:
    element = F32 if inputs[0].dtype == np.float32 else F64
    target, size = Target.host(), len(inputs[0])
    lanes = target.lanes(element)
    padded = [np.ascontiguousarray(np.pad(x, (0, -size % lanes))) for x in inputs]
    out = np.empty_like(padded[0])
    compiled(target, name, element, len(inputs))(*padded, out)
    return out[:size]


def ulps(got: NDArray[np.float32], exact: NDArray[np.float64]) -> NDArray[np.float64]:
    """The distance in units of the last place of float32; 0 where both are NaN or equal."""
    with np.errstate(over="ignore", invalid="ignore"):
        nearest = exact.astype(np.float32)
        step = np.spacing(np.minimum(np.abs(nearest), np.finfo(np.float32).max)).astype(np.float64)
        distance = np.abs(got.astype(np.float64) - exact) / step
    same = (got == nearest) | (np.isnan(got) & np.isnan(nearest))
    return np.where(same, 0.0, np.where(np.isnan(distance), np.inf, distance))


def worst_f32(name: str, chunks: Iterator[NDArray[np.uint32]]) -> tuple[float, float]:
    """The largest error over some bit patterns, and where it is."""
    worst = (0.0, 0.0)
    for bits in chunks:
        x = bits.view(np.float32)
        if name == "exp4_nonpositive":
            x = x[~(x > 0)]
        with np.errstate(all="ignore"):
            exact = EXACT[name](x.astype(np.float64))
        got = apply(name, x)
        error = ulps(got, exact)
        if name == "exp4_nonpositive":  # may flush below the normal numbers
            tiny = np.float64(np.finfo(np.float32).tiny)
            error = np.where((np.abs(exact) < tiny) & (got >= 0) & (got <= tiny), 0.0, error)
        if len(error) and error.max() > worst[0]:
            worst = (float(error.max()), float(x[error.argmax()]))
    return worst


def patterns(step: int) -> Iterator[NDArray[np.uint32]]:
    """Every step-th of the 2**32 bit patterns, in chunks."""
    size = (1 << 24) - (1 << 24) % step
    for start in range(0, 1 << 32, size):
        yield np.arange(start, min(start + size, 1 << 32), step, dtype=np.uint64).astype(np.uint32)


@pytest.mark.parametrize("name", sorted(EXACT))
def test_float32_within_bound(name: str) -> None:
    error, where = worst_f32(name, patterns(4099))
    assert error <= ULP_F32[name], f"{error} ulp at {where!r}"


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", sorted(EXACT))
def test_float32_within_bound_everywhere(name: str) -> None:
    error, where = worst_f32(name, patterns(1))
    assert error <= ULP_F32[name], f"{error} ulp at {where!r}"


# --- float64

LONG: dict[str, Callable[[Array], Array]] = EXACT | {
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "erf": lambda x: np.array([np.longdouble(mp.nstr(mp.erf(mpf(float(v))), 25)) for v in x]),
}


def samples(name: str) -> Array:
    """Where functions are used, where they are hard, and everywhere else."""
    rng, count = np.random.default_rng(0), 1000 if name == "erf" else 10000
    parts = [
        rng.uniform(-1, 1, count),
        rng.uniform(-20, 20, count),
        rng.uniform(0.5, 2.0, count),
        rng.uniform(-740, 700, count),
        rng.normal(size=count) * 10.0 ** rng.uniform(-300, 300, count),
    ]
    if name in ("sin", "cos"):
        parts += [rng.uniform(-(2**30), 2**30, count)]
    x = np.concatenate(parts)
    if name == "exp4_nonpositive":
        x = -np.abs(x)
    return np.abs(x) if name in ("log", "log2") else x


@pytest.mark.parametrize("name", sorted(LONG))
def test_float64_within_bound(name: str) -> None:
    x = samples(name)
    with np.errstate(all="ignore"):
        exact = LONG[name](x.astype(np.longdouble))
        nearest = exact.astype(np.float64)
        step = np.spacing(np.minimum(np.abs(nearest), np.finfo(np.float64).max))
        if name in ("sin", "cos"):  # near its zeros the error is one of the reduction
            step = np.maximum(step, np.spacing(0.25))
        got = apply(name, x)
        error = np.abs(got - exact) / step
    normal = np.abs(nearest) > np.finfo(np.float64).tiny
    error = np.where((got == nearest) | ~normal, 0.0, error)
    assert np.all(np.abs(got[~normal]) <= 2 * np.finfo(np.float64).tiny)
    assert error.max() <= ULP_F64[name], f"{error.max()} ulp at {x[error.argmax()]!r}"


# --- values that are not like others

INF, NAN = np.inf, np.nan
SPECIAL = {
    "exp2": [(0.0, 1.0), (-INF, 0.0), (INF, INF), (NAN, NAN), (-3.0, 0.125), (10.0, 1024.0)],
    "exp4": [(0.0, 1.0), (-INF, 0.0), (INF, INF), (NAN, NAN), (-1.5, 0.125), (5.0, 1024.0)],
    "exp4_nonpositive": [(0.0, 1.0), (-INF, 0.0), (NAN, NAN), (-1.5, 0.125), (-5000.0, 0.0)],
    "exp": [(0.0, 1.0), (-INF, 0.0), (INF, INF), (NAN, NAN), (-5000.0, 0.0), (5000.0, INF)],
    "log2": [(1.0, 0.0), (0.0, -INF), (INF, INF), (NAN, NAN), (-1.0, NAN), (0.125, -3.0)],
    "log": [(1.0, 0.0), (0.0, -INF), (-0.0, -INF), (INF, INF), (NAN, NAN), (-INF, NAN)],
    "tanh": [(0.0, 0.0), (INF, 1.0), (-INF, -1.0), (NAN, NAN), (50.0, 1.0), (1e-30, 1e-30)],
    "sigmoid": [(0.0, 0.5), (INF, 1.0), (-INF, 0.0), (NAN, NAN), (50.0, 1.0)],
    "erf": [(0.0, 0.0), (INF, 1.0), (-INF, -1.0), (NAN, NAN), (30.0, 1.0)],
    "sin": [(0.0, 0.0), (INF, NAN), (-INF, NAN), (NAN, NAN), (1e-30, 1e-30)],
    "cos": [(0.0, 1.0), (INF, NAN), (-INF, NAN), (NAN, NAN)],
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", sorted(SPECIAL))
def test_special_values(name: str, dtype: type[np.floating]) -> None:
    points = np.array(SPECIAL[name], dtype=dtype)
    np.testing.assert_array_equal(apply(name, points[:, 0]), points[:, 1])


@pytest.mark.parametrize("name", sorted(EXACT))
def test_nan_with_a_payload_stays_nan(name: str) -> None:
    payloads = np.array([0x7FC00001, 0x7F800001, 0xFFC001FF, 0x7FFFFFFF], dtype=np.uint32)
    assert np.isnan(apply(name, payloads.view(np.float32))).all()


@pytest.mark.parametrize("name", ["tanh", "erf"])
def test_sigmoids_stay_within_one(name: str) -> None:
    x = np.linspace(-20, 20, 1 << 18, dtype=np.float32)
    assert np.abs(apply(name, x)).max() <= 1.0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_pow_has_the_special_cases_of_c(dtype: type[np.floating]) -> None:
    numbers = [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 7.5, INF, -INF, NAN]
    x, y = (a.ravel().astype(dtype) for a in np.meshgrid(numbers, numbers))
    with np.errstate(all="ignore"):
        exact = np.power(x.astype(np.longdouble), y.astype(np.longdouble)).astype(dtype)
    got = apply("pow", x, y)
    np.testing.assert_allclose(got, exact, rtol=32 * np.finfo(dtype).eps)
    np.testing.assert_array_equal(np.signbit(got[got == 0]), np.signbit(exact[exact == 0]))


def test_pow_within_bound() -> None:
    rng = np.random.default_rng(1)
    x = np.exp(rng.uniform(-10, 10, 50000)).astype(np.float32)
    y = rng.uniform(-8, 8, 50000).astype(np.float32)
    exact = np.power(x.astype(np.float64), y.astype(np.float64))
    assert ulps(apply("pow", x, y), exact).max() <= 1.0
    x64, y64 = x.astype(np.float64), y.astype(np.float64)
    long = np.power(x64.astype(np.longdouble), y64.astype(np.longdouble))
    error = np.abs(apply("pow", x64, y64) - long) / np.spacing(long.astype(np.float64))
    assert (error <= 4 + 2 * np.abs(y64 * np.log2(x64))).all()


@pytest.mark.parametrize("element", [F32, F64])
def test_scalars_and_vectors_agree(element: Type) -> None:
    """Uniform values are computed as scalars and must give the bits that vectors give."""
    module, names = Module(), sorted(EXACT)
    with module.function("all", {"x": element, "out": PTR}) as f:
        x, out = f.parameters
        for place, name in enumerate(names):
            f.store(getattr(vecmath, name)(f, x), out, place)
    code = jit.load(jit.compile_object(module.text, Target.host()), ["all"])
    dtype, c_type = (
        (np.float32, ctypes.c_float) if element == F32 else (np.float64, ctypes.c_double)
    )
    function = ctypes.CFUNCTYPE(None, c_type, ctypes.c_void_p)(code.address("all"))
    for number in (-0.7, -3.25, -11.0):
        out = np.empty(len(names), dtype=dtype)
        function(number, out.ctypes.data)
        for name, scalar in zip(names, out, strict=True):
            np.testing.assert_array_equal(apply(name, np.full(8, number, dtype)), scalar)


def test_other_types_are_refused() -> None:
    module = Module()
    with module.function("f", {"x": F16}) as f, pytest.raises(CodegenError, match="convert it"):
        vecmath.exp2(f, f.parameters[0])
