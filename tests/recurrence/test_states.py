"""States of recurrent layers in tables of blocks: every output is that of a row computed from nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.prefix.eviction import make_room
from tests.support.few_kernels import compile_for_users
from tests.support.hash_states import HashState, StatePerToken, expected
from tests.support.state_script import (
    BLOCK,
    StateScript,
    admit,
    config_of_states,
    padded_step,
    run_layers,
    start,
)

ONE_KIND = dict(kinds=[HashState])


def _config_of_snapshots(num_snapshots, **options):
    """Has keys for many prompts, and blocks for that many states beside the rows' own."""
    layers = [kv.FullAttention(1, 1), HashState(1, 1, num_blocks=6 * 6 + num_snapshots)]
    snapshots = kv.Snapshots(**options)
    return dataclasses.replace(config_of_states(num_blocks=200, snapshots=snapshots), layers=layers)


TWO_SNAPSHOTS = _config_of_snapshots(2)
AT_JUNCTIONS = _config_of_snapshots(9, eviction="tokens saved", at_prompt_end=False, at_end=False)


@pytest.mark.slow  # in `make test`: the cells of "points" in tests/kinds, and an engine with states
def test_no_row_is_given_a_wrong_state():
    script = StateScript(0, config_of_states())
    script.run(250)
    assert script.count["tokens computed"] > 500 and script.count["tokens cached"] > 100


@pytest.mark.slow
@pytest.mark.parametrize(
    "rollback, options",
    [
        (0, {}),
        (3, {"snapshots": kv.Snapshots(every=2 * BLOCK, at_junctions=False)}),
        (11, {"num_blocks": 60}),
        (2, {"block_size": 2 * BLOCK, "num_blocks": 20}),
        (8, {"enable_prefix_caching": False}),
    ],
)
def test_no_row_is_given_a_wrong_state_by_any_config(rollback, options):
    config = config_of_states(rollback, **options)
    if "block_size" in options:  # blocks of keys hold two of states
        layers = [
            dataclasses.replace(k, block_size=BLOCK) if isinstance(k, kv.Recurrent) else k
            for k in config.layers
        ]
        config = dataclasses.replace(config, layers=layers)
    script = StateScript(rollback, config)
    script.run(800)
    assert script.count["tokens computed"] > 1300
    assert (script.count["tokens cached"] > 200) == config.enable_prefix_caching


def test_a_junction_is_found_by_the_second_prompt_and_hit_by_the_third():
    cache = kv.init(AT_JUNCTIONS)
    shared, found = [1] * 29, []
    for tail in (0, 2, 1, 0):
        cache, admission = start(cache, shared + [tail] * 30)
        found.append((int(admission.num_cached[0]), int(admission.junction[0])))
        cache, _ = kv.free(cache, [0])
    # The last one is the first one's prompt again: its keys are all there, its states up to the junction.
    assert found == [(0, 0), (0, 24), (24, 0), (24, 56)]
    stats = kv.stats(cache)
    assert stats.num_tokens_without_state == 24 + 56 - 24


def test_what_keys_match_and_states_do_not_is_said():
    cache = kv.init(AT_JUNCTIONS)
    assert kv.describe(cache.config).endswith("with prefixes, of which 8 tokens are the least that hits")
    cache, _ = start(cache, [1] * 59)
    told = kv.inspect.explain(cache, [1] * 29 + [2] * 30)
    assert told.startswith("0 of 59 tokens are cached. The keys of 24 are, and no state of the recurrent")


def test_snapshots_take_the_bytes_that_they_may():
    def num_blocks(max_bytes):
        config = config_of_states(snapshots=kv.Snapshots(max_bytes=max_bytes))
        return {g: group.num_blocks for g, group in enumerate(config.groups)}

    groups = config_of_states().snapshot_groups  # by default as many blocks for snapshots as for the rows
    of_one = {g: group.span.num_prefix_blocks(group.block_size) for g, group in groups.items()}
    num_bytes = sum(group.block_bytes * of_one[g] for g, group in groups.items())
    for most, num in ((num_bytes, 1), (4 * num_bytes - 1, 3)):
        counts = num_blocks(most)
        assert {g: counts[g] - groups[g].num_blocks // 2 for g in groups} == {
            g: num * of_one[g] for g in groups
        }


@pytest.mark.slow
@pytest.mark.parametrize("is_end", [False, True])
def test_the_manager_keeps_the_last_state_of_what_is_complete(is_end):
    config = config_of_states(snapshots=kv.Snapshots(at_junctions=False, at_prompt_end=False), **ONE_KIND)

    def step_fn(cache, batch):
        return run_layers(cache, batch.step, batch.tokens)

    with kv.CacheManager(config, widths=[16]) as manager:
        assert manager.allocate_request("first", [1] * 48) == 0
        for start in range(0, 48, 16):
            manager.run(step_fn, manager.append_tokens("first", [1] * 16))
            manager.commit_tokens("first", is_end=is_end and start == 32)
        assert manager.allocate_request("second", [1] * 50) == (48 if is_end else 0)


def test_the_second_identical_prompt_hits_though_it_fills_its_blocks():
    cache = kv.init(TWO_SNAPSHOTS)
    prompt = np.random.default_rng(0).integers(3, size=48).tolist()
    for num_cached in (0, 40):
        cache, admission = start(cache, prompt)
        cache, _ = kv.free(cache, [0])
        assert admission.num_cached[0] == num_cached


def test_a_prefill_of_any_length_stores_one_point():
    cache = kv.init(config_of_states(0, enable_prefix_caching=False, max_query_len=96, **ONE_KIND))
    points = next(g for g, group in enumerate(cache.config.groups) if "points" in group.kind.label)
    cache, _ = kv.allocate(cache, [0], [90])
    cache, step = kv.extend(cache, [90, 0, 0, 0, 0, 0], max_new=96)
    assert cache.control.block_pools[points].ref_count.sum() == 1
    assert step.held.tolist() == [0] * 6


def test_a_state_that_no_prompt_asked_for_is_evicted_first():
    cache = kv.init(TWO_SNAPSHOTS)
    rng = np.random.default_rng(1)
    shared = rng.integers(3, size=29).tolist()
    for tail in (0, 1):  # the second keeps the state at the junction
        cache, _ = start(cache, shared + [tail] * 9)
        cache, _ = kv.free(cache, [0])
    for _ in range(40):  # ends of answers that are not continued
        cache, _ = start(cache, rng.integers(3, size=30).tolist())
        cache, _ = kv.free(cache, [0])
    assert kv.stats(cache).num_evictions > 0
    _, admission = admit(cache, shared + [2] * 21)
    assert admission.num_cached[0] == 24


@pytest.mark.parametrize("config, num_cached", [(TWO_SNAPSHOTS, (40, 48)), (AT_JUNCTIONS, (0, 0))])
def test_the_ends_of_prompts_and_rows_are_kept_if_wanted(config, num_cached):
    """The row goes on, so that only the prompt's own end could serve its repetition."""
    assert config.snapshots.at_prompt_end == config.snapshots.at_end == (num_cached > (0, 0))
    cache = kv.init(config)
    prompt = np.random.default_rng(3).integers(3, size=41).tolist()
    cache, _ = start(cache, prompt, commits=False)
    cache, _, _ = padded_step(cache, np.array([9, 0, 0, 0, 0, 0], np.int32), np.full((6, 20), 2, np.int32))
    cache, _ = kv.free(kv.commit(cache, [0])[0], [0])
    whole = [*prompt, *[2] * 9, 0]
    assert tuple(int(admit(cache, text)[1].num_cached[0]) for text in (prompt, whole)) == num_cached


def _num_saved(cache, group_id):
    """Walks from each published state to the one before it; {block: tokens between them}."""
    index, links = cache.control.prefix_index, cache.control.prefix_index.group_links[group_id]
    pool, parents = cache.control.block_pools[group_id], np.asarray(index.parent)
    found = {}
    for block in np.flatnonzero(np.asarray(pool.cached.is_published)).tolist():
        at, num = int(links.indexed_ids[block]), 0
        while num == 0 or (at < len(parents) and links.block_ids[at, 0] == pool.num_blocks):
            at, num = int(parents[at]), num + BLOCK
        found[block] = num
    return found


def test_the_state_that_saves_the_fewest_tokens_for_its_age_is_evicted_first():
    cache = kv.init(AT_JUNCTIONS)
    [group_id] = cache.config.snapshot_groups

    @jax.jit
    def evict_one(control):
        return make_room(control, {group_id: control.block_pools[group_id].num_free + 1}, cache.config)

    rng, num_evicted = np.random.default_rng(5), 0
    texts = [rng.integers(3, size=90).tolist() for _ in range(3)]
    for _ in range(40):
        text = texts[rng.integers(3)]
        cut = int(rng.integers(1, 90))
        cache, _ = start(cache, [*text[:cut], *rng.integers(3, size=6).tolist()])
        cache, _ = kv.free(cache, [0])
    while saved := _num_saved(cache, group_id):
        cached = cache.control.block_pools[group_id].cached
        age = {block: float(cached.tail - cached.queued_at[block]) for block in saved}
        worst = max(saved, key=lambda block: age[block] / saved[block])
        cache = dataclasses.replace(cache, control=evict_one(cache.control))
        num_evicted += 1
        assert {*_num_saved(cache, group_id)} == {*saved} - {worst}
    assert num_evicted > 20 and kv.check_invariants(cache) == []


def test_a_block_that_fills_is_folded_whatever_its_rollback():
    """A token at a time, no token can be taken back, and the last of a block is stored until it is folded."""
    layers = [kv.FullAttention(1, 1), HashState(1, 1)]
    cache = kv.init(kv.CacheConfig(layers, num_blocks=16, block_size=BLOCK, max_seqs=6, max_seq_len=96))
    cache, _ = kv.allocate(cache, [0, 3], [0, 0])
    text, step = np.random.default_rng(2).integers(3, size=21).astype(np.int32), kv.donate(_plain_step)
    for place, token in enumerate(text):
        # The second row is three tokens shorter.
        new = np.zeros((6, 1), np.int32)
        new[0], new[3] = token, text[place - 3] if place >= 3 else 0
        cache, out = step(cache, np.array([1, 0, 0, int(place >= 3), 0, 0], np.int32), new)
        assert (out[0, 0] == expected(text[: place + 1].tolist())[-1]).all(), place
        assert place < 3 or (out[3, 0] == expected(text[: place - 2].tolist())[-1]).all(), place


def test_a_state_of_drafts_is_not_published():
    """No more than the tokens that stay, though the row holds later states."""
    cache = kv.init(TWO_SNAPSHOTS)
    prompt = np.random.default_rng(3).integers(3, size=24).tolist()
    cache, _ = start(cache, prompt, commits=False)
    cache, _ = kv.commit(cache, [0], final_len=[15])
    assert kv.check_invariants(cache) == []
    _, admission = admit(cache, prompt, row=1)
    assert admission.num_cached[0] == 0 and admission.junction[0] == 8
    cache, _ = kv.commit(cache, [0])
    _, admission = admit(cache, prompt, row=1)
    assert admission.num_cached[0] == 16


@pytest.mark.parametrize("width", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_a_donated_step_copies_no_pool(width):
    layers = [kv.FullAttention(1, 1), *[HashState(1, 1, width=1024, num_blocks=2**13)] * 2]
    config = kv.CacheConfig(layers, num_blocks=64, block_size=BLOCK, max_seqs=6, max_seq_len=96)
    cache = jax.eval_shape(lambda: kv.init(config))
    num_new = jax.ShapeDtypeStruct((6,), jnp.int32)
    program = kv.donate(_plain_step).lower(cache, num_new, jax.ShapeDtypeStruct((6, width), jnp.int32))
    memory = compile_for_users(program).memory_analysis()
    assert memory.temp_size_in_bytes < 0.05 * kv.memory_bytes(config), memory


def _plain_step(cache, num_new, tokens):
    cache, step = kv.extend(cache, num_new, max_new=tokens.shape[1], tokens=tokens)
    return run_layers(cache, step, tokens)


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: config_of_states(partial_hits=True),
            "partial_hits=True and layers.1. is HashState, expected",
        ),
        (
            lambda: config_of_states(
                enable_prefix_caching=False, extras=[kv.compression.Dropping()], max_seq_len=96
            ),
            "tokens to be dropped and layers.1. is HashState",
        ),
        (
            lambda: config_of_states(extras=[kv.chunks.Store(2, 8)]),
            "expected layers whose keys can be rotated",
        ),
        (
            lambda: dataclasses.replace(
                config_of_states(), layers=[kv.FullAttention(1, 1), HashState(1, 1, block_size=16)]
            ),
            "blocks of 16 tokens, and the blocks by which prefixes are found have 8",
        ),
        (
            lambda: (
                dataclasses.replace(
                    config_of_states(), layers=[kv.FullAttention(1, 1), HashState(1, 1, num_blocks=5)]
                ).groups
            ),
            "have num_blocks = 5, expected at least",
        ),
        (lambda: HashState(1, 1, max_rollback=-1), "max_rollback is -1"),
        (lambda: kv.Snapshots(every=0), "every is 0"),
        (lambda: kv.Snapshots(eviction="lru"), "snapshots.eviction is 'lru', expected one of"),
        (lambda: kv.Snapshots(eviction=np.ones(2)), "snapshots.eviction is array.*, expected one of"),  # type: ignore
        (lambda: kv.GatedDeltaNet(1, 1, key_dim=1, decay=np.ones(2)), "decay is array.*, expected 'head'"),  # type: ignore
        (lambda: config_of_states(snapshots=8), "snapshots is 8, expected kvcache_jax.Snapshots"),
        (lambda: config_of_states(snapshots=kv.Snapshots(every=12)), "every is 12, expected a multiple of 8"),
        (
            lambda: config_of_states(snapshots=kv.Snapshots(every=8), enable_prefix_caching=False),
            "there is no prefix cache to keep them, expected enable_prefix_caching=True",
        ),
        (lambda: config_of_states(snapshots=kv.Snapshots(max_bytes=1)), "max_bytes is 1, expected at least"),
        (
            lambda: kv.CacheConfig([HashState(1, 1)], memory_budget=100, max_seqs=6, max_seq_len=96),
            "memory_budget is 100 bytes, expected at least .* the states of all max_seqs rows",
        ),
    ],
)
def test_configs_that_states_cannot_serve_are_refused(make, message):
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        make()


def test_calls_that_do_not_fit_are_refused():
    cache = kv.init(config_of_states(enable_prefix_caching=False, **ONE_KIND))
    keys, tokens = np.zeros((6, 4, 1, 1), np.float32), np.zeros((6, 4), np.uint32)

    def call(cache):
        cache, step = kv.extend(cache, [3, 0, 0, 0, 0, 0], max_new=4)
        with pytest.raises(ValueError, match="layer 1 is of HashState entries, expected a layer of keys"):
            kv.attention(cache, 1, keys, keys, keys, step)
        with pytest.raises(ValueError, match="layer 1 is of HashState"):
            kv.gather(cache, 0, layer=1)
        with pytest.raises(ValueError, match="layer 0 is FullAttention, expected a recurrent one"):
            kv.recurrence(cache, 0, {"token": tokens}, step)
        with pytest.raises(ValueError, match=r"token has shape \(6, 3\), expected \(6, 4, '...'\)"):
            kv.recurrence(cache, 1, {"token": tokens[:, :3]}, step)
        for new, found in ((tokens, "a ndarray"), ({}, "empty")):
            with pytest.raises(ValueError, match=f"new is {found}, expected .name: array., the inputs of H"):
                kv.recurrence(cache, 1, new, step)
        with pytest.raises(NotImplementedError, match="rewrite and layers"):
            kv.rewrite(cache, [0], [[1]])
        with pytest.raises(NotImplementedError, match="drop and layers.1. is HashState, expected layers of"):
            kv.compression.drop(cache, [0], [1], [1])

    jax.eval_shape(call, cache)  # nothing is compiled


def test_layers_out_of_order_are_refused():
    """One after another of each kind; again from the first one on, as by a function that is traced twice."""
    cache = kv.init(
        config_of_states(enable_prefix_caching=False, kinds=[HashState, StatePerToken, HashState])
    )

    def extend():
        return kv.extend(cache, [3, 0, 0, 0, 0, 0], max_new=4)[1]

    def call(step, *layers):
        for layer in layers:
            kv.recurrence(cache, layer, {"token": jnp.zeros((6, 4), jnp.uint32)}, step)

    def trace(*layers):
        jax.eval_shape(lambda: call(extend(), *layers))

    trace(1, 2, 3, 1, 1, 3)
    trace(2, 1, 3)
    message = r"got layer 3 and not yet layer 1 with this step, expected layers \[1, 3\] in this order"
    for layers in ([3], [2, 3, 1]):
        with pytest.raises(ValueError, match=message):
            trace(*layers)
    jax.eval_shape(lambda step: call(step, 3, 1), jax.eval_shape(extend))  # not known
