"""LLVM's language: types, values, functions, mathematics, processors, and compiling."""
