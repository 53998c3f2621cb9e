"""A cache that one caller at a time changes: the foundation of `CacheManager`.

The cache is given to each step (donated), so an old one that a caller holds has no arrays. Therefore every
access takes its turn under a lock, and a step that fails after it was given the cache leaves none: the holder
then starts over with an empty one.
"""

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec, Sharding

from kvcache_jax.arrays.transfers import explicit_transfers
from kvcache_jax.core.cache_checks import require_values, same_cache
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.init import init, sharding_of
from kvcache_jax.core.state import Cache
from kvcache_jax.manager.errors import CacheLost, ManagerBusy, ManagerClosed
from kvcache_jax.manager.programs import without_pools

_MAX_STEP_FNS = 32


class CacheHolder:
    """A cache under a lock, which is read and replaced within a `turn`; None once closed."""

    @explicit_transfers
    def __init__(
        self,
        cache: CacheConfig | Cache,
        sharding: Sharding | PartitionSpec | None,
        on_lost: Callable[[], list[Hashable]],
    ):
        """Builds a cache, or takes one over; `on_lost` is called when it is gone and returns who had it."""
        if isinstance(cache, CacheConfig):
            taken = init(cache, sharding=sharding)
        elif isinstance(cache, Cache):
            require_values("CacheManager", cache, pools=True)
            num_active = int(np.asarray(cache.is_active).sum())
            if num_active:
                raise ValueError(
                    f"cache has {num_active} active rows, expected none, for no request stands for them: "
                    "free them first"
                )
            if sharding is not None:
                raise ValueError(f"sharding is {sharding} and the cache is built, expected a CacheConfig")
            taken: Cache = jax.tree.map(jnp.asarray, cache)  # its arrays are numpy's if it was fetched
            sharding = sharding_of(taken)
        else:
            raise TypeError(f"cache is a {type(cache).__name__}, expected a CacheConfig or a Cache")
        self.cache: Cache | None = taken
        self.config = taken.config
        self._sharding, self._has_storage = sharding, bool(taken.pools)
        self._hash_key = np.asarray(taken.control.hash_key)
        self._on_lost = on_lost
        self._step_fns: collections.OrderedDict[Callable, Callable] = collections.OrderedDict()
        self._lock = threading.RLock()
        self._is_running = self._is_kept = False

    @contextlib.contextmanager
    def turn(self, operation: str) -> Iterator[Cache]:
        """Locks the cache and yields it: no other caller has it meanwhile."""
        with self._lock:
            if self._is_running:
                raise ManagerBusy(
                    f"{operation} was called by a step function while the manager runs it, expected the "
                    "functions on the cache that the step was given"
                )
            if self.cache is None:
                raise ManagerClosed(f"{operation} was called on a manager that is closed")
            if _is_gone(self.cache):
                raise self._start_over("another caller who holds the manager's cache has donated it")
            yield self.cache

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keeps the cache from steps within a turn."""
        was_kept, self._is_kept = self._is_kept, True
        try:
            yield
        finally:
            self._is_kept = was_kept

    @explicit_transfers
    def on_control(self, program: Callable, *args: Any) -> tuple[Cache, Any]:
        """Runs `program(cache, *args) -> (cache, result)` on the control state; the result is in numpy.

        The cache of this holder stays: the caller judges the result first.
        """
        assert self.cache is not None
        control, result = program(without_pools(self.cache), *args)
        cache = dataclasses.replace(control, pools=self.cache.pools, kept=self.cache.kept)
        return cache, self.fetch(result)

    def step(self, program: Callable, *args: Any) -> Any:
        """Gives the cache to a jitted `program(cache, *args) -> (cache, result)`; keeps the returned one."""
        if self._is_kept:
            raise ManagerBusy("run was called by a question that looks at the cache, expected it after query")
        cache = self.cache
        self._is_running = True
        try:
            self.cache, result = program(cache, *args)
        except BaseException as error:
            if _is_gone(cache):
                lost = self._start_over()
                if isinstance(error, Exception):
                    raise lost from error
            raise
        finally:
            self._is_running = False
        return result

    def compiled(self, step_fn: Callable) -> Callable:
        """Jits `step_fn` with the cache donated; returns the same object for the same function."""
        if not (callable(step_fn) and isinstance(step_fn, Hashable)):
            raise TypeError(
                f"step_fn is {step_fn!r}, expected a function (cache, *args) -> (cache, result) "
                "that can be hashed"
            )
        if step_fn in self._step_fns:
            self._step_fns.move_to_end(step_fn)
        else:
            self._step_fns[step_fn] = jax.jit(_checked(step_fn), donate_argnums=0)
            if len(self._step_fns) > _MAX_STEP_FNS:
                self._step_fns.popitem(last=False)
        return self._step_fns[step_fn]

    def fetch(self, values: Any) -> Any:
        """Copies the values into numpy, by `ask`."""
        return self.ask(jax.device_get, values)

    def ask[T](self, question: Callable[..., T], *args: Any) -> T:
        """Calls `question(*args)`. If a step has spoilt the cache, starts over and raises `CacheLost`."""
        try:
            return question(*args)
        except jax.errors.JaxRuntimeError as error:
            try:
                jax.block_until_ready(self.cache)
            except jax.errors.JaxRuntimeError:
                raise self._start_over() from error
            raise

    def close(self) -> None:
        """Releases the cache."""
        with self._lock:
            if self._is_running:
                raise ManagerBusy("close was called by a step function while the manager runs it")
            self.cache = None
            self._step_fns.clear()

    def describe(self) -> str:
        """Describes the cache in one or two lines."""
        with self._lock:
            if self._is_running:
                return "running a step"
            return "closed" if self.cache is None else repr(self.cache)

    def _start_over(self, cause: str = "a step failed after it was given the cache") -> CacheLost:
        """Replaces the lost cache by an empty one, which still hits blocks saved under its key."""
        self.cache = None
        cache = init(self.config, sharding=self._sharding, storage=self._has_storage)
        hash_key = jax.device_put(self._hash_key, cache.control.hash_key.sharding)
        self.cache = dataclasses.replace(cache, control=dataclasses.replace(cache.control, hash_key=hash_key))
        request_ids = self._on_lost()
        return CacheLost(
            f"{cause}, and {len(request_ids)} requests are lost with it; the manager starts over, empty: "
            "allocate them again",
            request_ids,
        )


def _is_gone(cache: Cache | None) -> bool:
    """Tests whether an array of the cache was donated."""
    return any(leaf.is_deleted() for leaf in jax.tree.leaves(cache))


def _checked(step_fn: Callable) -> Callable:
    """Wraps `step_fn`: its result is checked while it is traced, when nothing is lost yet."""

    def checked(cache: Cache, *args: Any) -> tuple[Cache, Any]:
        result = step_fn(cache, *args)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Cache)):
            raise TypeError(f"step_fn returned a {type(result).__name__}, expected a tuple (cache, result)")
        same_cache("step_fn", result[0], cache)
        return result

    return checked
