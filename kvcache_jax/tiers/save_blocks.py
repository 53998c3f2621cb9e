"""The operation `save`: published blocks go to a store, for this process or another one, now or later."""

import functools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from kvcache_jax.arrays.transfers import explicit_transfers
from kvcache_jax.core import arguments
from kvcache_jax.core.attachment import ShardCache
from kvcache_jax.core.cache_checks import require_prefix_index, require_values
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import Cache
from kvcache_jax.operations.transfer import export_blocks
from kvcache_jax.tiers.block_store import BlockStore
from kvcache_jax.tiers.catalogue import (
    Questions,
    StoreReport,
    write_entries,
    write_namespaces,
)
from kvcache_jax.tiers.move_blocks import of_kept
from kvcache_jax.tiers.published import (
    Entry,
    Keyed,
    NamedBlocks,
    Published,
    keyed_by,
    namespaces_of,
    published_block,
    read_blocks,
)
from kvcache_jax.tiers.stored_block import BlockName, Scope, config_digest, pack_block

_BATCH_BYTES, _MOST_BLOCKS = 64 * 2**20, 48

_export = jax.jit(export_blocks)


def save(cache: Cache, store: BlockStore, *, weights: str, namespace: ArrayLike | None = None) -> StoreReport:
    """Writes the published blocks that a store does not have yet, so that `load` finds them.

    A block is written before those that continue it, and all are before they are listed: whenever the process
    ends, what is there is whole. A store that fails costs later hits and raises nothing.

    Args:
      cache: Not changed; outside of jit. Its rows may be active.
      store: Such as `DirectoryStore`.
      weights: Digest of all that keys and values depend on beside the config: `tiers.digest(params)`.
      namespace: u32[4], the one whose blocks are saved; only a `load` that names it finds them. Default: all
        namespaces, which `load` without one restores.

    Returns:
      What was saved, and what was not and why.

    Raises:
      ValueError, TypeError: no cache with values and prefix caching, no store, or no digest.

    Example:
      >>> import numpy as np, kvcache_jax as kv
      >>> config = kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=8, block_size=2, max_seqs=1,
      ...                         max_seq_len=8, enable_prefix_caching=True)
      >>> cache, tokens = kv.init(config), np.arange(7)[None]
      >>> cache, _ = kv.allocate(cache, [0], [7], tokens=tokens)
      >>> cache, _ = kv.extend(cache, [7], max_new=7, tokens=tokens)
      >>> cache, _ = kv.free(kv.commit(cache)[0], [0])
      >>> store, weights = kv.tiers.MemoryStore(), kv.tiers.digest({"w": np.ones(3)})
      >>> kv.tiers.save(cache, store, weights=weights).num_saved
      3
      >>> kv.tiers.save(cache, store, weights=weights).num_saved  # they are there
      0
      >>> cache, report = kv.tiers.load(store, kv.init(config), weights=weights)
      >>> report.num_loaded, kv.lookup(cache, tokens, [7]).tolist()
      (3, [6])
    """
    checked_weights(weights)
    require_stored("save", cache)
    questions, words = Questions(store), namespace_digits(namespace)
    num_saved, listed = write_blocks(cache, questions, weights, words)
    write_lists(questions, listed, is_open=words is None)
    return questions.report(num_saved=num_saved)


@explicit_transfers
def _read(kept: Any, at: int) -> np.ndarray:
    """Reads one block of those that a keeper keeps."""
    return np.asarray(kept[at])


type Listed = Mapping[Scope, Mapping[str, Entry]]
"""By scope the blocks that are published and in the store, by their keys."""


def write_blocks(
    cache: Cache, questions: Questions, weights: str, namespace: str | None
) -> tuple[int, Listed]:
    """Writes the blocks that a store does not have; returns how many, and all that the store has now."""
    cache = cache.config.keeper.settle(cache)
    found = read_blocks(cache)
    scopes = scopes_of(cache, weights, namespaces_of(found) if namespace is None else [namespace])
    named: NamedBlocks[Keyed] = NamedBlocks()
    order, now = named.update(found, keyed_by(scopes, cache.config.indexed_group)), time.time_ns()
    blocks = [published_block(found, at, keyed, now) for at in order if (keyed := named.names[at])]
    keys = [entry.key for block in blocks for entry in block.entries]
    is_there = dict(zip(keys, questions.contains(keys), strict=True))
    new = [block for block in blocks if not all(is_there[entry.key] for entry in block.entries)]
    num_saved = 0
    for _, contents in read_contents(cache, new):
        items = [(key, pack_block(name, arrays)) for name, key, arrays in contents if not is_there[key]]
        if questions.put(items):
            num_saved += len(items)
            is_there |= dict.fromkeys((key for key, _ in items), True)
    listed: dict[Scope, dict[str, Entry]] = {scope: {} for scope in scopes.values()}
    for block in blocks:
        of_scope = {entry.key: entry for entry in block.entries if is_there[entry.key]}
        listed[block.names[0].scope] |= of_scope
    return num_saved, listed


def write_lists(questions: Questions, listed: Listed, *, is_open: bool) -> None:
    """Lists blocks beside those that others listed; where it `is_open`, who names no namespace finds them."""
    for scope, entries in listed.items():

        def with_mine(earlier: Sequence[Entry], entries: Mapping[str, Entry] = entries) -> Iterable[Entry]:
            still_there = questions.contains([entry.key for entry in earlier], default=True)
            others = {entry.key: entry for entry, is_one in zip(earlier, still_there, strict=True) if is_one}
            return (others | dict(entries)).values()

        write_entries(questions, scope, with_mine)
    if is_open and listed:
        weights, config, _ = next(iter(listed))
        write_namespaces(questions, weights, config, [scope.namespace for scope in listed])


type Contents = list[tuple[BlockName, str, dict[str, np.ndarray]]]
"""The name, key and arrays of each block."""


def read_contents(
    cache: Cache, blocks: Sequence[Published]
) -> Iterator[tuple[Sequence[Published], Contents]]:
    """Yields batches of blocks, with the contents of them and of those linked to them.

    A batch is exported by the device while the one before is read.
    """
    num_blocks = [pool.num_blocks for pool in cache.control.block_pools]
    nowhere, size = num_blocks[cache.config.indexed_group], batch_size(cache)
    batches = [blocks[start : start + size] for start in range(0, len(blocks), size)]
    program = cache.export if isinstance(cache, ShardCache) else functools.partial(_export, cache)

    @explicit_transfers
    def export(batch: Sequence[Published]) -> Any:
        ids = [min(block.ids[0], nowhere) for block in batch]
        return program(np.array(ids + [nowhere] * (size - len(ids)), np.int32)).arrays

    programs = map(export, batches)
    following = next(programs, None)
    for batch in batches:
        present, following = following, next(programs, None)
        exported, contents = jax.device_get(present), []
        for i, block in enumerate(batch):
            for name, entry, block_id in zip(block.names, block.entries, block.ids, strict=True):
                g = name.group_id
                group, on_host, arrays = cache.config.groups[g], block_id - num_blocks[g], {}
                for part, array in group.arrays:
                    if on_host < 0:
                        arrays[part] = exported[g][part][i, name.slot]
                    else:
                        arrays[part] = of_kept(_read(cache.kept[g][part], on_host), array, group.num_layers)
                contents.append((name, entry.key, arrays))
        yield batch, contents


def checked_weights(weights: str) -> str:
    """Returns a digest of weights; refuses one that is none."""
    if not (isinstance(weights, str) and weights):
        raise TypeError(f"weights is {weights!r}, expected a digest: kv.tiers.digest(params)")
    return weights


def require_stored(caller: str, cache: Cache) -> None:
    """Refuses a cache that cannot go to a store or come from one."""
    require_values(caller, cache, pools=True)
    require_prefix_index(caller, cache)
    if not cache.pools:
        raise ValueError(f"{caller} got a cache built with storage=False, expected one with keys and values")


def require_pools_alone(caller: Any, config: CacheConfig) -> None:
    """Refuses a mesh's caches that keep blocks outside of their pools."""
    if config.keeper.memory_kind is not None:
        name, keeper = type(caller).__name__, type(config.keeper).__name__
        raise NotImplementedError(
            f"the engine has a placement and extras has a {keeper}, expected one of the two: {name} reads "
            "blocks of a mesh's pools alone"
        )


def scopes_of(cache: Cache, weights: str, namespaces: Iterable[str]) -> dict[str, Scope]:
    """Builds the scope of each namespace."""
    config = config_digest(cache.config)
    return {namespace: Scope(weights, config, namespace) for namespace in namespaces}


def namespace_digits(namespace: ArrayLike | None) -> str | None:
    """Returns a namespace u32[4] as 32 hexadecimal digits; None for none."""
    if namespace is None:
        return None
    return np.asarray(arguments.namespace_words(namespace, 1)).astype("<u4").tobytes().hex()


def batch_size(cache: Cache) -> int:
    """Counts the blocks that move at a time."""
    block_bytes = sum(group.block_bytes for group in cache.config.groups)
    num_blocks = cache.config.groups[cache.config.indexed_group].num_blocks
    return max(1, min(_MOST_BLOCKS, _BATCH_BYTES // max(block_bytes, 1), num_blocks // 2))
