"""What one namespace owns reaches no row of another, whatever both did; and scrubbing leaves nothing."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax import testing
from tests.support.helpers import assert_same, leaf_bytes
from tests.support.prefix_user import owned_slots, with_nan
from tests.support.window_script import NAMESPACES, ROWS, WindowScript, grouped_config, num_cached

WINDOW = kv.SlidingWindow(2, 5, window=6, num_sink_tokens=3, max_rollback=2, block_size=2, num_blocks=40)
CONFIG = grouped_config(layers=[WINDOW, kv.FullAttention(1, 5), WINDOW])
scrub_rows = kv.donate(kv.scrub)
scrub_namespace = kv.donate(lambda cache, words: kv.scrub(cache, namespace=words))


@pytest.mark.slow
def test_case_ff_what_another_namespace_owns_is_not_read():
    """All but what one namespace owns is NaN again and again: in rows, cached, freed, evicted, rolled out."""
    script = WindowScript(5, 2, CONFIG)
    script.checked = {0}
    for i in range(450):
        script.step()
        if i % 5 == 0:
            script.cache = with_nan(script.cache, owned_slots(script.cache, NAMESPACES[0]))
            script.check("NaN elsewhere")
    found = script.totals()
    assert found["hits"] > 20 and found["evictions"] > 5, found


def residue(cache, script, space):
    """How many slots hold something that rows of a namespace wrote."""
    count = 0
    for layer, kind in enumerate(cache.config.layers):
        group_id, index = cache.config.locate(layer)
        num_blocks, pool = cache.control.block_pools[group_id].num_blocks, cache.pools[group_id]
        for is_value, half in enumerate((pool.k, pool.v)):
            values = np.asarray(half)[index * num_blocks : (index + 1) * num_blocks].swapaxes(1, 2)
            for code in script.codes([1, 2], space):
                want = testing.token_codes(
                    np.array([code]), layer, kind.num_kv_heads, kind.head_dim, bool(is_value)
                )
                count += int((values == want[0]).all(axis=(2, 3)).sum())
    return count


@pytest.mark.slow
def test_scrubbing_a_namespace_leaves_nothing_of_it_and_all_of_the_other():
    script, num_before, num_beside = WindowScript(6, 2, CONFIG), 0, 0
    for i in range(300):
        script.step()
        if i % 25 != 24:
            continue
        space = int(script.rng.integers(2))
        others = owned_slots(script.cache, NAMESPACES[1 - space])
        num_before += residue(script.cache, script, space)
        # Also in blocks of the other, after its tokens.
        blocks = with_nan(script.cache, [mask.any(axis=1, keepdims=True) for mask in others])
        num_beside += residue(blocks, script, space)
        prompts = [script.text(20) for _ in range(4)]
        found = [num_cached(script.cache, text, NAMESPACES[1 - space]) for text in prompts]
        kept = leaf_bytes(with_nan(script.cache, others).pools)
        script.cache, _ = scrub_namespace(script.cache, NAMESPACES[space])
        for row in [row for row, owner in script.spaces.items() if owner == space]:
            assert not script.cache.is_active[row]
            script.end(row)
        script.check("scrub")
        assert_same(kept, leaf_bytes(with_nan(script.cache, others).pools))
        assert residue(script.cache, script, space) == 0
        is_owned = others[script.cache.config.indexed_group].any(axis=1)
        assert not np.asarray(script.cache.control.prefix_index.block_tokens)[~is_owned].any()
        assert [num_cached(script.cache, text, NAMESPACES[space]) for text in prompts] == [0] * 4
        assert [num_cached(script.cache, text, NAMESPACES[1 - space]) for text in prompts] == found
    assert num_before > 500 and num_beside > 5, (num_before, num_beside)
    assert script.counts["hits"] > 15, script.counts


def free_blocks(cache):
    """Per group bool[num_blocks]."""
    return [
        np.asarray((pool.ref_count == 0) & ~pool.cached.is_published) for pool in cache.control.block_pools
    ]


@pytest.mark.slow
def test_scrubbing_rows_overwrites_what_they_alone_hold():
    script, num_own, num_behind = WindowScript(7, config=CONFIG), 0, 0
    for i in range(300):
        script.step()
        if i % 10 != 9:
            continue
        chosen = script.rng.integers(0, ROWS + 1, 2).tolist()
        is_row = np.isin(np.arange(ROWS), chosen) & np.asarray(script.cache.is_active)
        tables = [np.asarray(pool.block_table) for pool in script.cache.control.block_pools]
        own = [np.setdiff1d(table[is_row], table[~is_row]) for table in tables]
        before = free_blocks(script.cache)
        script.cache, count = scrub_rows(script.cache, jnp.array(chosen))
        for row in np.flatnonzero(is_row).tolist():
            script.end(row)
        script.check("scrub")
        freed = [after & ~old for after, old in zip(free_blocks(script.cache), before, strict=True)]
        for ids, mask, pool in zip(own, freed, script.cache.pools, strict=True):
            ids = ids[ids < len(mask)]
            assert mask[ids].all()
            for half in (pool.k, pool.v):
                assert not np.asarray(half).reshape(-1, len(mask), *half.shape[1:])[:, mask].any()
            num_own, num_behind = num_own + len(ids), num_behind + int(mask.sum()) - len(ids)
        assert int(count) == sum(mask.sum() for mask in freed)
    assert num_own > 50 and num_behind > 5, (num_own, num_behind)
