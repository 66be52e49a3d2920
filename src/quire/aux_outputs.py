"""Results of attention besides its output, and how to ask for them.

    out, aux = attention(query, memory, return_aux=AuxRequest(argmax=True))
    aux.argmax

The first two fields are PyTorch's. A request of PyTorch's own class gets an answer of PyTorch's own
class, so code that unpacks the answer finds what it expects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from quire.errors import OptionError


class AuxRequest(NamedTuple):
    """Which results are wanted besides the output.

    `lse` is the log-sum-exp of the scores of a row, `max_scores` their maximum, and `argmax` the
    position of the key with that score. `entropy` is the entropy of the probabilities, in nats.
    `key_mass` is how much attention each key receives: its probabilities before dropout, summed
    over queries. It tells a cache which keys to keep. Only `lse` has a gradient.

    `weights` are rows of the query, as in `weights=[0, -1]`: their probabilities are wanted, before
    dropout. They are computed by torch ops, apart from the output, and take no more memory than
    the result.
    """

    lse: bool = False
    max_scores: bool = False
    argmax: bool = False
    entropy: bool = False
    key_mass: bool = False
    weights: Sequence[int] | Tensor | None = None


NO_AUX = AuxRequest()

OF_KERNELS = AuxRequest._fields[:-1]
"""The results that backends compute with the output. Weights are computed apart."""


class AuxOutput(NamedTuple):
    """The results that were asked for; the others are None.

    `lse`, `max_scores`, `argmax` and `entropy` [B, Hq, L] have a number for each row of the query,
    and `key_mass` [B, Hq, S] one for each key.

    `weights` is [B, Hq, rows, S], and 0 for a key that is not read. If queries are packed into one
    tensor it is [rows, Hq, S]. In ragged and paged memory S is the length of the longest sequence,
    and column i is the key at position i of the row's own sequence.

    If sequences are packed into one tensor, `key_mass` is [total keys, Hq] and the others are
    [total queries, Hq]. `argmax` is an absolute position in int64, the first one of equal scores.
    A row that reads no key has argmax -1 and entropy 0. The other results are float32, or float64
    for float64 queries. A key has a mass for each query head, even if several heads share it.
    """

    lse: Tensor | None = None
    max_scores: Tensor | None = None
    argmax: Tensor | None = None
    entropy: Tensor | None = None
    key_mass: Tensor | None = None
    weights: Tensor | None = None


def checked_request(request: object) -> AuxRequest:
    """Return what a kernel is asked for; `weights` are computed apart. Raise for other types."""
    if isinstance(request, AuxRequest):
        return request if request.weights is None else request._replace(weights=None)
    if isinstance(request, torch_flex.AuxRequest):
        return AuxRequest(request.lse, request.max_scores)
    raise OptionError(
        f"return_aux must be an AuxRequest, but is a {type(request).__name__}. Use "
        f"return_aux=AuxRequest(lse=True)."
    )
