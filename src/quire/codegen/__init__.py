"""From a graph to machine code: text of LLVM IR out of Python, objects out of the text."""
