"""The kernels: what a thread takes, which tiles it visits, and the loops around the phases."""
