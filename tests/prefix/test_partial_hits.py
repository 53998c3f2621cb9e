"""Prompts that begin inside a published block; the block is copied before it is written."""

import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import testing
from tests.support.helpers import assert_invariants, changed_leaves, num_copies, row_state, table

BLOCK, WIDTH, ROWS = 4, 20, 4
KINDS = [kv.FullAttention(1, 3), kv.SlidingWindow(1, 3, window=6, max_rollback=2)]
OTHERS = (7, 7, 7, 7)


def config_of(num_blocks=14, **options):
    return kv.CacheConfig(
        num_blocks=num_blocks,
        block_size=BLOCK,
        max_seqs=ROWS,
        max_seq_len=WIDTH,
        enable_prefix_caching=True,
        **{"layers": KINDS, "partial_hits": True} | options,
    )


@kv.donate
def compute(cache, tokens, num_new):
    cache, step = kv.extend(cache, num_new, max_new=WIDTH, tokens=tokens)
    return testing.write_tokens(cache, tokens, step), step.status


def padded(text):
    return np.array([[*text, *[0] * (WIDTH - len(text))]], np.int32)


class Rows:
    """A cache and the texts of its rows."""

    def __init__(self, config):
        self.cache, self.texts = testing.poison(kv.init(config)), {}

    def start(self, row, text, namespace=(0, 0, 0, 0)):
        """Allocates; what is cached counts as the row's text. Returns how many tokens that is."""
        words = np.array(namespace, np.uint32)
        found = kv.lookup(self.cache, padded(text), [len(text)], words).tolist()
        self.cache, admission = kv.allocate(
            self.cache, [row], [len(text)], tokens=padded(text), namespace=words
        )
        assert admission.status.tolist() == [0] and admission.num_cached.tolist() == found
        self.texts[row] = list(text[: found[0]])
        self.check()
        return found[0]

    def extend(self, row, text):
        tokens = np.zeros((ROWS, WIDTH), np.int32)
        tokens[row, : len(text)] = text
        num_new = np.where(np.arange(ROWS) == row, len(text), 0).astype(np.int32)
        self.cache, status = compute(self.cache, tokens, num_new)
        if status[row] == kv.Status.OK:
            self.texts[row] = self.texts[row] + list(text)
        self.check()
        return kv.Status(int(status[row]))

    def serve(self, row, text, **options):
        """Starts a row, computes what is not cached, and publishes it; returns how much was."""
        num_cached = self.start(row, text, **options)
        assert self.extend(row, text[num_cached:]) == kv.Status.OK
        self.commit(row)
        return num_cached

    def commit(self, row):
        self.cache, _ = kv.commit(self.cache, [row])
        self.check()

    def free(self, row):
        self.cache, _ = kv.free(self.cache, [row])
        del self.texts[row]

    def check(self):
        assert_invariants(self.cache)
        assert not testing.check_tokens(self.cache, self.texts)


def longest(cache, text, namespace):
    """The most first tokens that a chain of published blocks has, but the last token; in numpy."""
    index, pool = cache.control.prefix_index, cache.control.block_pools[0]
    is_there = np.asarray(pool.cached.is_published) & (np.asarray(index.namespace) == namespace).all(axis=1)
    parents, tokens = np.asarray(index.parent), np.asarray(index.block_tokens)
    at, length = len(parents), 0
    while True:
        same = {}
        for block in np.flatnonzero(is_there & (parents == at)).tolist():
            agrees = [a == b for a, b in zip(tokens[block].tolist(), text[length:], strict=False)]
            same[block] = (*agrees, False).index(False)
        best = max(same, key=same.get, default=None)
        if best is None or same[best] < BLOCK:
            return min(length + (same[best] if same else 0), len(text) - 1)
        at, length = best, length + BLOCK


def test_a_prompt_begins_inside_a_block_and_its_next_step_copies_it():
    rows = Rows(config_of())
    assert rows.serve(0, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 0
    assert rows.start(1, [1, 2, 3, 4, 5, 6, 9, 9, 9]) == 6
    assert table(rows.cache, 1)[:2] == table(rows.cache, 0)[:2]
    before = rows.cache.control.num_published.tolist()
    assert before == [2, 2, 0, 0]
    copies = num_copies(rows.cache)
    assert rows.extend(1, [9, 9, 9]) == kv.Status.OK
    assert num_copies(rows.cache) == copies + len(rows.cache.config.groups)
    assert table(rows.cache, 1)[1] != table(rows.cache, 0)[1]
    rows.commit(1)
    # Both continuations are found from now on, to the token; the last one of a prompt is computed.
    assert rows.start(2, [1, 2, 3, 4, 5, 6, 9, 9]) == 7
    assert rows.start(3, [1, 2, 3, 4, 5, 6, 7, 8]) == 7


def test_nothing_is_found_in_another_namespace_nor_unasked():
    rows = Rows(config_of())
    rows.serve(0, [1, 2, 3, 4, 5])
    assert rows.start(1, [1, 2, 9], namespace=OTHERS) == 0
    prompt, lengths = padded([1, 2, 9]), np.array([3])
    assert kv.allocate(rows.cache, [2], lengths, tokens=prompt, reuse=False)[1].num_cached.tolist() == [0]
    assert kv.lookup(rows.cache, prompt, lengths).tolist() == [2]
    items = [[[1, 3]]]
    assert kv.lookup(rows.cache, padded([1, 2, 3, 4]), [4], items=items).tolist() == [3]
    assert kv.lookup(rows.cache, padded([1, 2, 9]), [3], items=items).tolist() == [1]


@pytest.mark.slow
def test_the_copy_is_needed_and_not_held():
    """Of five blocks four are held when the row comes that would copy one: its copy is the last."""
    rows = Rows(config_of(num_blocks=5))
    rows.serve(0, [1, 2, 3, 4, 5, 6, 7, 8])
    for row, length in ((2, 8), (3, 1)):
        rows.start(row, [9] * length)
    prompt = padded([1, 2, 3, 4, 5, 6, 0])
    _, admission = kv.allocate(rows.cache, [1], [7], tokens=prompt)
    assert admission.status.tolist() == [kv.Status.OUT_OF_BLOCKS]
    rows.free(3)
    assert rows.start(1, prompt[0, :7].tolist()) == 6
    rows.start(3, [9])  # another row takes the last block
    before = row_state(rows.cache, 1)
    assert rows.extend(1, [0]) == kv.Status.OUT_OF_BLOCKS and row_state(rows.cache, 1) == before
    rows.free(3)
    _, admission = kv.allocate(rows.cache, [3], [7], tokens=padded([1, 2, 3, 4, 5, 6, 9]))
    assert admission.status.tolist() == [kv.Status.OK]  # the copy is there for one of them
    assert rows.extend(1, [0]) == kv.Status.OK


@pytest.mark.slow
def test_a_pool_of_exactly_the_row_takes_whole_hits_alone():
    """Else the row would need a block more than there are, and wait for ever."""
    rows, text = Rows(config_of(num_blocks=5)), list(range(1, 21))
    rows.serve(0, text)
    rows.free(0)
    assert rows.start(1, [*text[:14], 0, 0, 0, 0]) == 12
    assert rows.extend(1, [13, 14, 0, 0, 0, 0]) == kv.Status.OK


def test_explain_names_the_token_behind_what_is_cached():
    rows = Rows(config_of())
    rows.serve(0, [1, 2, 3, 4, 5, 6, 7, 8])
    said = kv.inspect.explain(rows.cache, padded([1, 2, 3, 4, 5, 6, 9, 9, 9])[0], 9)
    assert said.startswith("6 of 9 tokens are cached. At position 6 the prompt has token 9"), said
    said = kv.inspect.explain(rows.cache, padded([1, 2, 3, 4, 5, 6, 7, 8])[0], 8)
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


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [KINDS, KINDS[:1]], ids=["grouped", "full"])
def test_a_random_script(kinds):
    """Rows of few different tokens start, go on, fork, are cut, publish and end."""
    rng, rows = np.random.default_rng(len(kinds)), Rows(config_of(layers=kinds))
    num_partial = num_refused = 0
    for _ in range(500):
        row, what = int(rng.integers(ROWS)), rng.random()
        if row not in rows.texts:
            text = rng.choice([1, 2], int(rng.integers(1, WIDTH)), p=[0.9, 0.1]).tolist()
            namespace = OTHERS if rng.random() < 0.2 else (0, 0, 0, 0)
            words = np.array(namespace, np.uint32)
            most = longest(rows.cache, text, words)
            found = kv.lookup(rows.cache, padded(text), [len(text)], words).item()
            # A window that rolled on leaves less.
            assert found == most if len(kinds) == 1 else found <= most
            before = rows.cache
            rows.cache, admission = kv.allocate(
                before, [row], [len(text)], tokens=padded(text), namespace=words
            )
            if admission.status.item() == kv.Status.OK:
                assert admission.num_cached.item() == found
                rows.texts[row] = text[:found]
                num_partial += found % BLOCK > 0
            else:
                num_refused += 1
                assert not changed_leaves(before, rows.cache)
        elif what < 0.5:
            room = WIDTH - len(rows.texts[row])
            if room:
                rows.extend(
                    row, rng.choice([1, 2], int(rng.integers(1, min(room, 6) + 1)), p=[0.9, 0.1]).tolist()
                )
        elif what < 0.7:
            rows.commit(row)
        elif what < 0.8:
            rows.free(row)
        elif what < 0.9:
            length = max(len(rows.texts[row]) - int(rng.integers(3)), 0)
            rows.cache, status = kv.truncate(rows.cache, [row], [length])
            if status.item() == kv.Status.OK:
                rows.texts[row] = rows.texts[row][:length]
        elif idle := [other for other in range(ROWS) if other not in rows.texts]:
            rows.cache, _ = kv.fork(rows.cache, [row], idle[:1])
            rows.texts[idle[0]] = list(rows.texts[row])
        rows.check()
        rows.cache = testing.poison(rows.cache)
    assert min(num_partial, num_refused) > 5, (num_partial, num_refused)
