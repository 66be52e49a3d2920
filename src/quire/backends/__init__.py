"""The backends: what computes a call.

    jit        kernels that quire compiles for the mods of a call
    eager      torch operations, tile by tile
    inductor   PyTorch's own flex_attention, compiled by PyTorch

A backend imports nothing from another one. `choose` of `plans.py` takes one.
"""
