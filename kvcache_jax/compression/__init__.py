"""Fewer tokens per row: drop, compress, the scores that choose, streaming."""

from kvcache_jax.compression.compress_rows import compress
from kvcache_jax.compression.drop_tokens import drop
from kvcache_jax.compression.dropping import Dropping
from kvcache_jax.compression.scorers import (
    TokenMetadata,
    future_queries,
    pyramid_budgets,
    token_scorer,
    token_scores,
)
from kvcache_jax.compression.streaming import Streaming, drop_to_utilization

__all__ = [
    "Dropping",
    "Streaming",
    "TokenMetadata",
    "compress",
    "drop",
    "drop_to_utilization",
    "future_queries",
    "pyramid_budgets",
    "token_scorer",
    "token_scores",
]
