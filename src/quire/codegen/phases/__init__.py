"""Functions of generated code that kernels call for tiles and rows."""
