"""The cache of the behavioural cases by letter, in blocks of 16 tokens, and how to leave few of them."""

from kvcache_jax import Status
from tests.support.helpers import TokenDriver, num_free, tiny_config

# One size for all cases: each operation is compiled once. A row's last block is cut short, to 4 tokens.
NUM_BLOCKS, MAX_SEQS, MAX_LEN = 96, 12, 244
CONFIG = tiny_config(num_blocks=NUM_BLOCKS, block_size=16, max_seqs=MAX_SEQS, max_seq_len=MAX_LEN)
MOST_BLOCKS = 16  # of a row
HOARDERS = range(6, MAX_SEQS)  # rows that can hold all blocks


def start_with(num_spare):
    """A driver of a cache of which the hoarders have reserved all but so many blocks."""
    driver, num_left, lengths = TokenDriver(CONFIG), NUM_BLOCKS - num_spare, {}
    for row in HOARDERS:
        lengths[row] = min(min(num_left, MOST_BLOCKS) * 16, MAX_LEN)
        num_left -= min(num_left, MOST_BLOCKS)
    assert set(driver.allocate(lengths).values()) == {Status.OK}
    assert num_free(driver.cache) == num_spare
    return driver
