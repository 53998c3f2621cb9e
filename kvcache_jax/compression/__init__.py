"""Tokens that go: drop, compress, the scores that choose, streaming."""

from kvcache_jax.compression.drop_blocks import drop_to_utilization
from kvcache_jax.compression.dropping import Dropping
from kvcache_jax.compression.streaming import Streaming

__all__ = ["Dropping", "Streaming", "drop_to_utilization"]
