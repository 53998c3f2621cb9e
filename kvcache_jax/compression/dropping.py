"""Rows that drop tokens from within, and the original keys of the sinks before them.

The run that `drop(positions="cache")` drops shortens the way from a query to a row's first tokens, the sinks.
No key after them moves: the keys of the sinks are rotated by as many positions as were dropped, each time
from the original ones. These stay in blocks that the row holds beside its table, column for column. Forks
share both; the next drop of either row takes a block of its own.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from kvcache_jax.arrays.masked_updates import get_at, set_at
from kvcache_jax.arrays.number_checks import static_count
from kvcache_jax.arrays.pytree import pytree_dataclass
from kvcache_jax.blocks import block_pool
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.extras import Extra, HeldBlocks
from kvcache_jax.core.state import BlockPool, Cache, Control
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.layers.span import ceil_div


@pytree_dataclass()
class OriginalSinks:
    """The blocks with original keys of sinks that were rotated."""

    # Per group i32[max_seqs, columns], nowhere where the row reads the original keys; a group of sources
    # has no columns.
    block_ids: tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Dropping(Extra):
    """Allows rows to drop tokens from within: by `compress`, and without prefix caching by `drop`.

    XLA then does all attention: no kernel knows tokens that are hidden.

    Attributes:
      max_sink_len: Most first tokens of a row whose keys `drop(positions="cache")` rotates. Default: none;
        then no program knows of them.

    Example:
      >>> import kvcache_jax as kv
      >>> dropping = kv.compression.Dropping(max_sink_len=4)
      >>> config = kv.CacheConfig([kv.FullAttention(1, 8)], extras=[dropping])
    """

    name: ClassVar[str] = "dropping"
    hides_tokens: ClassVar[bool] = True

    max_sink_len: int | None = None

    def __post_init__(self):
        if self.max_sink_len is not None:
            object.__setattr__(self, "max_sink_len", static_count("max_sink_len", self.max_sink_len, 1))

    def check(self, config: CacheConfig) -> None:
        """Refuses layers of states, and a `max_sink_len` that the config cannot serve."""
        config.refuse_states("tokens to be dropped")
        if self.max_sink_len is None:
            return
        if config.enable_prefix_caching:
            raise ValueError(
                f"max_sink_len is {self.max_sink_len} and enable_prefix_caching is True, expected False: "
                "what a row holds after dropped tokens cannot be found by its tokens"
            )
        if self.max_sink_len > config.max_seq_len:
            raise ValueError(
                f"max_sink_len is {self.max_sink_len}, expected at most max_seq_len = {config.max_seq_len}"
            )
        for group in config.row_groups.values():
            if group.kind.rotated_features is None:
                raise NotImplementedError(
                    f"max_sink_len is given and layers[{group.layer_ids[0]}] is {group.kind.label}, expected "
                    "layers whose keys can be rotated to another position, as FullAttention"
                )

    def empty(self, config: CacheConfig, numpy: Any) -> OriginalSinks | None:
        """Builds the lists of blocks, all nowhere."""
        max_sink_len = self.max_sink_len
        if max_sink_len is None:
            return None

        def nowhere(group_id: int, group: LayerGroup) -> Any:
            num_columns = ceil_div(max_sink_len, group.block_size) if group_id in config.row_groups else 0
            return numpy.full((config.max_seqs, num_columns), group.num_blocks, jnp.int32)

        return OriginalSinks(block_ids=tuple(nowhere(g, group) for g, group in enumerate(config.groups)))

    def inherit(self, control: Control, rows: jax.Array, parent_ids: jax.Array) -> Control:
        """Shares the original blocks of their parents with `rows`, in place of their own."""

        def inherited(_: int, pool: BlockPool, block_ids: jax.Array) -> tuple[BlockPool, jax.Array]:
            new = get_at(block_ids, parent_ids, pool.num_blocks)
            new = jnp.where((rows < control.max_seqs)[:, None], new, pool.num_blocks)
            pool = block_pool.share(pool, new)  # before the old ones are released: they may be the same
            old = get_at(block_ids, rows, pool.num_blocks)
            return block_pool.release(pool, old[:, ::-1]), set_at(block_ids, rows, new)

        return _in_groups(control, inherited)

    def forget(self, control: Control, rows: jax.Array) -> Control:
        """Releases the original blocks of `rows`."""
        return keep_first(control, rows, [jnp.zeros_like(rows)] * len(control.block_pools))

    def truncate(self, control: Control, rows: jax.Array, new_len: jax.Array) -> Control:
        """Restores the original blocks where no token after the sinks is left: sinks are where they were."""
        assert control.holes is not None
        is_plain = new_len <= control.holes.of_rows(rows).prefix_len
        rows = jnp.where(is_plain, rows, control.max_seqs)

        def put_back(_: int, pool: BlockPool, block_ids: jax.Array) -> tuple[BlockPool, jax.Array]:
            columns = jnp.arange(block_ids.shape[1], dtype=jnp.int32)[None]
            original = get_at(block_ids, rows, pool.num_blocks)
            rotated = get_at(pool.block_table, (rows[:, None], columns), pool.num_blocks)
            is_back = original < pool.num_blocks
            table = jnp.where(is_back, original, rotated)
            table = set_at(pool.block_table, (rows[:, None], columns), table)
            pool = block_pool.release(pool, jnp.where(is_back, rotated, pool.num_blocks)[:, ::-1])
            return dataclasses.replace(pool, block_table=table), set_at(block_ids, rows, pool.num_blocks)

        return _in_groups(control, put_back)

    def prefix_len(self, control: Control, seq_ids: jax.Array, length: jax.Array) -> jax.Array:
        """Counts no token of rows that read rotated keys."""
        return jnp.where(reads_rotated(control, seq_ids), 0, length)

    def is_fixed(self, control: Control, seq_ids: jax.Array, places: jax.Array) -> jax.Array:
        """Masks sinks whose keys are rotated: a key written there would not be an original."""
        assert control.holes is not None
        starts = control.holes.of_rows(seq_ids).start
        return reads_rotated(control, seq_ids)[:, None] & (places < starts[:, None])

    def held_blocks(self, control: Control, group_id: int) -> HeldBlocks | None:
        """Lists the original blocks of a layer group."""
        sinks = original_sinks(control)
        if sinks is None:
            return None
        return HeldBlocks("original sinks", sinks.block_ids[group_id], control.namespace, is_of_rows=True)

    def violations(self, cache: Cache) -> list[str]:
        """Finds original sinks in columns where no dropped token follows, or that the row reads."""
        violations, holes, sinks = [], cache.control.holes, original_sinks(cache.control)
        if sinks is None or holes is None:
            return []
        starts = np.asarray(holes.start) * ~np.asarray(holes.is_plain)
        for g, group in cache.config.row_groups.items():
            pool, block_ids = cache.control.block_pools[g], np.asarray(sinks.block_ids[g])
            table = np.asarray(pool.block_table)
            for row, column in zip(*np.nonzero(block_ids < pool.num_blocks), strict=True):
                if column * group.block_size >= starts[row]:
                    violations.append(
                        f"group {g}: row {row} keeps original sinks of column {column}, where none are"
                    )
                if table[row, column] == block_ids[row, column]:
                    violations.append(f"group {g}: row {row} reads the original sinks of column {column}")
        return violations


def require_dropping(operation: str, config: CacheConfig) -> Dropping:
    """Refuses a cache whose rows cannot drop tokens, and returns the extra that lets them."""
    for extra in config.extras:
        if isinstance(extra, Dropping):
            return extra
    config.refuse_states(operation)
    raise ValueError(
        f"{operation} got a cache whose rows cannot drop tokens, expected one built with "
        "CacheConfig(extras=[kv.compression.Dropping()])"
    )


def original_sinks(control: Control) -> OriginalSinks | None:
    """Returns the blocks of original sinks; None without `max_sink_len`."""
    return control.extras.get(Dropping.name)


def reads_rotated(control: Control, seq_ids: jax.Array) -> jax.Array:
    """Masks the rows that read sinks whose keys are rotated, bool[n]."""
    is_rotated = jnp.zeros_like(seq_ids, bool)
    if (sinks := original_sinks(control)) is not None:
        for pool, block_ids in zip(control.block_pools, sinks.block_ids, strict=True):
            held = get_at(block_ids, seq_ids, pool.num_blocks)
            is_rotated |= (held < pool.num_blocks).any(axis=1)
    return is_rotated


def keep_first(control: Control, rows: jax.Array, num_columns: Sequence[jax.Array]) -> Control:
    """Releases the original blocks of `rows` i32[n] but the first `num_columns`, per group i32[n]."""

    def cut(group_id: int, pool: BlockPool, block_ids: jax.Array) -> tuple[BlockPool, jax.Array]:
        held = get_at(block_ids, rows, pool.num_blocks)
        goes = jnp.arange(held.shape[1], dtype=jnp.int32)[None] >= num_columns[group_id][:, None]
        kept = set_at(block_ids, rows, jnp.where(goes, pool.num_blocks, held))
        return block_pool.release(pool, jnp.where(goes, held, pool.num_blocks)[:, ::-1]), kept

    return _in_groups(control, cut)


def _in_groups(
    control: Control, change: Callable[[int, BlockPool, jax.Array], tuple[BlockPool, jax.Array]]
) -> Control:
    """Changes pool and original blocks of each layer group that has some."""
    if (sinks := original_sinks(control)) is None:
        return control
    pools, block_ids = list(control.block_pools), list(sinks.block_ids)
    for g, of_group in enumerate(sinks.block_ids):
        if of_group.shape[-1]:
            pools[g], block_ids[g] = change(g, pools[g], of_group)
    return with_original_sinks(control, tuple(pools), tuple(block_ids))


def with_original_sinks(
    control: Control, block_pools: tuple[BlockPool, ...], block_ids: tuple[jax.Array, ...]
) -> Control:
    """Sets the pools, and the original blocks beside them."""
    extras = control.extras | {Dropping.name: OriginalSinks(block_ids=block_ids)}
    return dataclasses.replace(control, block_pools=block_pools, extras=extras)
