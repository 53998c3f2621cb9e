"""The choice of the backend that serves a call."""

import dataclasses
import functools
import os

import jax

from kvcache_jax.core.backends import (
    MOVES,
    XLA,
    Backend,
    backend_names,
    get_backend,
    require_name,
    target_device,
)
from kvcache_jax.core.config import CacheConfig
from kvcache_jax.core.state import KVPool
from kvcache_jax.core.verdicts import proven
from kvcache_jax.layers.layer_group import LayerGroup

VARIABLE, AUTO = "KVCACHE_JAX_IMPLEMENTATION", "auto"


def choose(
    config: CacheConfig, asked: str | None, pool: KVPool, group: LayerGroup, group_size: int = 1
) -> Backend:
    """Chooses the backend of a call with `group_size` query heads per key/value head.

    One `asked` for by name, or else named by the config or the environment, runs or raises.
    """
    require_name(asked)
    name = asked or implementation_of(config)
    if config.hides_tokens and get_backend(name or XLA).decode:
        raise NotImplementedError(
            f"implementation {name!r} is asked for and rows may hide tokens, expected 'xla' or None, or a "
            "cache without such extras: kernels do not know tokens that are hidden"
        )
    if config.context_axis is not None and name not in (None, XLA):
        raise NotImplementedError(
            f"implementation {name!r} is asked for and context_axis is {config.context_axis!r}, expected "
            "'xla' or None: kernels read whole blocks, and a device has a part of each"
        )
    if name is None:
        fits = (each for each in _proven(config) if not _why_not(each, pool, group, group_size))
        return next(fits, get_backend(XLA))
    backend = get_backend(name)
    if reason := _why_not(backend, pool, group, group_size):
        by = "" if asked or config.implementation else f" of {VARIABLE}"
        fix = f"'xla' or {AUTO!r}" if by else "'xla' or None"
        raise NotImplementedError(f"implementation {name!r}{by} does not run here: {reason}; use {fix}")
    return backend


def implementation_of(config: CacheConfig) -> str | None:
    """Returns the name in the config, or else in the environment; None where the choice is free."""
    return config.implementation or _of_environment()


@functools.cache
def _of_environment() -> str | None:
    """Reads the environment, once: all programs of a process go by the same."""
    value = os.environ.get(VARIABLE) or AUTO
    if value != AUTO and value not in backend_names():
        raise ValueError(
            f"{VARIABLE} is {value!r}, expected {AUTO} or one of {', '.join(backend_names())}: set it to one "
            "of these, or register the backend before `init`"
        )
    return None if value == AUTO else value


def _proven(config: CacheConfig) -> list[Backend]:
    """Lists what None may pick: a verdict is of one device, and XLA splits no kernel over several."""
    if config.hides_tokens or jax.device_count() > 1 or not jax.sharding.get_abstract_mesh().empty:
        return []
    device = target_device()
    # Attention alone: it is what kernels are for, and XLA moves blocks wherever the program comes to run.
    free = dict.fromkeys(("write", *MOVES)) | dict(platform=device.platform)
    return [dataclasses.replace(get_backend(name), **free) for name in proven(device)]


def _why_not(backend: Backend, pool: KVPool, group: LayerGroup, group_size: int) -> str | None:
    reason = backend.supports(pool, group, group_size, target_device())
    if reason is not None and not isinstance(reason, str):
        raise TypeError(
            f"supports of the backend {backend.name!r} returned {reason!r}, expected None or a str"
        )
    return reason


def load(config: CacheConfig) -> None:
    """Imports the modules that the config's backend needs, or the backends that None may pick.

    Before anything is traced: importing Pallas makes jax trace anew whatever it has traced before.
    """
    name = implementation_of(config)
    for backend in _proven(config) if name is None else (get_backend(name),):
        if backend.load:
            backend.load()
