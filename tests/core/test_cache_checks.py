"""Stacked, traced and donated caches: taken where that is possible, and refused by name where it is not."""

import contextlib
import dataclasses
import gc
import inspect

import jax
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import testing
from tests.support.hash_states import StatePerToken

CONFIG = kv.CacheConfig(
    [kv.FullAttention(2, 8), kv.SlidingWindow(2, 8, window=5)],
    num_blocks=8,
    block_size=4,
    max_seqs=3,
    max_seq_len=20,
    enable_prefix_caching=True,
)
Q, K = np.zeros((3, 2, 4, 8), np.float32), np.zeros((3, 2, 2, 8), np.float32)
TOKENS = np.zeros((3, 2), np.int32)
ROWS, ONES = [0, 1, 2], [1, 1, 1]

CONTENTS = kv.tiers.export_blocks(kv.init(CONFIG), [0])

# Every public function of a cache; those of the device take `(cache, step)` here, those of the host a cache.
ON_DEVICE = {
    "allocate": lambda cache, step: kv.allocate(cache, ROWS, ONES, tokens=TOKENS),
    "append": lambda cache, step: kv.append(cache, [K, K], [K, K], ONES, tokens=TOKENS),
    "attend": lambda cache, step: kv.attend(cache, 0, Q, step),
    "attention_scores": lambda cache, step: kv.attention_scores(cache, 0, K, step),
    "attention": lambda cache, step: kv.attention(cache, 0, Q, K, K, step),
    "chunk_deviation": lambda cache, step: kv.chunks.deviation(cache, 0, K, K, step),
    "commit": lambda cache, step: kv.commit(cache, ROWS),
    "evict": lambda cache, step: kv.evict(cache, 1),
    "eviction_candidates": lambda cache, step: kv.tiers.eviction_candidates(cache, 1),
    "export_blocks": lambda cache, step: kv.tiers.export_blocks(cache, [0]),
    "import_blocks": lambda cache, step: kv.tiers.import_blocks(cache, CONTENTS),
    "preempt_to_utilization": lambda cache, step: kv.preempt_to_utilization(cache, 0.5),
    "extend": lambda cache, step: kv.extend(cache, ONES, max_new=2, tokens=TOKENS),
    "fork": lambda cache, step: kv.fork(cache, ROWS, ROWS),
    "free": lambda cache, step: kv.free(cache, ROWS),
    "gather": lambda cache, step: kv.gather(cache, 0, 0),
    "lookup": lambda cache, step: kv.lookup(cache, np.zeros((3, 5), np.int32), ONES),
    "num_available_blocks": lambda cache, step: kv.num_available_blocks(cache),
    "num_blocks_needed": lambda cache, step: kv.num_blocks_needed(cache, ONES),
    "poison": lambda cache, step: testing.poison(cache),
    "reorder": lambda cache, step: kv.reorder(cache, ROWS, ROWS),
    "reset": lambda cache, step: kv.reset(cache),
    "reset_prefix_cache": lambda cache, step: kv.reset_prefix_cache(cache),
    "rewrite": lambda cache, step: kv.rewrite(cache, ROWS, np.zeros((3, 1), np.int32)),
    "scrub": lambda cache, step: kv.scrub(cache, ROWS),
    "select_rows_to_preempt": lambda cache, step: kv.select_rows_to_preempt(cache, "lru", 2),
    "set_priority": lambda cache, step: kv.set_priority(cache, ROWS, ONES),
    "stats": lambda cache, step: kv.stats(cache),
    "token_scores": lambda cache, step: kv.compression.token_scores(cache, 0, K, step, "recency"),
    "touch": lambda cache, step: kv.touch(cache, ROWS),
    "truncate": lambda cache, step: kv.truncate(cache, ROWS, ONES),
    "utilization": lambda cache, step: kv.utilization(cache),
    "write": lambda cache, step: kv.write(cache, 0, K, K, step),
    "write_tokens": lambda cache, step: testing.write_tokens(cache, TOKENS, step),
}
ON_HOST = {
    "CacheManager": kv.CacheManager,
    "block_map": kv.block_map,
    "check_invariants": kv.check_invariants,
    "check_tokens": lambda cache: testing.check_tokens(cache, {}),
    "draw_block_map": kv.inspect.draw_block_map,
    "explain": lambda cache: kv.inspect.explain(cache, [1, 2]),
    "save": lambda cache: kv.tiers.save(cache, kv.tiers.MemoryStore(), weights="w"),
}
# Those of other caches: a config, and a call.
SIZES = dict(num_blocks=8, block_size=4, max_seqs=3, max_seq_len=20)
CHUNKS = kv.CacheConfig([kv.FullAttention(2, 8)], **SIZES, extras=[kv.chunks.Store(2, 4)])
HOSTED = kv.CacheConfig(
    [kv.FullAttention(2, 8)], **SIZES, enable_prefix_caching=True, extras=[kv.tiers.Host(4)]
)
TURNS = dataclasses.replace(HOSTED, extras=[kv.policies.Conversations()])
STATES = kv.CacheConfig([kv.FullAttention(2, 8), StatePerToken(1, 1)], **SIZES)


def _step_of_states():
    shapes = jax.eval_shape(lambda: kv.extend(kv.init(STATES), ONES, max_new=2)[1])
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)


OF_OTHERS = {
    "chunk_metadata": (CHUNKS, lambda cache: kv.chunks.metadata(cache, [[0]] * 3, [[0]] * 3)),
    "compose": (
        CHUNKS,
        lambda cache: kv.chunks.compose(cache, ROWS, [[0]] * 3, [[0]] * 3, rotate=None),
    ),
    "evict_chunks": (CHUNKS, lambda cache: kv.chunks.evict(cache, 1)),
    "find_chunks": (CHUNKS, lambda cache: kv.chunks.find(cache, TOKENS, ONES)),
    "free_chunks": (CHUNKS, lambda cache: kv.chunks.free(cache, ONES)),
    "store_chunk": (CHUNKS, lambda cache: kv.chunks.store(cache, ROWS, ONES, ONES, TOKENS)),
    "compress": (
        kv.CacheConfig([kv.FullAttention(2, 8)], **SIZES, extras=[kv.compression.Dropping()]),
        lambda cache: kv.compression.compress(cache, ROWS, np.ones((len(ROWS), 20), np.float32), ONES),
    ),
    "drop": (
        kv.CacheConfig([kv.FullAttention(2, 8)], **SIZES, extras=[kv.compression.Dropping()]),
        lambda cache: kv.compression.drop(cache, ROWS, ONES, ONES),
    ),
    "drop_to_utilization": (
        kv.CacheConfig([kv.FullAttention(2, 8)], **SIZES, extras=[kv.compression.Dropping()]),
        lambda cache: kv.compression.drop_to_utilization(cache, 0.5),
    ),
    "set_time": (TURNS, lambda cache: kv.policies.set_time(cache, 1.0)),
    "set_turns": (TURNS, lambda cache: kv.policies.set_turns(cache, ROWS, ONES)),
    "demote_to_utilization": (HOSTED, lambda cache: kv.tiers.demote_to_utilization(cache, 0.5)),
    "host_stats": (HOSTED, kv.tiers.host_stats),
    "prefetch": (HOSTED, lambda cache: kv.tiers.prefetch(cache, TOKENS, ONES)),
    "recurrence": (
        STATES,
        lambda cache: kv.recurrence(cache, 1, {"token": TOKENS.astype(np.uint32)}, _step_of_states()),
    ),
    "write_source": (
        kv.CacheConfig([kv.FullAttention(2, 8), kv.CrossAttention(2, 8, max_source_len=2)], **SIZES),
        lambda cache: kv.write_source(cache, ROWS, K[None], K[None], ONES),
    ),
}


@pytest.fixture(scope="module")
def cache():
    return kv.init(CONFIG)


@pytest.fixture(scope="module")
def stacked(cache):
    return jax.tree.map(lambda x: np.stack([x, x]), cache)


@pytest.fixture(scope="module")
def step(cache):
    _, step = jax.eval_shape(ON_DEVICE["extend"], cache, None)
    return step


@pytest.fixture(scope="module")
def started(cache):
    """The cache with a token in every row, and the step that reserved it."""
    cache, _ = ON_DEVICE["allocate"](cache, None)
    return ON_DEVICE["extend"](cache, None)


def test_no_function_is_forgotten():
    spaces = kv, *(value for name in kv.__all__ if inspect.ismodule(value := getattr(kv, name)))
    functions = [getattr(space, name) for space in spaces for name in space.__all__]
    takes_cache = {
        function.__name__
        for function in functions
        if inspect.isroutine(inspect.unwrap(function))
        and [*inspect.signature(function).parameters][:1] == ["cache"]
    }
    assert takes_cache | {"CacheManager"} == ON_DEVICE.keys() | ON_HOST.keys() | OF_OTHERS.keys()


@pytest.mark.parametrize("name", [*ON_DEVICE, *ON_HOST])
def test_stacked_caches_are_refused(stacked, step, name):
    match = rf"^{name} got a batched cache, is_active has shape \(2, 3\), expected \(max_seqs,\): .*x\[i\]"
    with pytest.raises(ValueError, match=match):
        if name in ON_HOST:
            ON_HOST[name](stacked)
        else:
            ON_DEVICE[name](stacked, step)


@pytest.mark.parametrize("name", [*ON_DEVICE, *ON_HOST])
@pytest.mark.parametrize("kind", [tuple, object])
def test_what_is_no_cache_is_refused(cache, step, name, kind):
    """Such as the pair that an operation returned, or what jit would not take."""
    wrong = (cache, None) if kind is tuple else object()
    call = ON_HOST[name] if name in ON_HOST else lambda wrong: ON_DEVICE[name](wrong, step)
    with pytest.raises(TypeError, match=f"a {kind.__name__}, expected a (CacheConfig or a )?Cache"):
        call(wrong)


@pytest.mark.parametrize("name", ON_DEVICE)
def test_what_is_refused_works_under_vmap_and_scan(stacked, step, name):
    def both(stacked, step):
        mapped = jax.vmap(ON_DEVICE[name], in_axes=(0, None))(stacked, step)
        _, scanned = jax.lax.scan(lambda _, cache: (None, ON_DEVICE[name](cache, step)), None, stacked)
        return mapped, scanned

    mapped, scanned = jax.eval_shape(both, stacked, step)
    assert jax.tree.leaves(mapped) == jax.tree.leaves(scanned)


@pytest.mark.parametrize("name", OF_OTHERS)
def test_operations_of_other_caches_refuse_and_take_the_same(name):
    config, operation = OF_OTHERS[name]
    stacked = jax.tree.map(lambda x: np.stack([x, x]), kv.init(config))
    with pytest.raises(ValueError, match=f"^{name} got a batched cache"):
        operation(stacked)
    with pytest.raises(TypeError, match=f"^{name} got a object, expected a Cache"):
        operation(object())
    with pytest.raises(TypeError, match=f"^{name} got a ShapeDtypeStruct in the cache, expected arrays"):
        operation(jax.eval_shape(lambda: kv.init(config)))
    mapped = jax.eval_shape(jax.vmap(operation), stacked)
    _, scanned = jax.eval_shape(lambda x: jax.lax.scan(lambda _, x: (None, operation(x)), None, x), stacked)
    assert jax.tree.leaves(mapped) == jax.tree.leaves(scanned)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_OTHERS)
def test_operations_of_other_caches_say_that_those_were_donated(name):
    config, operation = OF_OTHERS[name]
    donated = kv.init(config)
    kv.donate(lambda cache: cache)(donated)
    with pytest.raises(ValueError, match=f"^{name} got a cache that was donated, .*call returned"):
        operation(donated)


@pytest.mark.parametrize("name", ON_DEVICE)
def test_a_trace_leaves_no_tracer_behind(step, name):
    # A size that no other test has: what was traced before is not traced, nor looked at, again.
    cache = kv.init(dataclasses.replace(CONFIG, num_blocks=9))
    gc.freeze()  # the check looks at all objects that are not, after each function that it traces
    try:
        with jax.checking_leaks():
            jax.eval_shape(ON_DEVICE[name], cache, dataclasses.replace(step, config=cache.config))
    finally:
        gc.unfreeze()


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_DEVICE)
def test_a_cache_that_was_fetched_to_the_host_is_taken(started, name):
    got, expected = (ON_DEVICE[name](*args) for args in (jax.device_get(started), started))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ON_HOST)
def test_the_host_wants_values(cache, name):
    for transform in (jax.jit, lambda f: lambda c: jax.vmap(f)(jax.tree.map(lambda x: x[None], c))):
        with pytest.raises(TypeError, match=f"^{name} got a .*Tracer in the cache, .* outside of jit"):
            transform(lambda cache: ON_HOST[name](cache) and 0)(cache)
    with pytest.raises(TypeError, match=f"^{name} got a ShapeDtypeStruct in the cache"):
        ON_HOST[name](jax.eval_shape(lambda: kv.init(CONFIG)))


def test_shapes_are_no_cache(step):
    shapes = jax.eval_shape(lambda: kv.init(CONFIG))
    for name, operation in ON_DEVICE.items():
        with pytest.raises(TypeError, match=f"^{name} got a ShapeDtypeStruct in the cache, expected arrays"):
            operation(shapes, step)


@pytest.mark.parametrize(("leaf", "name"), [(None, "NoneType"), (0, "int")])
def test_what_a_cache_was_mapped_to_is_no_cache(cache, step, leaf, name):
    """Such as the axes that vmap maps, or what a partition of its leaves left out."""
    other = jax.tree.map(lambda x: leaf, cache)
    calls = {operation: (call, (other, step)) for operation, call in ON_DEVICE.items()}
    calls |= {operation: (call, (other,)) for operation, call in ON_HOST.items()}
    for operation, (call, args) in calls.items():
        says = f"^{operation} got a {name} in the cache, expected arrays"
        try:
            with pytest.raises(TypeError, match=says):
                call(*args)
        except AttributeError as error:
            raise AssertionError(f"{operation} looks at what is no array") from error


@pytest.mark.slow
def test_donated_caches_say_so(step):
    cache = kv.init(CONFIG)
    kept = kv.donate(lambda cache: cache)(cache)
    assert repr(cache) == "Cache(2 groups, 2 layers, float32; donated, its arrays are deleted)"
    for name, question in ON_HOST.items():
        with pytest.raises(ValueError, match=f"^{name} got a cache that was donated, .*call returned"):
            question(cache)
    step = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), step)
    for operation in ON_DEVICE.values():  # may be made of others
        with pytest.raises(ValueError, match=r"^\w+ got a cache that was donated, .*call returned"):
            operation(cache, step)
    assert "rows 0/3 active" in repr(kept)


def test_donated_caches_say_so_without_a_prefix_cache_too():
    cache = kv.init(kv.CacheConfig([kv.FullAttention(1, 8)], num_blocks=4, max_seqs=2, max_seq_len=8))
    assert kv.lookup(cache, [[1, 2]], [2]).tolist() == [0]
    kv.donate(lambda cache: cache)(cache)
    for name, ask in (
        ("lookup", lambda: kv.lookup(cache, [[1, 2]], [2])),
        ("evict", lambda: kv.evict(cache, 1)),
        ("reset_prefix_cache", lambda: kv.reset_prefix_cache(cache)),
    ):
        with pytest.raises(ValueError, match=f"^{name} got a cache that was donated, .*call returned"):
            ask()


def test_a_cache_of_anything_can_be_shown(cache):
    for of_leaf in (lambda x: x.shape, lambda x: x.sharding, lambda x: None):
        try:
            assert "block_table" in repr(jax.tree.map(of_leaf, cache))
        except AttributeError as error:
            raise AssertionError("it is not shown") from error


def test_states_that_are_traced_can_be_shown(started):
    shown = []
    with contextlib.suppress(jax.errors.ConcretizationTypeError):
        jax.eval_shape(
            lambda cache, step: shown.extend(map(repr, (cache.control, cache.pools, step))), *started
        )
    assert len(shown) == 3 and all("Tracer(" in text for text in shown)


def test_states_that_were_donated_can_be_shown(started):
    def shown(state):
        try:
            return repr(state)
        except RuntimeError as error:
            raise AssertionError(f"it is not shown: {error}") from error

    cache, step = jax.tree.map(np.array, started)
    state = jax.device_put((cache.control, cache.pools, step))
    assert "deleted" not in shown(state)
    jax.tree.map(lambda x: x.delete(), state)
    control, pools, step = map(shown, state)
    assert "is_active='deleted bool[3]', context_len='deleted int32[3]'" in control
    assert "KVPool(arrays={'k': 'deleted float32[8, 2, 4, 8]'" in pools and "table_row='deleted" in step
