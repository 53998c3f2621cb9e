"""The operations under jit, scan, while_loop, vmap and export; what they cost and what they keep."""

import copy
import dataclasses
import json
import logging
import pickle

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import testing
from kvcache_jax.arrays import pytree
from kvcache_jax.core.config import config_from_json, config_to_json
from kvcache_jax.operations import rows
from tests.support.few_kernels import compile_for_users
from tests.support.helpers import ROOMY, compiled_programs

pytestmark = pytest.mark.contract

KIND = kv.FullAttention(2, 8)
CONFIG = kv.CacheConfig([KIND] * 2, **ROOMY)
WINDOW = kv.SlidingWindow(1, 8, window=5, num_sink_tokens=2, block_size=2, max_rollback=1)
GROUPED = kv.CacheConfig([KIND, WINDOW], num_blocks=30, block_size=4, max_seqs=4, max_seq_len=40)
TOKENS = np.arange(120, dtype=np.int32).reshape(4, 30)


def append_tokens(cache, tokens, num_new):
    cache, step = kv.extend(cache, num_new, max_new=tokens.shape[1])
    return testing.write_tokens(cache, tokens, step), step


# Shared by several tests, on `GROUPED` and tokens of width 2.
append_donated = kv.donate(append_tokens)

CALLS = ("allocate", "fork", "append", "reorder", "truncate", "touch", "set_priority", "free")


def one_round(cache, now):
    """Every operation once, on the rows that `now` names. Returns the cache and all results."""
    results = {}
    for name in CALLS:
        if name == "append":
            cache, results[name] = append_tokens(cache, now["tokens"], now["num_new"])
        else:
            cache, results[name] = getattr(kv, name)(cache, *now[name])
    results["row 0"] = kv.gather(cache, 0, 1), kv.num_blocks_needed(cache, now["num_new"])
    results["stats"] = kv.stats(cache)
    return cache, results


def rounds_of(rounds):
    """An array for each name in `one_round`, with an entry per round; row 4, to be skipped, pads lists."""
    shapes = dict.fromkeys(("fork", "reorder", "truncate", "set_priority"), (2, 2))
    shapes |= dict(allocate=(2, 4), touch=(1, 2), free=(1, 2))
    data = {name: np.full((len(rounds), *shape), 4, np.int32) for name, shape in shapes.items()}
    data["num_new"] = np.array([each.get("append", [0] * 4) for each in rounds], np.int32)
    data["tokens"] = np.stack([TOKENS + 1000 * i for i in range(len(rounds))])
    for i, each in enumerate(rounds):
        for name in each.keys() - {"append"}:
            data[name][i, :, : len(each[name][0])] = each[name]
    return data


# Each on states that matter to it, then single tokens.
ROUNDS = [
    dict(allocate=[[2, 0, 1], [9, 6, 1]], append=[6, 1, 7, 2]),
    dict(fork=[[2, 0], [3, 4]], append=[1, 0, 1, 1], reorder=[[0, 3], [3, 2]], truncate=[[0, 2], [7, 8]]),
    dict(append=[2, 2, 0, 1], touch=[[1, 4]], set_priority=[[1, 2], [5, 6]], free=[[1, 1]]),
    dict(allocate=[[1], [0]], append=[1, 0, 1, 1]),
    *(dict(append=[1, i % 2, 1, 1]) for i in range(12)),
]


@jax.jit
def play(cache, rounds):
    return jax.lax.scan(one_round, cache, rounds)


def assert_equal_bits(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.slow
def test_scan_equals_eager():
    rounds, cache, results = rounds_of(ROUNDS), kv.init(GROUPED), []
    for i in range(len(ROUNDS)):
        cache, result = one_round(cache, {name: x[i] for name, x in rounds.items()})
        assert kv.check_invariants(cache) == []
        results.append(result)
    assert int(kv.stats(cache).num_copies) > 0
    stacked = jax.tree.map(lambda *x: np.stack(x), *results)
    assert_equal_bits(play(kv.init(GROUPED), rounds), (cache, stacked))


@pytest.mark.slow
def test_vmap_over_independent_caches():
    """Each element does something else; rare branches (copies, failures) run for some and not for others."""
    firsts = [[3, 0, 0, 0], [9, 4, 1, 8], [0, 0, 30, 2]]
    seconds = [[1, 0, 0, 1], [2, 2, 0, 0], [0, 0, 9, 2]]
    rounds = [
        [
            dict(allocate=[[0, 1, 2, 3], first], append=first, free=[[3]]),
            dict(fork=[[0], [3]], append=second, truncate=[[0, 2], [1, 29]]),
            *ROUNDS[2:],
        ]
        for first, second in zip(firsts, seconds, strict=True)
    ]
    elements = [rounds_of(each) for each in (ROUNDS, *rounds)]
    caches, stacked = jax.tree.map(lambda *x: np.stack(x), *((kv.init(GROUPED), x) for x in elements))
    batched = jax.device_get(jax.jit(jax.vmap(play))(caches, stacked))
    num_copies = []
    for i, each in enumerate(elements):
        alone = play(kv.init(GROUPED), each)
        assert kv.check_invariants(alone[0]) == []
        assert_equal_bits(jax.tree.map(lambda x, i=i: x[i], batched), alone)
        num_copies.append(int(alone[1]["stats"].num_copies[1]))
    assert num_copies == [2, 2, 2, 0]
    is_failure = batched[1]["truncate"][:, 1, :2] > 0
    assert is_failure.any(axis=0).all() and not is_failure.all(axis=0).any()


def test_while_loop_equals_single_calls():
    """Appending `tokens[i]`, i = 0, 1, and so on, until row 0 has 12 tokens."""
    tokens = np.stack([TOKENS[:, :2] + 1000 * i for i in range(12)])
    num_new = np.array([[1, i % 2, 1, 1] for i in range(12)], np.int32)

    @jax.jit
    def append_in_loop(cache, tokens, num_new):
        def body(state):
            i, cache = state
            return i + 1, append_tokens(cache, tokens[i], num_new[i])[0]

        return jax.lax.while_loop(lambda state: state[1].context_len[0] < 12, body, (jnp.int32(0), cache))[1]

    start, _ = kv.allocate(kv.init(GROUPED), [0, 3], [3, 9])
    start, _ = kv.allocate(start, [1, 4], [0, 0])
    looped = append_in_loop(start, tokens, num_new)
    expected = start
    for now in zip(tokens, num_new, strict=True):
        expected, _ = append_donated(expected, *now)
    assert expected.context_len.tolist() == [12, 6, 0, 12]
    assert_equal_bits(looped, expected)


def test_a_stored_config_is_equal_to_one_of_this_process():
    """Hashes of strings differ between processes, so none is stored."""
    config = dataclasses.replace(GROUPED)
    object.__setattr__(config, "_hash", hash(config) + 1)  # as another process may have it
    again = pickle.loads(pickle.dumps(config))
    assert again == GROUPED and {again: 1} == {GROUPED: 1}


def test_prompts_of_any_width_are_one_program_without_prefix_caching():
    cache, _ = kv.allocate(kv.init(GROUPED), [0, 1], [2, 1], tokens=[[1, 2]] * 2)
    num_programs = rows._run._cache_size()
    for width in (1, 3, 5):
        cache, _ = kv.free(cache, [0, 1])
        prompts = dict(tokens=[[7] * width] * 2, items=[[[0, 1]] * width] * 2)
        cache, admission = kv.allocate(cache, [0, 1], [width, 1], **prompts)
        assert admission.status.tolist() == [kv.Status.OK] * 2
    assert rows._run._cache_size() <= num_programs + 1  # of free
    cache, admission = kv.allocate(kv.init(GROUPED), [0, 1], [0, 0], tokens=np.zeros((2, 0), np.int32))
    assert admission.status.tolist() == [kv.Status.OK] * 2


def test_nothing_recompiles_whatever_the_lengths():
    cache = kv.init(GROUPED)
    tokens = np.zeros((4, 2), np.int32)
    programs = None
    for i in range(14):
        cache, _ = kv.allocate(cache, [i % 4, (i + 1) % 4], [i, 2 * i])
        cache, _ = append_donated(cache, tokens, np.array([2, i % 3, 1, 0], np.int32))
        cache, _ = kv.fork(cache, [i % 4, 0], [(i + 2) % 4, 3])
        cache, _ = kv.truncate(cache, [i % 4, 1], [i // 2, 0])
        cache, _ = kv.reorder(cache, [0, 1], [i % 2, 0])
        cache, _ = kv.free(cache, [(3 * i) % 4, (i + 3) % 4])
        jitted = [append_donated, rows._run]
        sizes = [fn._cache_size() for fn in jitted]
        programs = programs or sizes
        assert sizes == programs


def test_control_operations_hand_the_pools_on_by_reference():
    cache, _ = kv.allocate(kv.init(GROUPED), [0, 1], [7, 3])
    cache, _ = kv.allocate(cache, [2, 4], [1, 0])
    for num_new in ([2, 2, 1, 0], [1, 1, 0, 0]):
        cache, _ = append_donated(cache, TOKENS[:, :2], np.array(num_new, np.int32))
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache.pools)]
    for name, *args in (
        ("free", [1, 2]),
        ("fork", [0, 0], [1, 2]),
        ("reorder", [0, 1], [1, 0]),
        ("truncate", [0, 1], [1, 1]),
        ("touch", [0, 1]),
        ("set_priority", [0, 1], [3, 4]),
        ("free", [0, 1]),
        ("allocate", [0, 1], [2, 2]),
    ):
        cache, result = getattr(kv, name)(cache, *args)
        assert not np.asarray(jax.tree.leaves(result)[0]).any(), name
        assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache.pools)] == pointers, name
    cache = kv.reset(cache)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache.pools)] == pointers
    assert_equal_bits(cache.control, kv.init(GROUPED).control)


def test_donation_reuses_the_pools_and_reset_keeps_them():
    cache, _ = kv.allocate(kv.init(GROUPED), [1, 4], [2, 0])
    old, address = cache, cache.pools[0].k.unsafe_buffer_pointer()
    cache, _ = append_donated(cache, TOKENS[:, :2], np.array([0, 2, 0, 0], np.int32))
    assert old.pools[0].k.is_deleted() and cache.pools[0].k.unsafe_buffer_pointer() == address
    fresh = kv.reset(cache)
    assert fresh.pools[0].k is cache.pools[0].k
    assert_equal_bits(fresh.control, kv.init(GROUPED).control)


NUM_BLOCKS = 2**18  # an array of so many entries would be seen beside all that has other sizes


def decode(cache):
    cache, step = kv.extend(cache, jnp.ones(4, jnp.int32), max_new=1)
    total = jnp.zeros(())
    for layer in range(2):
        x = jnp.full((4, 1, 1 if isinstance(cache.config.layers[layer], kv.SlidingWindow) else 2, 8), 2.0)
        cache, out = kv.attention(cache, layer, x, x, x, step)
        total += out.sum()
    return cache, total, step.status


def decode_scan(cache):
    """The layers in a scan: the pool is carried, never sliced."""
    cache, step = kv.extend(cache, jnp.ones(4, jnp.int32), max_new=1)

    def layer_fn(carry, layer):
        cache, x = carry
        cache, x = kv.attention(cache, layer, x, x, x, step)
        return (cache, x), None

    (cache, x), _ = jax.lax.scan(layer_fn, (cache, jnp.ones((4, 1, 2, 8))), jnp.arange(2))
    return cache, x, step.status


def decode_loop(cache):
    return jax.lax.fori_loop(0, 5, lambda i, c: decode(c)[0], cache)


def extend_one_row(cache):
    row = jnp.argmax(cache.control.is_active).astype(jnp.int32)[None]
    cache, step = kv.extend(cache, row + 1, max_new=1, seq_ids=row)
    return cache, step.status


def rewrite_some(cache):
    cache, step = kv.rewrite(cache, jnp.arange(4), jnp.arange(8).reshape(4, 2))
    x = jnp.ones((4, 2, 2, 8))
    for layer in range(2):
        cache, x = kv.attention(cache, layer, x, x, x, step)
    return cache, x, step.status


def stream(cache):
    cache, _ = kv.compression.drop(cache, jnp.arange(4), jnp.full(4, 2), jnp.full(4, 7))
    return decode(cache)


def move_sinks(cache):
    rotate = kv.chunks.key_rotation([1.0, 0.1], max_distance=40)
    columns = jnp.arange(4), jnp.full(4, 2), jnp.full(4, 7)
    return kv.compression.drop(cache, *columns, positions="cache", rotate=rotate)


def compress(cache):
    return kv.compression.compress(cache, jnp.arange(4), jnp.ones((4, 2, 2, 40)), jnp.full(4, 7))


def use_chunks(cache):
    rows, names = jnp.arange(3), jnp.zeros((3, 6), jnp.int32)
    cache, _ = kv.chunks.store(cache, rows, rows, rows + 3, names)
    ids = kv.chunks.find(cache, names, rows + 3)
    cache, _ = kv.chunks.compose(cache, rows, ids[:, None], ids[:, None] + 20, rotate=None)
    return kv.chunks.evict(cache, 4, num_blocks=50, keep=ids)


def read_sources(cache):
    k, v = ([jnp.ones((4, 14, kind.num_kv_heads, 3)) for kind in SOURCES[1:]] for _ in "kv")
    cache, _ = kv.write_source(cache, jnp.arange(4), k, v, jnp.ones(4, jnp.int32))
    cache, step = kv.extend(cache, jnp.ones(4, jnp.int32), max_new=1)
    for layer in (1, 3):
        cache, _ = kv.attend(cache, layer, jnp.ones((4, 1, 2, 3)), step)
    return cache, step.status


def control_of(name, *args):
    return lambda cache: getattr(kv, name)(cache, *args)


CROSS = kv.CrossAttention(1, 3, max_source_len=11)
SOURCES = [KIND, CROSS, kv.CrossAttention(2, 3, max_source_len=11, block_size=3), CROSS]
DROPPING, SINKS, STORE = kv.compression.Dropping(), kv.compression.Dropping(2), kv.chunks.Store(6, 6)
OF_ROWS = 4 * 40 * 2 * 2 * 8 * 4  # bytes of the rows in one layer and of their scores
# By name: layers, extras, the step, and the bytes beside the donated cache that it may need for itself.
STEPS = {
    "rewrite": ([KIND] * 2, [], rewrite_some, 0),
    "one row": ([KIND, WINDOW], [], extend_one_row, 0),
    "grouped": ([KIND, WINDOW], [], decode, 0),
    "scan": ([KIND] * 2, [], decode_scan, 0),
    "loop": ([KIND, WINDOW], [], decode_loop, 0),
    "free": ([KIND], [], control_of("free", [0, 1]), 0),
    "fork": ([KIND], [], control_of("fork", [0, 1], [2, 3]), 0),
    "reorder": ([KIND], [], control_of("reorder", [0, 1], [1, 0]), 0),
    "allocate": ([KIND], [], control_of("allocate", [0, 1], [9, 30]), 0),
    "truncate": ([KIND], [], control_of("truncate", [0, 1], [3, 1]), 0),
    "drop": ([KIND, WINDOW], [DROPPING], stream, 0),
    "moved sinks": ([KIND] * 2, [SINKS], move_sinks, 0),
    "compress": ([KIND] * 2, [DROPPING], compress, OF_ROWS),
    "chunks": ([KIND], [STORE], use_chunks, -3 * NUM_BLOCKS),  # not even a byte per block
    "sources": (SOURCES, [], read_sources, 0),
}


@pytest.mark.quick_cases("grouped", "fork", "allocate")
@pytest.mark.parametrize("name", STEPS)
def test_the_compiled_step_copies_no_pool_and_no_array_of_blocks(name):
    """Not even one i32 per block, of which a pool has at least a hundred times as many bytes."""
    kinds, extras, step, of_its_own = STEPS[name]
    scaled = [dataclasses.replace(kind, num_blocks=NUM_BLOCKS) for kind in kinds]
    config = kv.CacheConfig(scaled, block_size=4, max_seqs=4, max_seq_len=40, extras=extras)
    cache = jax.eval_shape(lambda: kv.init(config))
    memory = compile_for_users(kv.donate(step).lower(cache)).memory_analysis()
    beside = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert beside < 4 * NUM_BLOCKS + of_its_own < 0.01 * kv.memory_bytes(config), beside


@pytest.mark.slow
def test_a_step_and_a_cache_survive_export():
    cache, _ = kv.allocate(kv.init(GROUPED), [0, 1], [5, 9])
    tokens, num_new = jnp.asarray(TOKENS), jnp.array([2, 1, 0, 0])
    exported = jax.export.export(jax.jit(append_tokens))(cache, tokens, num_new)
    restored = jax.export.deserialize(exported.serialize())
    got, expected = restored.call(cache, tokens, num_new), append_tokens(cache, tokens, num_new)
    assert isinstance(got[0], kv.Cache) and isinstance(got[1], kv.Step)
    assert got[0].config == GROUPED and hash(got[0].config) == hash(GROUPED)
    assert_equal_bits(got, expected)


@pytest.mark.parametrize("version", [3, 5, "4", None])
def test_another_format_version_is_refused(version):
    data = json.loads(config_to_json(GROUPED))
    assert data["format_version"] == 4 and config_from_json(json.dumps(data).encode()) == GROUPED
    del data["format_version"]
    values = data if version is None else {**data, "format_version": version}
    got = "no format_version" if version is None else f"format_version {version!r}"
    says = f"has {got}, expected 4: export it again with this kvcache_jax, or load it with the one that"
    with pytest.raises(ValueError, match=says):
        config_from_json(json.dumps(values).encode())
    state = {**GROUPED.__getstate__(), "format_version": version}
    with pytest.raises(ValueError, match=says):
        copy.copy(GROUPED).__setstate__(state)


def test_an_exported_step_of_another_format_version_is_refused(monkeypatch):
    step = jax.eval_shape(lambda: kv.extend(kv.init(CONFIG), [0] * 4, max_new=1)[1])
    data = jax.export.export(jax.jit(lambda step: step.status + 1))(step).serialize()
    assert pickle.loads(pickle.dumps(CONFIG)) == CONFIG
    monkeypatch.setattr(pytree, "FORMAT_VERSION", 5)
    with pytest.raises(ValueError, match="has format_version 4, expected 5"):
        jax.export.deserialize(data)


def test_clock_and_counters_wrap():
    cache = kv.init(CONFIG)
    almost = jnp.full_like(cache.control.counters, 2**32 - 1)
    control = dataclasses.replace(cache.control, clock=jnp.uint32(2**32 - 1), counters=almost)
    cache = dataclasses.replace(cache, control=control)
    cache, _ = kv.allocate(cache, [0], [1])
    assert int(cache.control.clock) == 0 and int(cache.control.last_used[0]) == 0
    cache, _ = kv.extend(cache, [1, 0, 0, 0], max_new=1)
    cache, _ = kv.fork(cache, [0], [1])
    assert cache.control.last_used.tolist() == [1, 2, 0, 0]
    cache, _ = kv.extend(cache, [1, 0, 0, 0], max_new=1)
    cache, _ = kv.free(cache, [0])
    counts = cache.control.counters.tolist()
    assert counts == [0] * 4 + [2**32 - 1] * (len(counts) - 4)
    assert kv.check_invariants(cache) == []


@pytest.mark.slow
def test_x64_changes_no_dtype():
    rounds = rounds_of(ROUNDS)
    plain = play(kv.init(GROUPED), rounds)
    with jax.enable_x64(True):
        wide = play(kv.init(GROUPED), rounds)
    assert_equal_bits(wide, plain)


def test_operations_are_labelled_for_profilers():
    def every(cache):
        cache, _ = kv.allocate(cache, [0], [3])
        cache, step = kv.extend(cache, [1, 0, 0, 0], max_new=1)
        x = jnp.ones((4, 1, 2, 8))
        cache, _ = kv.attention(cache, 0, x, x, x, step)
        return kv.free(cache, [0])

    text = jax.jit(every).lower(kv.init(CONFIG)).as_text(debug_info=True)
    for name in ("allocate", "extend", "write", "attention", "free"):
        assert f"kvcache.{name}" in text


def test_a_vmapped_query_on_one_cache_is_refused():
    cache, _ = kv.allocate(kv.init(CONFIG), [0], [1])
    cache, step = kv.extend(cache, [1, 0, 0, 0], max_new=1)
    q = jnp.ones((5, 4, 1, 2, 8))
    with pytest.raises(ValueError, match="vmap maps q over 5 elements and got one cache"):
        jax.vmap(lambda q: kv.attend(cache, 0, q, step))(q)
    with pytest.raises(ValueError, match="expected one per element"):
        jax.vmap(jax.jit(lambda q: kv.attention(cache, 0, q, q, q, step)[1]))(q)
    with pytest.raises(ValueError, match="vmap maps k over 5 elements and got one cache"):
        jax.vmap(lambda k: kv.write(cache, 0, k, k, step).pools[0].k.sum())(q)


def test_a_traced_layer_that_does_not_exist_writes_nowhere_and_reads_nan():
    cache, _ = kv.allocate(kv.init(CONFIG), [0], [1])
    x = jnp.ones((4, 1, 2, 8))

    @jax.jit
    def attend_at(cache, layer):
        cache, step = kv.extend(cache, [1, 0, 0, 0], max_new=1)
        return kv.attention(cache, layer, x, x, x, step)

    for layer in (-1, 2, 2**31 - 1):
        after, out = attend_at(cache, layer)
        assert np.isnan(out[0]).all() and not np.asarray(out[1:]).any()
        assert_equal_bits(after.pools, cache.pools)
    assert not np.isnan(attend_at(cache, 1)[1]).any()


def test_init_compiles_nothing_and_gives_the_same_inside_jit():
    """But for the pools' zeros. `hyperbolic` keeps all that a policy may look at."""
    layers = [KIND, dataclasses.replace(WINDOW, num_blocks=21)]
    config = kv.CacheConfig(
        layers, num_blocks=19, block_size=4, max_seqs=3, max_seq_len=36, enable_prefix_caching=True,
        eviction_policy="hyperbolic",
    )  # fmt: skip
    kv.init(CONFIG, storage=False)
    with compiled_programs() as programs:
        kv.init(config, storage=False)
    assert not programs
    cache, traced = kv.init(config), jax.jit(lambda: kv.init(config))()
    assert_equal_bits(cache, traced)
    assert [*map(jax.typeof, jax.tree.leaves(cache))] == [*map(jax.typeof, jax.tree.leaves(traced))]
    taken, _ = kv.donate(lambda cache: kv.touch(cache, [0]))(cache)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))
    assert not any(leaf.committed for leaf in jax.tree.leaves(taken))


def test_init_logs_its_sizes_and_is_silent_by_default(caplog, capfd):
    with caplog.at_level(logging.INFO, logger="kvcache_jax"):
        kv.init(CONFIG)
    assert "24 blocks of 4 tokens" in caplog.text
    logging.getLogger("kvcache_jax").setLevel(logging.NOTSET)
    kv.init(CONFIG)
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_compiled_step_does_not_copy_the_block_table():
    def temporary_and_table_bytes(max_seq_len):
        config = kv.CacheConfig(
            [kv.FullAttention(1, 4)],
            num_blocks=2048,
            block_size=4,
            max_seqs=8,
            max_seq_len=max_seq_len,
            enable_prefix_caching=True,
        )
        cache = jax.eval_shape(lambda: kv.init(config, storage=False))
        tokens = jax.ShapeDtypeStruct((8, 1), jnp.int32)
        num_new = jax.ShapeDtypeStruct((8,), jnp.int32)
        step = jax.jit(lambda c, n, t: kv.extend(c, n, max_new=1, tokens=t), donate_argnums=0)
        memory = compile_for_users(step.lower(cache, num_new, tokens)).memory_analysis()
        return memory.temp_size_in_bytes, cache.control.block_pools[0].block_table.size * 4

    temporaries, tables = zip(*map(temporary_and_table_bytes, (1024, 8192)), strict=True)
    assert temporaries[1] - temporaries[0] < 0.1 * (tables[1] - tables[0])
