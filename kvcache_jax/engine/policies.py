"""Policies: the order in which waiting requests are served and running ones give way.

A policy is a pure function of all requests at once. It returns keys, most significant first; the lowest is
served first, of equal ones the one that came first. The order of running rows is a second function, for an
order that changes while rows run has two rows preempt each other in turns: it may depend on a request's
fixed fields, and on its preemptions, which are bounded below, and not on time or on service.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvcache_jax.arrays.registry import Registry


class RequestMetadata(NamedTuple):
    """The requests as a policy sees them, one entry per slot; those that are done mean nothing.

    Attributes:
      uid: i32[R], number in the order of arrival.
      arrival_step: i32[R], the step at which it came, counted from the present one: 0 or less.
      priority: i32[R], higher is more urgent.
      num_tokens: i32[R], tokens known: prompt and generated ones.
      num_cached: i32[R], cached tokens of the first waiting requests; 0 unless the policy asks.
      num_preemptions: i32[R].
      num_bypassed: i32[R], later requests that were admitted before it.
      service: i32[R], weighted tokens that its client got so far.
      ageing_steps: Steps that weigh as much as one of priority (static).
      max_bypasses: Later requests that may go before one (static).
    """

    uid: jax.Array
    arrival_step: jax.Array
    priority: jax.Array
    num_tokens: jax.Array
    num_cached: jax.Array
    num_preemptions: jax.Array
    num_bypassed: jax.Array
    service: jax.Array
    ageing_steps: int
    max_bypasses: int


Key = Callable[[RequestMetadata], tuple[jax.Array, ...]]


policies = Registry[Key]("a request policy", "engine.request_policy", "policy", RequestMetadata)


def request_policy(name: str, *, row_key: Key | None = None, looks_up: bool = False) -> Callable[[Key], Key]:
    """Registers a function from `RequestMetadata` to a tuple of i32[R] keys as a policy of the engine.

    Args:
      name: For `Engine(policy=...)`.
      row_key: Order of running rows. Default: the order of arrival.
      looks_up: Whether the first waiting requests are looked up in the cache for `num_cached`.

    Returns:
      The decorator; it passes the function through unchanged.

    Raises:
      ValueError, TypeError: the name is taken or no str.

    Example:
      >>> import kvcache_jax as kv
      >>> @kv.engine.request_policy("shortest first")
      ... def shortest_first(requests: kv.engine.RequestMetadata):
      ...     return (requests.num_tokens,)
    """
    return policies.decorate(name, row_key=row_key or _by_arrival, looks_up=looks_up)


def keys_of(policy: str, requests: RequestMetadata, *, of_rows: bool = False) -> tuple[jax.Array, ...]:
    """Computes the keys of waiting requests, or `of_rows`, i32[R] each; the last one tells any two apart."""
    registered = policies.find(policy)
    with policies.noted(policy):
        keys = (registered.options["row_key"] if of_rows else registered.function)(requests)
        columns = keys if isinstance(keys, tuple) else (keys,)
        shape = requests.uid.shape
        columns = (policies.checked(policy, column, shape, dtype=jnp.int32) for column in columns)
        return (*columns, requests.uid)


def _by_arrival(requests: RequestMetadata) -> tuple[jax.Array, ...]:
    return (requests.uid,)


request_policy("fcfs")(_by_arrival)

_MOST_BOOSTS = 3
"""Preemptions that count; with more, two requests could take turns for ever."""


def _by_priority(requests: RequestMetadata) -> tuple[jax.Array, ...]:
    """Orders by the step at which it would have come, had it priority 0.

    A waiting request gains one of priority in `ageing_steps` steps over later requests: this key says so
    without the present step, so that the order of two requests does not change with time.
    """
    boosts = jnp.minimum(requests.num_preemptions, _MOST_BOOSTS) * (requests.ageing_steps // 4)
    most = 2**30 // requests.ageing_steps
    priority = jnp.clip(requests.priority, -most, most)
    # The sum is an i32: a request that waits longer than that no longer gains.
    arrival_step = jnp.maximum(requests.arrival_step, -(2**29))
    return (arrival_step - priority * requests.ageing_steps - boosts,)


request_policy("priority", row_key=_by_priority)(_by_priority)


@request_policy("longest prefix", looks_up=True)
def _by_cached_prefix(requests: RequestMetadata) -> tuple[jax.Array, ...]:
    """Orders by the tokens that the cache has; a request that was bypassed too often is first."""
    is_passed = requests.num_bypassed >= requests.max_bypasses
    return (1 - is_passed.astype(jnp.int32), jnp.where(is_passed, 0, -requests.num_cached))


INPUT_WEIGHT, OUTPUT_WEIGHT = 1, 2
"""Service of a token of a prompt, and of a generated one."""


@request_policy("fair")
def _by_service(requests: RequestMetadata) -> tuple[jax.Array, ...]:
    """Orders by the service that clients got (virtual token counter).

    References:
      Fairness in Serving Large Language Models (Sheng et al.; arXiv:2401.00588).
    """
    return (requests.service,)
