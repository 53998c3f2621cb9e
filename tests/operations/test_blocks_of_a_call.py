"""Who gets the blocks when the rows of one call want more than there are, and who copies.

Each case is one call on a state that the public API made; the rule's numbers are compared, and the oracle.
"""

import jax
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import Status, testing
from tests.oracle.comparison import check_against_oracle
from tests.oracle.oracle import Oracle
from tests.support.helpers import TokenDriver, append_donated, num_copies, tiny_config
from tests.support.random_script import padded

ROWS, WIDTH, BLOCK, MAX_LEN = 8, 8, 4, 32
HOARDERS = 5, 6, 7  # rows that hold what is not to be spare
OK, NONE = Status.OK, Status.OUT_OF_BLOCKS

SIZES = dict(num_blocks=14, block_size=BLOCK, max_seqs=ROWS, max_seq_len=MAX_LEN, max_query_len=WIDTH)
FULL = kv.CacheConfig([kv.FullAttention(1, 5)], **SIZES, enable_prefix_caching=True)
# A row that grows from n tokens on gives back the columns before (n - 5) // 4.
WINDOW = kv.CacheConfig([kv.SlidingWindow(1, 5, window=BLOCK, max_rollback=2)], **SIZES)

allocate, commit = jax.jit(kv.allocate), jax.jit(kv.commit)


def entries(ids, fill=ROWS):
    """As many as there are rows, so that one program serves all calls."""
    return np.array([*ids, *[fill] * (ROWS - len(ids))])


class Pair:
    """A cache and the oracle, through the same calls."""

    def __init__(self, config):
        self.cache, self.oracle, self.next_token = testing.poison(kv.init(config)), Oracle(config), 1

    def check(self, got, expected):
        got = [Status(status) for status in np.asarray(got).tolist()]
        assert got == expected
        assert kv.check_invariants(self.cache) == []
        assert check_against_oracle(self.cache, self.oracle) == []
        texts = {row: content.tokens for row, content in self.oracle.rows.items()}
        assert testing.check_tokens(self.cache, texts) == []
        return got

    def grow(self, num_new):
        """{row: how many tokens} in one call; returns the statuses of these rows."""
        new = [[*range(self.next_token, self.next_token + num_new.get(row, 0))] for row in range(ROWS)]
        self.next_token += sum(num_new.values())
        counts = np.array([*map(len, new)])
        self.cache, status = append_donated(self.cache, padded(new, WIDTH), counts)
        found = self.check(status, self.oracle.extend(range(ROWS), new))
        return [found[row] for row in num_new]

    def start(self, row, length, reserved=0):
        """A row of new tokens; or one that only reserves blocks."""
        num_tokens = [max(length, reserved * BLOCK), *[0] * (ROWS - 1)]
        prompts = [[9000 + row * 100 + i for i in range(n)] for n in num_tokens]
        rows = [row] + [ROWS] * (ROWS - 1)
        caches = self.cache.config.enable_prefix_caching
        tokens = padded(prompts, MAX_LEN) if caches else None
        self.cache, admission = allocate(self.cache, np.array(rows), np.array(num_tokens), tokens=tokens)
        self.check(admission.status, self.oracle.allocate(rows, num_tokens, prompts if caches else None))
        for first in range(0, length, WIDTH):
            assert self.grow({row: min(WIDTH, length - first)}) == [OK]

    def leave(self, num_spare):
        """Reserves what is free, but for so many blocks."""
        for row in HOARDERS:
            num_left = int(self.stats().num_blocks_free) - num_spare
            most = self.cache.config.groups[0].max_held_blocks
            self.start(row, 0, reserved=min(num_left, most))
        assert self.stats().num_blocks_free == num_spare

    def fork(self, source, *targets):
        sources = entries([source] * len(targets)), entries(targets)
        self.cache, status = kv.fork(self.cache, *sources)
        self.check(status, self.oracle.fork(*map(np.ndarray.tolist, sources)))

    def commit(self):
        self.cache, status = commit(self.cache)
        self.check(status, self.oracle.commit(None, [2**31 - 1] * ROWS))

    def truncate(self, rows, length):
        ids, lengths = entries(rows), entries([length] * len(rows), 0)
        self.cache, status = kv.truncate(self.cache, ids, lengths)
        found = self.check(status, self.oracle.truncate(ids.tolist(), lengths.tolist()))
        assert found[: len(rows)] == [OK] * len(rows)

    def free(self, *rows):
        self.cache, status = kv.free(self.cache, entries(rows))
        self.check(status, self.oracle.free(entries(rows).tolist()))

    def evict(self, num_blocks):
        """How many were evicted; the same ones by the oracle."""
        self.cache, num_evicted = kv.evict(self.cache, num_blocks)
        assert int(num_evicted) == self.oracle.evict(num_blocks)
        assert check_against_oracle(self.cache, self.oracle) == []
        return int(num_evicted)

    def stats(self):
        return jax.device_get(kv.stats(self.cache))


@pytest.mark.slow
@pytest.mark.parametrize("is_published", [False, True])
def test_how_many_writers_copy(is_published):
    """w of r owners write: w copies if w < r, else w - 1; w if the block is published."""
    pair = Pair(FULL)
    for num_owners in range(1, 5):
        for num_writers in range(1, num_owners + 1):
            pair.start(0, 8)
            if is_published:
                pair.commit()
            if num_owners > 1:
                pair.fork(0, *range(1, num_owners))
            pair.truncate([*range(num_owners)], 7)
            before = pair.stats().num_copies
            writers = range(num_owners - num_writers, num_owners)
            assert pair.grow(dict.fromkeys(writers, 1)) == [OK] * num_writers
            in_place = 0 if is_published or num_writers < num_owners else 1
            assert pair.stats().num_copies - before == num_writers - in_place
            pair.free(*range(num_owners))
            assert pair.evict(14) == (2 if is_published else 0)


@pytest.mark.slow
def test_more_rows_copy_than_a_trip_has_places():
    """Sixteen copies are made at a time."""
    driver = TokenDriver(tiny_config(num_blocks=21, block_size=BLOCK, max_seqs=20, max_seq_len=16))
    driver.start(0, 3)
    assert driver.fork([0] * 19, [*range(1, 20)]) == [OK] * 19
    assert driver.append(dict.fromkeys(range(20), 1)) == dict.fromkeys(range(20), OK)
    assert num_copies(driver.cache) == 19
    driver.check()


@pytest.mark.slow
def test_who_copies_when_blocks_are_short():
    """Three owners of a last block. A writer that failed still owns: no writer after it is alone."""
    for num_spare, expected in enumerate(([NONE, NONE, NONE], [OK, NONE, NONE], [OK, OK, OK])):
        pair = Pair(FULL)
        pair.start(0, 6)
        pair.fork(0, 1, 2)
        pair.leave(num_spare)
        assert pair.grow({0: 1, 1: 1, 2: 1}) == expected
        assert pair.stats().num_copies == num_spare
    # The first asks for more than there is; the others copy, for it owns the block still.
    pair = Pair(FULL)
    pair.start(0, 6)
    pair.fork(0, 1, 2)
    pair.leave(2)
    assert pair.grow({0: 8, 1: 1, 2: 1}) == [NONE, OK, OK]
    assert pair.stats().num_copies == 2 and pair.stats().num_blocks_free == 0
    assert pair.grow({0: 1}) == [OK] and pair.stats().num_copies == 2


def test_copies_of_one_block_leave_no_other_block_to_one_owner():
    """Two last blocks of two owners each, and a block for one copy."""
    pair = Pair(FULL)
    for row in (0, 2):
        pair.start(row, 6)
        pair.fork(row, row + 1)
    pair.leave(1)
    assert pair.grow({0: 1, 2: 1}) == [OK, NONE]
    assert pair.stats().num_copies == 1


def test_an_original_without_owner_can_be_taken_from_the_next_call_on():
    """Two published last blocks of one owner each, and one free block."""
    pair = Pair(FULL)
    for row in range(2):
        pair.start(row, 4)
    pair.commit()
    pair.truncate([0, 1], 3)
    pair.leave(1)
    assert pair.grow({0: 1, 1: 1}) == [OK, NONE]
    assert pair.stats().num_blocks_cached == 1 and pair.stats().num_evictions == 0
    assert pair.grow({1: 1}) == [OK]
    assert pair.stats().num_evictions == 1


def test_originals_stand_in_the_queue_in_the_order_of_the_entries():
    """Rows 0 and 4 share the first original: the later one releases it."""
    pair = Pair(FULL)
    pair.start(0, 4)
    pair.start(2, 4)
    pair.start(3, 8)
    pair.commit()
    texts = {row: list(pair.oracle.rows[row].tokens) for row in (2, 3, 0)}
    pair.fork(0, 4)
    pair.truncate([0, 2, 4], 3)
    pair.truncate([3], 7)
    assert pair.grow({0: 1, 2: 1, 3: 1, 4: 1}) == [OK] * 4
    for left in ((3, 0), (0,), ()):  # released by rows 2, 3 and 4
        assert pair.evict(1) == 1
        prompts = padded([[*text, 1] for text in texts.values()], MAX_LEN)
        hits = kv.lookup(pair.cache, prompts, [len(text) + 1 for text in texts.values()]).tolist()
        full = [len(text) if row in left else len(text) - BLOCK for row, text in texts.items()]
        assert hits == full


def test_cached_blocks_make_room_for_all_rows_of_a_call():
    """The first entry may take what is cached; the second finds what it left."""
    pair = Pair(FULL)
    pair.start(4, 8)
    pair.commit()
    pair.free(4)
    for row in range(3):
        pair.start(row, 4)
    pair.leave(1)
    assert pair.stats().num_blocks_cached == 2
    assert pair.grow({0: 8, 1: 5, 2: 1}) == [OK, NONE, OK]
    assert pair.stats().num_evictions == 2 and pair.stats().num_blocks_free == 0


@pytest.mark.slow
def test_blocks_that_left_the_own_or_an_earlier_window_count():
    pair = Pair(WINDOW)
    for row in (0, 1):
        pair.start(row, 12)  # 3 blocks, of which the first leaves the window
    pair.leave(0)
    assert pair.grow({0: 1, 1: 1}) == [OK, OK]  # each takes what it gives back
    for rows, expected in (((0, 1), [OK, OK]), ((1, 0), [OK, NONE])):
        pair = Pair(WINDOW)
        leaver, taker = rows
        pair.start(leaver, 8)
        assert pair.grow({leaver: 1}) == [OK]  # 9 tokens: it gives one back and takes none
        pair.start(taker, 4)
        pair.leave(0)
        found = pair.grow({leaver: 1, taker: 1})
        assert found == expected, rows


@pytest.mark.slow
def test_blocks_of_the_window_of_an_entry_that_failed_do_not_count():
    pair = Pair(WINDOW)
    pair.start(0, 12)
    pair.start(1, 4)
    pair.leave(0)
    assert pair.grow({0: 8, 1: 1}) == [NONE, NONE]  # row 0 gives one back and would take two


@pytest.mark.slow
def test_a_shared_block_leaves_with_its_last_owner():
    for num_spare, expected in ((0, [NONE, NONE, NONE]), (1, [OK, OK, NONE])):
        pair = Pair(WINDOW)
        pair.start(0, 12)
        pair.fork(0, 1)
        pair.start(2, 4)
        pair.leave(num_spare)
        assert pair.grow({0: 1, 1: 1, 2: 1}) == expected


@pytest.mark.slow
@pytest.mark.parametrize("is_writer_first", [False, True])
def test_what_windows_give_back_in_the_call_still_counts_as_owned(is_writer_first):
    """A row was cut into a block that another row's window leaves in this call: it copies, or finds none."""
    leaver, writer = (1, 0) if is_writer_first else (0, 1)
    for num_spare, expected in ((1, [OK, OK]), (0, [OK, NONE])):
        pair = Pair(WINDOW)
        pair.start(leaver, 4)
        pair.fork(leaver, writer)
        pair.truncate([writer], 2)
        assert pair.grow({leaver: 5}) == [OK]  # 9 tokens: the first block leaves at the next call
        pair.leave(num_spare)
        assert pair.grow({leaver: 1, writer: 1}) == expected
        assert pair.stats().num_copies == num_spare
        assert pair.stats().num_blocks_free == num_spare
        assert pair.grow({writer: 1}) == [OK] and pair.stats().num_copies == num_spare
