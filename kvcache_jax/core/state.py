"""The cache as a value: one immutable pytree, control state beside the pools of keys and values."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from kvcache_jax.arrays.masked_updates import add_at, get_at, set_at
from kvcache_jax.arrays.pytree import Static, pytree_dataclass
from kvcache_jax.arrays.same_form import same_form
from kvcache_jax.core.cache_form import summary
from kvcache_jax.core.config import CacheConfig, config_from_json, config_to_json
from kvcache_jax.core.holes import Holes
from kvcache_jax.layers.layer_kind import LayerKind
from kvcache_jax.layers.span import Span, span_from_json, span_to_json


@pytree_dataclass()
class CachedBlocks:
    """Published blocks, and the queue of those without owner in the order of their release.

    The queue is exact LRU at constant cost: a release appends the block, reuse only makes the entry stale,
    and eviction from the front skips stale entries. There is always room for the published blocks that
    have an owner. Positions in the queue count up modulo 2**32.

    Attributes:
      is_published: bool[num_blocks], the block's contents can be found.
      num_cached: i32[], published blocks without owner.
      queue: i32[power of two], block ids at `[head, tail)`, taken modulo its length.
      queued_at: u32[num_blocks], position of the block's latest entry; earlier ones are stale.
      head: u32[], position of the oldest entry.
      tail: u32[], position of the next entry.
      released_at: u32[num_blocks], releases of the pool before the one that cached the block, which unlike
        positions never change. Of states that a keeper may keep, else None.
      num_released: u32[], releases so far; None without `released_at`.
    """

    is_published: jax.Array
    num_cached: jax.Array
    queue: jax.Array
    queued_at: jax.Array
    head: jax.Array
    tail: jax.Array
    released_at: jax.Array | None
    num_released: jax.Array | None


@pytree_dataclass()
class BlockPool:
    """Owners and free blocks of one layer group.

    A block is free (on the stack), referenced (in a table) or cached (published, and in no table).

    "Nowhere" is `num_blocks`, one past the last block. `max_blocks_per_seq` columns of `block_size`
    tokens reach `max_seq_len`.

    Attributes:
      block_table: i32[max_seqs, max_blocks_per_seq], block that holds tokens
        `[column * block_size, (column + 1) * block_size)` of the row, or its source, or nowhere. Columns
        past the tokens held are blocks reserved by `allocate`, then nowhere. A window group has a
        hole of nowhere between its sinks and the tokens in reach.
      ref_count: i32[num_blocks], entries of the table and blocks of extras that point at the block;
        0 = free or cached.
      free_stack: i32[num_blocks], ids of the free blocks at `[0, num_free)`, the next one to hand
        out on top; the rest is unspecified.
      num_free: i32[], free blocks.
      peak_used: i32[], most blocks that were referenced at the same time.
      cached: CachedBlocks; None without prefix caching.
    """

    block_table: jax.Array
    ref_count: jax.Array
    free_stack: jax.Array
    num_free: jax.Array
    peak_used: jax.Array
    cached: CachedBlocks | None

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool; also the id that means nowhere."""
        return self.ref_count.shape[-1]

    @property
    def max_blocks_per_seq(self) -> int:
        """Columns of the block table."""
        return self.block_table.shape[-1]


@pytree_dataclass()
class KVPool:
    """The blocks of one layer group; block `b` of the group's layer `l` is at `l * num_blocks + b`.

    Attributes:
      arrays: by name `dtype[num_layers * num_blocks, *shape]`, with the names, shapes and dtypes that the
        group's layer kind gives in `arrays`. Of plain keys and values "k" and "v", of shape
        `[num_kv_heads, block_size, head_dim]`.
    """

    arrays: dict[str, Any]

    @property
    def k(self) -> jax.Array:
        """Keys, of kinds that have an array of this name."""
        return self.arrays["k"]

    @property
    def v(self) -> jax.Array:
        """Values: the group's array of that name."""
        return self.arrays["v"]

    @property
    def num_rows(self) -> int:
        """Blocks of all layers; also the place on the first axis that means nowhere."""
        return next((array.shape[0] for array in self.arrays.values()), 0)


@pytree_dataclass()
class BlockHistory:
    """Events of each block that eviction policies look at; see `BlockMetadata`. Unneeded fields are None.

    Entries of blocks that are not published are unspecified, but for `num_children`.

    Attributes:
      num_children: i32[num_blocks], published blocks whose parent it is.
      num_hits: i32[num_blocks], uses after the publication.
      published_at: u32[num_blocks], clock of the publication.
      last_used_at: u32[num_blocks], clock of the last use.
      priority: i32[num_blocks], of the row that used it last.
      depth: i32[num_blocks], blocks before it in its sequence.
    """

    num_children: jax.Array
    num_hits: jax.Array | None
    published_at: jax.Array | None
    last_used_at: jax.Array | None
    priority: jax.Array | None
    depth: jax.Array | None


@pytree_dataclass()
class GroupLinks:
    """Links between the indexed group's published blocks and another group's blocks with the same tokens.

    A block of the other group belongs to the published block that has its last token. Each may be missing:
    it left a window before it could be published, was evicted, or belongs to a block of another row. Forks
    that part within a block of the indexed group share smaller blocks, and only one of them is a hit.

    Attributes:
      block_ids: i32[num_blocks, most per block], of the other group, by their order in the sequence, or
        nowhere (its `num_blocks`).
      indexed_ids: i32[num_blocks of the other group], the published block that each belongs to, or nowhere.
      is_wanted: bool[num_blocks of the other group], a prompt has asked for the state: other prompts part
        there, or one started from it. Of published blocks; None for a group without snapshots.
    """

    block_ids: jax.Array
    indexed_ids: jax.Array
    is_wanted: jax.Array | None


@pytree_dataclass()
class PrefixIndex:
    """An index of the blocks of one layer group, the indexed one, by the tokens up to their end.

    An entry is a published block's id, in the bucket of its hash. The block's content is stored beside it,
    and compared at every hit.

    Attributes:
      buckets: i32[num_buckets, ways], block ids, or nowhere.
      block_tokens: i32[num_blocks, block_size], tokens of every block, as `extend` was told.
      block_hash: u32[num_blocks, 2], of the tokens up to the block's end; of published blocks.
      parent: i32[num_blocks], the published block before it, or nowhere at the start of a sequence.
      namespace: u32[num_blocks, 4], in which the block was published.
      group_links: per layer group GroupLinks; None for the indexed one.
      history: BlockHistory; None under the policy `lru`, which does not need it.
    """

    buckets: jax.Array
    block_tokens: jax.Array
    block_hash: jax.Array
    parent: jax.Array
    namespace: jax.Array
    group_links: tuple[GroupLinks | None, ...]
    history: BlockHistory | None


@pytree_dataclass()
class Control:
    """A cache's small integers: everything but the keys and values.

    Clock and counters are taken modulo 2**32 and compared by difference.

    Attributes:
      is_active: bool[max_seqs], the row holds a sequence.
      context_len: i32[max_seqs], tokens held, hidden ones too; 0 for idle rows.
      priority: i32[max_seqs], higher is worth more to eviction policies; 0 for idle rows.
      namespace: u32[max_seqs, 4], who may share the row's blocks; 0 for idle rows.
      last_used: u32[max_seqs], clock of the last allocate, extend, fork or reorder into the row, or touch.
      num_uses: u32[max_seqs], how many of these there were; 0 for idle rows.
      clock: u32[], advances by one with each call of these that uses a row.
      counters: u32[len(Counter)], events since `init`; see `Counter`.
      hash_key: u32[2], key of the content hash; kept for ever, so that a restored cache still hits.
      num_published: i32[max_seqs], leading blocks of the row known to be published. Counts a partly filled
        last block too if it is a published one that `truncate` shortened the row into.
      source_len: i32[max_seqs], tokens of the row's source, 0 for none; None without layers that read one.
      marks: i32[max_seqs, 2], lengths at which the states of a row's prompt are kept: where keys were found
        further than states, and the last that its repetition can start from; 0 for none. None without layers
        whose states are found by their prefix.
      holes: Holes of all rows, 0 for those that dropped nothing; None where no row hides tokens.
      prefix_index: PrefixIndex; None without prefix caching.
      block_pools: one BlockPool per layer group.
      extras: by name the arrays of each of the config's `extras` that keeps some.
    """

    is_active: jax.Array
    context_len: jax.Array
    priority: jax.Array
    namespace: jax.Array
    last_used: jax.Array
    num_uses: jax.Array
    clock: jax.Array
    counters: jax.Array
    hash_key: jax.Array
    num_published: jax.Array
    source_len: jax.Array | None
    marks: jax.Array | None
    holes: Holes | None
    prefix_index: PrefixIndex | None
    block_pools: tuple[BlockPool, ...]
    extras: dict[str, Any]

    @property
    def max_seqs(self) -> int:
        """Rows; also the seq_id that means nowhere."""
        return self.is_active.shape[-1]


_ROW_FIELDS = "is_active", "context_len", "priority", "namespace", "num_published", "last_used", "num_uses"


def row_fields(control: Control) -> dict[str, jax.Array]:
    """Returns the arrays of `Control` that have an entry per row, 0 for idle ones, by name."""
    fields = {name: getattr(control, name) for name in _ROW_FIELDS}
    more = {name: getattr(control, name) for name in ("source_len", "marks")}
    return fields | {name: values for name, values in more.items() if values is not None}


@pytree_dataclass(Static("config", config_to_json, config_from_json))
class Cache:
    """A KV cache: pass it in, get a new one back. Old states stay valid unless donated.

    Attributes:
      control: Control, the blocks that each row holds.
      pools: one KVPool per layer group; empty when built with `storage=False`.
      config: CacheConfig (static): kinds and options. Sizes are read from the arrays.
      kept: what an extra keeps of blocks outside of the pools (`core/extras.py`); None for nothing.
    """

    control: Control
    pools: tuple[KVPool, ...]
    config: CacheConfig
    kept: Any = None

    @property
    def context_len(self) -> jax.Array:
        """i32[max_seqs], tokens that each row holds."""
        return self.control.context_len

    @property
    def is_active(self) -> jax.Array:
        """bool[max_seqs], which rows hold a sequence."""
        return self.control.is_active

    @property
    def max_seqs(self) -> int:
        """Rows."""
        return self.control.max_seqs

    def __repr__(self) -> str:
        return summary(self.control, self.pools, self.config)


@pytree_dataclass()
class Admission:
    """The result of `allocate`, per row of the call.

    Attributes:
      status: i32[n], see `Status`.
      num_cached: i32[n], first tokens whose keys and values are already there; computation
        starts after them.
      num_items_cached: i32[n], multimodal items among them, which need not be encoded.
      junction: i32[n], the length up to which keys were found further than the states of recurrent layers; 0
        for none. The states at its end are kept, so that the next prompt that parts there starts from it.
      num_promoted: i32[n], tokens among them that an extra kept outside of the pools.
    """

    status: jax.Array
    num_cached: jax.Array
    num_items_cached: jax.Array
    junction: jax.Array
    num_promoted: jax.Array


@pytree_dataclass()
class SharedColumns:
    """The first columns of a block table that rows of an `AttentionPlan` read together, by companies.

    Attributes:
      members: i32[c, p], rows of the plan in each company, `r` where there are fewer.
      num_columns: i32[c], columns that the company's rows have in common; 0 for a company of none.
      num_of_row: i32[r], columns of each row that its company reads; 0 for a row without one.
    """

    members: jax.Array
    num_columns: jax.Array
    num_of_row: jax.Array


@pytree_dataclass(Static("within", span_to_json, span_from_json))
class AttentionPlan:
    """The columns of a group's block table that a step's queries read; shared by all its layers.

    Its rows are the step's, or the tokens of a packed step, each a row of one query.

    Attributes:
      table_row: i32[r], row of the block table.
      first_column: i32[r], first column in reach of the row's queries, after the sink columns.
      num_columns: i32[r], columns to read: the sink columns, then those from `first_column` on; 0 reads
        nothing.
      first_position: i32[r], position of the first query.
      num_queries: i32[r], queries that count; 0 for failed rows and padding.
      positions: i32[r, t], of the queries, ascending; None where they follow one another.
      num_keys: i32[r], tokens that all queries of a row see; None where they are causal.
      holes: Holes of the rows; None where no row hides tokens.
      first_offset: i32[r], of the part of every block that a device has; None for whole blocks.
      within: Span (static) that queries do not see beyond, whatever the kind's span; None for no other.
      work: From the backend's `plan`; () for a backend without one.
      shared: Columns that rows read together; None where each reads its own.
    """

    table_row: jax.Array
    first_column: jax.Array
    num_columns: jax.Array
    first_position: jax.Array
    num_queries: jax.Array
    positions: jax.Array | None = None
    num_keys: jax.Array | None = None
    holes: Holes | None = None
    first_offset: jax.Array | None = None
    within: Span | None = None
    work: tuple[Any, ...] = ()
    shared: SharedColumns | None = None

    def of_rows(self, rows: jax.Array) -> "AttentionPlan":
        """Reads the plan of `rows` i32[n] of its rows; an entry that is no row reads nothing."""
        return jax.tree.map(lambda x: get_at(x, rows, 0), dataclasses.replace(self, work=(), shared=None))


@pytree_dataclass()
class RecurrentPlan:
    """The blocks and tokens that a step's recurrent layers of one kind read and write, shared by all of them.

    A narrow step advances all its rows at once. Its rows that fill a block are folded after its last layer. A
    wide one is scanned, in trips of tokens of one block of one row each; a trip goes on where the trip before
    ended, or starts from the cache.

    Attributes:
      token: i32[r, t], the tokens of each row or trip in the step's token arrays, flat; past their end for
        none.
      num_tokens: i32[r].
      count: i32[r], entries that the row's block has before its tokens, or tokens in reach of a kind without
        points.
      held_ids: i32[r] the row's block of entries, or i32[r, reach] blocks of the last tokens; or nowhere.
      goes_on: bool[r] of a wide step, the trip starts where the one before ended; None for a narrow step.
      held_offsets: i32[r, reach], places of the last tokens in their blocks, of kinds without points.
      point_ids: i32[r], the last point, or nowhere; None, as all that follow, without points.
      is_full: bool[r], the tokens end a block or, of a narrow step, pass its end.
      full_ids: i32[r], the block of entries that is full then.
      new_point_ids: i32[r], the point at its end, or nowhere.
    """

    num_called: ClassVar[int | None] = None
    """Layers of the kind that were called with this very plan, or None where that is not known."""

    token: jax.Array
    num_tokens: jax.Array
    count: jax.Array
    held_ids: jax.Array
    goes_on: jax.Array | None
    held_offsets: jax.Array | None = None
    point_ids: jax.Array | None = None
    is_full: jax.Array | None = None
    full_ids: jax.Array | None = None
    new_point_ids: jax.Array | None = None


@pytree_dataclass(Static("config", config_to_json, config_from_json))
class Step:
    """The slots that `extend` or `rewrite` reserved, and the tokens to which the new tokens attend.

    For `n` rows, token arrays are `[n, max_new]` (padded) or `[num_tokens]` (packed: row `i` has
    the tokens `[cu_query_lens[i], cu_query_lens[i + 1])`). A row that failed has `query_len` 0.

    It serves until one of its rows is forked, committed, truncated, reordered, freed or, where there are
    windows, extended: the slots may be another row's then.

    It serves the cache that `extend` returned beside it. A step of a cache of another config is refused. One
    of another cache of the same config cannot be told from it, and would overwrite other rows.

    Attributes:
      status: i32[n], see `Status`.
      seq_ids: i32[n], rows of the block table; `max_seqs` where there is none.
      query_len: i32[n], new tokens.
      context_len: i32[n], row length after the call; for a rejected duplicate entry the length before it.
      positions: i32[tokens], position in the text, which models rotate by; unspecified without a token.
      slots: per group i32[tokens], `block_id * block_size + offset`; nowhere, as in all of a group of
        sources, is `num_blocks * block_size`.
      plans: per group AttentionPlan or RecurrentPlan, None for a group that another's plan is for; () for a
        cache without storage.
      cu_query_lens: i32[n + 1] of a packed step (as asked, each at most one more than `num_tokens`), or None.
      config: CacheConfig (static), of the cache.
      follows: bool[n], the entry's tokens follow those of the entry before, in the same row; None where every
        row has one entry.
      shift: i32[tokens], by how many places the text is ahead of the row; None where no row hides tokens.
      parts: Steps whose tokens, one after the other, are the rows of this one, `[tokens, 1]`; attention
        computes each by the plans of its own. () where this step has plans.
    """

    status: jax.Array
    seq_ids: jax.Array
    query_len: jax.Array
    context_len: jax.Array
    positions: jax.Array
    slots: tuple[jax.Array, ...]
    plans: tuple[Any, ...]
    cu_query_lens: jax.Array | None
    config: CacheConfig
    shift: jax.Array | None = None
    follows: jax.Array | None = None
    parts: tuple["Step", ...] = ()

    @property
    def held(self) -> jax.Array:
        """i32[n], tokens that each row held before the call, or before the tokens of this entry."""
        return self.context_len - self.query_len

    @property
    def cache_positions(self) -> jax.Array:
        """i32[tokens], place in the row; the position, but for rows that dropped tokens."""
        return self.positions if self.shift is None else self.positions - self.shift

    def watched(self) -> "Step":
        """Returns the step; its plans note which recurrent layers are called, until they pass a `jit`."""
        for plan in self.plans:
            if isinstance(plan, RecurrentPlan):
                object.__setattr__(plan, "num_called", 0)
        return self


class BlockCopies(NamedTuple):
    """Blocks of one group whose contents are copied before a row writes into them."""

    src: jax.Array  # i32[n], block ids; entries at `[0, num_copies)` count
    dst: jax.Array  # i32[n], block ids of the copies, entry by entry
    num_copies: jax.Array  # i32[]


def row_len(control: Control, kind: LayerKind) -> jax.Array:
    """Returns the tokens that each row holds in layers of `kind`, i32[max_seqs]."""
    length = kind.row_len(control.context_len, control.source_len)
    return same_form(f"{kind.label}.row_len()", length, control.context_len)


def mark_used(control: Control, rows: jax.Array, **fields: ArrayLike) -> Control:
    """Marks `rows` i32[n], which differ, as just used, and sets further fields of theirs.

    Nowhere is skipped. The clock advances if there is a row.
    """
    clock = control.clock + (rows < control.max_seqs).any().astype(jnp.uint32)
    updated = {name: set_at(getattr(control, name), rows, values) for name, values in fields.items()}
    return dataclasses.replace(
        control,
        clock=clock,
        last_used=set_at(control.last_used, rows, clock),
        num_uses=add_at(control.num_uses, rows, 1),
        **updated,
    )
