"""The operations of the oracle on chunks: they are stored, composed into rows, and forgotten."""

import dataclasses
from collections.abc import Callable, Sequence

from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.layer_kinds.span import ceil_div
from kvcache_jax.core.status import Status
from kvcache_jax.testing.oracle_blocks import OracleBlock, Prefix
from kvcache_jax.testing.oracle_compression import OracleCompression
from kvcache_jax.testing.oracle_rows import OracleRow


@dataclasses.dataclass(frozen=True)
class OracleChunk:
    """A passage: its name, the place in its row where it began, and per layer group its blocks."""

    namespace: tuple[int, ...]
    tokens: tuple[int | None, ...]
    start: int
    blocks: tuple[tuple[int, ...], ...]


class OracleChunks(OracleCompression):
    """Chunks by id, and the rows that they are put into; see `Oracle` for the attributes."""

    def __init__(self, config: CacheConfig, eviction_key: Callable[[OracleBlock, int], int] | None = None):
        """Starts without chunks."""
        super().__init__(config, eviction_key)
        self.chunks: dict[int, OracleChunk] = {}

    def find_chunk(self, namespace: tuple[int, ...], tokens: Sequence[int | None]) -> int:
        """Finds a chunk by its name like `kvcache_jax.find_chunks`, one at a time."""
        for chunk_id, chunk in self.chunks.items():
            if (chunk.namespace, chunk.tokens) == (namespace, tuple(tokens)):
                return chunk_id
        return self._num_chunks

    @property
    def _num_chunks(self) -> int:
        return self.config.num_chunks or 0

    def store_chunk(
        self,
        seq_ids: Sequence[int],
        start: Sequence[int],
        length: Sequence[int],
        tokens: Sequence[Sequence[int | None]],
    ) -> list[Status]:
        """Keeps spans of rows like `kvcache_jax.store_chunk`."""
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
                needs = [len(self._copied_edges(g, first, num)) for g in range(len(available))]
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
            [sum(len(self._copied_edges(g, first, num)) for _, first, num, _ in stored) for g in groups]
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
        is_inside = start >= 0 and 0 < length <= (self.config.max_chunk_len or 0)
        is_inside = is_inside and start + length <= self.rows[seq_id].prefix_len
        return Status.OK if is_inside else Status.BAD_LENGTH

    def _copied_edges(self, g: int, start: int, length: int) -> list[int]:
        """Lists the columns of a span whose tokens are copied: the chunk shares those that lie within it."""
        block_size = self.config.groups[g].block_size
        columns = range(start // block_size, ceil_div(start + length, block_size))
        if self.config.enable_prefix_caching:
            return [*columns]
        return [c for c in columns if c * block_size < start or (c + 1) * block_size > start + length]

    def _hold_span(self, g: int, row: OracleRow, start: int, length: int) -> tuple[int, ...]:
        """Shares the row's blocks of a span, or takes others for its edges."""
        block_size = self.config.groups[g].block_size
        copied, blocks = self._copied_edges(g, start, length), []
        for column in range(start // block_size, ceil_div(start + length, block_size)):
            if column in copied:
                blocks.append(self._take(g))
            else:
                blocks.append(row.tables[g][column])
                self._hold(g, blocks[-1])
        return tuple(blocks)

    def free_chunks(self, chunk_ids: Sequence[int]) -> list[Status]:
        """Forgets chunks like `kvcache_jax.free_chunks`."""
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
                for block in blocks:
                    self._let_go(g, block)
        return statuses

    def compose(
        self, seq_ids: Sequence[int], chunk_ids: Sequence[Sequence[int]], starts: Sequence[Sequence[int]]
    ) -> list[Status]:
        """Puts chunks into rows like `kvcache_jax.compose`; places between them hold None."""
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
            taken = [self._taken_columns(g, row, new_len) for g in range(len(available))]
            room = [left - len(columns) for left, columns in zip(available, taken, strict=True)]
            if min(room) < 0:
                statuses[i] = Status.OUT_OF_BLOCKS
                continue
            available = room
            composed.append((row, chunks, taken))
        self.clock += bool(composed)
        self._make_room([sum(len(taken[g]) for _, _, taken in composed) for g in range(len(available))])
        originals = []
        for row, chunks, taken in composed:
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

    def _taken_columns(self, g: int, row: OracleRow, new_len: int) -> list[int]:
        """Lists the columns from the row's end on that have no block, or one that may not be written."""
        block_size, table = self.config.groups[g].block_size, row.tables[g]
        return [
            column
            for column in range(len(row.tokens) // block_size, ceil_div(new_len, block_size))
            if column not in table or self.owners[g][table[column]] > 1 or self.is_published(g, table[column])
        ]

    def _append_chunks(self, row: OracleRow, chunks: Sequence[tuple[int, int]]) -> None:
        block_size = self.config.groups[self.config.indexed_group].block_size
        row.num_published = min(row.num_published, len(row.tokens) // block_size)
        if row.first_composed is None:
            row.first_composed = len(row.tokens)
        for start, chunk_id in chunks:
            row.tokens += [None] * (start - len(row.tokens))
            row.tokens += self.chunks[chunk_id].tokens
