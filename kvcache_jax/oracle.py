"""The cache that is obviously right: lists of tokens and dicts of blocks, one row at a time, in Python.

It predicts every status, every count and who shares which block; `kvcache_jax.testing` holds a real
cache against it.
"""

import dataclasses
from collections import Counter as Multiset
from collections.abc import Sequence

from kvcache_jax.config import CacheConfig, LayerGroup, SlidingWindow, ceil_div
from kvcache_jax.status import Status


@dataclasses.dataclass
class OracleRow:
    """A sequence: its tokens, and per layer group the block of each table column."""

    tokens: list[int]
    tables: list[dict[int, int]]


class Oracle:
    """Dict-of-lists model of a cache without prefix caching.

    Operations take the arguments of their namesakes as Python lists and return a list of `Status`.
    Block ids are serial numbers; compare them by structure, not by value.

    Attributes:
      rows: Active rows by seq_id.
      owners: Per layer group, how many table entries point at each block.
      num_copies: Blocks copied on write so far.

    Example:
      >>> import kvcache_jax as kv
      >>> oracle = kv.testing.Oracle(kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=4, max_seqs=2))
      >>> oracle.allocate([0], [20]), oracle.extend([0], [[7, 8, 9]]), oracle.num_free(0)
      ([<Status.OK: 0>], [<Status.OK: 0>], 2)
    """

    def __init__(self, config: CacheConfig):
        self.config = config
        self.rows: dict[int, OracleRow] = {}
        self.owners: list[Multiset[int]] = [Multiset() for _ in config.groups]
        self.num_copies = 0
        self._next_block = 0

    def num_free(self, group_id: int) -> int:
        """Blocks of a group that no row holds."""
        return self.config.groups[group_id].num_blocks - len(self.owners[group_id])

    def allocate(self, seq_ids: Sequence[int], num_tokens: Sequence[int]) -> list[Status]:
        """See `kvcache_jax.allocate`."""
        return [self._allocate(*row) for row in zip(seq_ids, num_tokens, strict=True)]

    def extend(self, seq_ids: Sequence[int], new_tokens: Sequence[Sequence[int]]) -> list[Status]:
        """See `kvcache_jax.extend`; takes the tokens themselves."""
        seen: set[int] = set()
        statuses = []
        for seq_id, tokens in zip(seq_ids, new_tokens, strict=True):
            status = self._check(seq_id)
            if status == Status.OK and tokens:
                status = Status.DUPLICATE_SEQ_ID if seq_id in seen else self._extend(seq_id, list(tokens))
                seen.add(seq_id)
            statuses.append(status)
        return statuses

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
        for seq_id, row in moves:
            self._release(before[seq_id])
            self.rows[seq_id] = row
        return statuses

    def truncate(self, seq_ids: Sequence[int], new_len: Sequence[int]) -> list[Status]:
        """See `kvcache_jax.truncate`."""
        return [self._truncate(*row) for row in zip(seq_ids, new_len, strict=True)]

    def free(self, seq_ids: Sequence[int]) -> list[Status]:
        """See `kvcache_jax.free`."""
        return [self._free(seq_id) for seq_id in seq_ids]

    def _check(self, *seq_ids: int) -> Status:
        if any(not 0 <= seq_id <= self.config.max_seqs for seq_id in seq_ids):
            return Status.BAD_SEQ_ID
        return Status.SKIPPED if self.config.max_seqs in seq_ids else Status.OK

    def _allocate(self, seq_id: int, num_tokens: int) -> Status:
        if status := self._check(seq_id):
            return status
        if seq_id in self.rows:
            return Status.SEQ_IN_USE
        if num_tokens < 0:
            return Status.BAD_LENGTH
        if num_tokens > self.config.max_seq_len:
            return Status.TOO_LONG
        need = [
            min(ceil_div(num_tokens, group.block_size), group.max_held_blocks) for group in self.config.groups
        ]
        if any(n > self.num_free(g) for g, n in enumerate(need)):
            return Status.OUT_OF_BLOCKS
        self.rows[seq_id] = OracleRow([], [{c: self._take(g) for c in range(n)} for g, n in enumerate(need)])
        return Status.OK

    def _extend(self, seq_id: int, tokens: list[int]) -> Status:
        if seq_id not in self.rows:
            return Status.SEQ_NOT_ACTIVE
        row = self.rows[seq_id]
        old_len, new_len = len(row.tokens), len(row.tokens) + len(tokens)
        if new_len > self.config.max_seq_len or len(tokens) > self.config.query_len_limit:
            return Status.TOO_LONG
        plans = []
        for g, group in enumerate(self.config.groups):
            table, owners = row.tables[g], self.owners[g]
            gone = [
                column for column in table if group.num_sink_blocks <= column < first_kept(group, old_len)
            ]
            columns = range(old_len // group.block_size, ceil_div(new_len, group.block_size))
            fresh = [column for column in columns if column not in table]
            tail = old_len // group.block_size if old_len % group.block_size else None
            copied = [] if tail is None or owners[table[tail]] == 1 else [tail]
            given_back = sum(owners[table[column]] == 1 for column in gone)
            if len(fresh) + len(copied) > self.num_free(g) + given_back:
                return Status.OUT_OF_BLOCKS
            plans.append((gone, fresh, copied))
        for g, (gone, fresh, copied) in enumerate(plans):
            for column in gone + copied:
                self._let_go(g, row.tables[g].pop(column))
            for column in fresh + copied:
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
            for column in [c for c in row.tables[g] if c >= ceil_div(new_len, group.block_size)]:
                self._let_go(g, row.tables[g].pop(column))
        return Status.OK

    def _free(self, seq_id: int) -> Status:
        if status := self._check(seq_id):
            return status
        if seq_id not in self.rows:
            return Status.SEQ_NOT_ACTIVE
        self._release(self.rows.pop(seq_id))
        return Status.OK

    def _take(self, group_id: int) -> int:
        self._next_block += 1
        self.owners[group_id][self._next_block] = 1
        return self._next_block

    def _let_go(self, group_id: int, block: int) -> None:
        self.owners[group_id][block] -= 1
        if not self.owners[group_id][block]:
            del self.owners[group_id][block]

    def _share(self, row: OracleRow) -> OracleRow:
        """A second row on the blocks that hold the tokens of `row`."""
        tables = []
        for g, group in enumerate(self.config.groups):
            end = ceil_div(len(row.tokens), group.block_size)
            tables.append({column: block for column, block in row.tables[g].items() if column < end})
            self.owners[g].update(tables[g].values())
        return OracleRow(list(row.tokens), tables)

    def _release(self, row: OracleRow) -> None:
        for g, table in enumerate(row.tables):
            for block in table.values():
                self._let_go(g, block)


def first_kept(group: LayerGroup, context_len: int) -> int:
    """First column behind the sinks that a row of `context_len` tokens keeps when it grows."""
    if not isinstance(group.kind, SlidingWindow):
        return 0
    first_position = context_len - group.kind.window - group.kind.max_rollback + 1
    return max(first_position, 0) // group.block_size
