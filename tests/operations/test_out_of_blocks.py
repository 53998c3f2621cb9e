"""One script of requests for every pool size: failures change nothing, and what still fits succeeds."""

import dataclasses

import pytest

from kvcache_jax import Status
from tests.support.helpers import (
    TokenDriver,
    assert_invariants,
    assert_same,
    leaf_bytes,
    num_free,
    tiny_config,
)


@dataclasses.dataclass
class BlockModel:
    """What the specification says about blocks, in lists and dicts: which request fits, what it leaves."""

    num_blocks: int
    block_size: int
    max_seq_len: int
    tables: dict = dataclasses.field(default_factory=dict)  # seq_id -> [block]
    lengths: dict = dataclasses.field(default_factory=dict)
    next_block: int = 0

    def num_refs(self, block):
        return sum(blocks.count(block) for blocks in self.tables.values())

    @property
    def num_free(self):
        return self.num_blocks - len({block for blocks in self.tables.values() for block in blocks})

    def new_blocks(self, count):
        self.next_block += count
        return list(range(self.next_block - count, self.next_block))

    def columns(self, length):
        return -(-length // self.block_size)

    def allocate(self, seq_id, length):
        if seq_id in self.tables:
            return Status.SEQ_IN_USE
        if length > self.max_seq_len:
            return Status.TOO_LONG
        if self.columns(length) > self.num_free:
            return Status.OUT_OF_BLOCKS
        self.tables[seq_id], self.lengths[seq_id] = self.new_blocks(self.columns(length)), 0
        return Status.OK

    def need(self, seq_id, count):
        blocks, length = self.tables[seq_id], self.lengths[seq_id]
        if count == 0:
            return 0
        num_copies = sum(
            self.num_refs(block) > 1
            for block in blocks[length // self.block_size : self.columns(length + count)]
        )
        return max(0, self.columns(length + count) - len(blocks)) + num_copies

    def extend(self, seq_id, count):
        if count == 0:
            return Status.OK
        if seq_id not in self.tables:
            return Status.SEQ_NOT_ACTIVE
        length, blocks = self.lengths[seq_id], self.tables[seq_id]
        if length + count > self.max_seq_len:
            return Status.TOO_LONG
        if self.need(seq_id, count) > self.num_free:
            return Status.OUT_OF_BLOCKS
        for column in range(length // self.block_size, self.columns(length + count)):
            if column == len(blocks):
                blocks += self.new_blocks(1)
            elif self.num_refs(blocks[column]) > 1:
                (blocks[column],) = self.new_blocks(1)
        self.lengths[seq_id] += count
        return Status.OK

    def fork(self, source, target):
        if source not in self.tables:
            return Status.SEQ_NOT_ACTIVE
        if target in self.tables:
            return Status.SEQ_IN_USE
        self.tables[target] = self.tables[source][: self.columns(self.lengths[source])]
        self.lengths[target] = self.lengths[source]
        return Status.OK

    def truncate(self, seq_id, length):
        if seq_id not in self.tables:
            return Status.SEQ_NOT_ACTIVE
        if length > self.lengths[seq_id]:
            return Status.TOO_LONG
        self.tables[seq_id], self.lengths[seq_id] = self.tables[seq_id][: self.columns(length)], length
        return Status.OK

    def free(self, seq_id):
        if seq_id not in self.tables:
            return Status.SEQ_NOT_ACTIVE
        del self.tables[seq_id], self.lengths[seq_id]
        return Status.OK


SCRIPT = [
    ("allocate", 2, 7),
    ("extend", {2: 5}),
    ("fork", 2, 4),
    ("extend", {2: 1, 4: 2}),
    ("allocate", 0, 9),
    ("extend", {0: 4, 2: 6}),
    ("fork", 4, 1),
    ("truncate", 4, 3),
    ("extend", {1: 7, 4: 6, 0: 5}),
    ("free", 2),
    ("allocate", 3, 6),
    ("extend", {3: 10}),
    ("fork", 1, 2),
    ("extend", {1: 1, 2: 1, 4: 1, 3: 1}),
    ("truncate", 0, 0),
    ("extend", {2: 9, 0: 3}),
    ("free", 1),
    ("extend", {4: 8, 2: 4}),
    ("free", 3),
    ("allocate", 1, 14),
    ("extend", {1: 14}),
    ("free", 4),
    ("extend", {0: 11}),
    ("fork", 0, 3),
    ("free", 0),
    ("extend", {3: 3}),
    ("free", 2),
    ("free", 1),
    ("extend", {3: 4}),
    ("free", 3),
]


def run_script(driver, model, held_by_others=()):
    """Runs SCRIPT on both, and after a failure the longest request that still fits. Returns the failures."""
    seen = []

    def free_matches():
        return num_free(driver.cache) == model.num_free

    for operation, *arguments in SCRIPT:
        before = leaf_bytes(driver.cache)
        if operation == "extend":
            wanted = {seq_id: model.extend(seq_id, count) for seq_id, count in sorted(arguments[0].items())}
            found = driver.append(arguments[0])
            assert found == wanted, (operation, arguments)
        elif operation == "allocate":
            wanted = {arguments[0]: model.allocate(*arguments)}
            assert driver.allocate({arguments[0]: arguments[1]}) == wanted, (operation, arguments)
        else:
            wanted = {arguments[0]: getattr(model, operation)(*arguments)}
            if operation == "free":
                found = driver.free(*arguments)
            else:
                call = driver.fork if operation == "fork" else driver.truncate
                found = call([arguments[0]], [arguments[1]])
            assert found == list(wanted.values()), (operation, arguments)
        if Status.OK not in wanted.values():
            assert_same(before, leaf_bytes(driver.cache))
        seen += [status for status in wanted.values() if status != Status.OK]
        assert free_matches(), (operation, arguments)
        assert_invariants(driver.cache)
        if operation == "extend":
            for seq_id, status in wanted.items():
                if status == Status.OUT_OF_BLOCKS:
                    count = max(
                        count
                        for count in range(arguments[0][seq_id] + 1)
                        if model.need(seq_id, count) <= model.num_free
                    )
                    assert (
                        driver.append({seq_id: count})
                        == {seq_id: model.extend(seq_id, count)}
                        == {seq_id: Status.OK}
                    )
                    assert free_matches()
        if operation == "allocate" and wanted[arguments[0]] == Status.OUT_OF_BLOCKS:
            count = model.num_free * model.block_size
            assert driver.allocate({arguments[0]: count}) == {arguments[0]: Status.OK}
            assert num_free(driver.cache) == 0
            assert driver.free(arguments[0]) == [Status.OK]
            assert free_matches()
        driver.check()
    assert set(driver.texts) == set(held_by_others)
    return seen


def test_out_of_blocks_at_every_moment():
    """A row of its own takes all but `size` of 17 blocks, for every size (one compilation)."""
    driver = TokenDriver(tiny_config(num_blocks=17, block_size=4, max_seqs=6, max_seq_len=68))
    num_failures = []
    for size in range(1, 18):
        hog = (5,) if size < 17 else ()
        for seq_id in hog:
            driver.start(seq_id, (17 - size) * 4)
        found = run_script(driver, BlockModel(size, 4, 68), held_by_others=hog)
        num_failures.append(found.count(Status.OUT_OF_BLOCKS))
        if hog:
            driver.free(*hog)
        assert num_free(driver.cache) == 17
    assert all(num_failures[:-1]) and num_failures[-1] == 0, num_failures


@pytest.mark.slow
def test_out_of_blocks_in_a_pool_of_one():
    driver = TokenDriver(tiny_config(num_blocks=1, block_size=4, max_seqs=6, max_seq_len=44))
    run_script(driver, BlockModel(1, 4, 44))
    assert num_free(driver.cache) == 1
