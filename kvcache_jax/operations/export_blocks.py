"""The question `export_blocks`: what published blocks hold, to be kept or published elsewhere."""

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.masked_updates import get_at
from kvcache_jax.arrays.pytree import pytree_dataclass
from kvcache_jax.arrays.sharding import as_varied
from kvcache_jax.blocks import block_pool
from kvcache_jax.blocks.storage import refuse_derivatives, rows_of_all_layers
from kvcache_jax.core import arguments
from kvcache_jax.core.arguments import IntRows
from kvcache_jax.core.cache_checks import require_prefix_index, takes_one
from kvcache_jax.core.state import Cache, PrefixIndex


@pytree_dataclass()
class BlockContents:
    """The contents of published blocks, whatever the layer kinds store.

    A block is known by all tokens up to its end, which also name the blocks before it: `import_blocks`
    compares them, and never goes by a hash alone.

    Attributes:
      tokens: i32[n, P], of the sequence from its start to the block's end; `P` covers `max_seq_len`.
      num_tokens: i32[n], how many, a multiple of the block size; 0 for no block.
      namespace: u32[n, 4], who may share the block.
      is_held: per layer group bool[n, m], which of its `m` blocks with the block's last tokens there are;
        m = 1 in the group that prefixes are found by.
      arrays: per layer group by name `[n, m, num_layers, *shape]`, as in `KVPool`; () without storage.
    """

    tokens: jax.Array
    num_tokens: jax.Array
    namespace: jax.Array
    is_held: tuple[jax.Array, ...]
    arrays: tuple[dict[str, jax.Array], ...]


@takes_one
@jax.named_scope("kvcache.export_blocks")
def export_blocks(cache: Cache, block_ids: IntRows) -> BlockContents:
    """Reads the contents of published blocks, and of the blocks linked to them in other layer groups.

    Args:
      cache: Not changed.
      block_ids: i32[n], of the group that prefixes are found by, as `eviction_candidates` gives them. Others
        than published ones give no block.

    Returns:
      `BlockContents`, arrays of their own, for `import_blocks` of this cache later or of another one.

    Raises:
      ValueError: the cache has no prefix caching.
    """
    require_prefix_index("export_blocks", cache)
    return _export(cache, arguments.int_column("block_ids", block_ids))


@jax.jit
def _export(cache: Cache, block_ids: jax.Array) -> BlockContents:
    cache, block_ids = as_varied((cache, block_ids))
    control, config = cache.control, cache.config
    index, indexed = control.prefix_index, config.groups[config.indexed_group]
    assert index is not None
    pool = control.block_pools[config.indexed_group]
    block_ids = jnp.where(block_pool.is_published(pool, block_ids), block_ids, pool.num_blocks)
    chain, depth = _chains(index, block_ids, pool.max_blocks_per_seq)
    tokens = get_at(index.block_tokens, chain, 0).reshape(chain.shape[0], -1)
    is_block = block_ids < pool.num_blocks
    is_held, arrays = [], []
    for g, links in enumerate(index.group_links):
        ids = block_ids[:, None]
        if links is not None:
            ids = get_at(links.block_ids, block_ids, control.block_pools[g].num_blocks)
        is_held.append(ids < control.block_pools[g].num_blocks)
        if cache.pools:
            kv_pool = refuse_derivatives(config.groups[g], cache.pools[g])
            rows = rows_of_all_layers(kv_pool, config.groups[g], ids)
            arrays.append({name: get_at(x, rows, 0) for name, x in kv_pool.arrays.items()})
    return BlockContents(
        tokens=tokens,
        num_tokens=jnp.where(is_block, (depth + 1) * indexed.block_size, 0),
        namespace=get_at(index.namespace, block_ids, 0),
        is_held=tuple(is_held),
        arrays=tuple(arrays),
    )


def _chains(index: PrefixIndex, block_ids: jax.Array, num_columns: int) -> tuple[jax.Array, jax.Array]:
    """Finds the blocks before each of i32[n] published blocks.

    In steps of powers of two, so that a long chain takes as many gathers as its length has bits, and no loop.

    Returns:
      i32[n, num_columns], by column up to the block itself, then nowhere; and i32[n], the block's own column.
    """
    nowhere = index.parent.shape[0]
    jumps = [index.parent]  # jumps[k][b] is 2**k blocks before b
    for _ in range(1, max(num_columns - 1, 1).bit_length()):
        jumps.append(get_at(jumps[-1], jumps[-1], nowhere))
    first, depth = block_ids, jnp.zeros_like(block_ids)
    for k, jump in reversed(list(enumerate(jumps))):
        before = get_at(jump, first, nowhere)
        first = jnp.where(before < nowhere, before, first)
        depth += jnp.where(before < nowhere, 1 << k, 0)
    distance = depth[:, None] - jnp.arange(num_columns, dtype=jnp.int32)[None]
    chain = jnp.broadcast_to(block_ids[:, None], distance.shape)
    for k, jump in enumerate(jumps):
        chain = jnp.where((distance >> k) & 1 == 1, get_at(jump, chain, nowhere), chain)
    return jnp.where(distance >= 0, chain, nowhere), depth
