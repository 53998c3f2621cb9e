"""Scrubbing leaves nothing behind and touches nothing else; and what one namespace holds reaches no other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import Status, testing
from tests.support.few_kernels import compile_for_users
from tests.support.helpers import append_donated, assert_same, leaf_bytes, num_free, table
from tests.support.prefix_user import CONFIG, TENANT_A, TENANT_B, PrefixUser, owned_slots, with_nan

scrub = kv.donate(kv.scrub)


def scrub_user(user, seq_ids=None, namespace=None):
    """Scrubs, and checks what must hold whatever was scrubbed. Returns how many blocks were overwritten."""
    before = [np.array(leaf) for leaf in jax.tree.leaves(user.cache.pools)]
    if seq_ids is not None:  # Padded to one shape; `max_seqs` is skipped.
        seq_ids = np.array(seq_ids + [CONFIG.max_seqs] * (5 - len(seq_ids)))
    user.cache, num_blocks = scrub(user.cache, seq_ids, namespace=namespace)
    ended = [row for row in user.texts if not user.cache.is_active[row]]
    for row in ended:
        del user.texts[row]
    user.check()
    for old, new in zip(before, jax.tree.leaves(user.cache.pools), strict=True):
        new = np.asarray(new)
        changed = (old != new) & ~(np.isnan(old) & np.isnan(new))
        assert not new[changed].any()
    return int(num_blocks)


def values_of(user, blocks):
    """Keys, values and tokens in some blocks, all layers."""
    pool = user.cache.pools[0]
    halves = [np.asarray(half).reshape(2, 24, -1)[:, blocks] for half in (pool.k, pool.v)]
    return [*halves, np.asarray(user.cache.control.prefix_index.block_tokens)[blocks]]


def is_zero(user, blocks):
    return not any(values.any() for values in values_of(user, blocks))


@pytest.mark.slow
def test_scrubbing_a_row_overwrites_what_it_alone_holds():
    user = PrefixUser(CONFIG)
    shared = user.new_text(1, 8)
    user.start(0, shared + user.new_text(2, 7))
    user.start(1, shared + user.new_text(3, 3))
    kept, own = table(user.cache, 1), table(user.cache, 0)[2:]
    before = values_of(user, kept)
    assert scrub_user(user, [0]) == 2
    assert is_zero(user, own)
    assert all(
        (a == b).all() for a, b in zip(before, values_of(user, kept), strict=True) if a.dtype == np.int32
    )
    assert user.lookup([*shared, *user.new_text(2, 7)]) == 8
    assert num_free(user.cache) == 24 - 3 and user.stats().num_blocks_cached == 0
    assert user.stats().num_frees == 1


@pytest.mark.slow
def test_rows_that_share_are_scrubbed_together():
    user = PrefixUser(CONFIG)
    text = user.new_text(1, 10)
    user.start(0, text)
    user.fork(0, 3)
    user.append({3: [7]})
    blocks = table(user.cache, 0) + table(user.cache, 3)
    assert scrub_user(user, [3, 0]) == 4
    assert is_zero(user, blocks) and user.lookup(text) == 0
    assert user.stats().num_blocks_free == 24


def test_cached_blocks_that_continue_a_scrubbed_one_go_along():
    user = PrefixUser(CONFIG)
    text = user.new_text(1, 21)
    user.start(0, text)
    user.start(1, text[:8] + user.new_text(2, 5))
    user.free(0)
    user.truncate(1, 5)
    # Row 1 holds blocks 0 and 1 of the text; 2, 3 and 4 are cached after them, and so is its own old block.
    assert user.stats().num_blocks_cached == 4
    assert scrub_user(user, [1]) == 6
    assert user.stats().num_blocks_free == 24
    assert user.lookup(text) == 0
    assert user.start(0, text) == 0
    assert user.lookup(text) == 20


def test_scrubbing_a_namespace_leaves_nothing_of_it():
    user = PrefixUser(CONFIG)
    text = user.new_text(1, 11)
    user.start(0, text, TENANT_A)
    user.start(1, user.new_text(2, 13), TENANT_A)
    user.free(1)  # Cached blocks, and a free one with its tail.
    user.start(2, text, TENANT_B)
    user.start(3, user.new_text(4, 9), TENANT_B)
    user.free(3)
    kept = table(user.cache, 2)
    cached = [b for b in range(24) if user.cache.control.block_pools[0].cached.is_published[b]]
    cached = [
        b for b in cached if (np.asarray(user.cache.control.prefix_index.namespace)[b] == TENANT_B).all()
    ]
    before = values_of(user, cached)
    scrub_user(user, namespace=TENANT_A)
    assert is_zero(user, [b for b in range(24) if b not in {*kept, *cached}])
    for old, new in zip(before, values_of(user, cached), strict=True):
        assert old.tobytes() == new.tobytes()
    assert user.lookup(text, TENANT_A) == user.lookup(user.new_text(2, 13), TENANT_A) == 0
    assert user.lookup(text, TENANT_B) == 8 and user.lookup(user.new_text(4, 9), TENANT_B) == 8
    assert user.texts.keys() == {2}
    # The rest of the last block after 11 tokens was another row's once.
    for half in user.cache.pools[0].k, user.cache.pools[0].v:
        rest = np.asarray(half).reshape(2, 24, 1, 4, 5)[:, kept[-1], :, 3:]
        assert not rest.any()
    assert user.start(1, text, TENANT_A) == 0


def test_the_index_forgets_tokens_behind_the_last_one_of_a_row():
    """Another tenant's row has the block of the first one's last tokens."""
    user = PrefixUser(CONFIG)
    user.admit(0, user.new_text(1, 24 * 4 // 2), TENANT_A)
    user.fill(0)
    user.admit(1, user.new_text(2, 24 * 4 // 2), TENANT_A)
    user.fill(1)
    user.free(0, 1)
    user.start(2, user.new_text(3, 5), TENANT_B)
    first, last = table(user.cache, 2)
    scrub_user(user, namespace=TENANT_A)
    tokens = np.asarray(user.cache.control.prefix_index.block_tokens)
    assert tokens[first].tolist() == user.texts[2][:4] and tokens[last].tolist() == [
        user.texts[2][4],
        0,
        0,
        0,
    ]
    assert np.count_nonzero(tokens) == 5


def test_what_another_namespace_reserved_is_overwritten_too():
    """Its blocks were the first tenant's, and stay with the row."""
    user = PrefixUser(CONFIG)
    for row in range(2):
        user.admit(row, user.new_text(1 + row, 48), TENANT_A)
    user.fill(0, 1)
    user.free(0, 1)
    user.admit(2, user.new_text(3, 23), TENANT_B)
    user.append({2: user.targets[2][:5]})
    reserved = table(user.cache, 2)[2:]
    assert len(reserved) == 4 and not is_zero(user, reserved)
    scrub_user(user, namespace=TENANT_A)
    assert is_zero(user, reserved) and table(user.cache, 2)[2:] == reserved


@pytest.mark.parametrize("length", [7, 8, 10])
def test_the_longest_of_the_forks_that_share_a_last_block_keeps_its_tokens(length):
    user = PrefixUser(CONFIG)
    user.admit(0, user.new_text(1, length), TENANT_B)
    user.fill(0)
    user.fork(0, 1)
    user.truncate(1, 5)
    scrub_user(user, namespace=TENANT_A)  # `check` compares both rows' contents.
    assert user.texts.keys() == {0, 1} and table(user.cache, 1) == table(user.cache, 0)[:2]


def test_a_published_last_block_keeps_all_its_tokens():
    user = PrefixUser(CONFIG)
    text = user.new_text(1, 9)
    user.start(0, text, TENANT_B)
    user.truncate(0, 5)
    scrub_user(user, namespace=TENANT_A)
    assert user.start(1, text, TENANT_B) == 8


def test_nothing_to_scrub():
    user = PrefixUser(CONFIG)
    user.start(0, user.new_text(1, 7), TENANT_B)
    before = leaf_bytes(user.cache)
    after, num_blocks = scrub(user.cache, np.array([1, 4, -1, 5, 2**31 - 1]))
    assert int(num_blocks) == 0
    assert_same(before, after)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["rows", "namespace"])
def test_scrubbing_without_prefix_caching_and_with_windows(form):
    window = kv.SlidingWindow(1, 5, window=5, num_sink_tokens=2, block_size=2)
    config = kv.CacheConfig(
        [kv.FullAttention(1, 5), window], num_blocks=20, block_size=4, max_seqs=3, max_seq_len=40
    )
    cache = testing.poison(kv.init(config))
    cache, _ = kv.allocate(cache, [0, 1], [9, 11], namespace=np.stack([TENANT_A, TENANT_B]))
    tokens = np.arange(1, 37).reshape(3, 12)
    cache, _ = append_donated(cache, tokens, np.array([9, 11, 0]))
    tables = [np.asarray(pool.block_table)[0] for pool in cache.control.block_pools]
    cache, _ = scrub(cache, **(dict(seq_ids=np.array([0])) if form == "rows" else dict(namespace=TENANT_A)))
    assert cache.is_active.tolist() == [False, True, False]
    assert (
        kv.check_invariants(cache) == [] and testing.check_tokens(cache, {1: tokens[1, :11].tolist()}) == []
    )
    for blocks, pool in zip(tables, cache.pools, strict=True):
        own = blocks[blocks < 20]
        assert len(own) and not np.asarray(pool.k)[own].any() and not np.asarray(pool.v)[own].any()


@pytest.mark.slow
def test_scrub_moves_no_other_data():
    layers, limits = [kv.FullAttention(2, 64)] * 2, dict(max_seqs=4, max_seq_len=128)
    config = kv.CacheConfig(layers, num_blocks=512, block_size=16, **limits, enable_prefix_caching=True)
    cache = jax.eval_shape(functools.partial(kv.init, config))
    for what in (dict(seq_ids=jnp.array([0, 1])), dict(namespace=TENANT_A)):
        lowered = kv.donate(functools.partial(kv.scrub, **what)).lower(cache)
        memory = compile_for_users(lowered).memory_analysis()
        beside = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        pools = sum(leaf.size * 4 for leaf in jax.tree.leaves(cache.pools))
        assert beside < 0.01 * pools, (beside, pools)


def test_scrub_says_what_it_wants():
    cache = kv.init(CONFIG)
    for options in ({}, {"seq_ids": jnp.array([0]), "namespace": TENANT_A}):
        with pytest.raises(ValueError, match="both or none of seq_ids and namespace, expected one"):
            kv.scrub(cache, **options)
    with pytest.raises(ValueError, match="expected uint32"):
        kv.scrub(cache, namespace=jnp.zeros(4, jnp.int32))


# --- case ff: nothing that one namespace holds reaches another ---

FULL = kv.FullAttention(2, 8)
WINDOW = kv.SlidingWindow(2, 8, window=6, num_sink_tokens=2, block_size=2)


def spoil(cache, words):
    """NaN in all that a namespace owns."""
    owned = owned_slots(cache, words)
    assert all(mask.any() for mask in owned)
    return with_nan(cache, [~mask for mask in owned])


@functools.partial(jax.jit, static_argnames="is_packed")
def attend(cache, tokens, num_new, is_packed):
    """One step of a model of sorts; its keys, values and queries follow from the tokens."""
    width = tokens.shape[-1]
    cache, step = kv.extend(
        cache, num_new, tokens=tokens, **({"num_tokens": width} if is_packed else {"max_new": width})
    )
    outputs = []
    for layer in range(cache.config.num_layers):
        scales = jnp.arange(1, 9, dtype=jnp.float32).reshape(*[1] * (tokens.ndim + 1), 8) * (layer + 1)
        signs = jnp.array([1.0, -0.5]).reshape(*[1] * tokens.ndim, 2, 1)
        x = jnp.sin(tokens[..., None, None].astype(jnp.float32) * scales) * signs
        q = jnp.concatenate([x, x * 2], axis=-2)
        cache, out = kv.attention(cache, layer, q, x, x, step)
        outputs.append(out)
    return cache, jnp.stack(outputs), step.status


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "is_packed"), [([FULL] * 2, False), ([WINDOW, FULL, WINDOW], True)], ids=["full", "windows"]
)
def test_case_ff_nan_in_one_namespace_changes_no_bit_of_another(layers, is_packed):
    config = kv.CacheConfig(
        layers, num_blocks=48, block_size=4, max_seqs=4, max_seq_len=40, max_query_len=12,
        enable_prefix_caching=True,
    )  # fmt: skip
    namespaces = np.stack([TENANT_A, TENANT_B, TENANT_A, TENANT_B])
    rng = np.random.default_rng(0)
    texts = rng.integers(1, 50, (4, 40)).astype(np.int32)
    texts[2, :8], texts[3, :8], texts[1, :8] = texts[0, :8], texts[0, :8], texts[0, :8]
    cache = testing.poison(kv.init(config))

    def step(cache, counts):
        """Appends `counts[row]` tokens to each row; returns the outputs by row."""
        starts = np.asarray(cache.context_len)
        pieces = [texts[row, starts[row] : starts[row] + n] for row, n in enumerate(counts)]
        if is_packed:
            tokens = np.zeros(24, np.int32)
            flat = np.concatenate(pieces)
            tokens[: len(flat)] = flat
        else:
            tokens = np.zeros((4, 1 if max(counts) == 1 else 12), np.int32)
            for row, piece in enumerate(pieces):
                tokens[row, : len(piece)] = piece
        cache, out, status = attend(cache, jnp.asarray(tokens), jnp.array(counts), is_packed)
        assert set(np.asarray(status).tolist()) == {Status.OK}
        ends = np.cumsum([0, *counts])
        out = np.asarray(out)
        return cache, [
            out[:, ends[row] : ends[row + 1]] if is_packed else out[:, row, : counts[row]] for row in range(4)
        ]

    def admit(cache, rows):
        lengths = np.full(len(rows), 17)
        return kv.allocate(cache, rows, lengths, tokens=texts[rows][:, :20], namespace=namespaces[rows])

    cache, _ = admit(cache, [0, 1])
    for counts in ([9, 7, 0, 0], [3, 10, 0, 0]):  # prefill in pieces
        cache, _ = step(cache, counts)
        cache, _ = kv.commit(cache, [0, 1])  # before windows roll
    cache, admission = admit(cache, [2, 3])
    assert admission.num_cached.tolist() == [8, 8]
    # Each namespace is spoilt in turn, before a prefill beside decoding, before plain decoding, and before
    # forks, of which two write into the last block that they share.
    for counts in ([1, 1, 8, 8], [1, 1, 1, 1], [1, 1, 1, 1], "forks"):
        if counts == "forks":
            cache, _ = kv.fork(kv.free(cache, [2, 3])[0], [0, 1], [2, 3])
            counts = [1, 1, 1, 1]
            assert cache.context_len.tolist() == [15, 20, 15, 20]
        after, expected = step(cache, counts)
        for words, others in ((TENANT_A, (1, 3)), (TENANT_B, (0, 2))):
            _, got = step(spoil(cache, words), counts)
            for row in range(4):
                assert np.isfinite(expected[row]).all() and expected[row].size
                if row in others:
                    assert got[row].tobytes() == expected[row].tobytes(), f"row {row}"
                elif int(cache.context_len[row]):
                    assert np.isnan(got[row]).any(), f"row {row} does not read what was spoilt"
        cache = after
