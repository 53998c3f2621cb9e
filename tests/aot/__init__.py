"""Compiles the kernels for accelerators that this machine lacks, and reads what came of it."""
