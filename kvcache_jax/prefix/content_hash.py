"""A keyed 64-bit hash of a prefix, of all its blocks at once.

Every token is mixed with its position, and the hash of a prefix is the sum of its tokens' mixes on top of
a root that represents the namespace: a cumulative sum gives the hash of every block of a prompt in
parallel, and a prefix grows from the hash of its last block. A hash only says where to look: the block
found there is compared by its tokens, so that a collision costs a hit and is never one.
"""

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.core.backends import computed_once

# Two hashes of 32 bits, on the last axis, each with a multiplier of its own.
_ODD = (0x9E3779B1, 0x85EBCA77)


def root_hash(hash_key: jax.Array, namespace: jax.Array) -> jax.Array:
    """Computes the hash u32[..., 2] of the empty prefix in `namespace u32[..., 4]`."""
    value, odd = (
        lax.broadcast_to_rank(words, namespace.ndim) for words in (hash_key, jnp.array(_ODD, jnp.uint32))
    )
    for word in range(4):
        value = _mix(value ^ namespace[..., word, None]) * odd
    return computed_once(value)


def block_hashes(hash_key: jax.Array, tokens: jax.Array, first_position: jax.Array) -> jax.Array:
    """Computes what blocks add to the hash of the prefix before them, u32[..., 2].

    `tokens` is i32[..., block_size], and `first_position` i32[...] the place of a block's first token.
    """
    order = lax.broadcast_to_rank(jnp.arange(tokens.shape[-1], dtype=jnp.int32), tokens.ndim)
    positions = first_position[..., None] + order
    tokens, positions = tokens.astype(jnp.uint32), positions.astype(jnp.uint32)
    key, odd = (
        lax.broadcast_to_rank(words[:, None], tokens.ndim + 1)
        for words in (hash_key, jnp.array(_ODD, jnp.uint32))
    )
    mixed = _mix(_mix(tokens[..., None, :] ^ key) ^ _mix(positions[..., None, :] * odd + key))
    return jnp.sum(mixed, axis=-1, dtype=jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """Spreads every bit over all 32 (the finaliser of MurmurHash3, Austin Appleby, public domain)."""
    x ^= x >> 16
    x *= jnp.uint32(0x85EBCA6B)
    x ^= x >> 13
    x *= jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
