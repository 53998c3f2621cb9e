"""Random operations on rows with states, each output compared with that of a row computed from nothing."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import kvcache_jax as kv
from kvcache_jax.testing import poison
from tests.support.hash_states import HashState, LastInputs, StatePerToken, expected

BLOCK, MAX_SEQS, MAX_LEN, MAX_NEW, PACKED, VOCAB = 8, 6, 96, 20, 64, 3


def config_of_states(rollback=3, kinds=(HashState, StatePerToken, LastInputs, HashState), **options):
    kinds = [kind(1, 1, max_rollback=rollback) for kind in kinds]
    sizes = dict(num_blocks=40, block_size=BLOCK, max_seqs=MAX_SEQS, max_seq_len=MAX_LEN)
    options = dict(max_query_len=MAX_NEW, enable_prefix_caching=True) | options
    return kv.CacheConfig([kv.FullAttention(1, 1), *kinds], **(sizes | options))


def with_window(rollback=0, window=12, sinks=0, num_blocks=None, num_blocks_of_keys=40, **options):
    """Adds a sliding window after the layers of `config_of_states`."""
    config = config_of_states(rollback, num_blocks=num_blocks_of_keys, **options)
    sizes = dict(num_blocks=num_blocks, num_sink_tokens=sinks, max_rollback=rollback)
    layer = kv.SlidingWindow(1, 1, window=window, **sizes)
    return dataclasses.replace(config, layers=[*config.layers, layer])


def run_layers(cache, step, tokens):
    """Calls the recurrent layers; returns the cache and their outputs side by side."""
    outs = []
    for layer, kind in enumerate(cache.config.layers):
        if isinstance(kind, kv.Recurrent):
            cache, out = kv.recurrence(cache, layer, {"token": tokens.astype(jnp.uint32)}, step)
            outs.append(out)
    return cache, jnp.concatenate(outs, axis=-1)


def expected_of_layers(tokens):
    both = expected(tokens)
    return np.concatenate([both, both[:, :1], both[:, 1:], both], axis=-1)


@functools.partial(jax.jit, donate_argnums=0)
def padded_step(cache, num_new, tokens):
    cache, step = kv.extend(cache, num_new, max_new=tokens.shape[1], tokens=tokens)
    cache, out = run_layers(poison(cache), step, tokens)
    return cache, step.status, out


@functools.partial(jax.jit, donate_argnums=0)
def packed_step(cache, num_new, tokens):
    cache, step = kv.extend(cache, num_new, num_tokens=tokens.shape[0], tokens=tokens)
    cache, out = run_layers(poison(cache), step, tokens)
    return cache, step.status, out


def admit(cache, prompt, row=0):
    """Allocates a row for a prompt; one program whatever its length."""
    tokens = np.zeros((1, MAX_LEN), np.int32)
    tokens[0, : len(prompt)] = prompt
    return kv.allocate(cache, [row], [len(prompt)], tokens=tokens)


def start(cache, prompt, row=0, commits=True):
    """Computes a prompt in calls of MAX_NEW tokens, and commits it; returns the cache and the admission."""
    cache, admission = admit(cache, prompt, row)
    at = int(admission.num_cached[0])
    while at < len(prompt):
        num = min(MAX_NEW, len(prompt) - at)
        new = np.zeros((MAX_SEQS, MAX_NEW), np.int32)
        new[row, :num] = prompt[at : at + num]
        num_new = np.where(np.arange(MAX_SEQS) == row, num, 0).astype(np.int32)
        cache, _, _ = padded_step(cache, num_new, new)
        at += num
    if commits:
        cache, _ = kv.commit(cache, [row])
    return cache, admission


class StateScript:
    """A cache and what its rows hold: their tokens, and those of their prompts that were not computed yet."""

    operations = dict(allocate=0.2, extend=0.5, fork=0.06, truncate=0.118, commit=0.05, free=0.07, move=0.002)

    def __init__(self, seed, config):
        self.rng, self.config, self.cache = np.random.default_rng(seed), config, kv.init(config)
        self.rollback = config.groups[2].max_rollback
        self.rows, self.pending, self.reach, self.count = {}, {}, {}, collections.Counter()
        self.texts = [self.rng.integers(VOCAB, size=MAX_LEN).tolist() for _ in range(4)]

    def run(self, num_operations):
        total = sum(self.operations.values())
        for nth in range(num_operations):
            name = self.rng.choice([*self.operations], p=[p / total for p in self.operations.values()])
            row = int(self.rng.integers(MAX_SEQS))
            if name in ("fork", "truncate", "free") and self.rows:
                row = int(self.rng.choice([*self.rows]))
            getattr(self, name)(row)
            self.count[name] += 1
            if nth % 20 == 0:
                assert kv.check_invariants(self.cache) == [], (nth, name)
                lengths = [len(self.rows.get(r, [])) for r in range(MAX_SEQS)]
                assert self.cache.context_len.tolist() == lengths, (nth, name)

    def allocate(self, row):
        if row in self.rows:
            return
        text = [*self.texts[self.rng.integers(4)]]
        if self.rng.random() < 0.5:  # leave the text somewhere
            at = int(self.rng.integers(MAX_LEN))
            text[at:] = self.rng.integers(VOCAB, size=MAX_LEN - at).tolist()
            self.texts[self.rng.integers(4)] = text
        length = int(self.rng.integers(1, MAX_LEN - 10))
        prompt = np.zeros((1, MAX_LEN), np.int32)
        prompt[0, :length] = text[:length]
        self.cache, admission = kv.allocate(self.cache, [row], [length], tokens=prompt)
        if admission.status[0] == kv.Status.OK:
            start = int(admission.num_cached[0])
            self.rows[row], self.pending[row], self.reach[row] = text[:start], text[start:length], start
            self.count["tokens cached"] += start
            self.count["junctions"] += int(admission.junction[0] > 0)

    def extend(self, row):
        width = BLOCK if self.rng.random() < 0.5 else MAX_NEW
        num_new, tokens = np.zeros(MAX_SEQS, np.int32), np.zeros((MAX_SEQS, width), np.int32)
        for row, held in self.rows.items():
            most = min(width, len(self.pending[row]) or MAX_LEN - len(held))
            most = min(most, 2) if self.rng.random() < 0.4 else most
            if most and self.rng.random() < 0.6:
                num_new[row] = self.rng.integers(1, most + 1)
                new = (
                    self.pending[row][: num_new[row]] or self.rng.integers(VOCAB, size=num_new[row]).tolist()
                )
                tokens[row, : num_new[row]] = new
        if self.rng.random() < 0.3 and num_new.sum() <= PACKED:
            flat = np.concatenate([tokens[row, :n] for row, n in enumerate(num_new)])
            flat = np.pad(flat, (0, PACKED - flat.size))
            self.cache, status, out = packed_step(self.cache, num_new, flat)
            ends = np.cumsum(num_new)
            out = [np.asarray(out)[end - n : end] for n, end in zip(num_new, ends, strict=True)]
        else:
            self.cache, status, out = padded_step(self.cache, num_new, tokens)
            out = [np.asarray(out)[row, :n] for row, n in enumerate(num_new)]
        for row in [*self.rows]:
            if num_new[row] and status[row] == kv.Status.OK:
                before, new = self.rows[row], tokens[row, : num_new[row]].tolist()
                self.rows[row], self.pending[row] = before + new, self.pending[row][num_new[row] :]
                self.reach[row] = max(self.reach[row], len(self.rows[row]) - self.rollback)
                want = expected_of_layers(self.rows[row])[len(before) :]
                assert (out[row] == want).all(), (row, len(before), num_new[row])
                self.count["tokens computed"] += int(num_new[row])
            elif num_new[row]:  # keys are short, never states
                assert status[row] == kv.Status.OUT_OF_BLOCKS
                for g, group in enumerate(self.config.groups):
                    num_left = kv.num_available_blocks(self.cache, group=g)
                    assert not group.span.is_read_later or num_left > 0, group.kind.label

    def fork(self, row):
        other = int(self.rng.integers(MAX_SEQS))
        if row in self.rows and other not in self.rows:
            self.cache, status = kv.fork(self.cache, [row], [other])
            assert status[0] == kv.Status.OK
            self.rows[other], self.pending[other] = [*self.rows[row]], []
            self.reach[other] = self.reach[row]

    def truncate(self, row):
        if not self.rows.get(row):
            return
        length = len(self.rows[row])
        new_len = max(0, length - int(self.rng.integers(0, 5)))
        if self.rng.random() < 0.3:
            new_len = int(self.rng.integers(length + 1))
        self.cache, status = kv.truncate(self.cache, [row], [new_len])
        assert status[0] == kv.Status.OK or (status[0] == kv.Status.WINDOW_LOST and new_len < self.reach[row])
        self.count[kv.Status(int(status[0])).name] += 1
        if status[0] == kv.Status.OK and new_len < length:
            self.rows[row], self.pending[row] = self.rows[row][:new_len], []

    def commit(self, row):
        if self.config.enable_prefix_caching:
            self.cache, _ = kv.commit(self.cache, is_end=bool(self.rng.random() < 0.5))

    def free(self, row):
        if row in self.rows:
            self.cache, _ = kv.free(self.cache, [row])
            del self.rows[row], self.pending[row]

    def move(self, row):
        """Moves all that is published into a fresh cache; the rows end."""
        if not self.config.enable_prefix_caching:
            return
        pool = self.cache.control.block_pools[self.config.indexed_group]
        ids = np.flatnonzero(pool.cached.is_published)
        ids = np.pad(ids, (0, pool.num_blocks - ids.size), constant_values=pool.num_blocks)
        contents = kv.tiers.export_blocks(self.cache, ids)
        self.cache, _ = kv.tiers.import_blocks(kv.init(self.config), contents)
        self.rows, self.pending = {}, {}
