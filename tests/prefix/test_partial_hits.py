"""Prompts that begin inside a published block; the block is copied before it is written."""

import numpy as np
import pytest

import kvcache_jax as kv
from tests.support.helpers import num_copies, row_state, table
from tests.support.prefix_user import PrefixUser

KINDS = [kv.FullAttention(1, 3), kv.SlidingWindow(1, 3, window=6, max_rollback=2)]
OTHERS = np.full(4, 7, np.uint32)


def config_of(num_blocks=14, **options):
    return kv.CacheConfig(
        num_blocks=num_blocks,
        block_size=4,
        max_seqs=4,
        enable_prefix_caching=True,
        **{"layers": KINDS, "max_seq_len": 20, "partial_hits": True} | options,
    )


class Rows(PrefixUser):
    """What a prompt finds is what was looked up."""

    def admit(self, row, text, namespace=None):
        found = self.lookup(text, namespace)
        assert super().admit(row, text, namespace) == found
        return found


def test_a_prompt_begins_inside_a_block_and_its_next_step_copies_it():
    rows = Rows(config_of())
    assert rows.start(0, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 0
    assert rows.admit(1, [1, 2, 3, 4, 5, 6, 9, 9, 9]) == 6
    assert table(rows.cache, 1)[:2] == table(rows.cache, 0)[:2]
    before = rows.cache.control.num_published.tolist()
    assert before == [2, 2, 0, 0]
    copies = num_copies(rows.cache)
    assert rows.append({1: [9, 9, 9]})[1] == kv.Status.OK
    assert num_copies(rows.cache) == copies + len(rows.cache.config.groups)
    assert table(rows.cache, 1)[1] != table(rows.cache, 0)[1]
    rows.commit(1)
    # Both continuations are found from now on, to the token; the last one of a prompt is computed.
    assert rows.admit(2, [1, 2, 3, 4, 5, 6, 9, 9]) == 7
    assert rows.admit(3, [1, 2, 3, 4, 5, 6, 7, 8]) == 7


def test_nothing_is_found_in_another_namespace_nor_unasked():
    rows = Rows(config_of())
    rows.start(0, [1, 2, 3, 4, 5])
    assert rows.admit(1, [1, 2, 9], OTHERS) == 0
    prompt, lengths = rows.prompts([[1, 2, 9]]), np.array([3])
    assert kv.allocate(rows.cache, [2], lengths, tokens=prompt, reuse=False)[1].num_cached.tolist() == [0]
    assert kv.lookup(rows.cache, prompt, lengths).tolist() == [2]
    items = [[[1, 3]]]
    assert kv.lookup(rows.cache, rows.prompts([[1, 2, 3, 4]]), [4], items=items).tolist() == [3]
    assert kv.lookup(rows.cache, rows.prompts([[1, 2, 9]]), [3], items=items).tolist() == [1]


@pytest.mark.slow
def test_the_copy_is_needed_and_not_held():
    """Of five blocks four are held when the row comes that would copy one: its copy is the last."""
    rows = Rows(config_of(num_blocks=5))
    rows.start(0, [1, 2, 3, 4, 5, 6, 7, 8])
    for row, length in ((2, 8), (3, 1)):
        rows.admit(row, [9] * length)
    prompt = rows.prompts([[1, 2, 3, 4, 5, 6, 0]])
    _, admission = kv.allocate(rows.cache, [1], [7], tokens=prompt)
    assert admission.status.tolist() == [kv.Status.OUT_OF_BLOCKS]
    rows.free(3)
    assert rows.admit(1, prompt[0, :7].tolist()) == 6
    rows.admit(3, [9])  # another row takes the last block
    before = row_state(rows.cache, 1)
    assert rows.append({1: [0]})[1] == kv.Status.OUT_OF_BLOCKS and row_state(rows.cache, 1) == before
    rows.free(3)
    _, admission = kv.allocate(rows.cache, [3], [7], tokens=rows.prompts([[1, 2, 3, 4, 5, 6, 9]]))
    assert admission.status.tolist() == [kv.Status.OK]  # the copy is there for one of them
    assert rows.append({1: [0]})[1] == kv.Status.OK


@pytest.mark.slow
def test_a_pool_of_exactly_the_row_takes_whole_hits_alone():
    """Else the row would need a block more than there are, and wait for ever."""
    rows, text = Rows(config_of(num_blocks=4, max_seq_len=16)), list(range(1, 17))
    rows.start(0, text)
    rows.free(0)
    assert rows.admit(1, [*text[:14], 0, 0]) == 12
    assert rows.append({1: [13, 14, 0, 0]})[1] == kv.Status.OK


def test_explain_names_the_token_behind_what_is_cached():
    rows = Rows(config_of())
    rows.start(0, [1, 2, 3, 4, 5, 6, 7, 8])
    said = kv.inspect.explain(rows.cache, rows.prompts([[1, 2, 3, 4, 5, 6, 9, 9, 9]])[0], 9)
    assert said.startswith("6 of 9 tokens are cached. At position 6 the prompt has token 9"), said
    said = kv.inspect.explain(rows.cache, rows.prompts([[1, 2, 3, 4, 5, 6, 7, 8]])[0], 8)
    assert said == "7 of 8 tokens are cached. That is all that can be: the last token is always computed."


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(enable_prefix_caching=False), "there is no prefix cache to hit"),
        (dict(layers=[kv.FullAttention(1, 3), kv.FullAttention(1, 4, block_size=8)]), r"\[4, 8\] tokens"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    sizes = dict(layers=KINDS, block_size=4, enable_prefix_caching=True, partial_hits=True)
    with pytest.raises(ValueError, match=message):
        kv.CacheConfig(**sizes | options)
