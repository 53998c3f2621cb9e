"""Moving keys and values: into slots, between blocks, out as contiguous arrays.

Reverse-mode rules are written out: autodiff of a scatter would build index arrays as large as the
pool, and it cannot pass a loop with a dynamic number of trips. Forward mode raises.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.head_axis import over_heads
from kvcache_jax.arrays.manual_axes import as_varied
from kvcache_jax.arrays.masked_updates import quotient, remainder
from kvcache_jax.core import backends
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import BlockCopies, Cache, KVPool


def block_rows(block_ids: jax.Array, layer: jax.Array | int, num_blocks: int, num_rows: int) -> jax.Array:
    """Index of each block on the pool's first axis; nowhere (`num_blocks`) becomes `num_rows`.

    Nowhere is mapped first: shifted by the layer, it would be block 0 of the next layer.
    """
    return jnp.where(block_ids < num_blocks, layer * num_blocks + block_ids, num_rows)


@jax.custom_vjp
def _store(pool: jax.Array, block: jax.Array, offset: jax.Array, values: jax.Array) -> jax.Array:
    """`pool[block[i], :, offset[i]] = values[i]`, entries with `block` out of range dropped."""
    return pool.at[block, :, offset].set(values, mode="drop")


def _store_fwd(pool, block, offset, values):
    return _store(pool, block, offset, values), (block, offset)


def _store_bwd(slots, grad):
    block, offset = slots
    grad_values = grad.at[block, :, offset].get(mode="fill", fill_value=0)
    # The barrier orders the read before the write, which can then be done in place.
    grad_values, grad = lax.optimization_barrier((grad_values, grad))
    return grad.at[block, :, offset].set(jnp.zeros_like(grad_values), mode="drop"), None, None, grad_values


_store.defvjp(_store_fwd, _store_bwd)


@functools.partial(jax.jit, static_argnames="num_blocks", inline=True)
def store_tokens(
    pool: KVPool, layer: jax.Array | int, k: jax.Array, v: jax.Array, slots: jax.Array, num_blocks: int
) -> KVPool:
    """Writes keys and values `[..., num_kv_heads, head_dim]` of one layer at `slots` `[...]`."""
    block_size = pool.k.shape[2]
    slots = slots.reshape(-1)
    block = block_rows(quotient(slots, block_size), layer, num_blocks, pool.k.shape[0])
    offset = remainder(slots, block_size)
    k = k.reshape(-1, *k.shape[-2:]).astype(pool.k.dtype)
    v = v.reshape(-1, *v.shape[-2:]).astype(pool.v.dtype)
    pool, k, v = as_varied((pool, k, v), slots)
    return KVPool(k=_store(pool.k, block, offset, k), v=_store(pool.v, block, offset, v))


def copy_blocks(pool: KVPool, copies: BlockCopies, num_blocks: int, config: CacheConfig) -> KVPool:
    """Copies whole blocks of all layers within a group's pool, in place under donation.

    A block may be overwritten after it was copied: it had one owner left, who copied it away.
    """
    name = backends.choose(config, None, pool)
    pool = as_varied(pool, copies)
    k, v = _copy(name, config.head_axis, num_blocks, (pool.k, pool.v), *copies)
    return KVPool(k=k, v=v)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _copy(
    name: str,
    head_axis: str | None,
    num_blocks: int,
    pools: tuple[jax.Array, jax.Array],
    src: jax.Array,
    dst: jax.Array,
    num_copies: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`pool[layer, dst[i]] = pool[layer, src[i]]` of both pools, for `i < num_copies` and every layer."""
    if name != backends.XLA:
        kernel = functools.partial(
            backends.kernels(name).copy_blocks,
            num_blocks=num_blocks,
            interpret=backends.is_interpreted.value,
        )
        copy = over_heads(kernel, pools[0], head_axis, (1, 1, None, None, None), (1, 1))
        return copy(*pools, src, dst, num_copies)
    layers = _layer_starts(pools[0], num_blocks)

    def copy_block(i, pools):
        return tuple(pool.at[layers + dst[i]].set(pool[layers + src[i]]) for pool in pools)

    return lax.fori_loop(0, num_copies, copy_block, pools)


def _copy_fwd(name, head_axis, num_blocks, pools, *copies):
    return _copy(name, head_axis, num_blocks, pools, *copies), copies


def _copy_bwd(name, head_axis, num_blocks, copies, grads):
    src, dst, num_copies = copies
    layers = _layer_starts(grads[0], num_blocks)

    def return_grads(i, grads):
        i = num_copies - 1 - i

        def return_grad(grad):
            moved = grad[layers + dst[i]]
            # In this order: a block may be handed to the row that copies it.
            return grad.at[layers + dst[i]].set(jnp.zeros_like(moved)).at[layers + src[i]].add(moved)

        return jax.tree.map(return_grad, grads)

    return lax.fori_loop(0, num_copies, return_grads, grads), None, None, None


_copy.defvjp(_copy_fwd, _copy_bwd)


def _layer_starts(pool: jax.Array, num_blocks: int) -> jax.Array:
    return jnp.arange(pool.shape[0] // num_blocks, dtype=jnp.int32) * num_blocks


def load_row(
    pool: KVPool, blocks: jax.Array, context_len: jax.Array, max_seq_len: int
) -> tuple[jax.Array, jax.Array]:
    """One row's keys and values `[max_seq_len, num_kv_heads, head_dim]`; 0 where there is no token.

    Args:
      pool: The group's pool.
      blocks: i32[max_blocks_per_seq], the row's blocks on the pool's first axis (`block_rows`).
      context_len: i32[], tokens held.
      max_seq_len: Length of the result.
    """
    block_size = pool.k.shape[2]
    position = jnp.arange(max_seq_len, dtype=jnp.int32)
    block = blocks[quotient(position, block_size)]
    is_token = (block < pool.k.shape[0]) & (position < context_len)

    def load(values: jax.Array) -> jax.Array:
        tokens = values.at[block, :, remainder(position, block_size)].get(mode="clip")
        return jnp.where(is_token[:, None, None], tokens, jnp.zeros((), tokens.dtype))

    return load(pool.k), load(pool.v)


def with_pool(cache: Cache, group_id: int, pool: KVPool) -> Cache:
    """The cache with one group's pool replaced."""
    pools = (*cache.pools[:group_id], pool, *cache.pools[group_id + 1 :])
    return dataclasses.replace(cache, pools=pools)
