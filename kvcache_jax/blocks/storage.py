"""Moving keys and values: into slots, between blocks, out as contiguous arrays.

Reverse-mode rules are written out: autodiff of a scatter would build index arrays as large as the
pool, and it cannot pass a loop with a dynamic number of trips. Forward mode raises.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.arrays.masked_updates import get_at, quotient, remainder
from kvcache_jax.arrays.sharding import as_varied, over_heads
from kvcache_jax.core import backends
from kvcache_jax.core.config import CacheConfig, LayerGroup
from kvcache_jax.core.state import BlockCopies, Cache, KVPool

_COPIES_PER_TRIP = 16


def block_rows(block_ids: jax.Array, layer: jax.Array | int, num_blocks: int, num_rows: int) -> jax.Array:
    """Computes each block's index on the pool's first axis; nowhere (`num_blocks`) becomes `num_rows`.

    Nowhere is mapped first: shifted by the layer, it would be block 0 of the next layer.
    """
    return jnp.where(block_ids < num_blocks, layer * num_blocks + block_ids, num_rows)


@functools.partial(jax.jit, static_argnames=("config", "group_id"), inline=True)
def store_tokens(
    pool: KVPool,
    layer: jax.Array | int,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    config: CacheConfig,
    group_id: int,
) -> KVPool:
    """Writes keys and values `[..., num_kv_heads, head_dim]` of one layer at `slots` `[...]`."""
    group = config.groups[group_id]
    backend = backends.choose(config, None, pool, group)
    new = KVPool(k=k, v=v)
    new = jax.tree.map(lambda x, array: x.reshape(-1, *x.shape[-2:]).astype(array.dtype), new, pool)
    slots, layer = slots.reshape(-1), jnp.asarray(layer)
    pool, new = as_varied((pool, new), slots)
    return _store(backend.name, config.head_axis, group, pool, new, slots, layer)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _store(
    name: str,
    head_axis: str | None,
    group: LayerGroup,
    pool: KVPool,
    new: KVPool,
    slots: jax.Array,
    layer: jax.Array,
) -> KVPool:
    if write := backends.get_backend(name).write:

        def local(pool, new, slots, layer):
            return write(pool, new.k, new.v, slots, group, layer=layer)

        return over_heads(local, pool.k, head_axis, (1, 1, None, None), 1)(pool, new, slots, layer)
    block, offset = _places(group, pool, slots, layer)
    return jax.tree.map(lambda x, values: x.at[block, :, offset].set(values, mode="drop"), pool, new)


def _places(
    group: LayerGroup, pool: KVPool, slots: jax.Array, layer: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The slots' index on the pool's first axis, past its end for nowhere, and their place in the block."""
    num_rows, _, block_size, _ = pool.k.shape
    block_ids = quotient(slots, block_size)
    return block_rows(block_ids, layer, num_rows // group.num_layers, num_rows), remainder(slots, block_size)


def _store_fwd(name, head_axis, group, pool, new, slots, layer):
    return _store(name, head_axis, group, pool, new, slots, layer), (slots, layer)


def _store_bwd(name, head_axis, group, places, grads):
    block, offset = _places(group, grads, *places)

    def split(grad: jax.Array) -> tuple[jax.Array, jax.Array]:
        grad_values = grad.at[block, :, offset].get(mode="fill", fill_value=0)
        # The barrier orders the read before the write, which can then be done in place.
        grad_values, grad = lax.optimization_barrier((grad_values, grad))
        return grad.at[block, :, offset].set(jnp.zeros_like(grad_values), mode="drop"), grad_values

    (k, new_k), (v, new_v) = split(grads.k), split(grads.v)
    return KVPool(k=k, v=v), KVPool(k=new_k, v=new_v), None, None


_store.defvjp(_store_fwd, _store_bwd)


def copy_all(cache: Cache, copies: Sequence[BlockCopies]) -> Cache:
    """Copies whole blocks of all layers, per layer group, in place under donation.

    A block may be overwritten after it was copied: it had one owner left, who copied it away.
    """
    config, pools = cache.config, []
    for pool, copied, group in zip(cache.pools, copies, config.groups, strict=True):
        name = backends.choose(config, None, pool, group).name
        pools.append(_copy(name, config.head_axis, group, as_varied(pool, copied), *copied))
    return dataclasses.replace(cache, pools=tuple(pools))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _copy(
    name: str,
    head_axis: str | None,
    group: LayerGroup,
    pool: KVPool,
    src: jax.Array,
    dst: jax.Array,
    num_copies: jax.Array,
) -> KVPool:
    """Sets `pool[layer, dst[i]] = pool[layer, src[i]]` for `i < num_copies` and every layer."""
    if copy := backends.get_backend(name).copy_blocks:

        def local(pool, src, dst, num_copies):
            return copy(pool, src, dst, num_copies, group)

        return over_heads(local, pool.k, head_axis, (1, None, None, None), 1)(pool, src, dst, num_copies)

    def copy_some(i, pool):
        rows, new_rows = (_copied_rows(group, pool, ids, num_copies, i) for ids in (src, dst))
        return jax.tree.map(lambda x: x.at[new_rows].set(get_at(x, rows), mode="drop"), pool)

    return lax.fori_loop(0, _num_trips(num_copies), copy_some, pool)


def _copy_fwd(name, head_axis, group, pool, *copies):
    return _copy(name, head_axis, group, pool, *copies), copies


def _copy_bwd(name, head_axis, group, copies, grads):
    src, dst, num_copies = copies
    num_trips = _num_trips(num_copies)

    def return_some(i, grads):
        i = num_trips - 1 - i
        rows, new_rows = (_copied_rows(group, grads, ids, num_copies, i) for ids in (src, dst))

        def return_grads(grad: jax.Array) -> jax.Array:
            moved = get_at(grad, new_rows)
            # In this order: a block may be handed to the row that copies it.
            grad = grad.at[new_rows].set(jnp.zeros_like(moved), mode="drop")
            return grad.at[rows].add(moved, mode="drop")

        return jax.tree.map(return_grads, grads)

    return lax.fori_loop(0, num_trips, return_some, grads), None, None, None


_copy.defvjp(_copy_fwd, _copy_bwd)


def _num_trips(num_copies: jax.Array) -> jax.Array:
    return (num_copies + _COPIES_PER_TRIP - 1) // _COPIES_PER_TRIP


def _copied_rows(
    group: LayerGroup, pool: KVPool, ids: jax.Array, num_copies: jax.Array, trip: jax.Array
) -> jax.Array:
    """i32[layers * copies], where the blocks of a trip stand in the pool; past its end for no copy."""
    num_rows = pool.k.shape[0]
    num_blocks = num_rows // group.num_layers
    nth = trip * _COPIES_PER_TRIP + jnp.arange(min(_COPIES_PER_TRIP, ids.shape[0]), dtype=jnp.int32)
    block_ids = jnp.where(nth < num_copies, get_at(ids, nth), num_blocks)
    layers = jnp.arange(group.num_layers, dtype=jnp.int32)[:, None]
    return block_rows(block_ids[None], layers, num_blocks, num_rows).reshape(-1)


def load_row(
    pool: KVPool, blocks: jax.Array, context_len: jax.Array, max_seq_len: int
) -> tuple[jax.Array, jax.Array]:
    """Reads a row's keys and values `[max_seq_len, num_kv_heads, head_dim]`; 0 where there is no token.

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
    """Replaces the pool of one layer group."""
    pools = (*cache.pools[:group_id], pool, *cache.pools[group_id + 1 :])
    return dataclasses.replace(cache, pools=pools)
