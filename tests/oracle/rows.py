"""The operations of the oracle that take no block: rows share, shrink and end, and prefixes are published."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.status import Status
from kvcache_jax.layers.layer_group import LayerGroup
from kvcache_jax.layers.span import ceil_div
from tests.oracle.blocks import OracleBlock, OracleBlocks


@dataclasses.dataclass
class OracleRow:
    """A sequence: its tokens, per layer group the block of each table column, and what is published.

    A token is None at a place between chunks that was not computed yet. Of its source there is the length
    alone. Of the text's positions there are those that were dropped, and among them those that went with
    their blocks. Of a row that was compressed the last `num_kept` tokens in front of these count as if they
    had stood there from the start. Of one that was composed there is the first place that is not its own.
    """

    tokens: list[int | None]
    tables: list[dict[int, int]]
    namespace: tuple[int, ...] = (0, 0, 0, 0)
    num_published: int = 0
    priority: int = 0
    source_len: int = 0
    dropped: frozenset[int] = frozenset()
    gone: frozenset[int] = frozenset()
    num_kept: int = 0
    first_composed: int | None = None

    @property
    def positions(self) -> list[int]:
        """The positions in the text of the tokens that it holds."""
        return [i for i in range(len(self.tokens) + len(self.gone)) if i not in self.gone]

    @property
    def plain_len(self) -> int:
        """The first tokens that stand in the text where they do in the row."""
        return min(self.dropped, default=len(self.tokens)) - self.num_kept

    @property
    def prefix_len(self) -> int:
        """The first tokens that the row computed itself, after one another."""
        return self.plain_len if self.first_composed is None else min(self.plain_len, self.first_composed)

    def note_let_go(self) -> None:
        """Notes that what is after the plain tokens is no longer where it was composed."""
        if self.first_composed is not None:
            self.first_composed = min(self.first_composed, self.plain_len)


class OracleRows(OracleBlocks):
    """Rows by seq_id, on blocks; see `Oracle` for the attributes."""

    def __init__(self, config: CacheConfig, eviction_key: Callable[[OracleBlock, int], int] | None = None):
        """Starts without rows."""
        super().__init__(config, eviction_key)
        self.rows: dict[int, OracleRow] = {}
        self.num_adoptions = 0

    def fork(self, src_ids: Sequence[int], dst_ids: Sequence[int]) -> list[Status]:
        """Forks rows like `kvcache_jax.fork`."""
        statuses, new_rows = self._check_ids(dst_ids, src_ids), {}
        for i, (src_id, dst_id) in enumerate(zip(src_ids, dst_ids, strict=True)):
            if not statuses[i]:
                statuses[i] = self._check_active(src_id)
            if not statuses[i] and dst_id in self.rows:
                statuses[i] = Status.SEQ_IN_USE
            if not statuses[i]:
                new_rows[dst_id] = self._share(self.rows[src_id])
        self.clock += bool(new_rows)
        self.rows.update(new_rows)
        return statuses

    def reorder(self, seq_ids: Sequence[int], parent_ids: Sequence[int]) -> list[Status]:
        """Lets rows continue from parents like `kvcache_jax.reorder`."""
        statuses, new_rows = self._check_ids(seq_ids, parent_ids), {}
        for i, (seq_id, parent_id) in enumerate(zip(seq_ids, parent_ids, strict=True)):
            statuses[i] = statuses[i] or self._check_active(seq_id) or self._check_active(parent_id)
            if not statuses[i] and seq_id != parent_id:
                new_rows[seq_id] = self._share(self.rows[parent_id])
        for seq_id in new_rows:  # all new owners are there
            self._drop_columns(self.rows[seq_id], first=0)
        self.clock += bool(new_rows)
        self.rows.update(new_rows)
        return statuses

    def truncate(self, seq_ids: Sequence[int], new_len: Sequence[int]) -> list[Status]:
        """Shortens rows like `kvcache_jax.truncate`."""
        statuses = self._check_ids(seq_ids)
        for i, (seq_id, length) in enumerate(zip(seq_ids, new_len, strict=True)):
            statuses[i] = statuses[i] or self._check_cut(seq_id, length)
            if not statuses[i]:
                row = self.rows[seq_id]
                if row.dropped and length <= row.plain_len:
                    row.dropped, row.gone, row.num_kept = frozenset(), frozenset(), 0
                if row.first_composed is not None and length <= row.first_composed:
                    row.first_composed = None
                del row.tokens[length:]
                self._drop_columns(row, first=length, keeps_source=True)
                block_size = self.config.groups[self.config.indexed_group].block_size
                row.num_published = min(row.num_published, length // block_size)
        return statuses

    def _check_cut(self, seq_id: int, new_len: int) -> Status:
        if seq_id not in self.rows:
            return Status.SEQ_NOT_ACTIVE
        row = self.rows[seq_id]
        if new_len < 0:
            return Status.BAD_LENGTH
        if new_len > len(row.tokens):
            return Status.TOO_LONG
        if row.dropped and row.plain_len < new_len < min(row.dropped):
            return Status.BAD_LENGTH
        if row.dropped and row.plain_len < new_len < len(row.positions):
            if row.positions[new_len] in row.dropped:
                return Status.BAD_LENGTH
        for group, table in zip(self.config.groups, row.tables, strict=True):
            span = group.kind.span
            if span.window is not None:
                is_beyond = len(row.tokens) - new_len > span.max_rollback
                reach = range(max(new_len - span.window + 1, 0), new_len)
                if len(row.tokens) > span.window and is_beyond:
                    return Status.WINDOW_LOST
                if any(position // group.block_size not in table for position in reach):
                    return Status.WINDOW_LOST
        return Status.OK

    def drop(self, seq_ids: Sequence[int], start: Sequence[int], length: Sequence[int]) -> list[Status]:
        """Drops tokens like `kvcache_jax.compression.drop`."""
        statuses = self._check_rows(seq_ids)
        for i, (seq_id, first, num) in enumerate(zip(seq_ids, start, length, strict=True)):
            statuses[i] = statuses[i] or self._check_drop(self.rows[seq_id], first, num)
            if not statuses[i] and num:
                self._drop_positions(self.rows[seq_id], range(first, first + num))
        return statuses

    def _check_drop(self, row: OracleRow, first: int, num: int) -> Status:
        text_len, dropped = len(row.positions) + len(row.gone), row.dropped.union(range(first, first + num))
        if min(first, num) < 0 or first + num > text_len:
            return Status.BAD_LENGTH
        is_among_sinks = first < max(group.kind.span.num_sink_tokens for group in self.config.groups)
        is_among_sinks |= row.num_kept > 0 and first <= max(row.dropped)  # or among what was kept
        is_one_run = not dropped or max(dropped) - min(dropped) + 1 == len(dropped)
        return Status.BAD_LENGTH if num and (is_among_sinks or not is_one_run) else Status.OK

    def _drop_positions(self, row: OracleRow, positions: range) -> None:
        """Hides positions, and lets the blocks go that hold nothing else in any group."""
        row.dropped |= {*positions}
        unit = math.lcm(*(group.block_size for group in self.config.groups if not group.holds_sources))
        for first in range(len(row.tokens) // unit * unit - unit, -1, -unit):
            gone = row.positions[first : first + unit]
            if not row.dropped.issuperset(gone):
                continue
            for g, group in enumerate(self.config.groups):
                if group.holds_sources:
                    continue
                width, kept = unit // group.block_size, {}
                for column, block in row.tables[g].items():
                    if first <= column * group.block_size < first + unit:
                        self._let_go(g, block)
                    else:
                        kept[column - width * (column * group.block_size > first)] = block
                row.tables[g] = kept
            del row.tokens[first : first + unit]
            row.gone |= {*gone}
        row.note_let_go()

    def free(self, seq_ids: Sequence[int]) -> list[Status]:
        """Ends rows like `kvcache_jax.free`."""
        statuses = self._check_rows(seq_ids)
        for seq_id, status in zip(seq_ids, statuses, strict=True):
            if not status:
                self._drop_columns(self.rows.pop(seq_id), first=0)
        return statuses

    def touch(self, seq_ids: Sequence[int]) -> list[Status]:
        """Marks rows as used like `kvcache_jax.touch`."""
        statuses = self._check_rows(seq_ids)
        self.clock += Status.OK in statuses
        return statuses

    def set_priority(self, seq_ids: Sequence[int], priority: Sequence[int]) -> list[Status]:
        """Sets priorities like `kvcache_jax.set_priority`."""
        statuses = self._check_rows(seq_ids)
        for seq_id, value, status in zip(seq_ids, priority, statuses, strict=True):
            if not status:
                self.rows[seq_id].priority = value
        return statuses

    def commit(self, seq_ids: Sequence[int] | None, final_len: Sequence[int]) -> list[Status]:
        """Publishes full blocks like `kvcache_jax.commit`."""
        if seq_ids is None:  # `max_seqs` names no row
            max_seqs = self.config.max_seqs
            seq_ids = [row if row in self.rows else max_seqs for row in range(max_seqs)]
        statuses = self._check_rows(seq_ids)
        for i, (seq_id, length) in enumerate(zip(seq_ids, final_len, strict=True)):
            if not statuses[i] and length < 0:
                statuses[i] = Status.BAD_LENGTH
            if not statuses[i]:
                self._publish_row(self.rows[seq_id], length)
        return statuses

    def _publish_row(self, row: OracleRow, final_len: int) -> None:
        group_id = self.config.indexed_group
        block_size = self.config.groups[group_id].block_size
        for column in range(row.num_published, min(final_len, len(row.tokens), row.prefix_len) // block_size):
            prefix = row.namespace, tuple(row.tokens[: (column + 1) * block_size])
            private = row.tables[group_id][column]
            if prefix not in self.published:
                self._publish(prefix, private, row.priority, column)
            block = self.published[prefix]
            row.num_published = column + 1
            if block != private:
                self.num_adoptions += 1
                self._note_use([block], row.priority)
                self.cached.pop(block, None)
                self.owners[group_id][block] += self.owners[group_id].pop(private)
                for holder in self.rows.values():
                    if holder.tables[group_id].get(column) == private:
                        holder.tables[group_id][column] = block

    def evict(self, num_blocks: int) -> int:
        """Gives up cached blocks like `kvcache_jax.evict`."""
        num_evicted = min(num_blocks, len(self.cached))
        self._evict(num_evicted)
        return num_evicted

    def reset_prefix_cache(self) -> int:
        """Forgets all prefixes like `kvcache_jax.reset_prefix_cache`."""
        num_dropped = len(self.published)
        self._forget_all()
        for row in self.rows.values():
            row.num_published = 0
        return num_dropped

    def _check_ids(
        self,
        seq_ids: Sequence[int],
        others: Sequence[int] | None = None,
        names: Sequence[bool] | None = None,
    ) -> list[Status]:
        """Returns what the ids alone say of each entry: BAD_SEQ_ID, SKIPPED, DUPLICATE_SEQ_ID or OK.

        Args:
          seq_ids: The rows to change, each once.
          others: A second id per entry, which may repeat.
          names: The entry counts as one that names its row; default: all do whose ids are rows.
        """
        named: set[int] = set()
        statuses = []
        for i, seq_id in enumerate(seq_ids):
            ids = [seq_id] if others is None else [seq_id, others[i]]
            if any(not 0 <= number <= self.config.max_seqs for number in ids):
                statuses.append(Status.BAD_SEQ_ID)
            elif self.config.max_seqs in ids:
                statuses.append(Status.SKIPPED)
            elif names is not None and not names[i]:
                statuses.append(Status.OK)
            else:
                statuses.append(Status.DUPLICATE_SEQ_ID if seq_id in named else Status.OK)
                named.add(seq_id)
        return statuses

    def _check_active(self, seq_id: int) -> Status:
        return Status.OK if seq_id in self.rows else Status.SEQ_NOT_ACTIVE

    def _check_rows(self, seq_ids: Sequence[int]) -> list[Status]:
        """Checks ids as `_check_ids`, for entries that ask for nothing but an active row."""
        statuses = self._check_ids(seq_ids)
        return [
            status or self._check_active(seq_id) for seq_id, status in zip(seq_ids, statuses, strict=True)
        ]

    def _share(self, row: OracleRow) -> OracleRow:
        """Makes a second row on the blocks that hold the tokens of `row`."""
        tables = []
        for g, group in enumerate(self.config.groups):
            end = ceil_div(row.source_len if group.holds_sources else len(row.tokens), group.block_size)
            tables.append({column: block for column, block in row.tables[g].items() if column < end})
            self.owners[g].update(tables[g].values())
        return dataclasses.replace(row, tokens=list(row.tokens), tables=tables)

    def _drop_columns(self, row: OracleRow, first: int, *, keeps_source: bool = False) -> None:
        """Lets the blocks go that begin at token `first` or after it, the last one first."""
        for g, group in enumerate(self.config.groups):
            if group.holds_sources and keeps_source:
                continue
            for column in sorted(row.tables[g], reverse=True):
                if column * group.block_size >= first:
                    self._let_go(g, row.tables[g].pop(column))


def first_kept(group: LayerGroup, context_len: int) -> int:
    """Finds the first column after the sinks that a row of `context_len` tokens keeps when it grows."""
    span = group.kind.span
    if span.window is None:
        return 0
    first_position = context_len - span.window - span.max_rollback + 1
    return max(first_position, 0) // group.block_size
