"""Snapshots: the states of recurrent layers that prefixes find, companions of published blocks.

A state is computed from exactly the tokens up to its end, so it belongs to the indexed block that has the
last of them.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import get_at, quotient, remainder, run_if, set_at
from kvcache_jax.core.backends import by_platform
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Control, PrefixIndex
from kvcache_jax.prefix import group_links


def publish_states(
    control: Control, rows: jax.Array, length: jax.Array, is_end: jax.Array | bool, config: CacheConfig
) -> Control:
    """Publishes the states that `rows` i32[n] hold at the lengths that `config.snapshots` chooses.

    Their blocks of the indexed group are published up to `length` i32[n]; `max_seqs` is skipped. `is_end`
    bool[n] says which rows are complete, so that their last states are kept.
    """
    lengths, is_wanted = _chosen(control, rows, length, is_end, config)  # [n, c]
    indexed, unit = config.groups[config.indexed_group], config.prefix_unit
    is_chosen = (lengths > 0) & (remainder(lengths, unit) == 0)
    # Of states that take several blocks, those before the last are in earlier blocks of the indexed group.
    num_columns = max(
        (group.span.num_prefix_blocks(group.block_size) - 1) * group.block_size // indexed.block_size + 1
        for group in config.snapshot_groups.values()
        if group.span.is_read_later
    )
    back = jnp.arange(num_columns, dtype=jnp.int32) + 1
    columns = quotient(lengths, indexed.block_size)[..., None] - back[None, None]
    mask = is_chosen[..., None] & (columns >= 0)
    is_wanted, rows = (jnp.broadcast_to(x, mask.shape) for x in (is_wanted[..., None], rows[:, None, None]))
    mask, rows, columns, is_wanted = (x.reshape(-1) for x in (mask, rows, columns, is_wanted))
    table = control.block_pools[config.indexed_group].block_table
    canonical = get_at(table, (rows, columns), config.groups[config.indexed_group].num_blocks)
    mask &= columns < get_at(control.num_published, rows, 0)

    def publish(control: Control) -> Control:
        return group_links.link(control, mask, rows, columns, canonical, config, is_wanted=is_wanted)

    # A step that ends no prompt has nothing to publish; on a GPU the host would wait for the answer.
    if by_platform(cpu=False, accelerator=True):
        return publish(control)
    return run_if(mask.any(), publish, control)


def _chosen(
    control: Control, rows: jax.Array, length: jax.Array, is_end: jax.Array | bool, config: CacheConfig
) -> tuple[jax.Array, jax.Array]:
    """Lists the lengths i32[n, c] whose states are kept, 0 for none, and which of them prompts asked for."""
    snapshots, unit = config.snapshots, config.prefix_unit
    assert control.marks is not None
    lengths = [*get_at(control.marks, rows, 0).T]
    is_wanted = [True, False]
    if snapshots.at_end:
        lengths.append(jnp.where(is_end, quotient(length, unit) * unit, 0))
        is_wanted.append(False)
    if snapshots.every:
        last = quotient(length, snapshots.every)
        for nth in range(snapshots.max_per_step(config.query_len_limit) - len(is_wanted)):
            lengths.append(jnp.maximum(last - nth, 0) * snapshots.every)
            is_wanted.append(True)
    stacked = jnp.stack(lengths, axis=1)
    return stacked, jnp.broadcast_to(jnp.array(is_wanted)[None], stacked.shape)


def note_wanted(index: PrefixIndex, hits: list[jax.Array]) -> PrefixIndex:
    """Notes that prompts started from the states among the blocks `hits`, per group i32[n, columns]."""
    links = tuple(
        dataclasses.replace(link, is_wanted=set_at(link.is_wanted, ids, True))
        if link is not None and link.is_wanted is not None
        else link
        for link, ids in zip(index.group_links, hits, strict=True)
    )
    return dataclasses.replace(index, group_links=links)
