"""Attention over a cache: storing keys and values, and attending to them, by XLA or by kernels."""
