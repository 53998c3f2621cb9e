"""Calls of every operation on rows, on one crowded state: those that succeed and those that fail."""

import math
from typing import Any

import numpy as np

import kvcache_jax as kv
from kvcache_jax import Status
from tests.support.helpers import TokenDriver, num_free, statuses, tiny_config

NUM_ROWS = 8
NUM_ENTRIES = 4  # of every call, so that one program of each operation serves all tests
NUM_PACKED = 20  # places of packed tokens
NOWHERE = 24  # no place of a row
CROWDED = tiny_config(num_blocks=13, block_size=4, max_seqs=NUM_ROWS, max_seq_len=NOWHERE)


def make_crowded():
    """Rows 0 and 2 share 7 tokens, row 3 is as long as can be, row 4 holds 5; 3 of 13 blocks are free."""
    driver = TokenDriver(CROWDED)
    for seq_id, length in ((4, 5), (0, 7), (3, 24)):
        driver.start(seq_id, length)
    driver.fork([0], [2])
    driver.check()
    assert num_free(driver.cache) == 3
    return driver


def finite(shape):
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape) + 0.5


def append_call(cache, seq_ids, num_new):
    keys = finite((2, len(seq_ids), 16, 2, 3))
    cache, step = kv.append(cache, keys, -keys, num_new, seq_ids=seq_ids)
    return cache, step.status


def extend_call(cache, seq_ids, num_new):
    cache, step = kv.extend(cache, num_new, max_new=16, seq_ids=seq_ids)
    return cache, step.status


def packed_call(cache, seq_ids, num_new):
    cache, step = kv.extend(cache, num_new, num_tokens=NUM_PACKED, seq_ids=seq_ids)
    return cache, step.status


def allocate_call(cache, seq_ids, num_tokens):
    cache, admission = kv.allocate(cache, seq_ids, num_tokens)
    return cache, admission.status


def rewrite_call(cache, seq_ids, places):
    """One or two places of each row."""
    indices = [place if isinstance(place, list) else [place, NOWHERE] for place in places]
    cache, step = kv.rewrite(cache, seq_ids, np.array(indices))
    return cache, step.status


CALLS = {
    "allocate": allocate_call,
    "extend": extend_call,
    "extend_packed": packed_call,
    "append": append_call,
    "fork": lambda cache, targets, sources: kv.fork(cache, sources, targets),
    "reorder": kv.reorder,
    "truncate": kv.truncate,
    "rewrite": rewrite_call,
    "free": lambda cache, seq_ids, _: kv.free(cache, seq_ids),
    "touch": lambda cache, seq_ids, _: kv.touch(cache, seq_ids),
    "set_priority": kv.set_priority,
}


def call(operation, cache, seq_ids, arguments):
    """Calls an operation with up to four rows and their arguments; returns the cache and the statuses."""
    num_more = NUM_ENTRIES - len(seq_ids)
    cache, status = CALLS[operation](cache, [*seq_ids, *[NUM_ROWS] * num_more], [*arguments, *[0] * num_more])
    found = statuses(status)
    assert found[len(seq_ids) :] == [Status.SKIPPED] * num_more
    return cache, found[: len(seq_ids)]


# Two (row, argument) pairs per operation that succeed on the crowded state, also with each other.
PARTNERS = {
    "allocate": ((1, 2), (5, 3)),
    "extend": ((2, 1), (0, 1)),
    "fork": ((1, 0), (5, 4)),
    "reorder": ((0, 4), (2, 2)),
    "truncate": ((0, 6), (2, 3)),
    "rewrite": ((0, 6), (2, 3)),
    "free": ((0, 0), (2, 0)),
    "touch": ((0, 0), (2, 0)),
    "set_priority": ((0, 7), (2, -3)),
}
PARTNERS["extend_packed"] = PARTNERS["append"] = PARTNERS["extend"]

BAD_IDS = [-1, NUM_ROWS + 1, 2**31 - 1, -(2**31)]
VALID_ARGUMENT = {
    "allocate": 3,
    "extend": 2,
    "fork": 0,
    "reorder": 0,
    "truncate": 3,
    "rewrite": 3,
    "free": 0,
    "touch": 0,
    "set_priority": 1,
}

FAILURES: list[Any] = [
    # Three blocks are free; with the partners' shares taken there are two.
    ("allocate", 6, 13, Status.OUT_OF_BLOCKS),
    ("allocate", 6, 24, Status.OUT_OF_BLOCKS),
    ("allocate", 6, 25, Status.TOO_LONG),
    ("allocate", 6, 2**31 - 1, Status.TOO_LONG),
    ("allocate", 4, 1, Status.SEQ_IN_USE),
    ("allocate", 3, 0, Status.SEQ_IN_USE),
    ("allocate", 6, -1, Status.BAD_LENGTH),
    ("allocate", 6, -(2**31), Status.BAD_LENGTH),
    ("extend", 4, 16, Status.OUT_OF_BLOCKS),  # 5 + 16 tokens: four more blocks
    ("extend", 3, 1, Status.TOO_LONG),
    ("extend", 3, 16, Status.TOO_LONG),
    ("extend", 6, 1, Status.SEQ_NOT_ACTIVE),
    ("extend", 4, -1, Status.BAD_LENGTH),
    ("extend", 3, -(2**31), Status.BAD_LENGTH),
    ("fork", 6, 7, Status.SEQ_NOT_ACTIVE),
    ("fork", 6, 6, Status.SEQ_NOT_ACTIVE),
    ("fork", 4, 0, Status.SEQ_IN_USE),
    ("fork", 4, 4, Status.SEQ_IN_USE),
    *(("fork", 6, bad, Status.BAD_SEQ_ID) for bad in BAD_IDS),  # as a source; as a target below
    ("reorder", 3, 6, Status.SEQ_NOT_ACTIVE),
    *(("reorder", 3, bad, Status.BAD_SEQ_ID) for bad in BAD_IDS),  # as a parent
    ("truncate", 6, 0, Status.SEQ_NOT_ACTIVE),
    ("truncate", 4, 6, Status.TOO_LONG),
    ("truncate", 3, 2**31 - 1, Status.TOO_LONG),
    ("truncate", 4, -1, Status.BAD_LENGTH),
    ("truncate", 4, -(2**31), Status.BAD_LENGTH),
    ("rewrite", 6, 0, Status.SEQ_NOT_ACTIVE),
    ("rewrite", 4, 5, Status.BAD_LENGTH),
    ("rewrite", 4, -1, Status.BAD_LENGTH),
    ("rewrite", 4, 2**31 - 1, Status.BAD_LENGTH),
    ("free", 6, 0, Status.SEQ_NOT_ACTIVE),
    ("touch", 6, 0, Status.SEQ_NOT_ACTIVE),
    ("set_priority", 6, 5, Status.SEQ_NOT_ACTIVE),
]
FAILURES += [("extend_packed", *case) for op, *case in FAILURES if op == "extend"]
FAILURES += [("append", *case) for op, *case in FAILURES if op == "extend"]
FAILURES += [(op, bad, VALID_ARGUMENT.get(op, 2), Status.BAD_SEQ_ID) for op in CALLS for bad in BAD_IDS]
FAILURES += [(op, NUM_ROWS, VALID_ARGUMENT.get(op, 2), Status.SKIPPED) for op in CALLS]
FAILURES += [("extend", 4, 17, Status.TOO_LONG), ("append", 4, 17, Status.TOO_LONG)]  # more than max_new
FAILURES += [("extend", 4, 2**31 - 1, Status.TOO_LONG)]
ALONE = [("extend_packed", 4, 2**31 - 1, Status.TOO_LONG)]  # packed, it leaves no place for the rows after it
