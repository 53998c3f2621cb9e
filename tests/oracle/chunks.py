"""The operations of the oracle on chunks: they are stored, composed into rows, and forgotten."""

import dataclasses
from collections.abc import Callable, Sequence

from kvcache_jax.chunks.chunk_store import Store
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.status import Status
from kvcache_jax.layers.span import ceil_div
from tests.oracle.blocks import OracleBlock, Prefix
from tests.oracle.compression import OracleCompression
from tests.oracle.rows import OracleRow, first_kept


@dataclasses.dataclass(frozen=True)
class OracleChunk:
    """A passage: its name, the place in its row where it began, and per layer group its blocks.

    They are counted from the one that the first token was in; those that a window let go are not there.
    """

    namespace: tuple[int, ...]
    tokens: tuple[int | None, ...]
    start: int
    blocks: tuple[dict[int, int], ...]


class OracleChunks(OracleCompression):
    """Chunks by id, and the rows that they are put into; see `Oracle` for the attributes."""

    def __init__(self, config: CacheConfig, eviction_key: Callable[[OracleBlock, int], int] | None = None):
        """Starts without chunks."""
        super().__init__(config, eviction_key)
        self.chunks: dict[int, OracleChunk] = {}

    def find_chunk(self, namespace: tuple[int, ...], tokens: Sequence[int | None]) -> int:
        """Finds a chunk by its name like `kvcache_jax.chunks.find`, one at a time."""
        for chunk_id, chunk in self.chunks.items():
            if (chunk.namespace, chunk.tokens) == (namespace, tuple(tokens)):
                return chunk_id
        return self._num_chunks

    @property
    def _store(self) -> Store | None:
        return next((extra for extra in self.config.extras if isinstance(extra, Store)), None)

    @property
    def _num_chunks(self) -> int:
        return self._store.num_chunks if self._store else 0

    def store_chunk(
        self,
        seq_ids: Sequence[int],
        start: Sequence[int],
        length: Sequence[int],
        tokens: Sequence[Sequence[int | None]],
    ) -> list[Status]:
        """Keeps spans of rows like `kvcache_jax.chunks.store`."""
        statuses: list[Status] = []
        available = [self.num_available(g) for g in range(len(self.config.groups))]
        fates: dict[Prefix, Status] = {}
        stored = []
        for seq_id, first, num, text in zip(seq_ids, start, length, tokens, strict=True):
            statuses.append(self._check_span(seq_id, first, num))
            if statuses[-1]:
                continue
            row = self.rows[seq_id]
            name = row.namespace, tuple(text[:num])
            if self.find_chunk(*name) < self._num_chunks:
                continue
            if name not in fates:  # equal chunks of a call share the fate of the first
                needs = [len(self._copied_edges(g, row, first, num)) for g in range(len(available))]
                fits = all(need <= left for need, left in zip(needs, available, strict=True))
                if len(self.chunks) + len(stored) == self._num_chunks:
                    fates[name] = Status.OUT_OF_CHUNKS
                elif not fits:
                    fates[name] = Status.OUT_OF_BLOCKS
                else:
                    fates[name] = Status.OK
                    available = [left - need for need, left in zip(needs, available, strict=True)]
                    stored.append((row, first, num, name))
            statuses[-1] = fates[name]
        groups = range(len(available))
        self._make_room(
            [
                sum(len(self._copied_edges(g, row, start, num)) for row, start, num, _ in stored)
                for g in groups
            ]
        )
        for row, first, num, (namespace, text) in stored:
            chunk_id = min({*range(self._num_chunks)} - {*self.chunks})
            blocks = tuple(self._hold_span(g, row, first, num) for g in groups)
            self.chunks[chunk_id] = OracleChunk(namespace, text, first, blocks)
        return statuses

    def _check_span(self, seq_id: int, start: int, length: int) -> Status:
        if not 0 <= seq_id <= self.config.max_seqs:
            return Status.BAD_SEQ_ID
        if seq_id == self.config.max_seqs:
            return Status.SKIPPED
        if seq_id not in self.rows:
            return Status.SEQ_NOT_ACTIVE
        is_inside = start >= 0 and 0 < length <= (self._store.max_chunk_len if self._store else 0)
        if not is_inside or start + length > self.rows[seq_id].prefix_len:
            return Status.BAD_LENGTH
        for group, table in zip(self.config.groups, self.rows[seq_id].tables, strict=True):
            if (window := group.kind.span.window) is not None:
                end = start + length
                first = max(start, end - window + 1) // group.block_size
                if any(column not in table for column in range(first, ceil_div(end, group.block_size))):
                    return Status.WINDOW_LOST
        return Status.OK

    def _span_columns(self, g: int, row: OracleRow, start: int, length: int) -> list[int]:
        """Lists the columns of a span that the row holds."""
        block_size = self.config.groups[g].block_size
        columns = range(start // block_size, ceil_div(start + length, block_size))
        return [column for column in columns if column in row.tables[g]]

    def _copied_edges(self, g: int, row: OracleRow, start: int, length: int) -> list[int]:
        """Lists those whose tokens are copied: the chunk shares the blocks that lie within the span."""
        block_size, columns = self.config.groups[g].block_size, self._span_columns(g, row, start, length)
        if self.config.enable_prefix_caching:
            return columns
        return [c for c in columns if c * block_size < start or (c + 1) * block_size > start + length]

    def _hold_span(self, g: int, row: OracleRow, start: int, length: int) -> dict[int, int]:
        """Shares the row's blocks of a span, or takes others for its edges."""
        copied, blocks = self._copied_edges(g, row, start, length), {}
        for column in self._span_columns(g, row, start, length):
            block = self._take(g) if column in copied else row.tables[g][column]
            if column not in copied:
                self._hold(g, block)
            blocks[column - start // self.config.groups[g].block_size] = block
        return blocks

    def free_chunks(self, chunk_ids: Sequence[int]) -> list[Status]:
        """Forgets chunks like `kvcache_jax.chunks.free`."""
        statuses, forgotten = [], []
        for chunk_id in chunk_ids:
            if chunk_id == self._num_chunks:
                statuses.append(Status.SKIPPED)
            elif chunk_id in self.chunks:
                forgotten.append(self.chunks.pop(chunk_id))
                statuses.append(Status.OK)
            else:
                statuses.append(Status.BAD_CHUNK_ID)
        for chunk in forgotten:
            for g, blocks in enumerate(chunk.blocks):
                for block in blocks.values():
                    self._let_go(g, block)
        return statuses

    def compose(
        self, seq_ids: Sequence[int], chunk_ids: Sequence[Sequence[int]], starts: Sequence[Sequence[int]]
    ) -> list[Status]:
        """Puts chunks into rows like `kvcache_jax.chunks.compose`; places between them hold None."""
        placed = [
            sorted((start, chunk_id) for chunk_id, start in pairs if chunk_id != self._num_chunks)
            for pairs in (
                zip(ids, firsts, strict=True) for ids, firsts in zip(chunk_ids, starts, strict=True)
            )
        ]
        statuses = self._check_ids(seq_ids, names=[len(chunks) > 0 for chunks in placed])
        available = [self.num_available(g) for g in range(len(self.config.groups))]
        composed = []
        for i, (seq_id, chunks) in enumerate(zip(seq_ids, placed, strict=True)):
            if statuses[i] or not chunks:
                continue
            statuses[i] = self._check_composition(seq_id, chunks)
            if statuses[i]:
                continue
            row, (start, last) = self.rows[seq_id], chunks[-1]
            new_len = start + len(self.chunks[last].tokens)
            plans = [self._plan_columns(g, row, chunks, new_len) for g in range(len(available))]
            if None in plans:
                statuses[i] = Status.WINDOW_LOST
                continue
            taken, leaving = zip(*filter(None, plans), strict=True)
            num_back = [
                sum(self.owners[g][row.tables[g][column]] == 1 for column in columns)
                for g, columns in enumerate(leaving)
            ]
            room = [
                left + back - len(columns)
                for left, back, columns in zip(available, num_back, taken, strict=True)
            ]
            if min(room) < 0:
                statuses[i] = Status.OUT_OF_BLOCKS
                continue
            available = room
            composed.append((row, chunks, taken, leaving))
        self.clock += bool(composed)
        for row, _, _, leaving in composed:
            for g, columns in enumerate(leaving):
                for column in reversed(columns):
                    self._let_go(g, row.tables[g].pop(column))
        self._make_room([sum(len(taken[g]) for _, _, taken, _ in composed) for g in range(len(available))])
        originals = []
        for row, chunks, taken, _ in composed:
            for g, columns in enumerate(taken):
                originals += [(g, row.tables[g][c]) for c in reversed(columns) if c in row.tables[g]]
                row.tables[g].update({column: self._take(g) for column in columns})
            self._append_chunks(row, chunks)
        for g, block in originals:
            self._let_go(g, block)
        return statuses

    def _check_composition(self, seq_id: int, chunks: Sequence[tuple[int, int]]) -> Status:
        if seq_id not in self.rows:
            return Status.SEQ_NOT_ACTIVE
        row = self.rows[seq_id]
        for _, chunk_id in chunks:
            if chunk_id not in self.chunks or self.chunks[chunk_id].namespace != row.namespace:
                return Status.BAD_CHUNK_ID
        end = len(row.tokens)
        for start, chunk_id in chunks:
            if start < end or row.dropped:
                return Status.BAD_LENGTH
            end = start + len(self.chunks[chunk_id].tokens)
        return Status.TOO_LONG if end > self.config.max_seq_len else Status.OK

    def _plan_columns(
        self, g: int, row: OracleRow, chunks: Sequence[tuple[int, int]], new_len: int
    ) -> tuple[list[int], list[int]] | None:
        """Lists the columns that need another block, and those that leave the window.

        None if the row's next token would read in the window what is not there any more.
        """
        group, table = self.config.groups[g], row.tables[g]
        first, num_sinks = self._first_kept(g, row, chunks, new_len), group.num_sink_blocks
        if first is None:
            return None

        def is_free_to_write(column: int) -> bool:
            is_alone = column in table and self.owners[g][table[column]] == 1
            return is_alone and not self.is_published(g, table[column])

        columns = range(len(row.tokens) // group.block_size, ceil_div(new_len, group.block_size))
        written = [column for column in columns if column < num_sinks or column >= first]
        taken = [column for column in written if not is_free_to_write(column)]
        return taken, [column for column in sorted(table) if num_sinks <= column < first]

    def _first_kept(
        self, g: int, row: OracleRow, chunks: Sequence[tuple[int, int]], new_len: int
    ) -> int | None:
        """Finds the first column after the sinks that the row has then, as if it had grown at its end."""
        group = self.config.groups[g]
        if (window := group.kind.span.window) is None:
            return 0
        block_size, num_sinks = group.block_size, group.num_sink_blocks
        missing = {c for c in range(ceil_div(len(row.tokens), block_size)) if c not in row.tables[g]}
        for start, chunk_id in chunks:
            chunk = self.chunks[chunk_id]
            for i in range(len(chunk.tokens)):
                if (chunk.start % block_size + i) // block_size not in chunk.blocks[g]:
                    missing.add((start + i) // block_size)
        grown_from = max(len(row.tokens), new_len - self.config.query_len_limit)
        first = max([num_sinks, first_kept(group, grown_from), *(column + 1 for column in missing)])
        last_read = max(num_sinks, max(new_len - window + 1, 0) // block_size)
        return first if first <= last_read and not any(c < num_sinks for c in missing) else None

    def _append_chunks(self, row: OracleRow, chunks: Sequence[tuple[int, int]]) -> None:
        block_size = self.config.groups[self.config.indexed_group].block_size
        row.num_published = min(row.num_published, len(row.tokens) // block_size)
        if row.first_composed is None:
            row.first_composed = len(row.tokens)
        for start, chunk_id in chunks:
            row.tokens += [None] * (start - len(row.tokens))
            row.tokens += self.chunks[chunk_id].tokens
