"""The operations of the prefix cache: publish what rows computed, ask for it, forget it.

`allocate` is the one that reuses; see `CacheConfig.enable_prefix_caching`.
"""

import dataclasses
import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvcache_jax import arguments, block_pool, eviction, publish
from kvcache_jax.admission import Prompt, find_hits
from kvcache_jax.arguments import IntRows
from kvcache_jax.cache_form import refuse_donated, takes_one
from kvcache_jax.config import CacheConfig
from kvcache_jax.empty_state import empty_index, in_place_of
from kvcache_jax.indexing import num_true
from kvcache_jax.single_kernel import one_control_kernel, single_kernel
from kvcache_jax.state import Cache, Control
from kvcache_jax.static_numbers import static_count


def namespace(*, tenant: str = "", adapter: str = "", weights: str = "") -> np.ndarray:
    """Who may share cached blocks: rows of equal namespaces only. A 128-bit digest, compared exactly.

    Args:
      tenant: Who asks. Sharing across tenants would tell one what another has asked, by the time it takes.
      adapter: What changes keys and values on top of the weights, such as a LoRA.
      weights: The weights, by a name or a digest.

    Returns:
      u32[4], for `allocate` and `lookup`. All empty is the default namespace, 0.

    Example:
      >>> import kvcache_jax as kv
      >>> (kv.namespace(tenant="a") == kv.namespace(adapter="a")).all().item()
      False
    """
    fields = {"tenant": tenant, "adapter": adapter, "weights": weights}
    for name, value in fields.items():
        if not isinstance(value, str):
            raise TypeError(f"{name} is {value!r}, expected a str")
    if not any(fields.values()):
        return np.zeros(4, np.uint32)
    digest = hashlib.blake2b(digest_size=16, person=b"kvcache_jax")
    for name, value in fields.items():
        data = value.encode()
        digest.update(f"{name}:{len(data)}:".encode() + data)
    return np.frombuffer(digest.digest(), np.uint32).copy()


def item_tokens(item: bytes, num_tokens: int) -> np.ndarray:
    """Stands for a multimodal item in a prompt's `tokens`: a digest in the place of token ids.

    Every position has a word of its own, below 0, so that no token id looks like one. The same item in
    another number of positions has other words: its keys and values are others too.

    Args:
      item: What the item is, such as the image's bytes; whoever has the digest may reuse its blocks.
      num_tokens: Positions that the item takes in the sequence.

    Returns:
      i32[num_tokens].

    Example:
      >>> import kvcache_jax as kv
      >>> kv.item_tokens(b"an image", 2).tolist() == kv.item_tokens(b"an image", 2).tolist()
      True
      >>> kv.item_tokens(b"an image", 2).tolist() == kv.item_tokens(b"an image", 3).tolist()[:2]
      False
    """
    num_tokens = static_count("num_tokens", num_tokens, least=0)
    if not isinstance(item, bytes | bytearray | memoryview):
        raise TypeError(f"item is a {type(item).__name__}, expected the item's bytes")
    digest = hashlib.shake_128(num_tokens.to_bytes(8, "little"))
    digest.update(item)
    words = np.frombuffer(digest.digest(4 * num_tokens), "<u4")
    return (words | np.uint32(1 << 31)).view(np.int32)


@takes_one
@jax.named_scope("kvcache.commit")
def commit(
    cache: Cache, seq_ids: IntRows | None = None, *, final_len: IntRows | None = None
) -> tuple[Cache, jax.Array]:
    """Publishes rows' full blocks, so that later prompts that begin alike can reuse them.

    Call it after the keys and values of the tokens are written; steps made before are stale then, for a block
    whose contents are already published is given back and the published one takes its place, in all rows.
    Work follows what is new: committing a row that has nothing to publish costs nothing.

    Args:
      cache: Not changed.
      seq_ids: i32[n], active rows. Default: all rows, n = max_seqs, of which idle ones are SKIPPED.
      final_len: i32[n], tokens that will not be taken back, at most; such as without drafts. Default: all.

    Returns:
      The cache and status i32[n]: SEQ_NOT_ACTIVE, DUPLICATE_SEQ_ID, BAD_LENGTH, SKIPPED, BAD_SEQ_ID.

    Raises:
      ValueError: the cache has no prefix caching.
    """
    _require_index("commit", cache)
    if seq_ids is not None:
        seq_ids = arguments.int_column("seq_ids", seq_ids)
    num_rows = cache.max_seqs if seq_ids is None else seq_ids.shape[0]
    if final_len is None:
        final_len = np.full(num_rows, np.iinfo(np.int32).max, np.int32)
    final_len = arguments.int_column("final_len", final_len, num_rows)
    control, status = _commit(cache.control, seq_ids, final_len, config=cache.config)
    return dataclasses.replace(cache, control=control), status


@takes_one
@jax.named_scope("kvcache.lookup")
def lookup(
    cache: Cache,
    tokens: ArrayLike,
    num_tokens: IntRows,
    namespace: ArrayLike | None = None,
    *,
    items: ArrayLike | None = None,
) -> jax.Array:
    """How many tokens of each prompt `allocate` would find cached; changes nothing.

    Args:
      cache: Not changed.
      tokens: i32[n, P], the prompts.
      num_tokens: i32[n], their lengths.
      namespace: u32[4] or u32[n, 4]. Default: all zero.
      items: i32[n, I, 2], as in `allocate`.

    Returns:
      i32[n]; at most `num_tokens - 1`, in whole blocks; 0 without prefix caching, and where `allocate` would
      refuse `num_tokens`.
    """
    num_tokens = arguments.int_column("num_tokens", num_tokens)
    tokens = arguments.token_ids(tokens, num_tokens.shape[0], None)
    namespaces = arguments.namespace_words(namespace, num_tokens.shape[0])
    if cache.control.prefix_index is None:
        refuse_donated("lookup", cache)
        return jnp.zeros_like(num_tokens)
    spans = arguments.item_spans(items, num_tokens.shape[0])
    return _lookup(cache.control, tokens, num_tokens, namespaces, spans, config=cache.config)


@takes_one
@jax.named_scope("kvcache.evict")
def evict(cache: Cache, num_blocks: ArrayLike) -> tuple[Cache, jax.Array]:
    """Gives up the contents of cached blocks, the least valuable first, and makes them free.

    Args:
      cache: Not changed.
      num_blocks: i32[], how many blocks of the group that prefixes are found by.

    Returns:
      The cache and i32[], how many there were to evict, at most `num_blocks`; 0 without prefix caching.
    """
    num_blocks = arguments.int_scalar("num_blocks", num_blocks)
    if cache.control.prefix_index is None:
        refuse_donated("evict", cache)
        return cache, jnp.zeros_like(num_blocks)
    control, num_evicted = _evict(cache.control, num_blocks, config=cache.config)
    return dataclasses.replace(cache, control=control), num_evicted


@takes_one
@jax.named_scope("kvcache.reset_prefix_cache")
def reset_prefix_cache(cache: Cache) -> tuple[Cache, jax.Array]:
    """Forgets all published contents; active rows keep their blocks and can publish them again.

    When the weights change, free the rows first: what they hold was computed with the old ones. Or give new
    rows another `namespace(weights=)`.

    Args:
      cache: Not changed.

    Returns:
      The cache and i32[], how many blocks of all layer groups were published; 0 without prefix caching.
    """
    if cache.control.prefix_index is None:
        refuse_donated("reset_prefix_cache", cache)
        return cache, jnp.int32(0)
    control, num_dropped = _reset_index(cache.control, config=cache.config)
    return dataclasses.replace(cache, control=control), num_dropped


def _require_index(operation: str, cache: Cache) -> None:
    if cache.control.prefix_index is None:
        raise ValueError(
            f"{operation} got a cache without prefix caching, expected one built with "
            "CacheConfig(enable_prefix_caching=True)"
        )


@functools.partial(jax.jit, static_argnames="config")
def _commit(control: Control, *columns: jax.Array | None, config: CacheConfig) -> tuple[Control, jax.Array]:
    commit_rows = functools.partial(publish.commit_rows, config=config)
    return single_kernel(commit_rows, control, *columns)


@functools.partial(jax.jit, static_argnames="config")
def _lookup(
    control: Control,
    tokens: jax.Array,
    num_tokens: jax.Array,
    namespaces: jax.Array,
    items: jax.Array | None,
    config: CacheConfig,
) -> jax.Array:
    prompts = Prompt(
        num_tokens=num_tokens,
        namespace=namespaces,
        priority=jnp.zeros_like(num_tokens),
        tokens=tokens,
        reuse=jnp.ones_like(num_tokens, bool),
        items=items,
    )
    num_cached = jax.vmap(lambda prompt: find_hits(control, prompt, config)[1])(prompts)
    is_length = (num_tokens >= 0) & (num_tokens <= min(tokens.shape[1], config.max_seq_len))
    return jnp.where(is_length, num_cached, 0)


@functools.partial(jax.jit, static_argnames="config")
def _evict(control: Control, num_blocks: jax.Array, config: CacheConfig) -> tuple[Control, jax.Array]:
    group_id = config.indexed_group

    def evict_most(control: Control, num_blocks: jax.Array) -> tuple[Control, jax.Array]:
        cached = control.block_pools[group_id].cached
        assert cached is not None
        num_evicted = jnp.clip(num_blocks, 0, cached.num_cached)
        return eviction.evict(control, group_id, num_evicted, config), num_evicted

    return one_control_kernel(evict_most, control, num_blocks)


@functools.partial(jax.jit, static_argnames="config")
def _reset_index(control: Control, config: CacheConfig) -> tuple[Control, jax.Array]:
    num_dropped = jnp.int32(0)
    pools = []
    for pool in control.block_pools:
        cached = pool.cached
        assert cached is not None
        num_dropped += num_true(cached.is_published)
        block_ids = jnp.where(
            cached.is_published, jnp.arange(pool.num_blocks, dtype=jnp.int32), pool.num_blocks
        )
        pools.append(block_pool.withdraw(pool, block_ids))
    index = control.prefix_index
    assert index is not None
    empty = dataclasses.replace(empty_index(config), block_tokens=index.block_tokens)
    return dataclasses.replace(
        control,
        num_published=jnp.zeros_like(control.num_published),
        prefix_index=in_place_of(index, empty),
        block_pools=tuple(pools),
    ), num_dropped
