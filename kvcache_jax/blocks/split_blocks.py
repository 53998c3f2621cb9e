"""Blocks whose tokens a mesh axis splits, `CacheConfig.context_axis`: each device has a run of every block.

    2 devices, blocks of 4 tokens   column 0            column 1
    tokens of a row                 0 1 | 2 3           4 5 | 6 7
    on device                        0  |  1             0  |  1

So a row's runs are dealt to the devices in turns, and each device has as many tokens of a row, whatever its
length. Block ids, tables, owners and the prefix index are of whole blocks, and alike on every device: what
shares, copies, finds or gives up whole blocks needs to know of nothing. Only what looks at places within
blocks does. Where XLA splits the arrays it does so by itself; attention and writing, which it would gather a
pool for, work on each device's own part, and attention's results are merged.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from kvcache_jax.core.state import AttentionPlan, KVPool
from kvcache_jax.layers.layer_group import LayerGroup


def run_len(pool: KVPool, group: LayerGroup) -> int:
    """Counts the tokens of a block that these arrays have: all, or one device's run within `shard_map`."""
    positions = group.token_positions.items()
    return next(
        (pool.arrays[name].shape[axis] for name, axis in positions if axis is not None), group.block_size
    )


def is_part(pool: KVPool, group: LayerGroup) -> bool:
    """Tests whether these arrays have one device's run of each block."""
    return run_len(pool, group) != group.block_size


def require_whole(what: str, pool: KVPool, group: LayerGroup) -> None:
    """Refuses an operation on places within blocks where the caller maps over the axis that splits them."""
    if is_part(pool, group):
        raise NotImplementedError(
            f"{what} got {run_len(pool, group)} of the {group.block_size} tokens of a block, one "
            "device's run inside shard_map over context_axis, expected whole blocks: call it outside "
            "of shard_map (in an Engine: leave context_axis out)"
        )


def own_places(
    pool: KVPool, group: LayerGroup, axis: str | None, block_ids: jax.Array, offset: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Finds tokens i32[n] in this device's part: blocks, past the end for tokens of others, and offsets."""
    if axis is None or not is_part(pool, group):
        return block_ids, offset
    own = offset - lax.axis_index(axis) * run_len(pool, group)
    is_own = (own >= 0) & (own < run_len(pool, group))
    num_blocks = pool.num_rows // group.num_layers
    return jnp.where(is_own, block_ids, num_blocks), jnp.where(is_own, own, 0)


def of_all_parts[T](pool: KVPool, group: LayerGroup, axis: str | None, values: T) -> T:
    """Sums what each device has of its own tokens, and 0 for others."""
    return values if axis is None or not is_part(pool, group) else lax.psum(values, axis)


def own_keys(plan: AttentionPlan, pool: KVPool, group: LayerGroup, axis: str) -> AttentionPlan:
    """Plans the same columns, of which this device reads its own run."""
    first = lax.axis_index(axis) * run_len(pool, group)
    return dataclasses.replace(plan, first_offset=jnp.broadcast_to(first, plan.table_row.shape))


def merged(out: jax.Array, lse: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
    """Merges results f32[..., e] of the devices' own keys by their log-sum-exps f32[...], the same on all."""
    peak = lax.pmax(lse, axis)
    peak = jnp.where(jnp.isneginf(peak), 0, peak)  # no device has a key of it
    share = jnp.exp(lse - peak)
    out, total = lax.psum((out * share[..., None], share), axis)
    out = out / jnp.where(total == 0, 1, total)[..., None]
    return out, peak + jnp.log(total)
