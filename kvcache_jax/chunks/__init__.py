"""Passages that are stored once and composed into rows at any position."""

from kvcache_jax.blocks.key_rotation import key_rotation
from kvcache_jax.chunks.answers import AnswerParts, Answers
from kvcache_jax.chunks.chunk_attention import chunk_attention as attention
from kvcache_jax.chunks.chunk_attention import chunk_deviation as deviation
from kvcache_jax.chunks.chunk_reuse import ChunkReuse as Reuse
from kvcache_jax.chunks.chunk_selector import ChunkMetadata as Metadata
from kvcache_jax.chunks.chunk_selector import chunk_metadata as metadata
from kvcache_jax.chunks.chunk_selector import chunk_selector as selector
from kvcache_jax.chunks.chunk_selector import select_tokens
from kvcache_jax.chunks.chunk_store import Chunks, Store
from kvcache_jax.chunks.chunk_store import StoredChunks as Stored
from kvcache_jax.chunks.chunk_store import evict_chunks as evict
from kvcache_jax.chunks.chunk_store import free_chunks as free
from kvcache_jax.chunks.compose_chunks import compose
from kvcache_jax.chunks.prompt_parts import ChunkParts as Parts
from kvcache_jax.chunks.prompts import Prompts
from kvcache_jax.chunks.store_chunk import find_chunks as find
from kvcache_jax.chunks.store_chunk import store_chunk as store

__all__ = [
    "AnswerParts",
    "Answers",
    "Chunks",
    "Metadata",
    "Parts",
    "Prompts",
    "Reuse",
    "Store",
    "Stored",
    "attention",
    "compose",
    "deviation",
    "evict",
    "find",
    "free",
    "key_rotation",
    "metadata",
    "select_tokens",
    "selector",
    "store",
]
