"""The operation `compress` of the oracle."""

import math
from collections.abc import Sequence

from kvcache_jax.core.layer_kinds.span import ceil_div
from kvcache_jax.core.status import Status
from tests.oracle.rows import OracleRow, OracleRows


class OracleCompression(OracleRows):
    """Rows that keep their best tokens; see `Oracle` for the attributes."""

    def compress(
        self, seq_ids: Sequence[int], scores: Sequence[Sequence[float]], num_keep: Sequence[int]
    ) -> list[Status]:
        """Compresses rows like `kvcache_jax.compress`, with a score per token of each row."""
        statuses = self._check_rows(seq_ids)
        available = [self.num_available(g) for g in range(len(self.config.groups))]
        compressed = []
        for i, (seq_id, row_scores, num) in enumerate(zip(seq_ids, scores, num_keep, strict=True)):
            if statuses[i]:
                continue
            row = self.rows[seq_id]
            shown = [place for place in range(len(row.tokens)) if row.positions[place] not in row.dropped]
            if not 1 <= num <= len(shown):
                statuses[i] = Status.BAD_LENGTH
                continue
            if num == len(shown):
                continue
            best = sorted((-row_scores[place], place) for place in shown)[:num]
            kept = sorted(place for _, place in best)
            columns = [self._moved_columns(g, row, kept) for g in range(len(available))]
            room = [
                left - max(len(written) - len(own), 0)
                for left, (written, own) in zip(available, columns, strict=True)
            ]
            if min(room) < 0:
                statuses[i] = Status.OUT_OF_BLOCKS
                continue
            available = room
            compressed.append((row, kept, columns))
        num_new = [0] * len(available)
        for _, _, columns in compressed:
            for g, (written, own) in enumerate(columns):
                num_new[g] += max(len(written) - len(own), 0)
        self._make_room(num_new)
        released = []
        for row, kept, columns in compressed:
            for g, (written, own) in enumerate(columns):
                if not self.config.groups[g].holds_sources:
                    released += [(g, block) for block in self._move(g, row, len(kept), written, own)]
            self._forget_others(row, kept)
        for g, block in released:
            self._let_go(g, block)
        return statuses

    def _num_same(self, row: OracleRow, kept: Sequence[int]) -> int:
        """Counts the tokens in front whose blocks stay."""
        unit = math.lcm(*(group.block_size for group in self.config.groups if not group.holds_sources))
        stay = [place for i, place in enumerate(kept) if i == place]
        return len(stay) // unit * unit

    def _moved_columns(self, g: int, row: OracleRow, kept: Sequence[int]) -> tuple[list[int], list[int]]:
        """Lists the columns that are written, and those whose blocks may be."""
        group, table = self.config.groups[g], row.tables[g]
        if group.holds_sources:
            return [], []
        first = self._num_same(row, kept) // group.block_size
        written = list(range(first, ceil_div(len(kept), group.block_size)))
        own = [
            column
            for column in range(first, ceil_div(len(row.tokens), group.block_size))
            if self.owners[g][table[column]] == 1 and not self.is_published(g, table[column])
        ]
        return written, own

    def _move(
        self, g: int, row: OracleRow, num_kept: int, written: Sequence[int], own: Sequence[int]
    ) -> list[int]:
        """Gives the row its blocks, and returns those that it lets go, the last one first."""
        group, table = self.config.groups[g], row.tables[g]
        new_end, end = (ceil_div(length, group.block_size) for length in (num_kept, len(row.tokens)))
        first = written[0] if written else new_end
        reused = [table[column] for column in own[: len(written)]]
        goes = [table[column] for column in range(first, end) if table[column] not in reused]
        blocks = reused + [self._take(g) for _ in written[len(reused) :]]
        behind = {column - end + new_end: block for column, block in table.items() if column >= end}
        front = {column: block for column, block in table.items() if column < first}
        row.tables[g] = front | dict(zip(written, blocks, strict=True)) | behind
        return goes[::-1]

    def _forget_others(self, row: OracleRow, kept: Sequence[int]) -> None:
        num_same, plain_len = self._num_same(row, kept), row.plain_len
        num_gone = len(row.gone) + len(row.tokens) - len(kept)
        row.tokens = [row.tokens[place] for place in kept]
        row.dropped = row.gone = frozenset(range(len(kept), len(kept) + num_gone))
        row.num_kept = len(kept) - min(num_same, plain_len)
        block_size = self.config.groups[self.config.indexed_group].block_size
        row.num_published = min(row.num_published, min(num_same, plain_len) // block_size)
        row.note_let_go()
