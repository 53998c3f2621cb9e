"""A plain user of the prefix cache: texts in, hits and blocks out, contents compared after every call."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import kvcache_jax as kv
from kvcache_jax import Status, commit, testing
from tests.support.helpers import ROOMY, append_donated, assert_invariants, statuses

WIDTH = 16  # of one `extend`
TENANT_A, TENANT_B = kv.namespace(tenant="a"), kv.namespace(tenant="b")

# Of the tests that need no numbers of their own, and of those that take CASES.md's blocks of 16 tokens: pools
# that such a test wants smaller are filled up by a row of `BALLAST` tokens, 14 blocks. Each is few programs.
CONFIG = kv.CacheConfig([kv.FullAttention(1, 5)] * 2, **ROOMY, enable_prefix_caching=True)
BALLAST = 224
BLOCKS_OF_16 = dataclasses.replace(CONFIG, block_size=16, max_seqs=5, max_seq_len=BALLAST)


class PrefixUser:
    """A cache and the text of every row. Whatever the rows hold is compared with their texts."""

    def __init__(self, config):
        self.cache = testing.poison(kv.init(config))
        self.texts = {}
        self.targets = {}

    def new_text(self, start, length):
        """Tokens that no text with another start has at the same place."""
        return [start * 1000 % 16_000 + i for i in range(length)]

    def prompts(self, texts):
        tokens = np.full((len(texts), self.cache.config.max_seq_len), 16_383, np.int32)
        for i, text in enumerate(texts):
            tokens[i, : len(text)] = text
        return tokens

    def padded(self, values, fill=None):
        """An entry per row, so that one program serves all; `max_seqs`, the default, is a row to skip."""
        num_rows = self.cache.max_seqs
        return np.array([*values, *[num_rows if fill is None else fill] * (num_rows - len(values))])

    def allocate(self, texts, namespace=None, reuse=True):
        """{row: prompt} in one call; returns the statuses and the tokens found cached."""
        prompts = [*texts.values(), *[[]] * (self.cache.max_seqs - len(texts))]
        self.cache, admission = kv.allocate(
            self.cache,
            self.padded(texts),
            np.array([*map(len, prompts)]),
            tokens=self.prompts(prompts),
            namespace=namespace,
            reuse=reuse,
        )
        found = statuses(admission.status)[: len(texts)]
        num_cached = np.asarray(admission.num_cached)[: len(texts)].tolist()
        for row, status, hit in zip(texts, found, num_cached, strict=True):
            if status == Status.OK:
                self.texts[row], self.targets[row] = list(texts[row][:hit]), list(texts[row])
        self.check()
        return found, num_cached

    def admit(self, row, text, namespace=None, reuse=True):
        """One row that ought to fit; returns its hit."""
        found, (hit,) = self.allocate({row: text}, namespace, reuse)
        assert found == [Status.OK]
        return hit

    def append(self, new):
        """{row: tokens}; returns {row: status}."""
        tokens = np.full((self.cache.max_seqs, WIDTH), 16_382, np.int32)
        num_new = np.zeros(self.cache.max_seqs, np.int32)
        for row, text in new.items():
            tokens[row, : len(text)], num_new[row] = text, len(text)
        self.cache, status = append_donated(self.cache, tokens, num_new)
        found = statuses(status)
        for row, text in new.items():
            if found[row] == Status.OK:
                self.texts[row] = self.texts[row] + list(text)
        self.check()
        return {row: found[row] for row in new}

    def fill(self, *rows, chunk=WIDTH):
        """Writes what the rows' prompts lack."""
        while new := {
            row: self.targets[row][len(self.texts[row]) :][:chunk]
            for row in rows
            if len(self.texts[row]) < len(self.targets[row])
        }:
            assert set(self.append(new).values()) == {Status.OK}

    def commit(self, *rows, final_len=None):
        lengths = self.padded(final_len or (), 2**31 - 1)
        self.cache, status = commit(self.cache, self.padded(rows), final_len=lengths)
        assert statuses(status)[: len(rows)] == [Status.OK] * len(rows)
        self.check()

    def start(self, row, text, namespace=None):
        """Allocates, writes and commits one row; returns its hit."""
        hit = self.admit(row, text, namespace)
        self.fill(row)
        self.commit(row)
        return hit

    def fork(self, source, target):
        self.cache, status = kv.fork(self.cache, [source], [target])
        assert statuses(status) == [Status.OK]
        self.texts[target], self.targets[target] = list(self.texts[source]), list(self.targets[source])
        self.check()

    def truncate(self, row, length):
        self.cache, status = kv.truncate(self.cache, [row], [length])
        assert statuses(status) == [Status.OK]
        self.texts[row] = self.texts[row][:length]
        self.check()

    def free(self, *rows):
        self.cache, status = kv.free(self.cache, self.padded(rows))
        assert statuses(status)[: len(rows)] == [Status.OK] * len(rows)
        for row in rows:
            del self.texts[row]
        self.check()

    def lookup(self, text, namespace=None):
        return int(kv.lookup(self.cache, self.prompts([text]), [len(text)], namespace)[0])

    def stats(self):
        return jax.device_get(kv.stats(self.cache))

    def num_used(self):
        return int(self.stats().num_blocks_used)

    def check(self):
        assert_invariants(self.cache)
        assert testing.check_tokens(self.cache, self.texts) == []
        lengths = np.asarray(self.cache.context_len)
        assert {row: lengths[row] for row in self.texts} == {
            row: len(text) for row, text in self.texts.items()
        }


def owned_slots(cache, words):
    """Per group bool[num_blocks, block_size]: the tokens of a namespace, in its rows and cached."""
    control, index, masks = cache.control, cache.control.prefix_index, []
    is_row = (np.asarray(control.namespace) == words).all(axis=1) & np.asarray(control.is_active)
    for g, (pool, group) in enumerate(zip(control.block_pools, cache.config.groups, strict=True)):
        table, is_owned = np.asarray(pool.block_table), np.zeros((pool.num_blocks, group.block_size), bool)
        for row in np.flatnonzero(is_row):
            positions = np.arange(int(control.context_len[row]))
            blocks = table[row, positions // group.block_size]
            is_held = blocks < pool.num_blocks
            is_owned[blocks[is_held], positions[is_held] % group.block_size] = True
        if index is not None:
            is_of_it = (np.asarray(index.namespace) == words).all(axis=1)
            if g != cache.config.indexed_group:
                is_of_it = np.append(is_of_it, False)[np.asarray(index.group_links[g].indexed_ids)]
            is_owned[np.asarray(pool.cached.is_published) & is_of_it] = True
        masks.append(is_owned)
    return masks


def with_nan(cache, masks):
    """NaN in every slot outside of the masks."""
    pools = []
    for pool, mask in zip(cache.pools, masks, strict=True):
        mask = np.tile(mask, (pool.num_rows // len(mask), 1))[:, None, :, None]
        arrays = {name: jnp.asarray(np.where(mask, x, np.float32(np.nan))) for name, x in pool.arrays.items()}
        pools.append(kv.state.KVPool(arrays=arrays))
    return dataclasses.replace(cache, pools=tuple(pools))
