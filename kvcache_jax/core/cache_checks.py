"""Checks of a cache's form: one or several stacked, with values or traced, donated."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from kvcache_jax.core.state import Cache

_HAS_VALUES = jax.Array, np.ndarray, np.generic


def is_batched(cache: Cache) -> bool:
    """Tells whether these are several caches, stacked; within a `vmap` over them there is one."""
    return cache.control.is_active.ndim != 1


def is_traced(cache: Cache) -> bool:
    """Tells whether the operation that got the cache becomes part of a program."""
    return isinstance(cache.control.is_active, Tracer)


def missing_values(cache: Cache) -> str | None:
    """Returns the type of an array without values, such as a tracer; None if all have values."""
    for leaf in jax.tree.leaves(cache.control):
        if isinstance(leaf, Tracer) or not isinstance(leaf, _HAS_VALUES):
            return type(leaf).__name__
    return None


def is_donated(cache: Cache) -> bool:
    """Tells whether a step was given the cache's arrays; the cache must have values.

    The pools are not asked: operations that move no keys and values pass the pools through, so that a later
    step donates those of an older cache, whose control state stays.
    """
    return _is_deleted(cache.control)


def _is_deleted(arrays: Any) -> bool:
    leaves = (leaf for leaf in jax.tree.leaves(arrays) if isinstance(leaf, jax.Array))
    return any(leaf.is_deleted() for leaf in leaves if not isinstance(leaf, Tracer))


def require_cache(caller: str, cache: Any) -> None:
    """Refuses what is no `Cache`."""
    if not isinstance(cache, Cache):
        raise TypeError(
            f"{caller} got a {type(cache).__name__}, expected a Cache: the one that init built, or the "
            "first of what an operation returned"
        )


def require_one(caller: str, cache: Cache, advice: str = "call it under jax.vmap, or on one") -> None:
    """Refuses stacked caches, by a shape alone: the check adds nothing to a program."""
    if is_batched(cache):
        raise ValueError(
            f"{caller} got a batched cache, is_active has shape {cache.control.is_active.shape}, expected "
            f"(max_seqs,): {advice} at a time, jax.tree.map(lambda x: x[i], cache)"
        )


def require_values(caller: str, cache: Any, *, pools: bool = False) -> None:
    """Refuses what the host cannot read: no cache, or one that is traced, a mere shape, donated or batched.

    With `pools`, also one whose keys and values alone were donated.
    """
    require_cache(caller, cache)
    if (kind := missing_values(cache)) is not None:
        raise TypeError(
            f"{caller} got a {kind} in the cache, expected arrays with values: call it outside of jit, vmap, "
            "scan and eval_shape, or hand the cache to jax.debug.callback"
        )
    if is_donated(cache) or (pools and _is_deleted(cache.pools)):
        raise _donated(caller)
    require_one(caller, cache, "look at one")


def refuse_donated(caller: str, cache: Cache) -> None:
    """Refuses a cache that a step was given, where no array is read that would tell."""
    if not is_traced(cache) and is_donated(cache):
        raise _donated(caller)


def _donated(caller: str) -> ValueError:
    return ValueError(
        f"{caller} got a cache that was donated, arrays of it are deleted, expected the cache that the "
        "donated call returned"
    )


def takes_one[**P, T](operation: Callable[P, T]) -> Callable[P, T]:
    """Decorates an operation: its first argument must be a single, unbatched `Cache`."""

    @functools.wraps(operation)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        cache: Any = args[0] if args else kwargs.get("cache")
        if args or "cache" in kwargs:
            require_cache(operation.__name__, cache)
            if isinstance(cache.control.is_active, jax.ShapeDtypeStruct):
                raise TypeError(
                    f"{operation.__name__} got a ShapeDtypeStruct in the cache, expected arrays: call it "
                    "within jax.eval_shape"
                )
            require_one(operation.__name__, cache)
        try:
            return operation(*args, **kwargs)
        except RuntimeError as error:  # jax's, which says of what shape the array was
            if isinstance(cache, Cache) and _is_deleted(cache):
                raise _donated(operation.__name__) from error
            raise

    return checked


def require_prefix_index(operation: str, cache: Cache) -> None:
    """Refuses a cache without prefix caching."""
    if cache.control.prefix_index is None:
        raise ValueError(
            f"{operation} got a cache without prefix caching, expected one built with "
            "CacheConfig(enable_prefix_caching=True)"
        )
