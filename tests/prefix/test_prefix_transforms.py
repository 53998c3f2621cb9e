"""The prefix cache under jit, vmap, scan, while_loop and export; what it costs, refuses and survives."""

import dataclasses
import functools
import math
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import Status
from kvcache_jax.blocks import block_pool
from kvcache_jax.operations import commit, evict, lookup, rows
from tests.support.few_kernels import compile_for_users
from tests.support.helpers import append_donated, append_tokens, assert_same, leaf_bytes, statuses
from tests.support.prefix_script import SCRIPT_CONFIG, PrefixDriver
from tests.support.prefix_user import CONFIG, TENANT_A, TENANT_B
from tests.support.script_configs import prefix_config

pytestmark = pytest.mark.contract

WIDTH = 48  # of all prompts, so that tests share programs, also those of `PrefixUser`
NEW = 16  # tokens of a call, at most
TEXTS = np.random.default_rng(3).integers(1, 3, (4, WIDTH)).astype(np.int32)
TEXTS[1:, :8] = TEXTS[0, :8]


def admit(cache, row, length, tokens, **options):
    """One row's prompt, in a call for four."""
    prompts = tokens[None].repeat(4, axis=0)
    return kv.allocate(cache, [row, *[4] * 3], [length, *[0] * 3], tokens=prompts, **options)


def append(cache, row, num_new, tokens):
    """The first of the tokens, by the one row."""
    num_new = np.where(np.arange(4) == row, num_new, 0).astype(np.int32)
    return append_donated(cache, tokens[None, :NEW].repeat(4, axis=0), num_new)


def commit_row(cache, row):
    return kv.commit(cache, [row, *[4] * 3])


LENGTHS = [[12, 9, 12, 11], [5, 12, 9, 12], [12, 12, 12, 12]]
REQUESTS = np.random.default_rng(0).choice([1, 2], (10, 2, WIDTH), p=[0.9, 0.1]).astype(np.int32)
NOBODY = [4, 4, 4, 4]  # rows to skip
NOTHING = dict(
    freed=NOBODY,
    namespace=TENANT_A,
    admitted=NOBODY,
    forked=[[4], [4]],  # source, target
    filled=[0, 0, 0, 0],  # up to so many tokens of the prompts
    committed=NOBODY,
    final_len=[2**31 - 1] * 4,
    num_evicted=0,
    truncated=[[4], [0]],  # row, length
)


def one_round(cache, now):
    """Release, admission, computation and publication of the rows that `now` names. Returns all results."""
    cache, freed = kv.free(cache, now["freed"])
    prompts = now["prompts"], now["lengths"]
    cache, admission = kv.allocate(
        cache, now["admitted"], prompts[1], tokens=prompts[0], namespace=now["namespace"]
    )
    cache, forked = kv.fork(cache, *now["forked"])
    # The rest of each prompt, moved to the front.
    columns = jnp.arange(NEW, dtype=jnp.int32)[None] + cache.context_len[:, None]
    rest = jnp.take_along_axis(jnp.asarray(prompts[0]), jnp.minimum(columns, WIDTH - 1), axis=1)
    cache, appended = append_tokens(cache, rest, jnp.maximum(now["filled"] - cache.context_len, 0))
    cache, committed = kv.commit(cache, now["committed"], final_len=now["final_len"])
    cache, num_evicted = kv.evict(cache, now["num_evicted"])
    cache, truncated = kv.truncate(cache, *now["truncated"])
    found = kv.lookup(cache, *prompts, now["namespace"]), kv.stats(cache)
    return cache, (freed, admission, forked, appended, committed, num_evicted, truncated, found)


def rounds_of(texts, lengths, requests):
    """Ten times two requests, each admitted, computed, published and released without the host.

    Then rows that begin alike: computed at once, adopted, freed, found, copied, evicted, forgotten.
    """
    rows = [0, 1, 4, 4]
    a, b, c, d = lengths
    served = dict(freed=rows, admitted=rows, lengths=[12, 10, 0, 0], filled=[12, 10, 0, 0], committed=rows)
    rounds = [
        *(dict(served, prompts=[*request, *request], namespace=[0] * 4) for request in requests),
        dict(
            freed=rows, admitted=rows, filled=[a, b, 0, 0], committed=[1, 0, 1, 4], final_len=[30, 10, 3, 0]
        ),
        dict(
            freed=[0, 4, 4, 4],
            admitted=[4, 4, 2, 3],
            forked=[[2], [0]],
            filled=[0, 0, c, d],
            committed=[2, 3, 4, 4],
            num_evicted=1,
            truncated=[[3], [5]],
        ),
        dict(prompts=3 - texts, filled=[0, 0, 0, 7], committed=[3, 4, 4, 4]),
    ]
    rounds = [NOTHING | dict(prompts=texts, lengths=lengths) | each for each in rounds]
    return {
        name: np.array([each[name] for each in rounds], np.uint32 if name == "namespace" else np.int32)
        for name in rounds[0]
    }


ROUNDS = rounds_of(TEXTS, LENGTHS[0], REQUESTS)
NUM_ROUNDS = len(ROUNDS["prompts"])


@jax.jit
def play(cache, rounds):
    return jax.lax.scan(one_round, cache, rounds)


@pytest.mark.slow
def test_scan_equals_eager():
    cache, results = kv.init(CONFIG), []
    for i in range(NUM_ROUNDS):
        cache, result = one_round(cache, {name: x[i] for name, x in ROUNDS.items()})
        assert kv.check_invariants(cache) == []
        results.append(result)
    stats = kv.stats(cache)
    for count in ("num_block_hits", "num_adoptions", "num_copies", "num_evictions"):
        assert int(getattr(stats, count)) > 0, count
    stacked = jax.tree.map(lambda *x: np.stack(x), *results)
    assert_same(play(kv.init(CONFIG), ROUNDS), (cache, stacked))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_x64_changes_no_dtype(policy):
    window = kv.SlidingWindow(1, 5, window=5, block_size=2, num_blocks=40)
    config = dataclasses.replace(CONFIG, layers=[*CONFIG.layers, window], eviction_policy=policy)

    def shapes():
        result = jax.eval_shape(lambda: play(kv.init(config), ROUNDS))
        return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(result)]

    plain = shapes()
    with jax.enable_x64(True):
        assert shapes() == plain


@pytest.mark.slow
def test_while_loops_over_independent_caches_under_vmap():
    """Each leaves the cache that a scan over its rounds alone does."""

    def play_in_loop(cache, rounds):
        def body(state):
            i, cache = state
            return i + 1, one_round(cache, {name: x[i] for name, x in rounds.items()})[0]

        return jax.lax.while_loop(lambda state: state[0] < NUM_ROUNDS, body, (jnp.int32(0), cache))[1]

    rounds = [rounds_of(np.roll(TEXTS, i, 1), LENGTHS[i], np.roll(REQUESTS, i, 2)) for i in range(3)]
    caches, stacked = jax.tree.map(lambda *x: np.stack(x), *((kv.init(CONFIG), each) for each in rounds))
    batched = jax.device_get(jax.jit(jax.vmap(play_in_loop))(caches, stacked))
    for i in range(3):
        alone, _ = play(kv.init(CONFIG), rounds[i])
        assert kv.check_invariants(alone) == []
        assert_same(jax.tree.map(lambda x, i=i: x[i], batched), jax.device_get(alone))


@pytest.mark.slow
def test_a_cache_with_published_blocks_survives_export():
    cache, _ = play(kv.init(CONFIG), ROUNDS)

    def go_on(cache, tokens):
        cache, freed = kv.free(cache, [0, *[4] * 3])
        cache, admission = admit(cache, 0, 11, tokens, namespace=TENANT_A)
        cache, committed = commit_row(cache, 3)
        return cache, (freed, admission, committed)

    tokens = TEXTS[0]
    restored = jax.export.deserialize(jax.export.export(jax.jit(go_on))(cache, tokens).serialize())
    got = restored.call(cache, tokens)
    assert got[0].config == CONFIG and int(got[1][1].num_cached[0]) > 0
    assert_same(got, go_on(cache, tokens))


def test_nothing_recompiles_whatever_the_prompts():
    programs = None
    cache = kv.init(CONFIG)
    for i in range(16):
        tokens, row = np.full(WIDTH, i % 3, np.int32), i % 4
        cache, admission = admit(cache, row, i % 31, tokens)
        kv.lookup(cache, tokens[None], [i])
        cache, _ = append(cache, row, i % 31 - int(admission.num_cached[0]), tokens)
        cache, _ = commit_row(cache, row)
        cache, _ = kv.evict(cache, i % 3)
        cache, _ = kv.free(cache, [(i + 2) % 4, *[4] * 3])
        jitted = [append_donated, rows._run, commit._commit, lookup._lookup, evict._evict]
        sizes = [fn._cache_size() for fn in jitted]
        programs = programs or sizes
        assert sizes == programs


def test_operations_hand_the_pools_on_by_reference():
    cache, _ = append(admit(kv.init(CONFIG), 0, 12, TEXTS[0])[0], 0, 12, TEXTS[0])
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache.pools)]
    for name, args in (
        ("commit", ([0, 4, 4, 4],)),
        ("free", ([0, 4, 4, 4],)),
        ("evict", (1,)),
        ("reset_prefix_cache", ()),
    ):
        cache, _ = getattr(kv, name)(cache, *args)
        assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache.pools)] == before, name


@pytest.mark.slow
def test_lookup_has_no_side_effect():
    """Asking neither counts as a use nor holds anything: the state and what goes next are the same."""
    cache, _ = play(kv.init(CONFIG), ROUNDS)
    before = leaf_bytes(cache)
    for namespace in (TENANT_A, TENANT_B, None):
        kv.lookup(cache, TEXTS, LENGTHS[0], namespace)
    assert_same(before, cache)


OPERATIONS = {
    "allocate": lambda c, ids, lens, texts: kv.allocate(c, ids, lens, tokens=texts),
    "extend": lambda c, ids, lens, texts: kv.extend(c, lens, max_new=3, seq_ids=ids, tokens=texts),
    "commit": lambda c, ids, lens, texts: kv.commit(c, ids),
    "free": lambda c, ids, lens, texts: kv.free(c, ids),
    "evict": lambda c, ids, lens, texts: kv.evict(c, lens[0]),
    "lookup": lambda c, ids, lens, texts: (c, kv.lookup(c, texts, lens)),
}


@pytest.mark.quick_cases("extend-1", "commit-1")
@pytest.mark.parametrize(("name", "num_rows"), [*((name, 1) for name in OPERATIONS), ("extend", 4)])
def test_compiled_operations_copy_no_array_of_blocks(name, num_rows):
    """Bytes beside the donated cache are fewer than in the smallest array with an entry per block.

    Of one row too: XLA dissolves loops of one trip, and may read again what was already written in place. A
    copy may also lie where the result goes.
    """
    window = kv.SlidingWindow(2, 64, window=64, num_sink_tokens=4, max_rollback=4)
    limits = dict(num_blocks=2**16, block_size=16, max_seqs=4, max_seq_len=512)
    config = kv.CacheConfig([kv.FullAttention(2, 64), window], **limits, enable_prefix_caching=True)
    cache = jax.eval_shape(functools.partial(kv.init, config, storage=False))
    ids, texts = (jax.ShapeDtypeStruct((num_rows, *shape), jnp.int32) for shape in ((), (3,)))
    compiled = compile_for_users(kv.donate(OPERATIONS[name]).lower(cache, ids, ids, texts))
    copied = re.findall(r" = \w+\[([\d,]+)\]\S* copy\(", compiled.as_text())
    assert max((math.prod(map(int, shape.split(","))) for shape in copied), default=0) < 2**16
    memory = compiled.memory_analysis()
    beside = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert beside < 2**16, beside


# --- the queue's positions count modulo 2**32 ---


@pytest.mark.slow
@pytest.mark.newest
@pytest.mark.parametrize("start", [2**32 - 4, 2**31 - 3])
def test_the_queue_wraps(start):
    """Random operations against the oracle while the positions of the eviction queue pass 2**32."""
    driver = PrefixDriver(SCRIPT_CONFIG, seed=start % 97)
    pool = driver.cache.control.block_pools[0]
    # Two arrays: what is donated must not be there twice.
    cached = dataclasses.replace(pool.cached, head=jnp.uint32(start), tail=jnp.uint32(start))
    pool = dataclasses.replace(pool, cached=cached)
    control = dataclasses.replace(driver.cache.control, block_pools=(pool,))
    driver.cache = dataclasses.replace(driver.cache, control=control)
    seen = []
    for _ in range(500):
        driver.step()
        cached = driver.cache.control.block_pools[0].cached
        seen.append((int(cached.head), int(cached.tail)))
    assert any((head - start) % 2**32 > 8 for head, _ in seen), "the queue did not move on"
    if start > 2**31:
        assert any(head > tail for head, tail in seen), "the queue never reached around"
    assert driver.oracle.num_evictions > 8


@pytest.mark.newest
@pytest.mark.parametrize("per_sweep", [4, 64])
@pytest.mark.parametrize("start", [3, 2**32 - 41])
def test_a_full_queue_is_swept_in_place(monkeypatch, per_sweep, start):
    """What is cached keeps its order, in as many entries; whatever stood between is gone."""
    monkeypatch.setattr(block_pool, "_ENTRIES_PER_SWEEP", per_sweep)
    rng, num_blocks = np.random.default_rng(per_sweep), 30
    pool = kv.init(prefix_config(num_blocks=num_blocks)).control.block_pools[0]
    positions = (start + np.arange(64)) % 2**32
    queue, queued_at = np.full(64, num_blocks, np.int32), np.zeros(num_blocks, np.uint32)
    for position, block in zip(positions, rng.integers(0, num_blocks, 64), strict=True):
        queue[position % 64], queued_at[block] = block, position
    ref_count = rng.integers(0, 2, num_blocks).astype(np.int32)
    is_published = rng.random(num_blocks) < 0.8
    order = np.argsort((queued_at - np.uint32(start)).astype(np.uint32))
    expected = [b for b in order.tolist() if is_published[b] and not ref_count[b] and b in queue]
    cached = dataclasses.replace(
        pool.cached,
        is_published=jnp.asarray(is_published),
        queue=jnp.asarray(queue),
        queued_at=jnp.asarray(queued_at),
        head=jnp.uint32(start),
        tail=jnp.uint32((start + 64) % 2**32),
    )
    # All others are referenced, so that there might be too few places for all that are released.
    cached = dataclasses.replace(cached, num_cached=jnp.int32(len(expected)))
    fields = dict(ref_count=jnp.asarray(ref_count), num_free=jnp.int32(0), cached=cached)
    sweep = jax.jit(block_pool.sweep_queue)
    swept = sweep(dataclasses.replace(pool, **fields), jnp.bool_(True)).cached
    places = (start + np.arange(len(expected))) % 2**32
    assert np.asarray(swept.queue)[places % 64].tolist() == expected and len(expected) > 5
    assert np.asarray(swept.queued_at)[expected].tolist() == places.tolist()
    assert int(swept.head) == start and int(swept.tail) == (start + len(expected)) % 2**32


# --- what is refused when the program is traced ---


def test_calls_that_change_nothing_sweep_nothing():
    """One prompt is found and freed again and again, so stale entries fill the queue; nothing is evicted."""
    cache, tokens, tails = kv.init(CONFIG), np.ones(WIDTH, np.int32), []
    for _ in range(40):
        cache, admission = admit(cache, 0, 9, tokens)
        cache, _ = append(cache, 0, 9 - int(admission.num_cached[0]), tokens)
        assert_same(commit_row(cache, 1)[0], cache)
        assert_same(admit(cache, 0, 9, tokens)[0], cache)
        cache, _ = commit_row(cache, 0)
        assert_same(commit_row(cache, 0)[0], cache)
        cache, _ = kv.free(cache, [0, *[4] * 3])
        assert kv.check_invariants(cache) == []
        tails.append(int(cache.control.block_pools[0].cached.tail))
    assert max(tails) > tails[-1], "the queue was never swept"


def test_blocks_of_unknown_content_are_refused():
    cache = jax.eval_shape(functools.partial(kv.init, CONFIG))
    k = jnp.ones((CONFIG.num_layers, 4, 1, 1, 5))
    for name, call in {
        "allocate": lambda c: kv.allocate(c, [0], [3]),
        "extend": lambda c: kv.extend(c, [1, 0, 0, 0], max_new=1),
        "append": lambda c: kv.append(c, k, k, [1, 0, 0, 0]),
    }.items():
        operation = "extend" if name == "append" else name
        with pytest.raises(TypeError, match=f"{operation} got no tokens.*expected tokens="):
            jax.eval_shape(call, cache)


@pytest.mark.slow
def test_commit_without_prefix_caching_is_refused():
    config = dataclasses.replace(CONFIG, enable_prefix_caching=False)
    with pytest.raises(ValueError, match=r"commit got a cache without.*enable_prefix_caching=True"):
        jax.eval_shape(lambda c: kv.commit(c, [0]), jax.eval_shape(functools.partial(kv.init, config)))


def test_namespaces_are_typed():
    names = [
        kv.namespace(**fields)
        for fields in (
            {},
            {"tenant": "a"},
            {"adapter": "a"},
            {"weights": "a"},
            {"tenant": "ab"},
            {"tenant": "a", "adapter": "b"},
            {"tenant": "b", "adapter": "a"},
            {"tenant": "1:a"},
            {"tenant": "a\x00"},
        )
    ]
    assert len({tuple(name.tolist()) for name in names}) == len(names)
    assert all(name.dtype == np.uint32 and name.shape == (4,) for name in names)
    assert not names[0].any() and (kv.namespace(tenant="a") == names[1]).all()
    for value in (3, b"a", None):
        with pytest.raises(TypeError, match="expected a str"):
            kv.namespace(tenant=value)
    cache = kv.init(CONFIG)
    for namespace in (
        np.zeros(4, np.int32),
        np.zeros(3, np.uint32),
        np.zeros((2, 4), np.uint32),
        [1, 2, 3, 4],
        7,
    ):
        with pytest.raises(ValueError, match=r"namespace is .*expected uint32 \(4,\)"):
            kv.lookup(cache, np.zeros((1, 8), np.int32), [8], namespace)
        with pytest.raises(ValueError, match=r"namespace is .*expected uint32 \(4,\)"):
            kv.allocate(cache, [0], [8], tokens=np.zeros((1, 8), np.int32), namespace=namespace)


def test_every_word_of_a_namespace_counts():
    cache, _ = admit(kv.init(CONFIG), 0, 8, TEXTS[0], namespace=TENANT_A)
    cache, status = append(cache, 0, 8, TEXTS[0])
    cache, committed = commit_row(cache, 0)
    assert statuses(status)[0] == statuses(committed)[0] == Status.OK
    near = np.tile(TENANT_A, (5, 1))
    near[np.arange(4), np.arange(4)] ^= np.array([1, 2**31, 2**16, 1], np.uint32)
    found = kv.lookup(cache, np.tile(TEXTS[:1], (5, 1)), [9] * 5, near)
    assert found.tolist() == [0, 0, 0, 0, 8]
