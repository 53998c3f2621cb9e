"""The cache that is obviously right: lists of tokens and dicts of blocks, one row at a time, in Python.

It predicts every status, every count and who shares which block; `kvcache_jax.testing` holds a real
cache against it.
"""

import dataclasses
from collections import Counter as Multiset
from collections.abc import Callable, Sequence

from kvcache_jax.core.config import CacheConfig, LayerGroup, SlidingWindow, ceil_div
from kvcache_jax.core.status import Status


@dataclasses.dataclass
class OracleRow:
    """A sequence: its tokens, per layer group the block of each table column, and what is published."""

    tokens: list[int]
    tables: list[dict[int, int]]
    namespace: tuple[int, ...] = (0, 0, 0, 0)
    num_published: int = 0
    priority: int = 0


@dataclasses.dataclass
class OracleBlock:
    """What eviction policies look at in a published block; see `BlockMetadata`."""

    published_at: int
    last_used_at: int
    priority: int
    depth: int
    num_hits: int = 0


EVICTION_KEYS: dict[str, Callable[[OracleBlock, int], int]] = {
    "lru": lambda block, clock: 0,
    "lfu": lambda block, clock: block.num_hits,
    "fifo": lambda block, clock: block.published_at,
    "priority": lambda block, clock: block.priority,
    "hyperbolic": lambda block, clock: -((clock - block.published_at) // (1 + block.num_hits)),
}

Prefix = tuple[tuple[int, ...], tuple[int, ...]]
"""A namespace and all tokens up to the end of a block: what a published block stands for."""


class Oracle:
    """Dict-of-lists model of a cache.

    Operations take the arguments of their namesakes as Python lists and return a list of `Status`, or how
    many blocks they changed. Block ids are serial numbers; compare them by structure, not by value. Cached
    prefixes of several layer groups are not modelled.

    Attributes:
      rows: Active rows by seq_id.
      owners: Per layer group, how many table entries point at each block.
      published: The block that stands for each published prefix.
      cached: Published blocks without owner, in the order of their release.
      clock: See `kvcache_jax.Control`.
      history: What eviction policies look at, of every published block.
      num_copies: Blocks copied on write so far.
      num_evictions: Published blocks given up so far.
      num_adoptions: Blocks given back by `commit` so far.

    Example:
      >>> import kvcache_jax as kv
      >>> oracle = kv.testing.Oracle(kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=4, max_seqs=2))
      >>> oracle.allocate([0], [20]), oracle.extend([0], [[7, 8, 9]]), oracle.num_free(0)
      ([<Status.OK: 0>], [<Status.OK: 0>], 2)
    """

    def __init__(self, config: CacheConfig, eviction_key: Callable[[OracleBlock, int], int] | None = None):
        """`eviction_key(block, clock)` is that of a policy of one's own, as a function of one block."""
        self.config = config
        self._eviction_key = eviction_key or EVICTION_KEYS[config.eviction_policy]
        self.rows: dict[int, OracleRow] = {}
        self.owners: list[Multiset[int]] = [Multiset() for _ in config.groups]
        self.published: dict[Prefix, int] = {}
        self.cached: dict[int, None] = {}
        self.history: dict[int, OracleBlock] = {}
        self.num_copies = self.num_evictions = self.num_adoptions = self.clock = 0
        self._prefix_of: dict[int, Prefix] = {}
        self._next_block = 0
        self._copied: set[int] = set()  # originals of this operation's copies

    def num_free(self, group_id: int) -> int:
        """Blocks of a group that no row holds and that are not cached."""
        return self.num_available(group_id) - len(self.cached) * (group_id == self.config.indexed_group)

    def num_available(self, group_id: int) -> int:
        """Blocks of a group that no row holds."""
        return self.config.groups[group_id].num_blocks - len(self.owners[group_id])

    def allocate(
        self,
        seq_ids: Sequence[int],
        num_tokens: Sequence[int],
        prompts: Sequence[Sequence[int]] | None = None,
        namespaces: Sequence[tuple[int, ...]] | None = None,
        priorities: Sequence[int] | None = None,
    ) -> list[Status]:
        """See `kvcache_jax.allocate`; with `prompts` it looks for cached prefixes.

        Raises:
          NotImplementedError: `prompts` with several layer groups.
        """
        if prompts and len(self.config.groups) > 1:
            raise NotImplementedError("got prompts and several layer groups, expected one: see Oracle")
        prompts = prompts or [()] * len(seq_ids)
        namespaces = namespaces or [(0, 0, 0, 0)] * len(seq_ids)
        priorities = priorities or [0] * len(seq_ids)
        rows = zip(seq_ids, num_tokens, prompts, namespaces, priorities, strict=True)
        return [self._allocate(*row) for row in rows]

    def commit(self, seq_ids: Sequence[int] | None, final_len: Sequence[int]) -> list[Status]:
        """See `kvcache_jax.commit`."""
        seen: set[int] = set()
        statuses = []
        if seq_ids is None:  # `max_seqs` names no row
            max_seqs = self.config.max_seqs
            seq_ids = [row if row in self.rows else max_seqs for row in range(max_seqs)]
        for seq_id, length in zip(seq_ids, final_len, strict=True):
            status = self._check(seq_id)
            if status == Status.OK:
                status = Status.DUPLICATE_SEQ_ID if seq_id in seen else self._commit(seq_id, length)
                seen.add(seq_id)
            statuses.append(status)
        return statuses

    def evict(self, num_blocks: int) -> int:
        """See `kvcache_jax.evict`."""
        num_evicted = min(num_blocks, len(self.cached))
        self._evict(num_evicted)
        return num_evicted

    def reset_prefix_cache(self) -> int:
        """See `kvcache_jax.reset_prefix_cache`."""
        num_dropped = len(self.published)
        self.published, self.cached, self._prefix_of, self.history = {}, {}, {}, {}
        for row in self.rows.values():
            row.num_published = 0
        return num_dropped

    def extend(self, seq_ids: Sequence[int], new_tokens: Sequence[Sequence[int]]) -> list[Status]:
        """See `kvcache_jax.extend`; takes the tokens themselves."""
        seen: set[int] = set()
        statuses, any_grew = [], False
        # Elsewhere a policy may look at many blocks at once, for all rows.
        is_one_by_one = any(map(self._writes_published, seq_ids, new_tokens))
        for seq_id, tokens in zip(seq_ids, new_tokens, strict=True):
            status = self._check(seq_id)
            if status == Status.OK and tokens:
                status = Status.DUPLICATE_SEQ_ID if seq_id in seen else self._extend(seq_id, list(tokens))
                seen.add(seq_id)
                self.clock += status == Status.OK and not any_grew
                any_grew |= status == Status.OK
            statuses.append(status)
            if is_one_by_one:
                self._make_room()
        self._make_room()
        return statuses

    def _writes_published(self, seq_id: int, tokens: Sequence[int]) -> bool:
        """Whether the row's next token would go into a published block."""
        if not tokens or self._check(seq_id) or self._check_growth(seq_id, tokens):
            return False
        row, tails = self.rows[seq_id], []
        for table, group in zip(row.tables, self.config.groups, strict=True):
            column, offset = divmod(len(row.tokens), group.block_size)
            tails += [table[column]] if offset else []
        return any(tail in self._prefix_of for tail in tails)

    def fork(self, src_ids: Sequence[int], dst_ids: Sequence[int]) -> list[Status]:
        """See `kvcache_jax.fork`."""
        return [self._fork(*row) for row in zip(src_ids, dst_ids, strict=True)]

    def reorder(self, seq_ids: Sequence[int], parent_ids: Sequence[int]) -> list[Status]:
        """See `kvcache_jax.reorder`."""
        before = dict(self.rows)
        seen: set[int] = set()
        statuses, moves = [], []
        for seq_id, parent_id in zip(seq_ids, parent_ids, strict=True):
            status = self._check(seq_id, parent_id)
            if status == Status.OK and seq_id in seen:
                status = Status.DUPLICATE_SEQ_ID
            elif status == Status.OK:
                seen.add(seq_id)
                if seq_id not in before or parent_id not in before:
                    status = Status.SEQ_NOT_ACTIVE
                elif seq_id != parent_id:
                    moves.append((seq_id, self._share(before[parent_id])))
            statuses.append(status)
        self.clock += bool(moves)
        self._release([before[seq_id] for seq_id, _ in moves])
        self.rows.update(moves)
        return statuses

    def truncate(self, seq_ids: Sequence[int], new_len: Sequence[int]) -> list[Status]:
        """See `kvcache_jax.truncate`."""
        return [self._truncate(*row) for row in zip(seq_ids, new_len, strict=True)]

    def free(self, seq_ids: Sequence[int]) -> list[Status]:
        """See `kvcache_jax.free`."""
        return [self._free(seq_id) for seq_id in seq_ids]

    def touch(self, seq_ids: Sequence[int]) -> list[Status]:
        """See `kvcache_jax.touch`."""
        statuses = [self._check_active(seq_id) for seq_id in seq_ids]
        self.clock += statuses.count(Status.OK)
        return statuses

    def set_priority(self, seq_ids: Sequence[int], priority: Sequence[int]) -> list[Status]:
        """See `kvcache_jax.set_priority`."""
        statuses = [self._check_active(seq_id) for seq_id in seq_ids]
        for seq_id, value, status in zip(seq_ids, priority, statuses, strict=True):
            if status == Status.OK:
                self.rows[seq_id].priority = value
        return statuses

    def _check_active(self, seq_id: int) -> Status:
        status = self._check(seq_id)
        return Status.SEQ_NOT_ACTIVE if status == Status.OK and seq_id not in self.rows else status

    def _check(self, *seq_ids: int) -> Status:
        if any(not 0 <= seq_id <= self.config.max_seqs for seq_id in seq_ids):
            return Status.BAD_SEQ_ID
        return Status.SKIPPED if self.config.max_seqs in seq_ids else Status.OK

    def _allocate(
        self, seq_id: int, num_tokens: int, prompt: Sequence[int], namespace: tuple[int, ...], priority: int
    ) -> Status:
        if status := self._check(seq_id):
            return status
        if seq_id in self.rows:
            return Status.SEQ_IN_USE
        if num_tokens < 0:
            return Status.BAD_LENGTH
        if num_tokens > self.config.max_seq_len:
            return Status.TOO_LONG
        if self.config.enable_prefix_caching and num_tokens > len(prompt):
            return Status.BAD_LENGTH
        hits, hit_len = self._find(prompt[:num_tokens], namespace)
        need = [
            min(ceil_div(num_tokens, group.block_size), group.max_held_blocks) for group in self.config.groups
        ]
        num_revived = sum(block in self.cached for block in hits)
        if any(n - len(hits) > self.num_available(g) - num_revived for g, n in enumerate(need)):
            return Status.OUT_OF_BLOCKS
        for block in hits:
            self.cached.pop(block, None)
            self.owners[self.config.indexed_group][block] += 1
        self.clock += 1
        self._note_use(hits, priority)
        tables = [
            {c: hits[c] if c < len(hits) else self._take(g) for c in range(n)} for g, n in enumerate(need)
        ]
        self.rows[seq_id] = OracleRow(list(prompt[:hit_len]), tables, namespace, len(hits), priority)
        self._make_room()
        return Status.OK

    def _note_use(self, blocks: Sequence[int], priority: int) -> None:
        for block in blocks:
            self.history[block].num_hits += 1
            self.history[block].last_used_at, self.history[block].priority = self.clock, priority

    def _find(self, prompt: Sequence[int], namespace: tuple[int, ...]) -> tuple[list[int], int]:
        """Cached blocks of the prompt and the tokens in them, one short of the prompt at least."""
        block_size = self.config.groups[self.config.indexed_group].block_size
        hits: list[int] = []
        while (end := (len(hits) + 1) * block_size) < len(prompt):
            block = self.published.get((namespace, tuple(prompt[:end])))
            if block is None:
                break
            hits.append(block)
        return hits, len(hits) * block_size

    def _commit(self, seq_id: int, final_len: int) -> Status:
        if seq_id not in self.rows:
            return Status.SEQ_NOT_ACTIVE
        if final_len < 0:
            return Status.BAD_LENGTH
        row, group_id = self.rows[seq_id], self.config.indexed_group
        block_size = self.config.groups[group_id].block_size
        for column in range(row.num_published, min(final_len, len(row.tokens)) // block_size):
            prefix = row.namespace, tuple(row.tokens[: (column + 1) * block_size])
            private = row.tables[group_id][column]
            if prefix not in self.published:
                self.history[private] = OracleBlock(self.clock, self.clock, row.priority, column)
            block = self.published.setdefault(prefix, private)
            self._prefix_of[block] = prefix
            row.num_published = column + 1
            if block != private:
                self.num_adoptions += 1
                self._note_use([block], row.priority)
                self.cached.pop(block, None)
                self.owners[group_id][block] += self.owners[group_id].pop(private)
                for holder in self.rows.values():
                    if holder.tables[group_id].get(column) == private:
                        holder.tables[group_id][column] = block
        return Status.OK

    def _check_growth(self, seq_id: int, tokens: Sequence[int]) -> Status:
        if seq_id not in self.rows:
            return Status.SEQ_NOT_ACTIVE
        new_len = len(self.rows[seq_id].tokens) + len(tokens)
        is_too_long = new_len > self.config.max_seq_len or len(tokens) > self.config.query_len_limit
        return Status.TOO_LONG if is_too_long else Status.OK

    def _extend(self, seq_id: int, tokens: list[int]) -> Status:
        if status := self._check_growth(seq_id, tokens):
            return status
        row = self.rows[seq_id]
        old_len, new_len = len(row.tokens), len(row.tokens) + len(tokens)
        plans = []
        for g, group in enumerate(self.config.groups):
            table, owners = row.tables[g], self.owners[g]
            gone = [
                column for column in table if group.num_sink_blocks <= column < first_kept(group, old_len)
            ]
            columns = range(old_len // group.block_size, ceil_div(new_len, group.block_size))
            fresh = [column for column in columns if column not in table]
            tail = old_len // group.block_size if old_len % group.block_size else None
            is_own = tail is None or (owners[table[tail]] == 1 and table[tail] not in self._prefix_of)
            copied = [] if is_own else [tail]
            given_back = sum(owners[table[column]] == 1 for column in gone)
            if len(fresh) + len(copied) > self.num_available(g) + given_back:
                return Status.OUT_OF_BLOCKS
            plans.append((gone, fresh, copied))
        for g, (gone, fresh, copied) in enumerate(plans):
            if g == self.config.indexed_group:
                self._copied |= {row.tables[g][column] for column in copied}
            for column in gone + copied:
                self._let_go(g, row.tables[g].pop(column))
            for column in copied + fresh:
                row.tables[g][column] = self._take(g)
            self.num_copies += len(copied)
        row.tokens += tokens
        return Status.OK

    def _fork(self, src_id: int, dst_id: int) -> Status:
        if status := self._check(src_id, dst_id):
            return status
        if src_id not in self.rows:
            return Status.SEQ_NOT_ACTIVE
        if dst_id in self.rows:
            return Status.SEQ_IN_USE
        self.clock += 1
        self.rows[dst_id] = self._share(self.rows[src_id])
        return Status.OK

    def _truncate(self, seq_id: int, new_len: int) -> Status:
        if status := self._check(seq_id):
            return status
        if seq_id not in self.rows:
            return Status.SEQ_NOT_ACTIVE
        row = self.rows[seq_id]
        if new_len < 0:
            return Status.BAD_LENGTH
        if new_len > len(row.tokens):
            return Status.TOO_LONG
        for group, table in zip(self.config.groups, row.tables, strict=True):
            if isinstance(group.kind, SlidingWindow):
                is_beyond = len(row.tokens) - new_len > group.kind.max_rollback
                reach = range(max(new_len - group.kind.window + 1, 0), new_len)
                if len(row.tokens) > group.kind.window and is_beyond:
                    return Status.WINDOW_LOST
                if any(position // group.block_size not in table for position in reach):
                    return Status.WINDOW_LOST
        del row.tokens[new_len:]
        for g, group in enumerate(self.config.groups):
            end = ceil_div(new_len, group.block_size)
            for column in sorted((c for c in row.tables[g] if c >= end), reverse=True):
                self._let_go(g, row.tables[g].pop(column))
        indexed = self.config.groups[self.config.indexed_group]
        row.num_published = min(row.num_published, new_len // indexed.block_size)
        return Status.OK

    def _free(self, seq_id: int) -> Status:
        if status := self._check(seq_id):
            return status
        if seq_id not in self.rows:
            return Status.SEQ_NOT_ACTIVE
        self._release([self.rows.pop(seq_id)])
        return Status.OK

    def _take(self, group_id: int) -> int:
        self._next_block += 1
        self.owners[group_id][self._next_block] = 1
        return self._next_block

    def _let_go(self, group_id: int, block: int) -> None:
        self.owners[group_id][block] -= 1
        if not self.owners[group_id][block]:
            del self.owners[group_id][block]
            if block in self._prefix_of:
                self.cached[block] = None

    def _make_room(self) -> None:
        """Evicts what the operation took too much, the originals of its copies last."""
        self._evict(-self.num_free(self.config.indexed_group))
        self._copied.clear()

    def _evict(self, num_blocks: int) -> None:
        block_size = self.config.groups[self.config.indexed_group].block_size
        batch = 1 if self.config.eviction_policy == "lru" else self.config.eviction_batch
        while num_blocks > 0:
            parents = {(namespace, tokens[:-block_size]) for namespace, tokens in self.published}
            leaves = [block for block in self.cached if self._prefix_of[block] not in parents]
            leaves = [block for block in leaves if block not in self._copied] or leaves
            leaves.sort(key=lambda block: self._eviction_key(self.history[block], self.clock))
            for block in leaves[: min(batch, num_blocks)]:
                del self.cached[block], self.history[block], self.published[self._prefix_of.pop(block)]
                self.num_evictions += 1
                num_blocks -= 1

    def _share(self, row: OracleRow) -> OracleRow:
        """A second row on the blocks that hold the tokens of `row`."""
        tables = []
        for g, group in enumerate(self.config.groups):
            end = ceil_div(len(row.tokens), group.block_size)
            tables.append({column: block for column, block in row.tables[g].items() if column < end})
            self.owners[g].update(tables[g].values())
        return OracleRow(list(row.tokens), tables, row.namespace, row.num_published, row.priority)

    def _release(self, rows: Sequence[OracleRow]) -> None:
        """Lets all blocks of the rows go, column by column from the last one."""
        for g, group in enumerate(self.config.groups):
            for column in reversed(range(group.max_blocks_per_seq)):
                for row in rows:
                    if column in row.tables[g]:
                        self._let_go(g, row.tables[g][column])


def first_kept(group: LayerGroup, context_len: int) -> int:
    """First column behind the sinks that a row of `context_len` tokens keeps when it grows."""
    if not isinstance(group.kind, SlidingWindow):
        return 0
    first_position = context_len - group.kind.window - group.kind.max_rollback + 1
    return max(first_position, 0) // group.block_size
