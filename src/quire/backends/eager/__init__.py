"""Attention in torch operations, tile by tile: any mod, memory linear in the sequence.

The forward pass computes the scores of one tile after the other, and updates a running maximum, sum
and output (online softmax). The backward pass computes each tile again from the log-sum-exp.

    tiling          which tiles there are
    tile            the scores of one tile
    forward         the forward pass of dense memory; `observe` adds argmax and entropy
    backward        the backward pass of dense memory
    tangent         the derivative of dense memory in a direction
    far             rows whose log-sum-exp is too far from 0 to be precise
    per_sequence    all of them for ragged and paged memory
"""
