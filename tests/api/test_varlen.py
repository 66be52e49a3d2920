"""varlen_attention and varlen_attn: other libraries' calling conventions, with mods."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen as torch_varlen

from quire import AuxRequest, reference, varlen_attention, varlen_attn
from quire.errors import ArgumentError, HeadsError, OptionError, QuireError, RankError, ShapeError

Q_LENGTHS, KV_LENGTHS = [5, 0, 20, 3, 9], [5, 4, 33, 70, 6]  # the last has more queries than keys
HQ, HKV, D = 4, 2, 16
SLOPES = torch.linspace(0.1, 0.7, HQ)
OWN_SLOPES = torch.rand(5, HQ)


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def rows(lengths: list[int]) -> list[range]:
    ends = offsets(lengths).tolist()
    return [range(first, last) for first, last in itertools.pairwise(ends)]


@pytest.fixture
def packed() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = ((sum(Q_LENGTHS), HQ), (sum(KV_LENGTHS), HKV), (sum(KV_LENGTHS), HKV))
    found = [torch.randn(*size, D, dtype=torch.float64, generator=generator) for size in sizes]
    return found[0], found[1], found[2]


def expected(
    packed: tuple[Tensor, Tensor, Tensor], score_mod: Any = None, mask_mod: Any = None
) -> reference.RaggedReference:
    return reference.ragged_attention(
        *packed, rows(Q_LENGTHS), rows(KV_LENGTHS), score_mod=score_mod, mask_mod=mask_mod
    )


SHIFT = torch.tensor([max(0, q - k) for q, k in zip(Q_LENGTHS, KV_LENGTHS, strict=True)])


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx <= q_idx - SHIFT[b]


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    here = q_idx - SHIFT[b]
    return (kv_idx >= here - 7) & (kv_idx <= here + 2)


def even(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx + b) % 2 == 0


def halved(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score / (b + 1)


def capped(score: Any, *_: Any) -> Any:
    return 0.5 * torch.tanh(score / 0.5)


class Asked(NamedTuple):
    """Options of varlen_attention, and the mods that mean the same."""

    options: dict[str, Any]
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None


ASKED = {
    "nothing": Asked({}),
    "causal": Asked({"causal": True}, None, causal),
    "window": Asked({"window_size": (7, 2)}, None, window),
    "window to the left": Asked(
        {"window_size": (3, -1)}, None, lambda b, h, q, k: k >= q - SHIFT[b] - 3
    ),
    "window to the right": Asked(
        {"window_size": (-1, 1)}, None, lambda b, h, q, k: k <= q - SHIFT[b] + 1
    ),
    "causal window": Asked(
        {"window_size": (7, 5), "causal": True},
        None,
        lambda b, h, q, k: causal(b, h, q, k) & (k >= q - SHIFT[b] - 7),
    ),
    "slopes": Asked(
        {"alibi_slopes": SLOPES},
        lambda s, b, h, q, k: s - SLOPES[h] * torch.abs(q - SHIFT[b] - k),
    ),
    "slopes of each sequence": Asked(
        {"alibi_slopes": OWN_SLOPES},
        lambda s, b, h, q, k: s - OWN_SLOPES[b, h] * torch.abs(q - SHIFT[b] - k),
    ),
    "softcap": Asked({"softcap": 0.5}, capped),
    "everything": Asked(
        {
            "causal": True,
            "softcap": 0.5,
            "alibi_slopes": SLOPES,
            "score_mod": halved,
            "mask": even,
            "deterministic": True,
        },
        lambda s, b, h, q, k: (capped(s) - SLOPES[h] * torch.abs(q - SHIFT[b] - k)) / (b + 1),
        lambda b, h, q, k: causal(b, h, q, k) & even(b, h, q, k),
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_it_means_what_flash_attention_means(
    name: str, packed: tuple[Tensor, Tensor, Tensor]
) -> None:
    asked = ASKED[name]
    ends = (offsets(Q_LENGTHS), offsets(KV_LENGTHS))
    found, aux = varlen_attention(
        *packed, *ends, 20, 70, **asked.options, return_aux=AuxRequest(lse=True)
    )
    wanted = expected(packed, asked.score_mod, asked.mask_mod)
    torch.testing.assert_close(found, wanted.out)
    torch.testing.assert_close(aux.lse, wanted.lse)
    assert aux.lse.shape == found.shape[:2]


def test_queries_before_the_first_key_read_nothing(packed: tuple[Tensor, Tensor, Tensor]) -> None:
    out = varlen_attention(*packed, offsets(Q_LENGTHS), offsets(KV_LENGTHS), causal=True)
    assert isinstance(out, Tensor)
    last = out[-9:]  # nine queries, six keys
    assert bool((last[:3] == 0).all()) and bool((last[3:] != 0).all())


def test_keys_that_are_not_used(packed: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value = packed
    used = [5, 0, 30, 1, 6]
    key, value = key.clone(), value.clone()
    for own, count in zip(rows(KV_LENGTHS), used, strict=True):
        key[own.start + count : own.stop] = value[own.start + count : own.stop] = math.nan
    out = varlen_attention(
        *(query, key, value, offsets(Q_LENGTHS), offsets(KV_LENGTHS)),
        causal=True,
        seqused_k=torch.tensor(used, dtype=torch.int32),
    )
    kv_rows = [
        range(own.start, own.start + n) for own, n in zip(rows(KV_LENGTHS), used, strict=True)
    ]
    shift = torch.tensor([max(0, q - k) for q, k in zip(Q_LENGTHS, used, strict=True)])
    wanted = reference.ragged_attention(
        *(query, key, value, rows(Q_LENGTHS), kv_rows),
        mask_mod=lambda b, h, q, k: k <= q - shift[b],
    )
    torch.testing.assert_close(out, wanted.out)


def test_rows_past_the_last_sequence_belong_to_none() -> None:
    query, key, value = torch.randn(3, 12, 2, 8)
    query[9:] = key[9:] = value[9:] = math.nan
    out = varlen_attention(query, key, value, [0, 4, 9], causal=True)
    assert isinstance(out, Tensor)
    assert bool((out[9:] == 0).all())
    assert torch.equal(
        out[:9], varlen_attention(query[:9], key[:9], value[:9], [0, 4, 9], None, causal=True)
    )


def test_gradients_and_dropout(packed: tuple[Tensor, Tensor, Tensor]) -> None:
    leaves = [tensor.requires_grad_() for tensor in packed]
    generator = torch.Generator().manual_seed(0)
    out = varlen_attention(
        *leaves, offsets(Q_LENGTHS), offsets(KV_LENGTHS), dropout_p=0.5, generator=generator
    )
    assert isinstance(out, Tensor)
    out.sum().backward()
    assert all(bool(leaf.grad.isfinite().all()) for leaf in leaves if leaf.grad is not None)
    assert all(leaf.grad is not None for leaf in leaves)
    assert not torch.allclose(out, expected(packed).out)


# PyTorch's names


def test_the_parameters_are_pytorchs() -> None:
    theirs = inspect.signature(torch_varlen.varlen_attn).parameters
    ours = inspect.signature(varlen_attn).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default)


def test_it_means_what_pytorch_means(packed: tuple[Tensor, Tensor, Tensor]) -> None:
    ends = (offsets(Q_LENGTHS), offsets(KV_LENGTHS), 20, 70)
    out, lse = varlen_attn(
        *packed,
        *ends,
        window_size=(-1, 0),
        enable_gqa=True,
        num_splits=1,
        return_aux=torch_varlen.AuxRequest(lse=True),
    )
    wanted = expected(packed, None, causal)
    torch.testing.assert_close(out, wanted.out)
    torch.testing.assert_close(lse, wanted.lse)
    alone = varlen_attn(*packed, *ends, enable_gqa=True, scale=0.3, score_mod=halved, mask=even)
    assert isinstance(alone, Tensor)
    wanted = reference.ragged_attention(
        *packed, rows(Q_LENGTHS), rows(KV_LENGTHS), scale=0.3, score_mod=halved, mask_mod=even
    )
    torch.testing.assert_close(alone, wanted.out)


# What is refused

ROWS = torch.randn(12, 2, 8)
ENDS = [0, 5, 12]
WINDOW_ADVICE = "Give how many keys before and after it a query reads, -1 for all of them."
LONGEST_ADVICE = "Give the length of the longest sequence, or None."


class Bad(NamedTuple):
    """A call and what is said to it."""

    error: type[QuireError]
    message: str
    options: dict[str, Any]


BAD = {
    "rank": Bad(
        RankError,
        "query must have 3 dimensions [total, heads, head_dim], but has shape [12, 8]. Pack the "
        "rows of all sequences into the first.",
        {"q": ROWS[:, 0]},
    ),
    "offsets": Bad(
        ArgumentError,
        "cu_seqlens_q must be from 0 to 12, the number of rows, but go from 0 to 13. cu_seqlens_q "
        "are the first row of each sequence and the end of the last one.",
        {"cu_seqlens_q": [0, 13]},
    ),
    "as many sequences": Bad(
        ArgumentError,
        "cu_seqlens_q and cu_seqlens_k must be for as many sequences, but hold 3 and 2 numbers. "
        "Give both one more number than there are sequences.",
        {"cu_seqlens_k": [0, 12]},
    ),
    "used": Bad(
        ArgumentError,
        "seqused_k[1] must be from 0 to 7, but is 8. seqused_k are how many rows each sequence "
        "has, at most up to the next of cu_seqlens_k.",
        {"seqused_k": [5, 8]},
    ),
    "too short a longest query": Bad(
        ArgumentError,
        f"max_seqlen_q must be at least 7, the length of the longest sequence, but is 6. "
        f"{LONGEST_ADVICE}",
        {"max_seqlen_q": 6},
    ),
    "too short a longest key": Bad(
        ArgumentError,
        f"max_seqlen_k must be at least 7, the length of the longest sequence, but is 0. "
        f"{LONGEST_ADVICE}",
        {"max_seqlen_k": 0},
    ),
    "a longest that is no number": Bad(
        ArgumentError,
        f"max_seqlen_q must be a whole number, but is 7.5. {LONGEST_ADVICE}",
        {"max_seqlen_q": 7.5},
    ),
    "window": Bad(
        ArgumentError,
        f"window_size must be two numbers, but is 3. {WINDOW_ADVICE}",
        {"window_size": 3},
    ),
    "negative window": Bad(
        ArgumentError,
        f"window_size[1] must be a whole number of at least -1, but is -2. {WINDOW_ADVICE}",
        {"window_size": (3, -2)},
    ),
    "softcap": Bad(
        ArgumentError,
        "soft_cap must be a finite number above 0, but is -1.0. Give the largest score that is "
        "allowed, or leave the mod out.",
        {"softcap": -1.0},
    ),
    "slopes": Bad(
        ShapeError,
        "alibi_slopes must have shape [2, 2], but has [3, 2]. Give one slope for each head [H], or "
        "for each sequence and head [B, H].",
        {"alibi_slopes": torch.ones(3, 2)},
    ),
    "probabilities": Bad(
        OptionError,
        "return_attn_probs must be False, since probabilities are never all in memory, but is "
        "True. Use return_aux=AuxRequest(lse=True): a probability is exp(score - lse).",
        {"return_attn_probs": True},
    ),
    "pages": Bad(
        OptionError,
        "block_table must be None, since keys and values are packed, but names pages. Gather the "
        "pages of each sequence, or call quire.attention with Paged memory.",
        {"block_table": torch.zeros(2, 1, dtype=torch.int32)},
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_refusals(name: str) -> None:
    bad = BAD[name]
    good = {"q": ROWS, "k": ROWS, "v": ROWS, "cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS}
    with pytest.raises(bad.error) as caught:
        varlen_attention(**(good | bad.options))
    assert str(caught.value) == bad.message


def test_groups_have_to_be_asked_for() -> None:
    with pytest.raises(HeadsError) as caught:
        varlen_attn(ROWS, ROWS[:, :1], ROWS[:, :1], ENDS, ENDS, 7, 7)
    assert str(caught.value) == (
        "query and key must have the same number of heads, but Hq=2 and Hkv=1. Set "
        "enable_gqa=True for grouped-query attention."
    )
