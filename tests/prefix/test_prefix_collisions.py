"""Case cc: with a hash of 4 bits nearly all prompts collide, and none gets foreign keys and values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.inspect import check_invariants
from kvcache_jax.operations import commit
from kvcache_jax.prefix import content_hash, prefix_index

NUM_NAMESPACES, ROWS, LENGTH, BLOCK = 3, 3, 9, 2
# An odd number of buckets, so that the four bits that are left decide about the bucket.
CONFIG = kv.CacheConfig(
    [kv.FullAttention(1, 4)],
    num_blocks=21,
    block_size=BLOCK,
    max_seqs=ROWS,
    max_seq_len=LENGTH,
    enable_prefix_caching=True,
)
NAMESPACES = np.stack([kv.namespace(tenant=str(i)) for i in range(NUM_NAMESPACES)])


@pytest.fixture
def four_bits(monkeypatch):
    """Two bits in each of the two hashes: the top ones, which sums of them keep."""

    def cut(hash_fn):
        return lambda *args: (hash_fn(*args) & jnp.uint32(3)) << 30

    jax.clear_caches()  # Programs with the whole hash.
    for name in ("root_hash", "block_hashes"):
        short = cut(getattr(content_hash, name))
        for module in (prefix_index, commit, check_invariants):
            monkeypatch.setattr(module, name, short)
    yield
    jax.clear_caches()


def code(tokens, positions, namespace_id):
    """Keys f32[..., 1, 4] that tell a token, its position and its namespace."""
    parts = [tokens, positions, jnp.broadcast_to(namespace_id, tokens.shape), jnp.ones_like(tokens)]
    return jnp.stack(parts, axis=-1).astype(jnp.float32)[..., None, :]


def one_prompt(cache, request):
    """Admission in a row that is freed first, what it found, computation, publication."""
    row, tokens, num_tokens, namespace_id = request
    cache, _ = kv.free(cache, row[None])
    cache, admission = kv.allocate(
        cache,
        row[None],
        num_tokens[None],
        tokens=tokens[None],
        namespace=jnp.asarray(NAMESPACES)[namespace_id],
    )
    num_cached = admission.num_cached[0]
    positions = jnp.arange(LENGTH, dtype=jnp.int32)
    k, v, _ = kv.gather(cache, row, 0)
    expected = code(tokens, positions, namespace_id)
    is_foreign = ((k != expected) | (v != -expected)).any(axis=(1, 2)) & (positions < num_cached)
    rest = jnp.minimum(positions + num_cached, LENGTH - 1)
    new = code(tokens[rest], rest, namespace_id)[None, None]
    num_new = jnp.where(admission.status[0] == kv.Status.OK, num_tokens - num_cached, 0)
    cache, step = kv.append(cache, new, -new, num_new[None], seq_ids=row[None], tokens=tokens[rest][None])
    cache, committed = kv.commit(cache, row[None])
    return cache, (num_cached, is_foreign.any(), jnp.stack([admission.status, step.status, committed]).any())


def random_prompts(count):
    rng = np.random.default_rng(0)
    return (
        np.arange(count, dtype=np.int32) % ROWS,
        rng.choice([1, 2, 3], (count, LENGTH), p=[0.7, 0.2, 0.1]).astype(np.int32),
        rng.integers(1, LENGTH + 1, count).astype(np.int32),
        rng.integers(0, NUM_NAMESPACES, count).astype(np.int32),
    )


def replay(count, check=True):
    """Per prompt: tokens cached, whether any was foreign; and what a dict that forgets nothing would say."""
    prompts = random_prompts(count)
    cache, found = kv.init(CONFIG), []
    scan = jax.jit(lambda cache, prompts: jax.lax.scan(one_prompt, cache, prompts))
    for start in range(0, count, 500):
        cache, result = scan(cache, tuple(column[start : start + 500] for column in prompts))
        found.append(jax.device_get(result))
        assert not check or kv.check_invariants(cache) == []
    num_cached, is_foreign, is_failed = (np.concatenate(column) for column in zip(*found, strict=True))
    assert not check or not is_failed.any()
    known, most = set(), []
    for _, tokens, num_tokens, namespace_id in zip(*prompts, strict=True):
        ends = range(BLOCK, num_tokens, BLOCK)
        prefixes = [(int(namespace_id), tuple(tokens[:end].tolist())) for end in ends]
        hits = [prefix in known for prefix in prefixes]
        most.append(BLOCK * (hits + [False]).index(False))
        known |= {
            (int(namespace_id), tuple(tokens[:end].tolist())) for end in range(BLOCK, num_tokens + 1, BLOCK)
        }
    return num_cached, is_foreign, np.array(most)


@pytest.mark.slow
def test_case_cc_ten_thousand_prompts_with_a_hash_of_four_bits(four_bits):
    num_cached, is_foreign, most = replay(10_000)
    assert not is_foreign.any()
    assert (num_cached <= most).all() and (num_cached % BLOCK == 0).all()
    # Collisions cost hits, and some are left.
    assert 0 < (num_cached > 0).sum() < 0.9 * (most > 0).sum()


@pytest.mark.slow
def test_this_test_can_fail(four_bits, monkeypatch):
    """Without verification, the same prompts read foreign keys and values."""

    def believe(index, block_ids, content):
        return block_ids < index.parent.shape[0]

    monkeypatch.setattr(prefix_index, "matches", believe)
    num_cached, is_foreign, most = replay(500, check=False)
    assert is_foreign.any() and (num_cached > most).any()


@pytest.mark.slow
@pytest.mark.parametrize("per_batch", [24, 3])
def test_rows_that_are_committed_together_collide(four_bits, monkeypatch, per_batch):
    """Every row keeps its own tokens, and a chain ends before the first block that cannot be found."""
    monkeypatch.setattr(commit, "_BATCH_ON_CPUS", per_batch)
    num_rows, length, num_blocks = 6, 16, 60
    config = kv.CacheConfig(
        [kv.FullAttention(1, 4)], num_blocks=num_blocks, block_size=BLOCK, max_seqs=num_rows,
        max_seq_len=length, enable_prefix_caching=True,
    )  # fmt: skip
    rows, lengths = np.arange(num_rows), np.full(num_rows, length)
    # Of few tokens there are rows that begin alike, and equal blocks in different places. Of few blocks those
    # in one place collide with each other.
    for seed, (num_tokens, most) in enumerate([(9, 16), *[(9, 2), (3, 4), (2, 16), (3, 16), (3, 6)] * 5]):
        texts = np.random.default_rng(seed).integers(0, num_tokens, (num_rows, length)).astype(np.int32)
        cache, _ = kv.allocate(kv.init(config, storage=False), rows, lengths, tokens=texts)
        cache, step = kv.extend(cache, lengths, max_new=length, tokens=texts)
        cache, status = kv.commit(cache, rows, final_len=np.full(num_rows, most))
        assert not step.status.any() and not status.any() and kv.check_invariants(cache) == []
        (pool,) = cache.control.block_pools
        blocks = np.asarray(pool.block_table)
        found = np.asarray(cache.control.prefix_index.block_tokens)[blocks].reshape(texts.shape)
        assert (found == texts).all(), seed
        num_published = np.asarray(cache.control.num_published)
        order = np.arange(length // BLOCK)
        assert (np.asarray(pool.cached.is_published)[blocks] == (order < num_published[:, None])).all()
        assert num_published.any() and num_published.min() + 3 < len(order)
        # As many as there are hashes.
        assert int(kv.stats(cache).num_blocks_published) <= 16


@pytest.mark.slow
def test_a_block_behind_one_that_collides_is_not_followed(four_bits):
    """Row 1's chain ends at once; row 2 has its second block, after what row 1's first one looks like."""
    config = dataclasses.replace(CONFIG, num_blocks=9)
    cache = kv.init(config, storage=False)
    blocks = jnp.asarray([[i, i] for i in range(40)])
    hashes = commit.block_hashes(cache.control.hash_key, blocks, jnp.zeros(40, jnp.int32)).tolist()
    second = next(i for i in range(40) if hashes[i] in hashes[:i])
    first = hashes.index(hashes[second])
    behind = commit.block_hashes(cache.control.hash_key, blocks, jnp.full(40, BLOCK)).tolist()
    other = next(i for i in range(40) if any(behind[i]))  # of another hash than the block before it
    texts = np.array([[first, first, 0, 0], [second, second, other, other], [first, first, other, other]])
    lengths = [BLOCK, 2 * BLOCK, 2 * BLOCK]
    cache, _ = kv.allocate(cache, range(3), lengths, tokens=texts)
    cache, _ = kv.extend(cache, lengths, max_new=2 * BLOCK, tokens=texts)
    cache, status = kv.commit(cache, range(3))
    assert not status.any() and kv.check_invariants(cache) == []
    assert cache.control.num_published.tolist() == [1, 0, 1]
    assert int(kv.stats(cache).num_adoptions) == 1


@pytest.mark.slow
def test_equal_rows_of_namespaces_that_collide_stay_apart(four_bits):
    """Committed together, and one after the other."""
    names = [kv.namespace(tenant=str(i)) for i in range(20)]
    key = kv.init(CONFIG, storage=False).control.hash_key
    roots = [tuple(root.tolist()) for root in prefix_index.root_hash(key, jnp.asarray(np.stack(names)))]
    second = next(i for i in range(20) if roots[i] in roots[:i])
    pair = np.stack([names[roots.index(roots[second])], names[second]])
    tokens, num_tokens = np.full((2, LENGTH), 5, np.int32), np.full(2, BLOCK)
    cache, _ = kv.allocate(
        kv.init(CONFIG, storage=False), [0, 1], num_tokens, tokens=tokens[:, :BLOCK], namespace=pair
    )
    cache, _ = kv.extend(cache, num_tokens, max_new=BLOCK, seq_ids=[0, 1], tokens=tokens[:, :BLOCK])
    for some in ([[0, 1]], [[0], [1]]):
        committed = cache
        for ids in some:
            committed, _ = kv.commit(committed, ids)
        assert kv.check_invariants(committed) == []
        found = kv.lookup(committed, tokens, [LENGTH] * 2, pair)
        assert found.tolist() == [BLOCK, 0]  # where a hash is taken, the second has no place
        assert int(kv.stats(committed).num_adoptions) == 0


@pytest.fixture
def one_bucket(monkeypatch):
    """All blocks belong into the first bucket, which has eight places."""
    jax.clear_caches()
    for module in (prefix_index, check_invariants):
        monkeypatch.setattr(module, "bucket_of", lambda index, hashes: (hashes[..., 0] & 0).astype(jnp.int32))
    yield
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize(("together", "num_blocks"), [(False, 1), (True, 2)])
def test_a_full_bucket_refuses_blocks_and_takes_them_later(one_bucket, together, num_blocks):
    config = dataclasses.replace(CONFIG, max_seqs=10, num_blocks=40)
    rows, prompts, length = np.arange(10), np.arange(90).reshape(10, 9), num_blocks * BLOCK
    cache, _ = kv.allocate(kv.init(config, storage=False), rows, np.full(10, length), tokens=prompts)
    cache, _ = jax.jit(kv.extend, static_argnames="max_new")(
        cache, np.full(10, length), max_new=length, tokens=prompts[:, :length]
    )
    for some in [rows] if together else rows[:, None]:
        cache, status = jax.jit(kv.commit)(cache, some)
        assert status.tolist() == [kv.Status.OK] * len(some)
        assert not kv.check_invariants(cache)
    num_found = 8 // num_blocks
    expected = length * (rows < num_found)
    np.testing.assert_array_equal(kv.lookup(cache, prompts, np.full(10, 9)), expected)
    cache, _ = kv.free(cache, [1, 2])
    cache, _ = kv.evict(cache, 2 * num_blocks)
    cache, _ = jax.jit(kv.commit)(cache)
    assert not kv.check_invariants(cache)
    expected = length * ((rows < num_found + 2) & (rows != 1) & (rows != 2))
    np.testing.assert_array_equal(kv.lookup(cache, prompts, np.full(10, 9)), expected)
