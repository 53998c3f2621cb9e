"""Random scripts over several layer groups with a host tier: what rows read depends on all tokens before."""

import jax
import numpy as np

import kvcache_jax as kv
from kvcache_jax import testing
from tests.support.random_script import padded
from tests.support.window_script import (
    NAMESPACES,
    ROWS,
    WIDTH,
    WindowScript,
    append_as,
    grouped_config,
    longest_chain,
)

TEXT = 31  # of prompts that are fetched ahead, which go on for longer than those that start rows
OFTEN = ("admit", *["extend"] * 5, "commit", "free") * 3 + ("fork", "truncate", "reorder")
SOMETIMES = ("prefetch", "prefetch", "evict", "demote", "poison") * 12 + (
    "scrub_rows",
    "scrub_namespace",
    "forget",
)


def host_config(**sizes):
    """Pools of few blocks: a full group, one with windows and smaller blocks, and one more."""
    window = kv.SlidingWindow(2, 5, window=6, num_sink_tokens=3, max_rollback=2, block_size=2, num_blocks=30)
    layers = [window, kv.FullAttention(1, 5), kv.FullAttention(2, 5), window]
    defaults = dict(layers=layers, num_blocks=16, extras=[kv.tiers.Host(num_blocks=24)])
    return grouped_config(**defaults | sizes)


prefetch = jax.jit(kv.tiers.prefetch)


class HostScript(WindowScript):
    """A `WindowScript` on a cache with a host tier.

    Attributes:
      num_promoted: Tokens of prompts that came from the host, by what asked for them.
      num_overwritten: Blocks that were scrubbed.
    """

    def __init__(self, seed, config=None):
        super().__init__(seed, len(NAMESPACES), config or host_config())
        self.texts = [self.new_text(TEXT) for _ in range(4)]
        self.num_promoted = {"admit": 0, "prefetch": 0}
        self.num_overwritten = 0

    def new_text(self, length):
        return [int(token) for token in self.rng.integers(1, 100, length)]

    def text(self, length):
        """The beginning of a known text, or such a one with another end."""
        known = self.texts[int(self.rng.integers(len(self.texts)))][:length]
        if self.rng.random() < 0.7:
            return known
        kept = int(self.rng.integers(0, length + 1))
        return [*known[:kept], *self.new_text(length - kept)]

    def longest(self, text, namespace):
        """The most of both tiers: the host has whole blocks, from the last one of the device on."""
        (chain, _), block_size = longest_chain(self.cache, text, namespace), self.cache.config.block_size
        tier = self.cache.control.extras["host"]
        awaits = np.asarray(tier.awaits[0])
        is_there = np.asarray(tier.control.block_pools[0].cached.is_published)[: len(awaits)]
        is_there = is_there & (awaits == self.cache.config.groups[0].num_blocks)
        serial, index = np.asarray(tier.serial), tier.index
        number, length = serial[tier.num_blocks + chain[-1]] if chain else 0, len(chain) * block_size
        while number or not length:
            piece = text[length : length + block_size]
            blocks = [
                b
                for b in np.flatnonzero(is_there)
                if index.parent[b] == number
                and (index.namespace[b] == namespace).all()
                and index.block_tokens[b].tolist() == piece
            ]
            if not blocks or length + block_size >= len(text):
                break
            number, length = serial[blocks[0]], length + block_size
        return max(super().longest(text, namespace), length)

    def codes(self, tokens, space):
        """A number for each place, of all tokens up to it and of the namespace."""
        code, codes = 1 + 4999 * space, []
        for token in tokens:
            code = (code * 31 + 17 * token + 3) % 16381
            codes.append(code)
        return codes

    def step(self):
        name = self.rng.choice(SOMETIMES if self.rng.random() < 0.2 else OFTEN)
        # Most calls name rows that they can serve.
        able = [row for row in range(ROWS) if (row in self.rows) == (name != "admit")]
        others = [row for row in range(ROWS) if row not in able]
        rows = [*self.rng.permutation(able), *self.rng.permutation(others)][:3]
        rows = [int(row) for row in (rows if self.rng.random() < 0.8 else self.rng.integers(0, ROWS, 3))]
        before = int(kv.tiers.host_stats(self.cache).num_promoted)
        getattr(self, f"_{name}")(rows)
        if name in self.num_promoted:
            self.num_promoted[name] += int(kv.tiers.host_stats(self.cache).num_promoted) - before
        # What has to move moves later in half of the cases, with the next `extend`.
        if self.rng.random() < 0.5:
            self.check(f"{name} {rows}")
        else:
            violations = kv.check_invariants(self.cache)
            assert not violations, f"{name} {rows}: {violations}"

    def _extend(self, _):
        lengths = self.rng.integers(0, WIDTH + 1, ROWS).tolist()
        new, codes = [], []
        for row, length in enumerate(lengths):
            held = self.rows.get(row, [])
            # Rows go on as a known text that begins as they do.
            known = [text for text in self.texts if text[: len(held)] == held]
            ids = known[int(self.rng.integers(len(known)))][len(held) :][:length] if known else []
            ids = [*ids, *self.new_text(length - len(ids))]
            new.append(ids)
            codes.append(self.codes([*held, *ids], self.spaces.get(row, 0))[len(held) :])
        self.cache, status = append_as(
            self.cache, padded(new, WIDTH), padded(codes, WIDTH), np.array(lengths, np.int32)
        )
        for row in self.compare(status, [self._growth(row, length) for row, length in enumerate(lengths)]):
            if new[row]:
                self.rows[row] = self.rows[row] + new[row]
        self.counts["refused"] += status.tolist().count(kv.Status.OUT_OF_BLOCKS)

    def _evict(self, _):
        self.cache, _ = kv.evict(self.cache, int(self.rng.integers(0, 5)))

    def _prefetch(self, _):
        texts = [self.text(TEXT), self.text(TEXT)]
        words = np.stack([NAMESPACES[int(self.rng.integers(2))] for _ in texts])
        tokens, lengths = np.array(texts), np.array([TEXT, int(self.rng.integers(0, TEXT))])
        found = np.asarray(kv.lookup(self.cache, tokens, lengths, words)).tolist()
        self.cache, num_promoted = prefetch(self.cache, tokens, lengths, words)
        assert (np.asarray(num_promoted) <= found).all()

    def _demote(self, _):
        target = float(self.rng.choice([0.2, 0.5, 0.9]))
        self.cache, _ = kv.tiers.demote_to_utilization(self.cache, target)
        pool = self.cache.control.block_pools[self.cache.config.indexed_group]
        num_used = int((np.asarray(pool.ref_count) > 0).sum())
        num_left = pool.num_blocks - int(pool.num_free)
        assert num_left <= max(int(target * pool.num_blocks), num_used)

    def _poison(self, _):
        self.cache = testing.poison(self.cache)

    def _scrub_rows(self, rows):
        self.cache, num_blocks = kv.scrub(self.cache, rows[:1])
        self.num_overwritten += int(num_blocks)
        for row in {rows[0]} & {*self.rows}:
            self.end(row)

    def _scrub_namespace(self, _):
        space = int(self.rng.integers(2))
        self.cache, num_blocks = kv.scrub(self.cache, namespace=NAMESPACES[space])
        self.num_overwritten += int(num_blocks)
        for row in [row for row in self.rows if self.spaces[row] == space]:
            self.end(row)
        tokens = np.array([text for text in self.texts])
        assert not kv.lookup(self.cache, tokens, [TEXT] * len(tokens), NAMESPACES[space]).any()

    def _forget(self, _):
        self.cache, _ = kv.reset_prefix_cache(self.cache)
        tokens = np.array([text for text in self.texts])
        for words in NAMESPACES:
            assert not kv.lookup(self.cache, tokens, [TEXT] * len(tokens), words).any()
