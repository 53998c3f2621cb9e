"""A model of the cache that is obviously right: lists of tokens and dicts of blocks, in plain Python.

The oracle predicts every status, every count and who shares which block; `comparison.py` compares a real
cache with it. All rows of a call act on the state before it: first it is decided, entry by entry, who
succeeds, and only then is anything changed.
"""

import dataclasses
from collections import Counter as Multiset
from collections.abc import Callable, Sequence

from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.layer_group import LayerGroup
from kvcache_jax.core.layer_kinds.span import ceil_div
from kvcache_jax.core.status import Status
from tests.oracle.blocks import OracleBlock
from tests.oracle.chunks import OracleChunks
from tests.oracle.rows import OracleRow, first_kept


@dataclasses.dataclass
class _Prompt:
    """An entry of `allocate`; `hits` are the cached blocks that it starts on."""

    seq_id: int
    num_tokens: int
    tokens: Sequence[int]
    namespace: tuple[int, ...]
    priority: int
    hits: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Growth:
    """The columns of a row and a layer group that an entry of `extend` changes.

    Attributes:
      left: They left the window.
      fresh: They get a block.
      copied: The one of the last block, if that is to be copied.
    """

    left: list[int]
    fresh: list[int]
    copied: list[int]


class Oracle(OracleChunks):
    """Dict-of-lists model of a cache.

    Operations take the arguments of their namesakes as Python lists and return a list of `Status`, or how
    many blocks they changed. Block ids are serial numbers; compare them by structure, not by value. Cached
    prefixes of several layer groups are not modelled, nor are hits of a part of a block.

    Attributes:
      rows: Active rows by seq_id.
      chunks: Chunks that are stored, by id.
      owners: Per layer group, how many entries of tables and chunks point at each block.
      published: The block that ends each published prefix.
      cached: Published blocks without owner, in the order of their release.
      clock: Calls that used a row; see `kvcache_jax.Control`.
      history: The facts that eviction policies look at, of every published block.
      num_copies: Blocks copied on write so far.
      num_evictions: Published blocks given up so far.
      num_adoptions: Blocks given back by `commit` so far.
    """

    def __init__(self, config: CacheConfig, eviction_key: Callable[[OracleBlock, int], int] | None = None):
        """`eviction_key(block, clock)` is that of a policy of one's own, as a function of one block."""
        super().__init__(config, eviction_key)
        self.num_copies = 0

    def allocate(
        self,
        seq_ids: Sequence[int],
        num_tokens: Sequence[int],
        prompts: Sequence[Sequence[int]] | None = None,
        namespaces: Sequence[tuple[int, ...]] | None = None,
        priorities: Sequence[int] | None = None,
    ) -> list[Status]:
        """Starts rows like `kvcache_jax.allocate`; with `prompts` it looks for cached prefixes.

        Raises:
          NotImplementedError: `prompts` with several layer groups, or with `partial_hits`.
        """
        if prompts and self.config.partial_hits:
            raise NotImplementedError("got prompts and partial_hits, expected whole hits: see Oracle")
        if prompts and len(self.config.groups) > 1:
            raise NotImplementedError("got prompts and several layer groups, expected one: see Oracle")
        prompts = prompts or [()] * len(seq_ids)
        namespaces = namespaces or [(0, 0, 0, 0)] * len(seq_ids)
        priorities = priorities or [0] * len(seq_ids)
        entries = [
            _Prompt(*row) for row in zip(seq_ids, num_tokens, prompts, namespaces, priorities, strict=True)
        ]
        statuses = self._check_ids(seq_ids)
        available = [self.num_available(g) for g in range(len(self.config.groups))]
        revived: set[int] = set()  # cached blocks that successful entries hold from now on
        admitted = []
        for i, entry in enumerate(entries):
            statuses[i] = statuses[i] or self._check_prompt(entry)
            if statuses[i]:
                continue
            entry.hits = self._find(entry.tokens[: entry.num_tokens], entry.namespace)
            revives = {block for block in entry.hits if block in self.cached} - revived
            needs = [num_reserved(group, entry.num_tokens) - len(entry.hits) for group in self.config.groups]
            needs[self.config.indexed_group] += len(revives)
            if any(need > left for need, left in zip(needs, available, strict=True)):
                statuses[i] = Status.OUT_OF_BLOCKS
                continue
            available = [left - need for need, left in zip(needs, available, strict=True)]
            revived |= revives
            admitted.append(entry)
        self._admit(admitted)
        return statuses

    def _check_prompt(self, entry: _Prompt) -> Status:
        if entry.seq_id in self.rows:
            return Status.SEQ_IN_USE
        if entry.num_tokens < 0:
            return Status.BAD_LENGTH
        if entry.num_tokens > self.config.max_seq_len:
            return Status.TOO_LONG
        is_unknown = self.config.enable_prefix_caching and entry.num_tokens > len(entry.tokens)
        return Status.BAD_LENGTH if is_unknown else Status.OK

    def _find(self, prompt: Sequence[int], namespace: tuple[int, ...]) -> list[int]:
        """Lists the published blocks that a prompt begins with; the last token is left over."""
        block_size = self.config.groups[self.config.indexed_group].block_size
        hits: list[int] = []
        while (end := (len(hits) + 1) * block_size) < len(prompt):
            block = self.published.get((namespace, tuple(prompt[:end])))
            if block is None:
                break
            hits.append(block)
        return hits

    def _admit(self, entries: Sequence[_Prompt]) -> None:
        """Holds all hits, evicts, and takes; there are blocks for all entries."""
        self.clock += bool(entries)
        for entry in entries:
            for block in entry.hits:
                self._hold(self.config.indexed_group, block)
            self._note_use(entry.hits, entry.priority)
        num_new = [
            sum(num_reserved(group, entry.num_tokens) - len(entry.hits) for entry in entries)
            for group in self.config.groups
        ]
        self._make_room(num_new)
        for entry in entries:
            tables = [
                {
                    column: entry.hits[column] if column < len(entry.hits) else self._take(g)
                    for column in range(num_reserved(group, entry.num_tokens))
                }
                for g, group in enumerate(self.config.groups)
            ]
            block_size = self.config.groups[self.config.indexed_group].block_size
            tokens: list[int | None] = [*entry.tokens[: len(entry.hits) * block_size]]
            row = OracleRow(tokens, tables, entry.namespace, len(entry.hits), entry.priority)
            self.rows[entry.seq_id] = row

    def write_source(self, seq_ids: Sequence[int], source_len: Sequence[int]) -> list[Status]:
        """Stores sources like `kvcache_jax.write_source`, with room for the longest that its kind allows."""
        statuses = self._check_ids(seq_ids)
        groups = {g: group for g, group in enumerate(self.config.groups) if group.holds_sources}
        available = {g: self.num_available(g) for g in groups}
        started = []
        for i, (seq_id, length) in enumerate(zip(seq_ids, source_len, strict=True)):
            statuses[i] = statuses[i] or self._check_source(seq_id, length)
            if statuses[i]:
                continue
            needs = {g: ceil_div(length, group.block_size) for g, group in groups.items()}
            if any(needs[g] > available[g] for g in groups):
                statuses[i] = Status.OUT_OF_BLOCKS
                continue
            available = {g: available[g] - needs[g] for g in groups}
            started.append((self.rows[seq_id], length, needs))
        for row, length, needs in started:
            row.source_len = length
            for g, need in needs.items():
                row.tables[g] = {column: self._take(g) for column in range(need)}
        return statuses

    def _check_source(self, seq_id: int, length: int) -> Status:
        if seq_id not in self.rows:
            return Status.SEQ_NOT_ACTIVE
        if self.rows[seq_id].source_len:
            return Status.HAS_SOURCE
        if length < 0:
            return Status.BAD_LENGTH
        most = min(group.max_len for group in self.config.groups if group.holds_sources)
        return Status.TOO_LONG if length > most else Status.OK

    def extend(self, seq_ids: Sequence[int], new_tokens: Sequence[Sequence[int]]) -> list[Status]:
        """Extends rows like `kvcache_jax.extend`; takes the tokens themselves."""
        statuses = self._check_ids(seq_ids, names=[len(tokens) > 0 for tokens in new_tokens])
        available = [self.num_available(g) for g in range(len(self.config.groups))]
        given_back: list[Multiset[int]] = [Multiset() for _ in available]  # by windows, owners of each block
        copied: list[Multiset[int]] = [Multiset() for _ in available]  # how often each block is copied
        growing = []
        for i, (seq_id, tokens) in enumerate(zip(seq_ids, new_tokens, strict=True)):
            if statuses[i] or not tokens:
                continue
            statuses[i] = self._check_growth(seq_id, tokens)
            if statuses[i]:
                continue
            row, room, plans = self.rows[seq_id], [], []
            for g in range(len(available)):
                plan = self._plan(g, row, tokens, copied[g])
                blocks = [row.tables[g][column] for column in plan.left]
                num_back = sum(self.owners[g][block] - given_back[g][block] == 1 for block in blocks)
                room.append(available[g] + num_back - len(plan.fresh) - len(plan.copied))
                plans.append(plan)
            if min(room) < 0:
                statuses[i] = Status.OUT_OF_BLOCKS
                continue
            available = room
            for g, plan in enumerate(plans):
                given_back[g].update(row.tables[g][column] for column in plan.left)
                copied[g].update(row.tables[g][column] for column in plan.copied)
            growing.append((row, tokens, plans))
        self._grow(growing)
        return statuses

    def _check_growth(self, seq_id: int, tokens: Sequence[int]) -> Status:
        if seq_id not in self.rows:
            return Status.SEQ_NOT_ACTIVE
        new_len = len(self.rows[seq_id].tokens) + len(tokens)
        is_too_long = new_len > self.config.max_seq_len or len(tokens) > self.config.query_len_limit
        return Status.TOO_LONG if is_too_long else Status.OK

    def _plan(self, g: int, row: OracleRow, tokens: Sequence[int], copied: Multiset[int]) -> _Growth:
        """Lists the columns that change; `copied` counts earlier writers of the call that copy a block."""
        group, table = self.config.groups[g], row.tables[g]
        if group.holds_sources:
            return _Growth([], [], [])
        old_len, new_len = len(row.tokens), len(row.tokens) + len(tokens)
        kept = first_kept(group, old_len)
        left = [column for column in sorted(table) if group.num_sink_blocks <= column < kept]
        columns = range(old_len // group.block_size, ceil_div(new_len, group.block_size))
        fresh = [column for column in columns if column not in table]
        plan = _Growth(left, fresh, copied=[])
        if old_len % group.block_size:
            tail = table[old_len // group.block_size]
            if self.is_published(g, tail) or self.owners[g][tail] - copied[tail] > 1:
                plan.copied.append(old_len // group.block_size)
        return plan

    def _grow(self, growing: Sequence[tuple[OracleRow, Sequence[int], list[_Growth]]]) -> None:
        """Gives back what left windows, evicts, takes, copies, and releases the originals, in this order."""
        self.clock += bool(growing)
        num_new = [0] * len(self.config.groups)
        for row, _, plans in growing:
            for g, plan in enumerate(plans):
                num_new[g] += len(plan.fresh) + len(plan.copied)
                for column in reversed(plan.left):
                    self._let_go(g, row.tables[g].pop(column))
        self._make_room(num_new)
        originals = []
        for row, tokens, plans in growing:
            for g, plan in enumerate(plans):
                originals += [(g, row.tables[g][column]) for column in plan.copied]
                row.tables[g].update({column: self._take(g) for column in plan.copied + plan.fresh})
            row.tokens += tokens
        self.num_copies += len(originals)
        for g, block in originals:
            self._let_go(g, block)

    def rewrite(
        self,
        seq_ids: Sequence[int],
        indices: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]] | None = None,
    ) -> list[Status]:
        """Copies what is written anew like `kvcache_jax.rewrite`; takes places without padding.

        `tokens` are those at the places, for places between chunks, which held none. Default: what was there.
        """
        statuses = self._check_ids(seq_ids, names=[len(places) > 0 for places in indices])
        available = [self.num_available(g) for g in range(len(self.config.groups))]
        rewritten = []
        for i, (seq_id, places) in enumerate(zip(seq_ids, indices, strict=True)):
            if statuses[i] or not places:
                continue
            statuses[i] = self._check_places(seq_id, places)
            if statuses[i]:
                continue
            copied = [self._rewritten_columns(g, self.rows[seq_id], places) for g in range(len(available))]
            room = [left - len(columns) for left, columns in zip(available, copied, strict=True)]
            if min(room) < 0:
                statuses[i] = Status.OUT_OF_BLOCKS
                continue
            available = room
            rewritten.append((self.rows[seq_id], copied))
        self.clock += bool(rewritten)
        self._make_room([sum(len(copied[g]) for _, copied in rewritten) for g in range(len(available))])
        originals = []
        for row, copied in rewritten:
            for g, columns in enumerate(copied):
                originals += [(g, row.tables[g][column]) for column in reversed(columns)]
                row.tables[g].update({column: self._take(g) for column in columns})
            row.num_published = min([row.num_published, *copied[self.config.indexed_group]])
        self.num_copies += len(originals)
        for g, block in originals:
            self._let_go(g, block)
        for seq_id, status, places, new in zip(seq_ids, statuses, indices, tokens or (), strict=False):
            for place, token in zip(places, new, strict=True) if not status else ():
                self.rows[seq_id].tokens[place] = token
        return statuses

    def _check_places(self, seq_id: int, places: Sequence[int]) -> Status:
        if seq_id not in self.rows:
            return Status.SEQ_NOT_ACTIVE
        row = self.rows[seq_id]
        if list(places) != sorted({*places}) or not 0 <= places[0] <= places[-1] < len(row.tokens):
            return Status.BAD_LENGTH
        if any(row.positions[place] in row.dropped for place in places):
            return Status.BAD_LENGTH
        if row.num_kept and any(row.plain_len <= place < min(row.dropped) for place in places):
            return Status.BAD_LENGTH
        for group, table in zip(self.config.groups, row.tables, strict=True):
            if (reach := group.kind.span.window) is None:
                continue
            for place in places:
                read = range(max(place - reach + 1, 0), place + 1)
                if any(position // group.block_size not in table for position in read):
                    return Status.WINDOW_LOST
        return Status.OK

    def _rewritten_columns(self, g: int, row: OracleRow, places: Sequence[int]) -> list[int]:
        """Lists the columns whose blocks are copied before they are written."""
        if self.config.groups[g].holds_sources:
            return []
        table, written = row.tables[g], {place // self.config.groups[g].block_size for place in places}
        kept = [c for c, block in table.items() if self.is_published(g, block) or self.owners[g][block] > 1]
        copied = [column for column in kept if column in written]
        if self.config.enable_prefix_caching and g == self.config.indexed_group and copied:
            copied = [column for column in kept if column >= min(copied)]
        return sorted(copied)


def num_reserved(group: LayerGroup, num_tokens: int) -> int:
    """Counts the blocks that a prompt reserves, hits included."""
    if group.holds_sources:
        return 0
    return min(ceil_div(num_tokens, group.block_size), group.max_held_blocks)
