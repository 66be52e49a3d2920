"""The intermediate representation: ops, graphs, tracing and what is derived from a graph."""
