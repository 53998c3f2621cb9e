"""`OutOfBlocks.needed` is exact: with so many blocks available the call succeeds, with one fewer it fails."""

import contextlib
import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv

ROWS = 4
FULL = kv.FullAttention(1, 5)
WINDOW = kv.SlidingWindow(1, 5, window=5, num_sink_tokens=2, max_rollback=2, block_size=2, num_blocks=60)
SIZES = dict(num_blocks=60, block_size=4, max_seqs=ROWS, max_seq_len=32, max_query_len=8)
CONFIG = kv.CacheConfig([FULL, WINDOW], **SIZES, enable_prefix_caching=True)


class State:
    """What a manager is made of, to come back to with another number of free blocks."""

    def __init__(self, manager):
        self._manager, self._rows = manager, copy.deepcopy(manager._rows)
        self._cache = manager.query(lambda cache: jax.tree.map(np.array, cache))

    def restore(self, group=None, num_free=0):
        """With `num_free` blocks in the group, as if a row held the others, or (None) as it was."""
        cache = jax.tree.map(jnp.array, self._cache)
        if group is not None:
            pools = list(cache.control.block_pools)
            pools[group] = dataclasses.replace(pools[group], num_free=jnp.int32(num_free))
            cache = dataclasses.replace(
                cache, control=dataclasses.replace(cache.control, block_pools=tuple(pools))
            )
        self._manager._holder.cache, self._manager._rows = cache, copy.deepcopy(self._rows)


def check_needed(manager, call):
    """Runs into `OutOfBlocks` in each group; returns the errors. The manager is then as before."""
    state, errors = State(manager), []
    for group in range(len(manager._config.groups)):
        state.restore(group)
        try:
            call()
        except kv.manager.OutOfBlocks as raised:
            error = raised
        else:
            continue  # what is cached is enough
        errors.append(error)
        lack = error.needed - error.available
        assert lack > 0
        state.restore(group, lack)
        call()
        state.restore(group, lack - 1)
        with pytest.raises(kv.manager.OutOfBlocks) as caught:
            call()
        assert (caught.value.needed, caught.value.available) == (error.needed, error.needed - 1)
    state.restore()
    return errors


def random_call(rng, manager):
    """A call that takes blocks, of the present requests: its name, and a function without arguments."""
    names = manager.request_ids()

    def text(least, most):
        return rng.choice([1, 2], int(rng.integers(least, most)), p=[0.93, 0.07])

    if not names or rng.random() < 0.35:
        is_new = len(names) < ROWS and rng.random() < 0.6
        name = f"r{rng.integers(10**9)}" if is_new or not names else names[0]
        prompt = text(1, 30)
        return "allocate", lambda: manager.allocate_request(name, prompt, replace=True)
    room = {name: 32 - manager.num_computed_tokens(name) for name in names}
    new = {name: text(0, 9)[: room[name]] for name in rng.permutation(names)}
    return "append", lambda: manager.append_tokens(new)


def change(rng, manager):
    """Some operation that succeeds."""
    names, kind = manager.request_ids(), rng.choice(["take", "take", "commit", "fork", "truncate", "free"])
    if kind == "take" or not names:
        random_call(rng, manager)[1]()
        return
    name = names[rng.integers(len(names))]
    length = manager.num_computed_tokens(name)
    if kind == "commit" and manager._config.enable_prefix_caching:
        manager.commit_tokens(dict.fromkeys(names))
    elif kind == "fork" and len(names) < ROWS:
        manager.fork_request(name, f"r{rng.integers(10**9)}")
    elif kind == "truncate":
        with contextlib.suppress(kv.manager.WindowLost):  # hits after the window
            manager.truncate_request(name, max(length - int(rng.integers(3)), 0))
    elif kind == "free":
        manager.free_request(name)
    if rng.random() < 0.2:
        manager.evict(int(rng.integers(9)))


@pytest.mark.slow
def test_as_many_blocks_as_are_needed_are_enough_and_one_less_is_not():
    rng = np.random.default_rng(0)
    manager = kv.CacheManager(kv.init(CONFIG, storage=False), widths=[8])
    num_errors = dict(allocate=0, append=0)
    for _ in range(80):
        change(rng, manager)
        kind, call = random_call(rng, manager)
        num_errors[kind] += len(check_needed(manager, call))
    assert min(num_errors.values()) > 10, num_errors


@pytest.mark.slow
def test_rows_of_one_call_help_each_other():
    """A last owner that writes in place; a published block after its copy helps from the next call on."""
    manager = kv.CacheManager(kv.init(CONFIG, storage=False), widths=[8])

    def needed(new):
        state = State(manager)
        state.restore(0)
        with pytest.raises(kv.manager.OutOfBlocks) as caught:
            manager.append_tokens(new)
        state.restore()
        return caught.value.needed, caught.value.available

    for name in "abc":
        manager.allocate_request(name, [1] * 6, reuse=False)
    manager.append_tokens({"a": [1] * 6})
    manager.fork_request("a", "d")
    # The last of the owners writes in place.
    assert needed({"a": [2], "d": [2]}) == (1, 0)
    assert needed({"a": [2] * 8, "d": [2] * 8}) == (5, 0)
    manager.free_request("d")
    manager.append_tokens({"a": [1] * 2})
    manager.commit_tokens("a")
    manager.truncate_request("a", 7)
    # The published block after "a" is copied, and is no block for "b" in the same call.
    manager.append_tokens({"b": [3] * 8})
    assert needed({"a": [2], "b": [2] * 8}) == (3, 0)
    assert needed({"b": [2] * 8, "a": [2]}) == (3, 0)
