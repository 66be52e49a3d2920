"""The one way to compare numbers: bound the error, do not tune the tolerance.

`actual` is compared with `truth`, the same computation in float64. It may be wrong by at most a
small multiple of what `peer`, plain arithmetic in the same dtype, is wrong by.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from strategies import LAYOUTS, Case
from torch import Tensor

from quire import AuxRequest, create_block_mask, flex_attention, reference
from quire.config import Backend
from quire.mods.dropout import Dropout

RMS_FACTOR = 2.0
MAX_FACTOR = 4.0


def assert_as_good_as(
    actual: Tensor,
    peer: Tensor,
    truth: Tensor,
    name: str = "output",
    *,
    size: float = 1.0,
    most: float = MAX_FACTOR,
) -> None:
    """Error of `actual` against float64 `truth`: rms at most 2 x, maximum at most 4 x `peer`'s.

    `most` is another factor for the maximum.

    A peer may be right by luck, or be the truth itself. So on top of both comes one rounding of
    the largest value, and a few of `size` in the dtype that sums are made in: the root of the sum
    of squares of what is added up, which may be large where the sum is small.
    """
    assert actual.shape == truth.shape, f"{name}: shape {actual.shape}, expected {truth.shape}"
    assert actual.dtype == peer.dtype, f"{name}: dtype {actual.dtype}, expected {peer.dtype}"
    assert truth.dtype == torch.float64, "the truth is computed in float64"
    _assert_same_specials(actual, truth, name)
    finite = torch.isfinite(truth)
    if not bool(finite.any()):
        return
    exact = truth[finite]
    ours = (actual.double()[finite] - exact).abs()
    theirs = (peer.double()[finite] - exact).nan_to_num(0.0, 0.0, 0.0).abs()
    epsilon = _epsilon(peer.dtype, exact.abs().max().item(), size)
    rms, rms_bound = _rms(ours), RMS_FACTOR * _rms(theirs) + epsilon
    assert rms <= rms_bound, f"{name}: rms error {rms:.3e} exceeds {rms_bound:.3e}"
    worst, worst_bound = ours.max().item(), most * theirs.max().item() + epsilon
    assert worst <= worst_bound, f"{name}: error {worst:.3e} exceeds {worst_bound:.3e}"


def _epsilon(dtype: torch.dtype, largest: float, size: float) -> float:
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.finfo(dtype).eps * largest + 32 * torch.finfo(sums).eps * size


def _assert_same_specials(actual: Tensor, truth: Tensor, name: str) -> None:
    """NaN, inf and -inf stand in the same places."""
    for what in (torch.isnan, torch.isposinf, torch.isneginf):
        different = what(actual) != what(truth)
        assert not bool(different.any()), (
            f"{name}: {what.__name__} differs at {int(different.sum())} elements, first at "
            f"{different.nonzero()[0].tolist()}"
        )


def _rms(error: Tensor) -> float:
    return error.square().mean().sqrt().item()


# --- whole calls ---------------------------------------------------------------------------------


def assert_matches_reference(case: Case, backend: Backend = "eager") -> None:
    """Outputs and all gradients of `flex_attention` are as good as those of the reference.

    The truth is the reference on float64 copies, the peer the reference in the dtype itself.
    """
    actual = _results(case, case.dtype, lambda *args: _ours(*args, backend=backend))
    peer = _results(case, case.dtype, _reference)
    truth = _results(case, torch.float64, _reference)
    for name, exact in truth.items():
        # The gradient of a tensor adds up those of the scores that it takes part in.
        numbers_added = case.num_scores / max(1, exact.numel()) if name.startswith("d ") else 1
        size = math.sqrt(max(1, numbers_added))
        if name.startswith("d ") and case.dtype == torch.float64:
            # The truth is then as far off as what it judges, by sums over values and a difference.
            size *= 2 * math.sqrt(case.value_dim)
        if name == "entropy":  # a difference of scores, however large they are
            size = max([1.0, *truth["max_scores"].nan_to_num(0.0, 0.0, 0.0).abs().flatten()])
        assert_as_good_as(actual[name], peer[name], exact, name, size=size)


Named = dict[str, Tensor]
Attend = Callable[[Case, Named, Named], Named]


def _results(case: Case, dtype: torch.dtype, attend: Attend) -> Named:
    """out, lse, max_scores, entropy and the gradient of a random function of the first two."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    narrow = {"query": dtype, "key": dtype, "value": dtype}
    # Whatever the dtype, the numbers are those that the case's own dtype can hold.
    leaves = {
        name: tensor.to(case.dtype if name in narrow else torch.float32)
        .to(narrow.get(name, wide))
        .requires_grad_()
        for name, tensor in {**case.operands(), **case.captures()}.items()
    }
    operands = {name: leaves[name] for name in case.operands()}
    for name in narrow:
        operands[name] = LAYOUTS[case.layout](operands[name])
    captures = {name: leaves[name] for name in case.captures()}
    torch.set_default_dtype(wide)  # in which mods divide integers
    try:
        outputs = attend(case, operands, captures)
        sums = [_random_sum(case, outputs[name], n) for n, name in enumerate(("out", "lse"))]
        grads = torch.autograd.grad(sum(sums), list(leaves.values()), materialize_grads=True)
    finally:
        torch.set_default_dtype(torch.float32)
    results = {name: tensor.detach() for name, tensor in outputs.items()}
    return results | {f"d {name}": grad for name, grad in zip(leaves, grads, strict=True)}


def _random_sum(case: Case, output: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(case.seed + seed)
    weights = torch.randn(output.shape, generator=generator).to(case.dtype).to(output.dtype)
    return (torch.where(output.isinf(), 0.0, output) * weights).sum()


def _block_mask(case: Case, captures: Named) -> dict[str, object]:
    """The case's mask as a mask_mod, or where it has a block size as a block mask."""
    mask_mod = case.mod(case.mask, captures)
    if mask_mod is None or case.block_size is None:
        return {"mask_mod": mask_mod}
    sizes = (case.batch, case.q_heads, case.q_len, case.kv_len)
    return {"block_mask": create_block_mask(mask_mod, *sizes, BLOCK_SIZE=case.block_size)}


def _ours(case: Case, operands: Named, captures: Named, *, backend: Backend) -> Named:
    out, aux = flex_attention(
        **operands,
        score_mod=case.mod(case.score, captures),
        **_block_mask(case, captures),
        scale=case.scale,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True, max_scores=True, entropy=True),
        dropout_p=case.dropout_p,
        generator=torch.Generator().manual_seed(case.seed),
        backend=backend,
    )
    return {"out": out, "lse": aux.lse, "max_scores": aux.max_scores, "entropy": aux.entropy}


def _reference(case: Case, operands: Named, captures: Named) -> Named:
    keep = None
    if case.dropout_p > 0:
        dropout = Dropout(case.dropout_p).seeded(torch.Generator().manual_seed(case.seed))
        shape = (case.batch, case.q_heads, case.q_len, case.kv_len)
        keep = dropout.keep(*torch.meshgrid(*map(torch.arange, shape), indexing="ij"))
    result = reference.attention(
        **operands,
        score_mod=case.mod(case.score, captures),
        **_block_mask(case, captures),
        scale=case.scale,
        keep=keep,
        dropout_p=case.dropout_p,
    )
    names = ("out", "lse", "max_scores", "entropy")
    return {name: getattr(result, name) for name in names}
