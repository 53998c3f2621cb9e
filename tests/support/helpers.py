"""Bit-exact comparisons and the token test, shared by the behavioural tests.

`TokenDriver` holds a cache and, beside it in plain Python, the tokens of every row: it writes recognisable
keys and values and reads them back with `kv.gather`. Slots that no row owns are NaN: a read of one shows.
"""

import contextlib
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import testing
from kvcache_jax.core.state import row_fields
from kvcache_jax.testing import poison
from tests.support.few_kernels import compile_for_users

# ---------------------------------------------------------------------------------------
# what many tests begin with


# Sizes for tests that need no numbers of their own: caches of equal sizes share the control plane's programs,
# whatever their layers, and compiling those is most of what tests cost.
ROOMY = {"num_blocks": 24, "block_size": 4, "max_seqs": 4, "max_seq_len": 48}


def tiny_config(**sizes):
    """Two layers: a write just past the first layer's blocks would land in the next layer's block 0."""
    return kv.CacheConfig(layers=[kv.FullAttention(num_kv_heads=2, head_dim=3)] * 2, **sizes)


def append_tokens(cache, tokens, num_new):
    """The first `num_new` of `tokens [max_seqs, T]`, as `testing.write_tokens` writes them."""
    cache, step = kv.extend(cache, num_new, max_new=tokens.shape[1], tokens=tokens)
    return testing.write_tokens(cache, tokens, step), step.status


# Its programs are shared by all caches of one config.
append_donated = kv.donate(append_tokens)


def newest_unless(names, cases):
    """The `cases` of a contract test, of which the oldest jax runs `names` alone."""
    return [case if case in names else pytest.param(case, marks=pytest.mark.newest) for case in cases]


# ---------------------------------------------------------------------------------------
# comparisons


def leaf_bytes(tree):
    """The tree's leaves by path, as (dtype, shape, bytes): NaN equals NaN, 0.0 differs from -0.0."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    found = {}
    for path, leaf in leaves:
        array = np.asarray(leaf)
        found[jax.tree_util.keystr(path)] = (str(array.dtype), array.shape, array.tobytes())
    return found


def changed_leaves(before, after):
    """Paths of the leaves that are not bit-identical. Either side may be a `leaf_bytes` snapshot."""
    old = before if isinstance(before, dict) else leaf_bytes(before)
    new = after if isinstance(after, dict) else leaf_bytes(after)
    return sorted(path for path in old.keys() | new.keys() if old.get(path) != new.get(path))


def assert_same(before, after):
    """Demands two bit-identical pytrees."""
    if not isinstance(before, dict) and not isinstance(after, dict):
        assert jax.tree.structure(before) == jax.tree.structure(after)
    changed = changed_leaves(before, after)
    assert not changed, f"expected a bit-identical state, but these leaves changed: {changed}"


def statuses(status):
    """A status array as a list of `kv.Status`."""
    return [kv.Status(int(code)) for code in np.asarray(status)]


def row_state(cache, seq_id):
    """Everything the control plane holds for one row, as bytes."""
    control = cache.control
    per_row = row_fields(control)
    for group, pool in enumerate(control.block_pools):
        per_row[f"block_table[{group}]"] = pool.block_table
    return {name: np.asarray(array)[seq_id].tobytes() for name, array in per_row.items()}


def num_free(cache, group=0):
    return int(kv.num_available_blocks(cache, group=group))


def num_used(cache, group=0):
    return cache.config.groups[group].num_blocks - num_free(cache, group)


def table(cache, seq_id, group=0):
    """The block ids of one row, holes and the empty end left out."""
    row = np.asarray(cache.control.block_pools[group].block_table)[seq_id]
    return row[row < cache.config.groups[group].num_blocks].tolist()


def num_copies(cache):
    return int(kv.stats(cache).num_copies)


def assert_invariants(cache):
    problems = kv.check_invariants(cache)
    assert problems == [], problems


@contextlib.contextmanager
def compiled_programs():
    """A list that gets an entry for each program that is compiled meanwhile, or taken from the disk."""
    programs = []

    def listener(name, *_, **__):
        if "backend_compile" in name:
            programs.append(name)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield programs
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def says(*words):
    """A pattern for `pytest.raises`: the message contains all these words and numbers, in any order."""
    return r"(?si)\A" + "".join(rf"(?=.*(?<!\w){re.escape(str(word))}(?!\w))" for word in words)


# ---------------------------------------------------------------------------------------
# the token test

append = jax.jit(kv.append)


@jax.jit
def read_all(cache):
    """(k, v, length) of every row, for every layer."""
    rows = jnp.arange(cache.is_active.shape[0], dtype=jnp.int32)
    return [
        jax.lax.map(lambda seq_id, layer=layer: kv.gather(cache, seq_id, layer), rows)
        for layer in range(cache.config.num_layers)
    ]


def token_vectors(config, layer, tokens, start=0):
    """Keys and values f32[len(tokens), num_kv_heads, head_dim], telling token, position, layer and side."""
    kind = config.layers[layer]
    tokens = np.asarray(tokens, np.int64)[:, None, None]
    positions = start + np.arange(tokens.shape[0])[:, None, None]
    heads = np.arange(kind.num_kv_heads)[None, :, None]
    dims = np.arange(kind.head_dim)[None, None, :]
    mix = tokens * 7919 + positions * 104729 + layer * 1299709 + heads * 15485863 + dims * 32452843
    return ((mix % 2**20).astype(np.float32), -((mix * 3 + 49979687) % 2**20).astype(np.float32) - 0.5)


class TokenDriver:
    """A cache and the token ids that every row ought to hold.

    `append` gives all rows to one call of width `width`; longer texts go in several calls.
    Whatever is not a new token of an active row (padding, other rows) is NaN in the arrays passed in.
    """

    def __init__(self, config, width=16):
        self.cache = poison(kv.init(config))
        self.config = config
        self.width = width
        self.texts = {}
        self.next_token = 1

    def new_tokens(self, count):
        """Token ids that were never used before."""
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def allocate(self, lengths):
        """Starts rows (a dict from seq_id to length), without writing tokens yet."""
        seq_ids, counts = list(lengths), list(lengths.values())
        self.cache, admission = kv.allocate(self.cache, seq_ids, counts)
        found = statuses(admission.status)
        assert np.asarray(admission.num_cached).tolist() == [0] * len(seq_ids)
        for seq_id, status in zip(seq_ids, found, strict=True):
            if status == kv.Status.OK:
                self.texts[seq_id] = []
        return dict(zip(seq_ids, found, strict=True))

    def start(self, seq_id, text):
        """Allocates one row and writes its text (a list of ids, or how many new ones)."""
        text = self.new_tokens(text) if isinstance(text, int) else text
        assert self.allocate({seq_id: len(text)}) == {seq_id: kv.Status.OK}
        assert set(self.append({seq_id: text}).values()) == {kv.Status.OK}
        return text

    def append_call(self, texts):
        """One call of `kv.append` over all rows; returns (cache, step) and changes nothing here."""
        num_rows = self.config.max_seqs
        num_new = np.zeros(num_rows, np.int32)
        keys = [
            np.full((num_rows, self.width, kind.num_kv_heads, kind.head_dim), np.nan, np.float32)
            for kind in self.config.layers
        ]
        values = [array.copy() for array in keys]
        for seq_id, text in texts.items():
            assert len(text) <= self.width
            num_new[seq_id] = len(text)
            start = len(self.texts.get(seq_id, []))
            for layer in range(self.config.num_layers):
                keys[layer][seq_id, : len(text)], values[layer][seq_id, : len(text)] = token_vectors(
                    self.config, layer, text, start
                )
        if len(self.config.groups) == 1:
            keys, values = np.stack(keys), np.stack(values)
        return append(self.cache, keys, values, num_new)

    def append(self, texts):
        """Appends each row's text (ids, or how many new ones); returns the status by row."""
        texts = {
            seq_id: self.new_tokens(text) if isinstance(text, int) else list(text)
            for seq_id, text in texts.items()
        }
        found = dict.fromkeys(texts, kv.Status.OK)
        while any(texts.values()):
            chunk = {seq_id: text[: self.width] for seq_id, text in texts.items() if text}
            texts = {seq_id: text[self.width :] for seq_id, text in texts.items()}
            self.cache, step = self.append_call(chunk)
            step_status = statuses(step.status)
            for seq_id, text in chunk.items():
                found[seq_id] = step_status[seq_id]
                if found[seq_id] == kv.Status.OK:
                    self.texts[seq_id] = self.texts[seq_id] + text
                else:
                    texts[seq_id] = []
        return found

    def fork(self, sources, targets):
        before = self.cache
        self.cache, status = kv.fork(self.cache, sources, targets)
        found = statuses(status)
        for source, target, status in zip(sources, targets, found, strict=True):
            if status == kv.Status.OK:
                self.texts[target] = list(self.texts[source])
        for old, new in zip(before.pools, self.cache.pools, strict=True):
            assert old.k is new.k and old.v is new.v, "a fork must not touch the pools"
        return found

    def reorder(self, seq_ids, parents):
        self.cache, status = kv.reorder(self.cache, seq_ids, parents)
        found = statuses(status)
        old = dict(self.texts)
        for seq_id, parent, status in zip(seq_ids, parents, found, strict=True):
            if status == kv.Status.OK:
                self.texts[seq_id] = list(old[parent])
        return found

    def truncate(self, seq_ids, lengths):
        self.cache, status = kv.truncate(self.cache, seq_ids, lengths)
        found = statuses(status)
        for seq_id, length, status in zip(seq_ids, lengths, found, strict=True):
            if status == kv.Status.OK:
                self.texts[seq_id] = self.texts[seq_id][:length]
        return found

    def free(self, *seq_ids):
        self.cache, status = kv.free(self.cache, list(seq_ids))
        found = statuses(status)
        for seq_id, status in zip(seq_ids, found, strict=True):
            if status == kv.Status.OK:
                del self.texts[seq_id]
        return found

    @contextlib.contextmanager
    def unchanged(self, *seq_ids):
        """Demands that these rows, their tables and their contents are bit-identical afterwards."""
        before = [row_snapshot(self.cache, seq_id) for seq_id in seq_ids]
        yield
        assert [row_snapshot(self.cache, seq_id) for seq_id in seq_ids] == before

    def check(self):
        """Poisons the pools, then compares the rows, every key and every value with the texts."""
        assert_invariants(self.cache)
        self.cache = poison(self.cache)
        rows = range(self.config.max_seqs)
        is_active = np.asarray(self.cache.is_active).tolist()
        assert is_active == [seq_id in self.texts for seq_id in rows]
        context_len = np.asarray(self.cache.context_len).tolist()
        assert {r: context_len[r] for r in self.texts} == {r: len(text) for r, text in self.texts.items()}
        for layer, (keys, values, lengths) in enumerate(jax.device_get(read_all(self.cache))):
            for seq_id, text in self.texts.items():
                assert lengths[seq_id] == len(text)
                want_k, want_v = token_vectors(self.config, layer, text)
                message = f"row {seq_id}, layer {layer}"
                np.testing.assert_array_equal(keys[seq_id, : len(text)], want_k, message)
                np.testing.assert_array_equal(values[seq_id, : len(text)], want_v, message)


def row_contents(cache, seq_id):
    """The bytes of one row's keys and values, all layers."""
    parts = []
    for layer in range(cache.config.num_layers):
        keys, values, length = kv.gather(cache, seq_id, layer)
        parts += [np.asarray(keys)[: int(length)].tobytes(), np.asarray(values)[: int(length)].tobytes()]
    return parts


def row_snapshot(cache, seq_id):
    """Everything that belongs to one row, to be compared before and after."""
    return row_state(cache, seq_id), row_contents(cache, seq_id)


def first_program(patch, name):
    """Takes the compiled text of the first call of a jitted function, "module.function"."""
    path, _, function = name.rpartition(".")
    module = importlib.import_module(f"kvcache_jax.{path}")
    jitted, texts = getattr(module, function), []

    def call(*args, **options):
        if not texts:
            texts.append(compile_for_users(jitted.lower(*args, **options)).as_text())
        return jitted(*args, **options)

    call.eval_shape = getattr(jitted, "eval_shape", None)
    patch.setattr(module, function, call)
    return texts
