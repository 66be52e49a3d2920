"""What attention can say about rows and keys besides its output, and how that is asked for.

    out, aux = attention(query, memory, return_aux=AuxRequest(argmax=True))
    aux.argmax

The first fields are PyTorch's. A request of PyTorch's own class is taken wherever ours is, and is
answered in PyTorch's own class, so that code which unpacks the answer finds what it expects.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from quire.errors import OptionError


class AuxRequest(NamedTuple):
    """What is wanted besides the output.

    `lse` is the log-sum-exp of the scores, `max_scores` their maximum, `argmax` the position of the
    key that has it, `entropy` that of the probabilities, in nats. `key_mass` is the attention that
    each key receives, for what keeps the keys that matter: its probabilities, before dropout,
    summed over queries. Only `lse` has a gradient.
    """

    lse: bool = False
    max_scores: bool = False
    argmax: bool = False
    entropy: bool = False
    key_mass: bool = False


NO_AUX = AuxRequest()


class AuxOutput(NamedTuple):
    """What was asked for, `key_mass` [B, Hq, S] and the others [B, Hq, L]; None for the rest.

    `argmax` is an absolute position, int64, of equals the first. In a row that reads nothing it is
    -1 and the entropy 0. The others are float32, or float64 for float64 queries. A key has a mass
    for each query head, also where heads share it. Of sequences that are packed into one tensor
    `key_mass` is [total keys, Hq], and the others are [total queries, Hq].
    """

    lse: Tensor | None = None
    max_scores: Tensor | None = None
    argmax: Tensor | None = None
    entropy: Tensor | None = None
    key_mass: Tensor | None = None


def checked_request(request: object) -> AuxRequest:
    """A `return_aux` as a request of ours; refuse what is none."""
    if isinstance(request, AuxRequest):
        return request
    if isinstance(request, torch_flex.AuxRequest):
        return AuxRequest(request.lse, request.max_scores)
    raise OptionError(
        f"return_aux must be an AuxRequest, but got {type(request).__name__}. Use "
        f"return_aux=AuxRequest(lse=True)."
    )
