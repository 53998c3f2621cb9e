"""Statuses of rows as errors on the host."""

import jax.numpy as jnp
import pytest

import kvcache_jax as kv


def test_failed_rows_raise():
    kv.raise_for_status([kv.Status.OK, kv.Status.SKIPPED])
    with pytest.raises(kv.StatusError, match=r"extend failed for 2 of 3 rows \(row 0: .*; row 2: TOO_LONG"):
        kv.raise_for_status(jnp.array([kv.Status.OUT_OF_BLOCKS, kv.Status.OK, kv.Status.TOO_LONG]), "extend")
