"""Results of attention besides its output, and how to ask for them.

    out, aux = attention(query, memory, return_aux=AuxRequest(argmax=True))
    aux.argmax

The first two fields are PyTorch's. A request of PyTorch's own class gets an answer of PyTorch's own
class, so code that unpacks the answer finds what it expects.
"""

from __future__ import annotations

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
    """

    lse: bool = False
    max_scores: bool = False
    argmax: bool = False
    entropy: bool = False
    key_mass: bool = False


NO_AUX = AuxRequest()


class AuxOutput(NamedTuple):
    """The results that were asked for: `key_mass` [B, Hq, S], the others [B, Hq, L]; else None.

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


def checked_request(request: object) -> AuxRequest:
    """Return `return_aux` as a request of our class. Raise if it is not a request."""
    if isinstance(request, AuxRequest):
        return request
    if isinstance(request, torch_flex.AuxRequest):
        return AuxRequest(request.lse, request.max_scores)
    raise OptionError(
        f"return_aux must be an AuxRequest, but is a {type(request).__name__}. Use "
        f"return_aux=AuxRequest(lse=True)."
    )
