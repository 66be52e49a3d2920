"""The tiled path in torch ops: any mod, memory linear in the sequence.

Scores are made one tile at a time and folded into a running maximum, sum and output (online
softmax); the backward pass makes each tile again from the saved log-sum-exp. Read `tiling`, which
tiles there are; `tile`, the scores of one; `forward`; `backward`; `key_mass`, the attention that
each key receives; `per_sequence`, which does all that for ragged and paged memory.
"""
