"""Statuses of rows as errors on the host."""

import pickle

import jax.numpy as jnp
import pytest

import kvcache_jax as kv


def test_failed_rows_raise():
    kv.raise_for_status([kv.Status.OK, kv.Status.SKIPPED])
    with pytest.raises(kv.StatusError, match=r"extend failed for 2 of 3 rows \(row 0: .*; row 2: TOO_LONG"):
        kv.raise_for_status(jnp.array([kv.Status.OUT_OF_BLOCKS, kv.Status.OK, kv.Status.TOO_LONG]), "extend")


def test_the_error_of_a_process_reaches_another():
    with pytest.raises(kv.StatusError) as raised:
        kv.raise_for_status([0, 2], "extend")
    got = pickle.loads(pickle.dumps(raised.value))
    assert (type(got), str(got), got.statuses.tolist()) == (kv.StatusError, str(raised.value), [0, 2])


def test_statuses_of_several_caches_are_told_apart():
    kv.raise_for_status([[0, 1]])
    with pytest.raises(kv.StatusError, match=r"failed for 1 of 4 rows \(row \(0, 1\): OUT_OF_BLOCKS\)"):
        kv.raise_for_status([[0, 2], [1, 0]])


@pytest.mark.parametrize("status", ["OK", None, 0.5, {"a": 1}])
def test_what_is_no_status_is_named(status):
    with pytest.raises(TypeError, match=f"status is a {type(status).__name__}, expected the integers"):
        kv.raise_for_status(status)
    with pytest.raises(ValueError, match=r"status holds \[99\], expected members"):
        kv.raise_for_status(99)
