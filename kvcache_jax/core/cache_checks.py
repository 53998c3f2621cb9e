"""Checks of the cache that an operation gets."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from kvcache_jax.arrays.same_form import form_of, same_form
from kvcache_jax.arrays.transfers import explicit_transfers
from kvcache_jax.core.cache_form import are_deleted, is_batched, is_donated, is_traced, missing_values
from kvcache_jax.core.state import Cache


def require_cache(caller: str, cache: Any) -> None:
    """Refuses anything but a `Cache`."""
    if not isinstance(cache, Cache):
        raise TypeError(
            f"{caller} got a {type(cache).__name__}, expected a Cache: the one that init built, or the "
            "first of what an operation returned"
        )
    if not hasattr(cache.control.is_active, "ndim"):  # such as a tree of None, or of axes
        raise TypeError(
            f"{caller} got a {type(cache.control.is_active).__name__} in the cache, expected arrays: the "
            "cache itself, not what jax.tree.map made of it"
        )


def same_cache(what: str, found: Any, like: Cache) -> Cache:
    """Returns what a caller's own function returned, a cache of the config, shapes and dtypes of `like`."""
    if not isinstance(found, Cache):
        raise TypeError(
            f"{what} returned {form_of(found)}, expected the cache that it got, or one made of it"
        )
    if found.config != like.config:
        raise TypeError(f"{what} returned a cache of another config, expected the one that it got")
    return same_form(what, found, like)


def require_one(caller: str, cache: Cache, advice: str = "call it under jax.vmap, or on one") -> None:
    """Refuses stacked caches, by a shape alone: the check adds nothing to a program."""
    if is_batched(cache.control):
        raise ValueError(
            f"{caller} got a batched cache, is_active has shape {cache.control.is_active.shape}, expected "
            f"(max_seqs,): {advice} at a time, jax.tree.map(lambda x: x[i], cache)"
        )


def require_values(caller: str, cache: Any, *, pools: bool = False) -> None:
    """Refuses a cache that the host cannot read: one that is traced, a mere shape, donated or batched.

    With `pools`, also one whose keys and values alone were donated.
    """
    require_cache(caller, cache)
    if (kind := missing_values(cache.control)) is not None:
        raise TypeError(
            f"{caller} got a {kind} in the cache, expected arrays with values: call it outside of jit, vmap, "
            "scan and eval_shape, or hand the cache to jax.debug.callback"
        )
    if is_donated(cache.control) or (pools and are_deleted(cache.pools)):
        raise _donated(caller)
    require_one(caller, cache, "look at one")


def refuse_donated(caller: str, cache: Cache) -> None:
    """Refuses a cache that a step was given, where no array is read that would tell."""
    if not is_traced(cache.control) and is_donated(cache.control):
        raise _donated(caller)


def _donated(caller: str) -> ValueError:
    return ValueError(
        f"{caller} got a cache that was donated, arrays of it are deleted, expected the cache that the "
        "donated call returned"
    )


def takes_one[**P, T](operation: Callable[P, T]) -> Callable[P, T]:
    """Decorates an operation: its first argument must be a single, unbatched `Cache`."""
    moves = explicit_transfers(operation)  # such as lists of the caller's

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
            return moves(*args, **kwargs)
        except RuntimeError as error:  # jax's, which says the array's shape
            if isinstance(cache, Cache) and are_deleted(cache):
                raise _donated(operation.__name__) from error
            raise

    return checked


def one_program[**P, T](operation: Callable[P, T]) -> Callable[P, T]:
    """Decorates an operation that is one program, and `takes_one`; `jax.jit` alone would hide its types."""
    return takes_one(jax.jit(operation))


def require_prefix_index(operation: str, cache: Cache) -> None:
    """Refuses a cache without prefix caching."""
    if cache.control.prefix_index is None:
        raise ValueError(
            f"{operation} got a cache without prefix caching, expected one built with "
            "CacheConfig(enable_prefix_caching=True)"
        )
