"""Calls of a one-row operation for many rows, jitted over the control state alone."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from kvcache_jax.core.cache_checks import is_traced
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.single_kernel import one_control_kernel
from kvcache_jax.core.state import Cache, Control
from kvcache_jax.operations import rows


def on_rows(operation: Callable, cache: Cache, *columns: Any) -> tuple[Cache, Any]:
    """A one-row operation of `rows` for all rows of `columns`, ids first; the pools are handed on."""
    num_rows = columns[0].shape[0]
    num_more = 0
    if not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(columns)) and not is_traced(cache):
        # One program for lists of five to eight rows, and so on.
        num_more = (1 << (num_rows - 1).bit_length()) - num_rows
        columns = _padded(columns, num_more, cache.max_seqs)
    control, result = _each_row(cache.control, *columns, operation=operation, config=cache.config)
    if num_more:
        result = _first_rows(result, num_rows)
    return dataclasses.replace(cache, control=control), result


def _padded(columns: tuple[Any, ...], num_more: int, nobody: int) -> tuple[Any, ...]:
    """The columns, all of them in numpy, with `num_more` entries that are skipped."""

    def padded(column: np.ndarray, fill: int = 0) -> np.ndarray:
        return np.pad(column, [(0, num_more)] + [(0, 0)] * (column.ndim - 1), constant_values=fill)

    return padded(columns[0], nobody), *jax.tree.map(padded, columns[1:])


@functools.partial(jax.jit, static_argnames="num_rows")
def _first_rows(result: Any, num_rows: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[:num_rows], result)


@functools.partial(jax.jit, static_argnames=("operation", "config"))
def _each_row(
    control: Control, *columns: Any, operation: Callable, config: CacheConfig
) -> tuple[Control, Any]:
    one_row = functools.partial(operation, config=config)
    return one_control_kernel(functools.partial(rows.each_row, one_row), control, *columns)
