"""Rows beside their texts, which tell what attention must give once tokens were dropped."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import kvcache_jax as kv
from kvcache_jax import testing
from tests.support.helpers import assert_invariants, statuses

ROWS, WIDTH, MAX_LEN, HEADS, DIM = 3, 4, 24, 2, 8
MAX_TEXT = 64  # with what was dropped
FULL = kv.FullAttention(1, DIM)
WINDOW = kv.SlidingWindow(1, DIM, window=9, num_sink_tokens=2, block_size=2)
OK = kv.Status.OK


@kv.donate
def step(cache, q, k, v, num_new):
    cache, reserved = kv.extend(cache, num_new, max_new=WIDTH)
    return attended(cache, q, k, v, reserved)


@kv.donate
def step_again(cache, q, k, v, rows, places):
    cache, reserved = kv.rewrite(cache, rows, places)
    return attended(cache, q, k, v, reserved)


@functools.partial(jax.jit, static_argnames="rotate")
def rotated(k, distance, rotate):
    return rotate(k, distance)


def attended(cache, q, k, v, reserved):
    outs = []
    for layer in range(cache.config.num_layers):
        cache, out = kv.attention(cache, layer, q, k, v, reserved)
        outs.append(out)
    return cache, jnp.stack(outs), reserved


class Texts:
    """Rows beside their texts: of each position its key and value, and whether it was dropped.

    With `rotate`, a function as `drop` takes it, the tokens in front of those that were dropped move along.
    """

    def __init__(self, layers, seed=0, rotate=None, max_sink_len=None, **sizes):
        sizes = dict(num_blocks=30, block_size=4, max_seqs=ROWS, max_seq_len=MAX_LEN) | sizes
        extras = [kv.compression.Dropping(max_sink_len)]
        self.cache = kv.init(kv.CacheConfig(layers, max_query_len=WIDTH, extras=extras, **sizes))
        self.cache, _ = kv.allocate(self.cache, range(ROWS), [0] * ROWS)
        self.rotate = rotate
        self.drop_tokens = kv.compression.drop
        if rotate is not None:
            self.drop_tokens = functools.partial(kv.compression.drop, positions="cache", rotate=rotate)
        self.rng = np.random.default_rng(seed)
        self.k = {row: np.zeros((0, 1, DIM), np.float32) for row in range(ROWS)}
        self.v = dict(self.k)
        self.dropped = {row: np.zeros(0, bool) for row in range(ROWS)}

    def draw(self, *shape):
        return self.rng.standard_normal(shape, np.float32)

    def expected(self, row, position, q):
        """What the query at `position` sees in each layer, f32[layers, heads, d]."""
        keys = np.arange(len(self.k[row]))
        k, outs = self.k[row], []
        if self.rotate is not None and self.dropped[row].any():
            first, num_dropped = self.dropped[row].argmax(), self.dropped[row].sum()
            distance = np.where(np.arange(MAX_TEXT) < first, num_dropped, 0).astype(np.int32)
            padded = np.pad(k, [(0, MAX_TEXT - len(k)), (0, 0), (0, 0)])
            k = np.asarray(rotated(padded, distance, self.rotate))[: len(k)]
        for layer in self.cache.config.layers:
            seen = (keys <= position) & ~self.dropped[row]
            if layer.span.window is not None:
                is_near = keys > position - layer.span.window
                seen &= is_near | (keys < layer.span.num_sink_tokens)
            logits = q @ k[seen, 0].T.astype(np.float64) / np.sqrt(DIM)
            shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
            outs.append(shares / shares.sum(axis=-1, keepdims=True) @ self.v[row][seen, 0])
        return np.stack(outs)

    def grow(self, num_new):
        q, k, v = (self.draw(ROWS, WIDTH, heads, DIM) for heads in (HEADS, 1, 1))
        self.cache, out, reserved = step(testing.poison(self.cache), q, k, v, np.array(num_new))
        out, positions = np.asarray(out), np.asarray(reserved.positions)
        assert statuses(reserved.status) == [OK] * ROWS
        for row, num in enumerate(num_new):
            first = len(self.k[row])
            self.k[row] = np.concatenate([self.k[row], k[row, :num]])
            self.v[row] = np.concatenate([self.v[row], v[row, :num]])
            self.dropped[row] = np.concatenate([self.dropped[row], np.zeros(num, bool)])
            assert positions[row, :num].tolist() == list(range(first, first + num))
            for i in range(num):
                self.check(row, first + i, q[row, i], out[:, row, i])
        assert_invariants(self.cache)

    def extend(self, num_new):
        """Appends tokens that are not compared with anything, by the program of `grow`; returns the step."""
        zeros = (np.zeros((ROWS, WIDTH, heads, DIM), np.float32) for heads in (HEADS, 1, 1))
        self.cache, _, reserved = step(self.cache, *zeros, np.array(num_new))
        return reserved

    def check(self, row, position, q, out):
        want = self.expected(row, position, q)
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5, err_msg=f"row {row} at {position}")

    def drop(self, row, start, length):
        self.cache, status = self.drop_tokens(self.cache, [row], [start], [length])
        if statuses(status) == [OK]:
            self.dropped[row][start : start + length] = True
        assert_invariants(self.cache)
        return statuses(status)[0]

    def again(self, row, positions):
        """Other keys and values of tokens that the row holds."""
        gone = np.flatnonzero(self.dropped[row])
        num_gone = int(self.cache.control.holes.num_dropped[row])
        places = [p - num_gone * (len(gone) > 0 and p > gone[0]) for p in positions]
        padded = np.array([[*places, *[MAX_LEN] * WIDTH][:WIDTH]])
        q, k, v = (self.draw(1, WIDTH, heads, DIM) for heads in (HEADS, 1, 1))
        self.cache, out, reserved = step_again(self.cache, q, k, v, np.array([row]), padded)
        out = np.asarray(out)
        assert statuses(reserved.status) == [OK]
        assert np.asarray(reserved.positions)[0, : len(positions)].tolist() == list(positions)
        self.k[row], self.v[row] = self.k[row].copy(), self.v[row].copy()
        for i, position in enumerate(positions):
            self.k[row][position], self.v[row][position] = k[0, i], v[0, i]
        for i, position in enumerate(positions):
            self.check(row, position, q[0, i], out[:, 0, i])
        assert_invariants(self.cache)
