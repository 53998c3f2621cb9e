"""Rows of a cache of one kind, beside the texts that they ought to hold.

A token's queries, keys and values follow from the token and its position alone, so a text says what attention
over it must give: the oracle's result for that text, from scratch. One jitted step serves all properties of a
kind. Before each call, all that no row may read is NaN.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import kvcache_jax as kv
from kvcache_jax import testing
from tests.kinds.table import HEAD_DIM, NUM_KV_HEADS, NUM_Q_HEADS, Refused
from tests.support.helpers import assert_invariants, statuses

MAX_LEN, WIDTH, BLOCK_SIZE, NUM_BLOCKS, NUM_ROWS = 32, 5, 4, 13, 4
SOURCE_WIDTH = 12
SPLITS = np.cumsum([NUM_Q_HEADS, NUM_KV_HEADS]).tolist()
VOCAB = NUM_Q_HEADS * HEAD_DIM
OK = kv.Status.OK


def config_of(kind):
    """Of all properties of the kind, with prefix caching unless that is refused; all states are kept."""
    has_states = any(isinstance(layer, kv.Recurrent) for layer in kind.layers)
    return kv.CacheConfig(
        kind.layers,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_seqs=NUM_ROWS,
        max_seq_len=MAX_LEN,
        max_query_len=WIDTH,
        enable_prefix_caching=not isinstance(kind.cells.get("commit"), Refused),
        snapshots=kv.Snapshots(every=BLOCK_SIZE) if has_states else kv.Snapshots(),
    )


def indexed_config(kind):
    return dataclasses.replace(config_of(kind), enable_prefix_caching=True)


def dropping_config(kind):
    options = dict(enable_prefix_caching=False, snapshots=kv.Snapshots(), extras=[kv.compression.Dropping()])
    return dataclasses.replace(config_of(kind), **options)


@functools.cache
def make_params(num_layers):
    rng = np.random.default_rng(3)
    shape = (num_layers, SPLITS[-1] + NUM_KV_HEADS, HEAD_DIM)
    return {
        name: rng.standard_normal((size, *shape), np.float32)
        for name, size in (("tokens", VOCAB), ("positions", MAX_LEN))
    }


def forward(params, tokens, cache, step):
    """A model whose logits are the sum of what its layers attend to."""
    params = jax.tree.map(jnp.asarray, params)
    vectors = params["tokens"][tokens] + params["positions"][step.positions]
    logits = 0
    for layer in range(cache.config.num_layers):
        q, k, v = jnp.split(vectors[..., layer, :, :], SPLITS, axis=-2)
        if isinstance(cache.config.layers[layer], kv.Recurrent):
            cache, out = kv.recurrence(cache, layer, {"token": tokens.astype(jnp.uint32)}, step)
            logits += as_logits(out)
            continue
        if layer not in cache.config.own_layers:
            cache, out = kv.attend(cache, layer, q, step)
            logits += out.reshape(*tokens.shape, VOCAB)
            continue
        if "v" not in cache.config.layers[layer].inputs:  # a latent is keys and values of all heads
            k, v = k[..., :1, :], None
        cache, out = kv.attention(cache, layer, q, k, v, step)
        out = jnp.pad(out, [(0, 0)] * (out.ndim - 1) + [(0, HEAD_DIM - out.shape[-1])])
        logits += out.reshape(*tokens.shape, VOCAB)
    return logits, cache


def as_logits(numbers):
    """Numbers from 0 to 1 from the highest bits of `u32[..., n]`, the same for each id."""
    return jnp.sum((numbers >> 12).astype(jnp.float32), axis=-1, keepdims=True) / 2**20


def extend_and_attend(params, cache, tokens, num_new):
    cache, step = kv.extend(cache, num_new, max_new=WIDTH, tokens=tokens)
    logits, cache = forward(params, tokens, cache, step)
    return cache, logits, step.status


@kv.donate
def rewrite_and_attend(cache, params, rows, tokens, indices):
    cache, step = kv.rewrite(cache, rows, indices)
    logits, cache = forward(params, tokens, cache, step)
    return cache, logits, step.status


# Of all kinds and properties.
run_step = jax.jit(extend_and_attend)


def write_sources(params, cache, rows, sources, lengths):
    """Stores `sources i32[n, SOURCE_WIDTH]`, in each layer as keys and values that follow from the tokens."""
    params = jax.tree.map(jnp.asarray, params)
    vectors = params["tokens"][sources] + params["positions"][None, :SOURCE_WIDTH]
    parts = [jnp.split(vectors[..., layer, :, :], SPLITS, axis=-2) for layer in cache.config.source_layers]
    return kv.write_source(cache, rows, [k for _, k, _ in parts], [v for _, _, v in parts], lengths)


store_sources = kv.donate(lambda cache, params, *sources: write_sources(params, cache, *sources))


@functools.partial(jax.jit, static_argnames="oracles")
def expected_logits(params, text, source, source_len, oracles, positions=None, is_hidden=False):
    """What `forward` must give for each token of `text i32[MAX_LEN]`, whose end may be anything.

    Its tokens are one after the other, unless `positions` says where they stand. Those that are hidden,
    `bool[MAX_LEN]`, no query sees; what they see themselves is not meant.
    """
    params = jax.tree.map(jnp.asarray, params)
    stand = params["positions"] if positions is None else params["positions"][positions]
    vectors = params["tokens"][text] + stand
    of_source = params["tokens"][source] + params["positions"][:SOURCE_WIDTH]
    logits = 0
    for layer, (owner, reads_source, oracle) in enumerate(oracles):
        if owner is None:
            logits += as_logits(oracle(text))
            continue
        q, _, _ = jnp.split(vectors[:, layer], SPLITS, axis=-2)
        _, k, v = jnp.split((of_source if reads_source else vectors)[:, owner], SPLITS, axis=-2)
        out = oracle(q, k, v, source_len) if reads_source else oracle(q, k, v, is_hidden=is_hidden)
        logits += out.reshape(MAX_LEN, VOCAB)
    return logits


def oracles_of(kind):
    """Of each layer: whose keys and values it reads, None for states; whether of a source; and its oracle."""
    found = []
    for i, oracle in enumerate(kind.oracles):
        if isinstance(kind.layers[i], kv.Recurrent):
            found.append((None, False, oracle))
            continue
        owner = i if kind.layers[i].shared_layer is None else kind.layers[i].shared_layer
        found.append((owner, kind.layers[owner].source_len_limit is not None, oracle))
    return tuple(found)


def source_of(row):
    """The source that a row starts with: another one, of another length, for each."""
    return random_text(1 + (7 * row + 3) % (SOURCE_WIDTH - 1), 50 + row)


def padded(text, length=MAX_LEN):
    return np.pad(np.asarray(text, np.int32), (0, length - len(text)))


def random_text(length, seed=0):
    return np.random.default_rng([length, seed]).integers(VOCAB, size=length).tolist()


@functools.cache
def empty(config):
    """An empty cache whose free blocks are in no order, on the host, so that no call donates it."""
    return jax.device_get(permuted(kv.init(config)))


def permuted(cache):
    """The empty cache after rows that came and went: its free blocks are in no order."""
    for lengths, ends in (([13, 5, 7, 1], [2, 0]), ([9, 3], [3, 0, 1, 2])):
        rows = [row for row in range(NUM_ROWS) if not bool(cache.is_active[row])]
        rows, lengths = entries(rows, lengths)
        cache, admission = kv.allocate(cache, rows, lengths, tokens=np.zeros((NUM_ROWS, MAX_LEN), np.int32))
        assert OK in statuses(admission.status)
        cache, _ = kv.free(cache, *entries(ends))
    assert not cache.is_active.any()
    return cache


def entries(rows, *columns):
    """Rows and what goes with each, with entries that are skipped up to one a row: one program for all."""
    num_more = NUM_ROWS - len(rows)
    padded_columns = [[*column, *[1] * NUM_ROWS][:NUM_ROWS] for column in columns]
    return [[*rows, *[NUM_ROWS] * num_more], *padded_columns]


class Rows:
    """A cache and the text of each of its rows.

    Attributes:
      cache: Its free blocks are in no order at first.
      texts: From row to tokens.
      sources: From row to the tokens of its source, where there are layers that read one.
      dropped: From row to the positions that it dropped, of a cache whose rows can.
    """

    def __init__(self, kind, cache=None):
        self.kind = kind
        self.cache = empty(config_of(kind)) if cache is None else cache
        self.params = make_params(len(kind.layers))
        self.texts, self.sources, self.dropped = {}, {}, {}

    def allocate(self, texts, *, writes_sources=True):
        """Starts rows without computing anything; returns status and cached tokens of each."""
        rows, lengths = entries(list(texts), [len(text) for text in texts.values()])
        tokens = np.zeros((NUM_ROWS, MAX_LEN), np.int32)
        for i, text in enumerate(texts.values()):
            tokens[i, : len(text)] = text
        self.cache, admission = kv.allocate(self.cache, rows, lengths, tokens=tokens)
        found = statuses(admission.status)[: len(texts)]
        num_cached = np.asarray(admission.num_cached)[: len(texts)].tolist()
        for row, status, cached in zip(texts, found, num_cached, strict=True):
            if status == OK:
                self.texts[row] = list(texts[row][:cached])
        assert_invariants(self.cache)
        started = [row for row, status in zip(texts, found, strict=True) if status == OK]
        self.sources |= {row: source_of(row) for row in started}
        if writes_sources:
            self.write_sources(started)
        return found, num_cached

    def write_sources(self, rows):
        if not rows or not self.cache.config.source_layers:
            return
        arguments = self.source_arguments(rows)
        self.cache, status = store_sources(testing.poison(self.cache), self.params, *arguments)
        assert statuses(status)[: len(rows)] == [OK] * len(rows)
        assert_invariants(self.cache)

    def source_arguments(self, rows):
        """`seq_ids`, `sources` and `lengths` of `write_sources`."""
        seq_ids, lengths = entries(rows, [len(self.sources[row]) for row in rows])
        sources = np.zeros((NUM_ROWS, SOURCE_WIDTH), np.int32)
        for i, row in enumerate(rows):
            sources[i] = padded(self.sources[row], SOURCE_WIDTH)
        return np.array(seq_ids), sources, np.array(lengths)

    def start(self, texts):
        """Starts rows and computes all that is not cached; returns how much was."""
        found, num_cached = self.allocate(texts)
        assert set(found) == {OK}
        self.feed({row: text[cached:] for (row, text), cached in zip(texts.items(), num_cached, strict=True)})
        return num_cached

    def feed(self, texts):
        """Appends texts, in as many steps as the longest takes, and compares what each step attends to."""
        texts = {row: list(text) for row, text in texts.items()}
        while any(texts.values()):
            self.step({row: text[:WIDTH] for row, text in texts.items()})
            texts = {row: text[WIDTH:] for row, text in texts.items()}

    def step(self, texts):
        before = testing.poison(self.cache)
        arguments = self.arguments(texts)
        self.cache, logits, status = run_step(self.params, before, *arguments)
        self.check(texts, logits, status)

    def arguments(self, texts):
        """`tokens` and `num_new` of a step."""
        tokens, num_new = np.zeros((NUM_ROWS, WIDTH), np.int32), np.zeros(NUM_ROWS, np.int32)
        for row, text in texts.items():
            tokens[row, : len(text)], num_new[row] = text, len(text)
        return tokens, num_new

    def check(self, texts, logits, status):
        """Takes over the texts of a step that ran; compares its logits with the oracle's."""
        assert set(statuses(status)) == {OK}
        assert_invariants(self.cache)
        logits = np.asarray(logits)
        for row, text in texts.items():
            start = len(self.texts[row])
            self.texts[row] = self.texts[row] + list(text)
            np.testing.assert_allclose(
                logits[row, : len(text)],
                self.expected(self.texts[row], self.sources[row], dropped=self.dropped.get(row, ()))[start:],
                rtol=2e-5,
                atol=2e-5,
                err_msg=f"row {row} of {self.kind.name}, tokens from {start} on",
            )
        lengths = np.asarray(self.cache.context_len)
        if (holes := self.cache.control.holes) is not None:
            lengths = lengths + np.asarray(holes.num_dropped)
        assert {row: lengths[row] for row in self.texts} == {r: len(text) for r, text in self.texts.items()}

    def expected(self, text, source=(), positions=None, dropped=()):
        of_source = padded(source, SOURCE_WIDTH), len(source)
        positions = np.arange(MAX_LEN) if positions is None else padded(positions)
        is_hidden = np.isin(np.arange(MAX_LEN), list(dropped))
        logits = expected_logits(
            self.params, padded(text), *of_source, oracles_of(self.kind), positions, is_hidden
        )
        return np.asarray(logits)[: len(text)]

    def fork(self, source, *targets):
        self.sources |= dict.fromkeys([row for row in targets if row not in self.texts], self.sources[source])
        self.cache, status = kv.fork(self.cache, *entries([source] * len(targets), targets))
        return self.took(status, {target: self.texts[source] for target in targets})

    def truncate(self, row, length):
        self.cache, status = kv.truncate(self.cache, *entries([row], [length]))
        return self.took(status, {row: self.texts[row][:length]})

    def took(self, status, texts):
        """Takes over the texts of entries that are OK; returns all statuses."""
        found = statuses(status)[: len(texts)]
        for (row, text), code in zip(texts.items(), found, strict=True):
            if code == OK:
                self.texts[row] = list(text)
        assert_invariants(self.cache)
        return found

    def rewrite(self, places, *, is_right=True, expects=OK):
        """Computes tokens again, with the right parameters or with others."""
        (rows,) = entries(list(places))
        tokens, indices = np.zeros((NUM_ROWS, WIDTH), np.int32), np.full((NUM_ROWS, WIDTH), MAX_LEN)
        for i, (row, line) in enumerate(places.items()):
            indices[i, : len(line)] = line
            tokens[i, : len(line)] = np.take(self.texts[row], line, mode="clip")
        params = self.params if is_right else {name: -values for name, values in self.params.items()}
        self.cache, logits, status = rewrite_and_attend(
            testing.poison(self.cache), params, np.array(rows), tokens, indices.astype(np.int32)
        )
        assert set(statuses(status)[: len(places)]) == {expects}
        assert_invariants(self.cache)
        for i, (row, line) in enumerate(places.items()):
            if is_right and expects == OK:
                want = self.expected(self.texts[row], self.sources[row])[line]
                np.testing.assert_allclose(logits[i, : len(line)], want, rtol=2e-5, atol=2e-5)

    def drop(self, row, start, length):
        self.cache, status = kv.compression.drop(self.cache, *entries([row], [start], [length]))
        if statuses(status)[0] == OK:
            self.dropped[row] = {*self.dropped.get(row, ()), *range(start, start + length)}
        assert_invariants(self.cache)
        return statuses(status)[0]

    def free(self, *rows):
        self.cache, status = kv.free(self.cache, *entries(rows))
        assert set(statuses(status)[: len(rows)]) == {OK}
        for row in rows:
            del self.texts[row]
        assert_invariants(self.cache)

    def num_available(self):
        return [int(kv.num_available_blocks(self.cache, group=g)) for g in range(len(self.groups))]

    def num_held(self, row):
        """Blocks of each group that the row holds."""
        tables = (pool.block_table[row] for pool in self.cache.control.block_pools)
        return [int((ids < group.num_blocks).sum()) for ids, group in zip(tables, self.groups, strict=True)]

    @property
    def groups(self):
        return self.cache.config.groups
