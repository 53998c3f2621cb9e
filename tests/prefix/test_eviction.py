"""Eviction policies: every victim is predicted, children go before parents, and lru pays for nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.core.eviction_policy import eviction_keys, policies
from kvcache_jax.prefix import victim_heap
from tests.oracle.blocks import EVICTION_KEYS, OracleBlock
from tests.support.few_kernels import compile_for_users
from tests.support.prefix_script import (
    MIXED,
    NAMESPACES,
    PROMPT_WIDTH,
    allocate,
    commit,
    mixed_policy,
    policy_config,
)
from tests.support.random_script import ENTRIES, ROWS, WIDTH, append_some, padded

LAYERS = [kv.FullAttention(1, 5)]


@pytest.mark.parametrize("policy", [name for name in EVICTION_KEYS if name != "lru"])
def test_keys_have_the_oracles_order(policy):
    rng, clock = np.random.default_rng(0), 50
    blocks = [
        OracleBlock(*map(int, rng.integers(0, clock, 2)), *map(int, rng.integers(0, 9, 3))) for _ in range(99)
    ]
    metadata = kv.policies.BlockMetadata(
        recency=np.arange(99),
        num_hits=np.array([block.num_hits for block in blocks]),
        age=np.array([clock - block.published_at for block in blocks]),
        priority=np.array([block.priority for block in blocks]),
    )
    keys = np.asarray(eviction_keys(policy, metadata))
    expected = np.array([EVICTION_KEYS[policy](block, clock) for block in blocks])
    assert (np.sign(keys[:, None] - keys) == np.sign(expected[:, None] - expected)).all()


def config_of(policy, num_blocks=8, **options):
    sizes = dict(num_blocks=num_blocks, block_size=2, max_seqs=4, max_seq_len=16)
    return kv.CacheConfig(LAYERS, **sizes, enable_prefix_caching=True, eviction_policy=policy, **options)


MIXED_CONFIG = config_of(kv.policies.InBatches(MIXED, 2))


@kv.donate
def serve_each(cache, prompts, lengths, priorities):
    """Requests from beginning to end, one after the other; those without tokens are skipped.

    One of a negative priority begins without an end, in row 1.
    """

    def serve_one(cache, request):
        prompt, length, priority = request
        nobody = cache.max_seqs
        row = jnp.where(length > 0, jnp.where(priority < 0, 1, 0), nobody)
        cache, admission = kv.allocate(
            cache, row[None], length[None], tokens=prompt[None], priority=priority[None]
        )
        new = jnp.roll(prompt, -admission.num_cached[0])[None]
        num_new = length - admission.num_cached
        cache, step = kv.extend(cache, num_new, max_new=prompt.shape[0], seq_ids=row[None], tokens=new)
        cache, _ = kv.commit(cache, row[None])
        cache, _ = kv.free(cache, jnp.where(priority < 0, nobody, row)[None])
        return cache, jnp.maximum(admission.status[0], step.status[0])

    return jax.lax.scan(serve_one, cache, (prompts, lengths, priorities))


def serve(cache, requests):
    """Serves up to 8 pairs of a prompt and its priority."""
    prompts, lengths, priorities = np.zeros((8, 8), np.int32), np.zeros(8, np.int32), np.zeros(8, np.int32)
    for i, (prompt, priority) in enumerate(requests):
        prompts[i, : len(prompt)], lengths[i], priorities[i] = prompt, len(prompt), priority
    cache, status = serve_each(cache, prompts, lengths, priorities)
    assert not np.asarray(status)[: len(requests)].any()
    return cache


def cached_lens(cache, prompts):
    """How many tokens of each prompt are cached; {prompt: length}."""
    tokens = np.zeros((len(prompts), 5), np.int32)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = prompt
    found = kv.lookup(cache, tokens, [len(prompt) + 1 for prompt in prompts])
    return dict(zip(prompts, found.tolist(), strict=True))


A, B, C = (1, 1), (2, 2), (3, 3)


@pytest.mark.quick_cases("fifo-requests0-gone0")
@pytest.mark.parametrize(
    ("policy", "requests", "gone"),
    [
        ("fifo", [(A, 0), (B, 0), ((*A, 9), 0)], A),
        ("priority", [(A, 5), (B, 1), (C, 2)], B),
        ("priority", [(A, 5), (B, 1), (C, 2), ((*B, 9), 7)], C),  # the last user's
        ("priority", [(A, 5), (B, 1), (C, 2), ((*A, 9), 0)], A),
    ],
)
def test_the_least_valuable_block_goes(policy, requests, gone):
    cache = serve(kv.init(config_of(policy), storage=False), requests)
    check_that_it_goes(cache, [A, B, C], [prompt[:2] for prompt, _ in requests], gone)


def check_that_it_goes(cache, contents, held, gone):
    """Of some contents of one block the cache has `held`, and evicts `gone` first."""
    is_there = {prompt for prompt, length in cached_lens(cache, contents).items() if length}
    assert is_there == {*held}
    cache, num_evicted = kv.evict(cache, 1)
    assert int(num_evicted) == 1 and not kv.check_invariants(cache)
    assert {prompt for prompt in is_there if not cached_lens(cache, contents)[prompt]} == {gone}


def serve_in_steps(cache, prompts):
    """Serves prompts by the programs of the random scripts."""
    words, row = np.array([NAMESPACES[0]] * ENTRIES, np.uint32), np.array([0, *[ROWS] * (ENTRIES - 1)])
    for prompt in prompts:
        cache, admission = allocate(
            cache,
            row,
            np.array([len(prompt), *[0] * (ENTRIES - 1)]),
            tokens=padded([prompt, *[()] * (ENTRIES - 1)], PROMPT_WIDTH),
            namespace=words,
            priority=np.zeros(ENTRIES, int),
        )
        new = prompt[int(admission.num_cached[0]) :]
        num_new = np.array([len(new), *[0] * (ROWS - 1)])
        tokens = padded([new, *[()] * (ROWS - 1)], WIDTH)
        cache, status = append_some(cache, tokens, num_new, np.arange(ROWS))
        assert not int(admission.status[0]) and not int(status[0])
        cache, _ = commit(cache, row, final_len=np.full(ENTRIES, 2**31 - 1))
        cache, _ = kv.free(cache, row)
    return cache


AA, BB, CC = A + A, B + B, C + C  # a block of those scripts each


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "batch", "prompts", "gone"),
    [
        ("lfu", 3, [AA, (*AA, 9), BB, (*BB, 9), (*BB, 9), CC, (*CC, 9)], AA),
        # A has two uses in 8 ticks, B two in 4, C one in 2, or in 4 after another request.
        ("hyperbolic", 1, [AA, (*AA, 9), BB, (*BB, 9), CC], AA),
        ("hyperbolic", 1, [AA, BB, (*AA, 9), (*AA, 9), CC, (*CC, 9)], BB),
        ("lfu", 3, [AA, (*AA, 9), BB], BB),  # though it was used last
    ],
)
def test_the_least_used_block_goes(policy, batch, prompts, gone):
    cache = serve_in_steps(kv.init(policy_config(policy, batch)), prompts)
    check_that_it_goes(cache, [AA, BB, CC], [prompt[:4] for prompt in prompts], gone)


@pytest.mark.parametrize(("num_blocks", "expected"), [(2**31, 2), (2**40, 2), (-(2**40), 0)])
def test_wide_numbers_of_blocks_mean_all_or_none(num_blocks, expected):
    cache = serve(kv.init(config_of("fifo"), storage=False), [(A, 0), (B, 0)])
    assert int(kv.evict(cache, num_blocks)[1]) == expected


@pytest.mark.parametrize("policy", ["fifo", pytest.param("lru", marks=pytest.mark.slow)])
def test_an_eviction_ends_with_the_cached_blocks_where_the_count_of_them_is_wrong(policy):
    """The loop ends, so that a fault elsewhere shows as a wrong number and not as a program that hangs."""
    cache = serve(kv.init(config_of(policy), storage=False), [(A, 0), (B, 0)])
    (pool,) = cache.control.block_pools
    pool = dataclasses.replace(
        pool, cached=dataclasses.replace(pool.cached, num_cached=pool.cached.num_cached + 3)
    )
    control = dataclasses.replace(cache.control, block_pools=(pool,))
    cache, _ = kv.evict(dataclasses.replace(cache, control=control), 5)
    assert cached_lens(cache, [A, B]) == {A: 0, B: 0}
    assert int(cache.control.block_pools[0].num_free) == cache.config.num_blocks


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_parent_counts_as_its_most_valuable_child(batch):
    """The beginning of the prompt has priority 0, as others have; its continuation has 9."""
    cache = kv.init(config_of("priority"), storage=False)
    long_a, long_b = (*A, 4, 4), (*B, 6, 6)
    # The second, a hit, sets the beginning's to 9, and the third sets it back to 0.
    cache = serve(cache, [(A, 0), (long_a, 9), ((*A, 5), 0), (long_b, 1)])
    assert int(kv.stats(cache).num_evictions) == 0  # up to here, so the batch has not mattered yet
    cache = dataclasses.replace(cache, config=config_of(kv.policies.InBatches("priority", batch)))
    order = []
    for _ in range(4):
        before = cached_lens(cache, [long_a, long_b])
        cache, num_evicted = kv.evict(cache, 1)
        assert int(num_evicted) == 1 and not kv.check_invariants(cache)
        after = cached_lens(cache, [long_a, long_b])
        order += [prompt[0] for prompt in before if after[prompt] < before[prompt]]
    assert order == [2, 2, 1, 1]
    assert int(kv.evict(cache, 1)[1]) == 0


def test_a_parent_of_two_does_not_compete_while_one_is_left():
    """It is older than both of them."""
    cache = serve(kv.init(config_of("fifo"), storage=False), [((*A, 4, 4), 0), ((*A, 6, 6), 0), (B, 0)])
    cache, num_evicted = kv.evict(cache, 2)
    assert int(num_evicted) == 2 and not kv.check_invariants(cache)
    assert cached_lens(cache, [A, B]) == {A: 2, B: 2}


def test_a_parent_that_a_row_holds_does_not_compete():
    """It is older than all that is cached, and its last child goes first."""
    cache = serve(kv.init(config_of("fifo"), storage=False), [((*A, 4, 4), 0), (B, 0), ((*A, 5), -1)])
    assert cache.context_len.tolist() == [0, 3, 0, 0]
    cache, num_evicted = kv.evict(cache, 2)
    assert int(num_evicted) == 2 and not kv.check_invariants(cache)
    assert cached_lens(cache, [A, B]) == {A: 2, B: 0}


@pytest.mark.slow
def test_a_parent_whose_children_go_together_goes_once():
    cache = kv.init(config_of("priority"), storage=False)
    cache = serve(cache, [((*A, 4, 4), 0), ((*A, 6, 6), 0), (B, 1), (C, 2)])
    cache = dataclasses.replace(cache, config=config_of(kv.policies.InBatches("priority", 2)))
    cache, num_evicted = kv.evict(cache, 4)
    assert int(num_evicted) == 4 and not kv.check_invariants(cache)
    assert cached_lens(cache, [A, B, C]) == {A: 0, B: 0, C: 2}


def test_the_least_are_taken_in_order():
    """Of three groups, the last of them not full, as some leave and some enter, in part again."""
    rng, num_blocks = np.random.default_rng(1), 600
    start, push = jax.jit(victim_heap.start), jax.jit(victim_heap.push)
    pop = jax.jit(victim_heap.pop, static_argnums=2)
    for trial in range(6):
        keys = rng.choice([-(2**31), -5, -1, 0, 1, 7, 2**31 - 1], num_blocks).astype(np.int32)
        recency = rng.permutation(num_blocks).astype(np.int32) * (2**31 // num_blocks)
        is_left = rng.random(num_blocks) < (0.05 if trial else 0)
        left = set(np.flatnonzero(is_left).tolist())
        heap = start(is_left, keys, recency)
        for _ in range(40):
            is_wanted = bool(rng.random() < 0.8)
            heap, taken = pop(heap, jnp.bool_(is_wanted), num_blocks)
            least = min(left, key=lambda b: (keys[b], recency[b]), default=num_blocks)
            assert int(taken) == (least if is_wanted else num_blocks)
            left -= {int(taken)}
            entering = int(rng.integers(num_blocks + 1)) if rng.random() < 0.3 else num_blocks
            # A pool's nowhere, which may lie within the last group, is handed over as one past its end.
            heap = push(heap, jnp.int32(entering if entering < num_blocks else heap.key.size))
            left |= {entering} - {num_blocks}


def test_lru_keeps_no_history():
    """Only what a policy asks for exists."""
    index = kv.init(config_of("lru"), storage=False).control.prefix_index
    assert index.history is None
    history = kv.init(config_of("lfu"), storage=False).control.prefix_index.history
    kept = {name for name, field in vars(history).items() if field is not None}
    assert kept == {"num_children", "num_hits"}


@pytest.mark.slow
def test_a_policy_evicts_inside_jit_and_scan():
    """Admission, publication and eviction under one jit, a policy of one's own in it."""

    rng = np.random.default_rng(0)
    cache = kv.init(MIXED_CONFIG, storage=False)
    for _ in range(8):
        cache = serve(cache, [(prompt, 0) for prompt in rng.integers(0, 3, (8, 5))])
        assert not kv.check_invariants(cache)
    assert int(kv.stats(cache).num_evictions) > 20


@pytest.mark.slow
def test_broken_histories_are_found():
    cache = serve(kv.init(MIXED_CONFIG, storage=False), [((*A, *B, 7), 0)])
    index = cache.control.prefix_index

    def violations(**fields):
        history = dataclasses.replace(index.history, **fields)
        control = dataclasses.replace(cache.control, prefix_index=dataclasses.replace(index, history=history))
        return " ".join(kv.check_invariants(dataclasses.replace(cache, control=control)))

    history = index.history
    assert violations() == ""
    assert "children and counts" in violations(num_children=history.num_children + 1)
    assert "is at depth 1, noted 2" in violations(depth=history.depth + 1)
    assert "negative number of hits" in violations(num_hits=history.num_hits - 1)
    assert "before it was published" in violations(last_used_at=history.last_used_at - 1)


def test_a_config_names_its_policy():
    assert policies.names[:5] == ("lru", "lfu", "fifo", "priority", "hyperbolic")
    with pytest.raises(ValueError, match="eviction_policy is 'newest', expected one of 'lru', 'lfu'"):
        config_of("newest")
    with pytest.raises(ValueError, match="expected enable_prefix_caching=True with it"):
        kv.CacheConfig(LAYERS, eviction_policy="lfu")
    with pytest.raises(ValueError, match="batch_size is 0, expected at least 1"):
        config_of(kv.policies.InBatches("lfu", 0))


def test_registration_refuses_what_cannot_work():
    with pytest.raises(ValueError, match="there is an eviction policy 'lfu' already, expected a new name"):
        kv.policies.eviction_policy("lfu")
    with pytest.raises(ValueError, match=r"needs is \['colour'\], expected some of \['age', 'depth'"):
        kv.policies.eviction_policy("test: by colour", needs=["colour"])
    with pytest.raises(TypeError, match="expected a str: write @kvcache_jax.policies.eviction_policy"):
        kv.policies.eviction_policy(mixed_policy)
    for needs in (None, 3, "age", [1], [["age"]]):
        with pytest.raises(ValueError, match=r"needs is .*, expected some of \['age', 'depth'"):
            kv.policies.eviction_policy("test: unmade", needs=needs)
    with pytest.raises(TypeError, match="the eviction policy 'test: unmade' is 3, expected a function"):
        kv.policies.eviction_policy("test: unmade")(3)
    first, second = kv.policies.eviction_policy("test: twice"), kv.policies.eviction_policy("test: twice")
    first(mixed_policy)
    by_generator = kv.policies.eviction_policy(
        "test: by a generator", needs=(field for field in ["age", "depth"])
    )
    by_generator(mixed_policy)
    assert policies.find("test: by a generator").needs == {"age", "depth"}
    for decorator in (first, second):
        with pytest.raises(ValueError, match="there is an eviction policy 'test: twice' already"):
            decorator(mixed_policy)

    @kv.policies.eviction_policy("test: halves", needs=["num_hits"])
    def halves(blocks):
        return blocks.num_hits / 2

    @kv.policies.eviction_policy("test: forgot")
    def forgot(blocks):
        return blocks.num_hits

    @kv.policies.eviction_policy("test: forgot one", needs=["num_hits"])
    def forgot_one(blocks):
        return blocks.num_hits - blocks.age

    for name, match in (
        ("forgot", r"'test: forgot' returned a NoneType, expected int32(?s:.*)has needs=\[\]"),
        ("forgot one", r"unsupported operand(?s:.*)'test: forgot one' has needs=\['num_hits'\]"),
    ):
        with pytest.raises(TypeError, match=match):
            kv.evict(kv.init(config_of(f"test: {name}"), storage=False), 1)
    with pytest.raises(TypeError, match=r"'test: halves' returned float32\[8\], expected int32\[8\]"):
        kv.evict(kv.init(config_of("test: halves"), storage=False), 1)


@pytest.mark.slow
def test_an_exported_program_knows_its_policy():
    cache = kv.init(MIXED_CONFIG, storage=False)
    exported = jax.export.export(jax.jit(lambda cache: kv.evict(cache, 1)))(cache)
    loaded = jax.export.deserialize(exported.serialize())
    cache = serve(cache, [((*A, *B, 7), 0)])
    after, num_evicted = loaded.call(cache)
    assert int(num_evicted) == 1 and after.config == cache.config and not kv.check_invariants(after)


def test_eviction_copies_nothing_of_the_pools_size():
    """Temporaries are the keys of the blocks, not copies of what is kept of them."""

    def temporaries(num_blocks):
        config = config_of("lfu", num_blocks=num_blocks)
        lowered = kv.donate(lambda cache: kv.evict(cache, 5)).lower(kv.init(config, storage=False))
        return compile_for_users(lowered).memory_analysis().temp_size_in_bytes

    assert temporaries(8_000) - temporaries(1_000) <= 7_000 * 20
