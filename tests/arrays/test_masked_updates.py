"""Reads and updates at computed places, against numpy: those outside are skipped, negative ones too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvcache_jax.arrays import masked_updates
from kvcache_jax.arrays.masked_updates import (
    count_down,
    first_of_equal,
    first_true,
    get_at,
    last_of_equal,
    rank_true,
    run_if,
    run_of,
    set_at,
)

OUTSIDE = -(2**31), -7, -1, 7, 8, 2**31 - 1
IN_ALL = pytest.mark.parametrize("num_more", [0, 40], ids=["compared", "scattered"])
"""Entries outside, added to a test's own: few entries are compared with each place."""


def test_reads_outside_give_the_fill():
    array = np.arange(10, 17, dtype=np.int32)
    places = np.array([0, *OUTSIDE, 6, 3], np.int32)
    read = jax.jit(get_at)
    assert read(array, places, 5).tolist() == [10, *[5] * len(OUTSIDE), 16, 13]
    without_fill = read(array, places).tolist()
    assert set(without_fill) <= {*range(10, 17)} and without_fill[-2:] == [16, 13]
    table = np.arange(14, dtype=np.int32).reshape(7, 2)
    assert read(table, np.array([2, 7, -1], np.int32), 9).tolist() == [[4, 5], [9, 9], [9, 9]]
    rows, columns = np.array([[1], [7], [2]], np.int32), np.array([[-1, 0, 1, 2]], np.int32)
    assert read(table, (rows, columns), 9).tolist() == [[9, 2, 3, 9], [9] * 4, [9, 4, 5, 9]]


@IN_ALL
@pytest.mark.parametrize("how", ["set", "add", "min", "max"])
def test_updates_skip_what_is_outside(how, num_more):
    update = jax.jit(getattr(masked_updates, f"{how}_at"))
    array = np.full(7, 4, np.int32)
    kept = {"set": 9, "add": 13, "min": 4, "max": 9}[how]
    outside = [*OUTSIDE, *[-1] * num_more]
    assert update(array, np.array([*outside, 5], np.int32), 9).tolist() == [4, 4, 4, 4, 4, kept, 4]
    values = np.arange(len(outside), dtype=np.int32)
    assert update(array, np.array(outside, np.int32), values).tolist() == [4] * 7
    assert update(array, np.zeros(0, np.int32), 9).tolist() == [4] * 7
    places = np.array([0, 7, 2, -1], np.int32), np.array([0, 0, 1, -1], np.int32)
    found = update(array.reshape(7, 1), places, 9)
    assert found[:, 0].tolist() == [kept, 4, 4, 4, 4, 4, 4]


@IN_ALL
@pytest.mark.parametrize("how", ["set", "add", "min", "max"])
def test_rows_of_several_axes_are_updated_at_equal_entries_too(how, num_more):
    rng, update = np.random.default_rng(2), jax.jit(getattr(masked_updates, f"{how}_at"))
    more = np.full((2, num_more), 5)
    for _ in range(10):
        array = rng.integers(0, 99, (5, 2), dtype=np.uint32)
        places = np.concatenate([rng.integers(-1, 7, (2, 4)), more], axis=1).astype(np.int32)
        values = rng.integers(0, 99, (*places.shape, 2), dtype=np.uint32)
        found = np.asarray(update(jnp.asarray(array), jnp.asarray(places), jnp.asarray(values)))
        assert found.dtype == array.dtype
        for place, (old, new) in enumerate(zip(array, found, strict=True)):
            named = values[places == place]
            if how == "set" and len(named):
                assert new.tolist() in named.tolist()
            else:
                combine = {"set": np.add, "add": np.add, "min": np.minimum, "max": np.maximum}[how]
                assert new.tolist() == combine.reduce([old, *named]).tolist()


@IN_ALL
def test_the_last_of_equal_entries_takes_the_last_one(num_more):
    """Random counts and entries, some of them outside; the counts never get negative."""
    rng, count = np.random.default_rng(0), jax.jit(count_down)
    for _ in range(30):
        places = np.pad(rng.integers(-2, 9, (3, 4)), [(0, 0), (0, num_more)], constant_values=-1)
        inside = [place for place in places.flat if 0 <= place < 7]
        counts = np.bincount(inside, minlength=7) + rng.integers(0, 2, 7)
        left, expected = counts.copy(), []
        for place in places.flat:
            is_inside = 0 <= place < 7
            left[place if is_inside else 0] -= is_inside
            expected.append(bool(is_inside and left[place] == 0))
        found, is_last = count(jnp.asarray(counts, jnp.int32), jnp.asarray(places, jnp.int32))
        assert found.tolist() == left.tolist()
        assert np.ravel(is_last).tolist() == expected


@IN_ALL
@pytest.mark.parametrize(("find", "which"), [(first_of_equal, 0), (last_of_equal, -1)])
def test_one_of_equal_masked_entries_is_found(find, which, num_more):
    rng, find = np.random.default_rng(1), jax.jit(find, static_argnames="held")
    for _ in range(30):
        places = np.pad(rng.integers(-1, 6, (2, 5)), [(0, 0), (0, num_more)], constant_values=6)
        mask = rng.random(places.shape) < 0.7
        found, lent = find(jnp.zeros(5, jnp.int32), jnp.asarray(mask), jnp.asarray(places, jnp.int32))
        inside = [i for i in range(places.size) if mask.flat[i] and 0 <= places.flat[i] < 5]
        expected = [[i for i in inside if places.flat[i] == place][which] for place in {*places.flat[inside]}]
        assert np.flatnonzero(np.ravel(found)).tolist() == sorted(expected)
        # What was not lent for marks is as it was, and all of it where what it held is said.
        assert {*np.flatnonzero(np.asarray(lent)).tolist()} <= {*places.flat[inside].tolist()}
        again, kept = find(jnp.zeros(5, jnp.int32), jnp.asarray(mask), jnp.asarray(places, jnp.int32), held=0)
        assert again.tolist() == found.tolist() and not kept.any()


def test_true_entries_are_ranked_and_found():
    mask = jnp.array([False, True, True, False, True])
    rank, num_true = rank_true(mask)
    assert rank[mask].tolist() == [0, 1, 2] and int(num_true) == 3
    assert first_true(jnp.stack([mask, ~mask, mask & False])).tolist() == [1, 0, 5]


@pytest.mark.parametrize("num_runs", [1, 5, 40])
def test_places_find_their_runs(num_runs):
    lens = np.random.default_rng(num_runs).integers(0, 4, num_runs)
    of_places = np.append(np.repeat(np.arange(num_runs), lens), [num_runs] * 2)
    found = run_of(jnp.cumsum(jnp.array(lens, jnp.int32)), jnp.arange(of_places.size, dtype=jnp.int32))
    assert found.dtype == jnp.int32 and found.tolist() == of_places.tolist()


def test_what_is_done_once_or_not_at_all():
    def change(state):
        return set_at(state, jnp.array([1, 9]), 7)

    run = jax.jit(lambda condition, state: run_if(condition, change, state))
    assert run(True, jnp.zeros(3, jnp.int32)).tolist() == [0, 7, 0]
    assert run(False, jnp.zeros(3, jnp.int32)).tolist() == [0, 0, 0]
