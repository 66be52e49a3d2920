"""From graphs to machine code. Read `convention.py` first: it draws and explains all words.

llvm/           writing LLVM's language, and compiling it
phases/         functions that compute parts of a tile or a row
convention.py   what the runtime tells a kernel; contract.py checks it, scratch.py is its memory
mods/           a user's mods as functions that kernels call
kernels/        the loops: forward, decode, backward, append, pyramid
"""
