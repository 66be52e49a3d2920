"""Mods as values and as modules: copied, pickled, compared, composed, and always learning."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mods.test_mods import MASKS, SCORES, positions
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import flex_attention as theirs

import quire
from quire import Dense, attention, mods
from quire.errors import ModSignatureError
from quire.ir.trace import check_signature, trace
from quire.ir.variables import variable_names
from quire.mods.attention_gym import causal_mask

H, L = 2, 9
ALL = [case.mask for case in MASKS] + [case.mod for case in SCORES]
each_mod = pytest.mark.parametrize("mod", ALL, ids=[mod.__name__ for mod in ALL])


def pickled(mod: Any) -> Any:
    return pickle.loads(pickle.dumps(mod))


WAYS = [copy.deepcopy, pickled, copy.copy]
each_way = pytest.mark.parametrize("way", WAYS)


# Values


@each_way
@each_mod
def test_a_copy_is_equal_and_does_the_same(mod: Any, way: Callable[[Any], Any]) -> None:
    twin = way(mod)
    assert twin == mod
    assert hash(twin) == hash(mod)
    assert (repr(twin), twin.__name__) == (repr(mod), mod.__name__)
    kind = twin.kind
    ours, other = trace(mod, kind), trace(twin, kind)
    assert ours.output is other.output
    assert all(map(torch.equal, ours.captures, other.captures))


def test_mods_are_equal_by_what_they_were_made_with() -> None:
    assert mods.alibi(8) == mods.alibi(8) != mods.alibi(4)
    assert mods.sliding_window(3) != mods.prefix_lm(3)
    assert mods.sliding_window(3) != mods.sliding_window(4)
    assert mods.document(lengths=[2, 3]) == mods.document(offsets=[0, 2, 5])
    assert mods.document([0, 1]) != mods.document([0, 2])
    assert mods.causal & mods.prefix_lm(2) == mods.and_masks(mods.causal, mods.prefix_lm(2))
    assert mods.offset(mods.causal, 3) != mods.offset(mods.causal, torch.tensor(3))
    assert mods.causal != "causal"


def test_a_tensor_that_learns_equals_itself_alone() -> None:
    table = nn.Parameter(torch.zeros(5))
    assert mods.distance_bias(table) == mods.distance_bias(table)
    assert mods.distance_bias(table) != mods.distance_bias(nn.Parameter(torch.zeros(5)))


def test_masks_without_parameters_are_one_object() -> None:
    for mask in (mods.causal, mods.noop_mask):
        assert pickled(mask) is mask is copy.deepcopy(mask)
    assert causal_mask is mods.causal
    assert mods.causal.__doc__.startswith("Let a query see itself")
    assert bool(mods.causal(torch.tensor(0), torch.tensor(0), torch.tensor(3), torch.tensor(2)))


@pytest.mark.parametrize(
    ("mod", "text"),
    [
        (mods.causal, "causal"),
        (mods.softcap(30.0), "softcap(soft_cap=30.0)"),
        (mods.distance_bias(torch.zeros(2, 5)), "distance_bias(table=float32[2, 5], reach=2)"),
        (
            mods.causal & mods.sliding_window(4) | ~mods.document(lengths=[2, 3]),
            "or_masks(and_masks(causal, sliding_window(window_size=4)), "
            "not_mask(document(ids=int32[5])))",
        ),
        (
            mods.alibi(8) >> mods.softcap(2),
            "in_turn(alibi(slopes=float32[8]), softcap(soft_cap=2))",
        ),
        (mods.offset(mods.causal, 7), "offset(mod=causal, q_offset=7)"),
        (mods.neighbourhood((3, 4), 2 * [3]), "neighbourhood(canvas=(3, 4), kernel=(3, 3))"),
    ],
)
def test_a_mod_reads_as_it_is_written(mod: Any, text: str) -> None:
    assert repr(mod) == text


def bent(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, by: Tensor) -> Tensor:
    return score * by[h]


@mods.Mask
def odd(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Every second key."""
    return kv_idx % 2 == 1


def test_a_users_function_as_a_value() -> None:
    mod = mods.ScoreChange(bent, by=torch.ones(2))
    assert pickled(mod) == mod
    assert repr(mod) == "bent(by=float32[2])"
    assert mod.__name__ == "bent"
    assert pickled(odd) is odd
    assert odd.__doc__ == "Every second key."
    assert (~odd).__name__ == "not_mask(odd)"
    again = mods.Mask(odd.function)
    assert again == odd


def test_a_function_of_other_arguments_is_no_mask() -> None:
    with pytest.raises(ModSignatureError, match=r"mask_mod must take 4 .* 'bent' takes 6"):
        mods.Mask(bent)


def test_the_tensors_of_a_mod_have_its_parameters_names() -> None:
    table = torch.zeros(2, 5)
    mod = mods.in_turn(mods.distance_bias(table), mods.softcap(2))
    assert variable_names(mod, trace(mod, "score").captures) == ["table"]


def test_the_fast_check_refuses_what_the_slow_one_does() -> None:
    for mod, wrong in ((mods.causal, "score"), (mods.LearnedAlibi(2), "mask")):
        with pytest.raises(ModSignatureError, match=f"{wrong}_mod must take"):
            check_signature(mod, wrong)  # type: ignore[arg-type]


# Composition


def shown(mask: Any, n: int = 6) -> Tensor:
    result: Tensor = mask(*positions(1, 1, n, n)).expand(1, 1, n, n)
    return result


def user(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx < 3


def test_operators_of_masks() -> None:
    a, b, c = mods.causal, mods.sliding_window(2), mods.document(lengths=[4, 2])
    expected = (shown(a) & shown(b)) | ~shown(c)
    mask = a & b | ~c
    assert torch.equal(shown(mask), expected)
    assert torch.equal(shown(trace(mask, "mask")), expected)
    assert torch.equal(shown(user & b), shown(user) & shown(b))
    assert torch.equal(shown(user | b), shown(user) | shown(b))
    assert torch.equal(shown(b & user), shown(b) & shown(user))
    assert torch.equal(shown(a & trace(b, "mask")), shown(b))


def test_masks_and_scores_do_not_mix() -> None:
    for combine in (
        lambda: mods.causal & mods.alibi(2),
        lambda: mods.causal | 3,
        lambda: mods.alibi(2) >> mods.causal,
        lambda: mods.causal & mods.LearnedAlibi(2),
    ):
        with pytest.raises(TypeError, match="unsupported operand"):
            combine()


def test_scores_one_after_the_other() -> None:
    places = positions(1, 2, 4, 4)
    score = torch.linspace(-3, 3, 32).view(1, 2, 4, 4)
    first, then = mods.alibi(2), mods.softcap(2)

    def halved(score: Tensor, *place: Tensor) -> Tensor:
        return score / 2

    expected = then(first(score, *places), *places)
    assert torch.equal((first >> then)(score, *places), expected)
    assert torch.equal(mods.in_turn(first, then)(score, *places), expected)
    assert (first >> then).__name__ == "alibi_2_then_softcap_2"
    assert torch.equal((halved >> then)(score, *places), then(score / 2, *places))
    assert torch.equal((first >> halved)(score, *places), first(score, *places) / 2)
    assert torch.equal(mods.in_turn()(score, *places), score)
    assert mods.in_turn().__name__ == "in_turn()"


# Modules


class Kept(nn.Module):
    """A module that keeps a mod with a parameter of its own in it."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(H, 5))
        self.mod = make(self.table)

    def forward(self, x: Tensor) -> Tensor:
        return attention(x, Dense(x, x), score_mod=self.mod)


class Owning(nn.Module):
    """A module that owns a module which is a mod."""

    def __init__(self, mod: Any) -> None:
        super().__init__()
        self.mod = mod

    def forward(self, x: Tensor) -> Tensor:
        return attention(x, Dense(x, x), score_mod=self.mod)


INPUT = torch.randn(1, H, L, 4, generator=torch.Generator().manual_seed(0))
KEPT: list[Callable[[Tensor], Any]] = [
    mods.distance_bias,
    lambda table: mods.distance_bias(table) >> mods.softcap(5),
    lambda table: mods.offset(mods.distance_bias(table), 2),
    lambda table: mods.ScoreChange(bent, by=table[:, 0].detach()) >> mods.distance_bias(table),
]
each_kept = pytest.mark.parametrize("make", KEPT)


@each_kept
def test_a_copied_module_trains_its_own_parameter(make: Callable[[Tensor], Any]) -> None:
    module = Kept(make)
    twin = copy.deepcopy(module)
    twin(INPUT).square().sum().backward()
    assert module.table.grad is None
    assert twin.table.grad is not None and twin.table.grad.abs().sum() > 0


@each_kept
def test_a_module_that_keeps_a_mod_is_saved_whole(make: Callable[[Tensor], Any]) -> None:
    module, file = Kept(make), io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    assert torch.equal(twin(INPUT), module(INPUT))
    twin(INPUT).square().sum().backward()
    assert twin.table.grad is not None and twin.table.grad.abs().sum() > 0


OWNED: dict[str, Callable[[], Any]] = {
    "alibi": lambda: mods.LearnedAlibi(H),
    "distance": lambda: mods.LearnedDistanceBias(H, 3),
    "relative": lambda: mods.LearnedRelativePositionBias(H, 8, max_distance=6),
    "causal relative": lambda: mods.LearnedRelativePositionBias(H, 8, False, 9),
    "table": lambda: mods.LearnedTableBias(H, L, L),
    "chain": lambda: mods.LearnedDistanceBias(H, 3) >> mods.softcap(4),
    "chain behind a function": lambda: mods.softcap(4) >> mods.LearnedDistanceBias(H, 3),
    "chain of two": lambda: mods.LearnedAlibi(H) >> mods.LearnedDistanceBias(H, 3),
}
each_owned = pytest.mark.parametrize("make", OWNED.values(), ids=OWNED)


def varied(module: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def check_it_trains(module: nn.Module, others: nn.Module) -> None:
    module(INPUT).square().sum().backward()
    assert list(module.parameters())
    for parameter in module.parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in others.parameters())


@each_owned
def test_a_module_that_is_a_mod_goes_wherever_modules_go(make: Callable[[], Any]) -> None:
    module, other = varied(Owning(make()), 1), varied(Owning(make()), 2)
    wanted = other(INPUT)
    assert not torch.equal(module(INPUT), wanted)
    check_it_trains(copy.deepcopy(module), others=module)

    assigned = Owning(make())
    weights = {name: nn.Parameter(x) for name, x in other.state_dict().items()}
    assigned.load_state_dict(weights, assign=True)
    assert torch.equal(assigned(INPUT), wanted)
    check_it_trains(assigned, others=module)

    given = {name: x.detach().clone().requires_grad_() for name, x in other.named_parameters()}
    out = functional_call(module, given, (INPUT,))
    assert torch.equal(out, wanted)
    gradients = torch.autograd.grad(out.square().sum(), list(given.values()))
    assert all(gradient.abs().sum() > 0 for gradient in gradients)

    with torch.device("meta"):
        empty = Owning(make())
    empty.to_empty(device="cpu").load_state_dict(other.state_dict())
    assert torch.equal(empty(INPUT), wanted)
    check_it_trains(empty, others=module)

    file = io.BytesIO()
    torch.save(other, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(INPUT), wanted)


@pytest.mark.parametrize(
    ("module", "same"),
    [
        (mods.LearnedAlibi(H), mods.alibi(H)),
        (mods.LearnedDistanceBias(H, 3), mods.distance_bias(torch.zeros(H, 7))),
        (mods.LearnedRelativePositionBias(H), mods.relative_position_bias(torch.zeros(32, H))),
        (mods.LearnedTableBias(L, L), mods.table_bias(torch.zeros(L, L))),
    ],
)
def test_a_module_begins_as_the_function(module: Any, same: Any) -> None:
    assert trace(module, "score").output is trace(same, "score").output
    for _ in range(2):
        found, wanted = trace(module, "score").captures, trace(same, "score").captures
        assert all(map(torch.equal, found, wanted))
        varied(module, 3)
        assert not all(map(torch.equal, found, wanted))
        module.reset_parameters()


def test_a_module_says_its_sizes() -> None:
    assert repr(mods.LearnedAlibi(2)) == "LearnedAlibi(num_heads=2)"
    assert repr(mods.LearnedDistanceBias(2, 3)) == "LearnedDistanceBias(num_heads=2, reach=3)"
    assert repr(mods.LearnedTableBias(2, 3, 4)) == "LearnedTableBias(2, 3, 4)"
    assert repr(mods.LearnedRelativePositionBias(2)) == (
        "LearnedRelativePositionBias(num_heads=2, num_buckets=32, bidirectional=True, "
        "max_distance=128)"
    )
    chain = mods.softcap(4) >> mods.LearnedDistanceBias(2, 3)
    assert chain.__name__ == "softcap_4_then_LearnedDistanceBias"
    assert list(chain.state_dict()) == ["1.table"]
    assert "(0): softcap(soft_cap=4)" in repr(chain)


def test_a_part_of_a_chain_may_be_exchanged() -> None:
    chain = mods.LearnedAlibi(H) >> mods.softcap(4)
    other = varied(mods.LearnedAlibi(H), 5)
    setattr(chain, "0", other)
    assert chain[0] is other
    assert chain[1] == mods.softcap(4)
    places = positions(1, H, 3, 3)
    score = torch.ones(1, H, 3, 3)
    expected = mods.softcap(4)(other(score, *places), *places)
    assert torch.equal(chain(score, *places), expected)


def test_modules_have_a_device_and_a_dtype() -> None:
    assert mods.LearnedAlibi(2, dtype=torch.float64).slopes.dtype == torch.float64
    assert mods.LearnedDistanceBias(2, 3, device="meta").table.is_meta


# PyTorch


# Of Dynamo in PyTorch's own create_block_mask: the first since Python 3.13, the second since 3.14.
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.filterwarnings("ignore:'_UnionGenericAlias' is deprecated")
@pytest.mark.parametrize("name", ["mask", "score", "module"])
def test_pytorchs_own_attention_takes_them_compiled(name: str) -> None:
    query = torch.randn(1, H, 64, 16)
    mask, score = mods.causal & ~mods.sliding_window(7), mods.alibi(H) >> mods.softcap(3)
    options = {
        "mask": {"mask_mod": mask},
        "score": {"score_mod": score},
        "module": {"score_mod": varied(mods.LearnedDistanceBias(H, 3), 1) >> mods.softcap(4)},
    }[name]
    with torch.no_grad():
        ours = quire.flex_attention(query, query, query, **options)
        if name == "mask":
            block_mask = torch.compile(theirs.create_block_mask, backend="eager", fullgraph=True)(
                mask, None, None, 64, 64, device="cpu"
            )
            assert torch.equal(
                block_mask.to_dense(),
                theirs.create_block_mask(mask, None, None, 64, 64, device="cpu").to_dense(),
            )
            options = {"block_mask": block_mask}
        compiled = torch.compile(theirs.flex_attention, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(query, query, query, **options), ours)


# Random numbers


def test_random_numbers_of_positions() -> None:
    seed = torch.tensor(2**40 + 5)

    def noise(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return quire.random(seed, b, h, q_idx, kv_idx)

    args = [torch.zeros(()), *positions(2, 3, 40, 50)]
    found = noise(*args)
    assert found.dtype == torch.float32
    assert 0 <= found.min() < 0.001 and 0.999 < found.max() < 1
    assert abs(found.mean() - 0.5) < 0.01 and abs(found.var() - 1 / 12) < 0.01
    assert len(found.unique()) > 0.99 * found.numel()
    graph = trace(noise, "score")
    assert torch.equal(graph(*args), found)
    assert torch.equal(quire.random(2**40 + 5, *args[1:]), found)
    for other in (2**40 + 6, 2**41 + 5, -3, 2**63):
        assert (quire.random(other, *args[1:]) == found).float().mean() < 0.001
    seed += 1  # a graph that was traced before reads it again
    assert torch.equal(graph(*args), quire.random(2**40 + 6, *args[1:]))


def test_a_seed_is_a_whole_number() -> None:
    with pytest.raises(quire.QuireError, match=r"seed must be a whole number, but is 0.5. Give"):
        quire.random(0.5, *positions(1, 1, 1, 1))  # type: ignore[arg-type]


def test_random_numbers_in_attention() -> None:
    seed = torch.tensor(7)

    def noisy(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + quire.random(seed, b, h, q_idx, kv_idx)

    noise = quire.random(seed, *positions(1, H, L, L)).expand(1, H, L, L)
    expected = attention(INPUT, Dense(INPUT, INPUT), score_mod=mods.table_bias(noise))
    torch.testing.assert_close(attention(INPUT, Dense(INPUT, INPUT), score_mod=noisy), expected)


# Refusals that no other path mends


def test_random_masks_are_refused_by_every_entry() -> None:
    def drawn(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & (torch.rand(()) < 0.5)

    for ask in (
        lambda: quire.create_block_mask(drawn, None, None, 64, 64),
        lambda: attention(INPUT, Dense(INPUT, INPUT), mask=drawn),
        lambda: quire.draw(drawn, 8),
    ):
        with pytest.raises(quire.QuireError, match=r"torch\.rand draws random numbers at test_mod"):
            ask()


def test_a_complex_score_is_refused() -> None:
    table = torch.tensor([1j, 2j])

    def turned(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * table[h]

    with pytest.raises(quire.QuireError, match=r"a real number, but returned .*complex"):
        attention(INPUT, Dense(INPUT, INPUT), score_mod=turned)


def test_completion_offers_public_names() -> None:
    assert set(dir(quire)) == {*quire.__all__, "errors"}
    assert all(hasattr(quire, name) for name in dir(quire))
