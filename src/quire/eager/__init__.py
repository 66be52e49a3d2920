"""The tiled path in torch ops: any mod, memory linear in the sequence.

Scores are made one tile at a time and folded into a running maximum, sum and output (online
softmax); the backward pass makes each tile again from the saved log-sum-exp. Read `tiling`, which
tiles there are; `tile`, the scores of one; `forward`; `backward`; `function`, both under autograd;
`key_mass`, the attention that each key receives; `far`, rows of which the log-sum-exp is no help.
"""

from quire.eager.backward import Above, Gradients, Wanted, backward
from quire.eager.forward import Result, forward, output_layout
from quire.eager.function import attention
from quire.eager.key_mass import key_mass
from quire.eager.tile import Operands, working_dtype

__all__ = [
    "Above",
    "Gradients",
    "Operands",
    "Result",
    "Wanted",
    "attention",
    "backward",
    "forward",
    "key_mass",
    "output_layout",
    "working_dtype",
]
