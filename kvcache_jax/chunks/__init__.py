"""Passages that are stored once and composed into rows at any position."""

from kvcache_jax.chunks.prompts import Prompts
from kvcache_jax.chunks.stored_chunks import Store

__all__ = ["Prompts", "Store"]
